//! Latency, the cost of a message and the rate, from how long rows of messages took.
//!
//! In the simulator's model `n` messages of `b` bytes, one behind the other, take
//!
//! ```text
//! latency + (n + 1) * message + n * b / rate
//! ```
//!
//! Times differ by six orders of magnitude, so errors count by their share of the measured time; and one that is far off is worse
//! than several that are a little off. What is made small is the worst error plus the mean one: convex in the three unknowns, so
//! that one search inside another, each by the golden section, comes to the minimum whatever the numbers are.

/// No host's memory is faster, in bytes a second. Of messages that are too small to tell, the rate comes out as this.
const FASTEST: f64 = 1e12;

/// Messages one behind the other, and how long they took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    pub messages: u64,
    pub bytes: u64,
    pub seconds: f64,
}

/// What the model needs to know of a way from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    pub latency_s: f64,
    pub message_s: f64,
    pub bytes_per_s: f64,
}

impl Row {
    /// What latency, a message's cost and the time of a byte are multiplied by.
    fn factors(&self) -> [f64; 3] {
        [1.0, self.messages as f64 + 1.0, self.messages as f64 * self.bytes as f64]
    }

    /// How far a time is from the measured one, as a share of it.
    pub fn error(&self, seconds: f64) -> f64 {
        seconds / self.seconds - 1.0
    }
}

/// The costs that explain the rows best. Rows have messages, bytes and times above zero; there is at least one.
pub fn fit(rows: &[Row]) -> Costs {
    // With an unknown above this, its share alone would be twice as long as some measured time.
    let most =
        |i: usize| rows.iter().map(|row| 2.0 * row.seconds / row.factors()[i]).fold(f64::INFINITY, f64::min);
    let (latency, message, byte) = (most(0), most(1), most(2));
    let mut best = ([0.0; 3], f64::INFINITY);
    let least = 1.0 / FASTEST;
    golden((byte - least).max(0.0), |beyond| {
        let byte_s = least + beyond;
        golden(message, |message_s| {
            golden(latency, |latency_s| {
                let costs = [latency_s, message_s, byte_s];
                let badness = badness(rows, costs);
                if badness < best.1 {
                    best = (costs, badness);
                }
                badness
            })
        })
    });
    let [latency_s, message_s, byte_s] = best.0;
    Costs { latency_s, message_s, bytes_per_s: 1.0 / byte_s }
}

/// The worst error and the mean one, together.
fn badness(rows: &[Row], costs: [f64; 3]) -> f64 {
    let (mut worst, mut sum) = (0.0f64, 0.0);
    for row in rows {
        let seconds: f64 = row.factors().iter().zip(costs).map(|(factor, cost)| factor * cost).sum();
        let error = row.error(seconds).abs();
        worst = worst.max(error);
        sum += error;
    }
    worst + sum / rows.len() as f64
}

/// The least value of a function with one minimum between 0 and `most`.
fn golden(most: f64, mut value: impl FnMut(f64) -> f64) -> f64 {
    const SECTION: f64 = 0.618_033_988_749_894_9;
    const STEPS: usize = 48;
    let (mut low, mut high) = (0.0, most);
    let inner = |low: f64, high: f64| (high - SECTION * (high - low), low + SECTION * (high - low));
    let (mut left, mut right) = inner(low, high);
    let (mut at_left, mut at_right) = (value(left), value(right));
    for _ in 0..STEPS {
        if at_left <= at_right {
            (high, right, at_right) = (right, left, at_left);
            left = inner(low, high).0;
            at_left = value(left);
        } else {
            (low, left, at_left) = (left, right, at_right);
            right = inner(low, high).1;
            at_right = value(right);
        }
    }
    at_left.min(at_right)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: [(u64, u64); 9] = [
        (1, 1 << 10),
        (100, 1 << 10),
        (10_000, 1 << 10),
        (1, 1 << 16),
        (1000, 1 << 16),
        (1, 1 << 20),
        (100, 1 << 20),
        (1, 1 << 28),
        (10, 1 << 24),
    ];

    /// Rows that the model explains up to a factor each.
    fn rows(costs: Costs, mut off: impl FnMut() -> f64) -> Vec<Row> {
        let seconds = |messages: u64, bytes: u64| {
            costs.latency_s
                + (messages + 1) as f64 * costs.message_s
                + (messages * bytes) as f64 / costs.bytes_per_s
        };
        let row = |(messages, bytes)| Row { messages, bytes, seconds: seconds(messages, bytes) * off() };
        GRID.map(row).to_vec()
    }

    #[test]
    fn finds_what_the_times_were_made_of() {
        for (latency_s, message_s, bytes_per_s) in
            [(50e-6, 4e-6, 2e9), (1e-3, 1e-7, 1e8), (2e-6, 3e-5, 1e11), (0.0, 1e-6, 1e10)]
        {
            let costs = Costs { latency_s, message_s, bytes_per_s };
            let found = fit(&rows(costs, || 1.0));
            assert!((found.message_s / message_s - 1.0).abs() < 1e-3, "{found:?}, not {costs:?}");
            assert!((found.bytes_per_s / bytes_per_s - 1.0).abs() < 1e-3, "{found:?}, not {costs:?}");
            assert!((found.latency_s - latency_s).abs() < 1e-3 * (latency_s + message_s), "{found:?}");
        }
    }

    #[test]
    fn times_that_tell_no_rate_give_one_that_can_be_written_down() {
        let row = |(messages, bytes, seconds)| Row { messages, bytes, seconds };
        let found = fit(&[(1, 1 << 10, 40e-6), (10, 1 << 10, 400e-6), (1, 1 << 14, 30e-6)].map(row));
        assert!(found.bytes_per_s <= FASTEST * 1.001, "{found:?}");
    }

    #[test]
    fn nothing_at_random_is_better() {
        let mut state = 7u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let costs = Costs { latency_s: 60e-6, message_s: 5e-6, bytes_per_s: 3e9 };
        let rows = rows(costs, || 0.7 + 0.6 * random());
        let found = fit(&rows);
        let at = [found.latency_s, found.message_s, 1.0 / found.bytes_per_s];
        let least = badness(&rows, at);
        for _ in 0..20_000 {
            let other = at.map(|cost| cost * (0.5 + random()));
            assert!(badness(&rows, other) >= least - 1e-9, "{other:?} is better than {at:?}");
        }
    }
}
