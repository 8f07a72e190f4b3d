//! Latency, the cost of a message and the rate, from how long rows of messages took.
//!
//! In the simulator's model `n` messages of `b` bytes, one behind the other, take
//!
//! ```text
//! latency + (n + 1) * message + n * b / rate
//! ```
//!
//! and where a cache carries the first `c` bytes at a rate of its own, what is beyond them takes so much longer a byte:
//!
//! ```text
//! latency + (n + 1) * message + n * b / cached + max(n * b - c, 0) * (1 / rate - 1 / cached)
//! ```
//!
//! Times differ by six orders of magnitude, so errors count by their share of the measured time; and one that is far off is worse
//! than several that are a little off. What is made small is the worst error plus the mean one: convex in the unknowns, so
//! that one search inside another, each by the golden section, comes to the minimum whatever the numbers are. Sizes of caches are tried one after
//! the other.

use crossmesh_core::cluster::Cache;

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
    /// Where small rows move faster.
    pub cache: Option<Cache>,
}

/// What caches may hold of a row: a processor's last one, as processors of today have them.
pub const CACHES: [u64; 6] = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20];
/// A cache is believed in where it makes errors this much smaller.
const WORTH: f64 = 0.9;

impl Row {
    /// What latency, a message's cost, the time of a byte and what a byte takes longer that a cache does not hold are multiplied by.
    fn factors(&self, cache: u64) -> [f64; 4] {
        let bytes = self.messages * self.bytes;
        [1.0, self.messages as f64 + 1.0, bytes as f64, bytes.saturating_sub(cache) as f64]
    }

    /// How far a time is from the measured one, as a share of it.
    pub fn error(&self, seconds: f64) -> f64 {
        seconds / self.seconds - 1.0
    }
}

/// The costs that explain the rows best, with one of these caches or none. Rows have messages, bytes and times above zero; there is at least one.
pub fn fit(rows: &[Row], caches: &[u64]) -> Costs {
    let plain = Fit::of(rows, u64::MAX);
    // Of rows that are all on one side of it, none would tell what a cache does.
    let tells = |cache: &u64| rows.iter().any(|row| row.messages * row.bytes > *cache);
    let cached = caches.iter().filter(|cache| tells(cache)).map(|cache| Fit::of(rows, *cache));
    let best = cached.min_by(|a, b| a.badness.total_cmp(&b.badness));
    best.filter(|best| best.badness < WORTH * plain.badness).unwrap_or(plain).costs()
}

struct Fit {
    cache: u64,
    /// Latency, a message, a byte, and what it takes longer beyond the cache.
    seconds: [f64; 4],
    badness: f64,
}

impl Fit {
    fn of(rows: &[Row], cache: u64) -> Self {
        let rows: Vec<_> = rows.iter().map(|row| (row, row.factors(cache))).collect();
        // With an unknown above this, its share alone would be twice as long as some measured time.
        let most = |i: usize| {
            let shares = rows.iter().filter(|(_, factors)| factors[i] > 0.0);
            let least =
                shares.map(|(row, factors)| 2.0 * row.seconds / factors[i]).fold(f64::INFINITY, f64::min);
            if least.is_finite() { least } else { 0.0 }
        };
        let (latency, message, byte, longer) = (most(0), most(1), most(2), most(3));
        let mut best = Self { cache, seconds: [0.0; 4], badness: f64::INFINITY };
        let least = 1.0 / FASTEST;
        golden(longer, |longer_s| {
            golden((byte - least).max(0.0), |beyond| {
                golden(message, |message_s| {
                    golden(latency, |latency_s| {
                        let seconds = [latency_s, message_s, least + beyond, longer_s];
                        let badness = badness(&rows, seconds);
                        if badness < best.badness {
                            best = Self { cache, seconds, badness };
                        }
                        badness
                    })
                })
            })
        });
        best
    }

    fn costs(&self) -> Costs {
        let [latency_s, message_s, byte_s, longer_s] = self.seconds;
        let cache = Cache { bytes: self.cache, bytes_per_s: 1.0 / byte_s };
        Costs {
            latency_s,
            message_s,
            bytes_per_s: 1.0 / (byte_s + longer_s),
            cache: (longer_s > 0.0 && self.cache < u64::MAX).then_some(cache),
        }
    }
}

/// The worst error and the mean one, together.
fn badness(rows: &[(&Row, [f64; 4])], costs: [f64; 4]) -> f64 {
    let (mut worst, mut sum) = (0.0f64, 0.0);
    for (row, factors) in rows {
        let seconds: f64 = factors.iter().zip(costs).map(|(factor, cost)| factor * cost).sum();
        let error = row.error(seconds).abs();
        worst = worst.max(error);
        sum += error;
    }
    worst + sum / rows.len() as f64
}

/// The least value of a function with one minimum between 0 and `most`.
fn golden(most: f64, mut value: impl FnMut(f64) -> f64) -> f64 {
    const SECTION: f64 = 0.618_033_988_749_894_9;
    const STEPS: usize = 30;
    if most == 0.0 {
        return value(0.0);
    }
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

    fn costs(latency_s: f64, message_s: f64, bytes_per_s: f64) -> Costs {
        Costs { latency_s, message_s, bytes_per_s, cache: None }
    }

    /// Rows that the model explains up to a factor each.
    fn rows(costs: Costs, mut off: impl FnMut() -> f64) -> Vec<Row> {
        let moved = |bytes: f64| match costs.cache {
            None => bytes / costs.bytes_per_s,
            Some(Cache { bytes: most, bytes_per_s }) => {
                let near = bytes.min(most as f64);
                near / bytes_per_s + (bytes - near) / costs.bytes_per_s
            }
        };
        let seconds = |messages: u64, bytes: u64| {
            costs.latency_s + (messages + 1) as f64 * costs.message_s + moved((messages * bytes) as f64)
        };
        let row = |(messages, bytes)| Row { messages, bytes, seconds: seconds(messages, bytes) * off() };
        GRID.map(row).to_vec()
    }

    #[test]
    fn finds_what_the_times_were_made_of() {
        for (latency_s, message_s, bytes_per_s) in
            [(50e-6, 4e-6, 2e9), (1e-3, 1e-7, 1e8), (2e-6, 3e-5, 1e11), (0.0, 1e-6, 1e10)]
        {
            let costs = costs(latency_s, message_s, bytes_per_s);
            let found = fit(&rows(costs, || 1.0), &[]);
            assert!((found.message_s / message_s - 1.0).abs() < 1e-3, "{found:?}, not {costs:?}");
            assert!((found.bytes_per_s / bytes_per_s - 1.0).abs() < 1e-3, "{found:?}, not {costs:?}");
            assert!((found.latency_s - latency_s).abs() < 1e-3 * (latency_s + message_s), "{found:?}");
        }
    }

    #[test]
    fn finds_the_cache_that_rows_went_through_and_none_where_there_was_none() {
        let cache = Cache { bytes: 4 << 20, bytes_per_s: 40e9 };
        let through = Costs { cache: Some(cache), ..costs(18e-6, 0.5e-6, 13e9) };
        let found = fit(&rows(through, || 1.0), &CACHES);
        let found_cache = found.cache.expect("small rows are much faster");
        assert_eq!(found_cache.bytes, cache.bytes);
        assert!((found_cache.bytes_per_s / cache.bytes_per_s - 1.0).abs() < 1e-2, "{found:?}");
        assert!((found.bytes_per_s / 13e9 - 1.0).abs() < 1e-2, "{found:?}");
        assert_eq!(fit(&rows(costs(18e-6, 0.5e-6, 13e9), || 1.0), &CACHES).cache, None);
    }

    #[test]
    fn times_that_tell_no_rate_give_one_that_can_be_written_down() {
        let row = |(messages, bytes, seconds)| Row { messages, bytes, seconds };
        let rows = [(1, 1 << 10, 40e-6), (10, 1 << 10, 400e-6), (1, 1 << 14, 30e-6)].map(row);
        let found = fit(&rows, &CACHES);
        assert!(found.bytes_per_s <= FASTEST * 1.001, "{found:?}");
    }

    #[test]
    fn nothing_at_random_is_better() {
        let mut state = 7u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        for cache in [u64::MAX, 1 << 20] {
            let rows = rows(costs(60e-6, 5e-6, 3e9), || 0.7 + 0.6 * random());
            let found = Fit::of(&rows, cache);
            let rows: Vec<_> = rows.iter().map(|row| (row, row.factors(cache))).collect();
            for _ in 0..20_000 {
                let other = found.seconds.map(|cost| cost * (0.5 + random()));
                let badness = badness(&rows, other);
                assert!(badness >= found.badness - 1e-6, "{other:?} is better than {:?}", found.seconds);
            }
        }
    }
}
