//! How long steps took: a mean hides the few that stood still, so there are three numbers more.

use crossmesh_core::units::Seconds;
use serde::Serialize;

use super::metrics::StepMetrics;
use crate::runner::median;

/// A step that takes so many times the median was held up by something that the others were not.
const MANY: f64 = 4.0;

/// Over the steps of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepSpread {
    pub mean_s: f64,
    pub median_s: f64,
    /// 19 of 20 steps took no longer.
    pub p95_s: f64,
    pub longest_s: f64,
    /// Which one that was.
    pub longest_step: u64,
    /// How many took [`MANY`] times the median or more.
    pub held_up: usize,
}

impl StepSpread {
    pub fn of<'a>(metrics: impl IntoIterator<Item = &'a StepMetrics>) -> Option<Self> {
        let steps: Vec<(f64, u64)> = metrics.into_iter().map(|m| (m.step_s, m.step)).collect();
        let mut sorted: Vec<f64> = steps.iter().map(|(seconds, _)| *seconds).collect();
        sorted.sort_by(f64::total_cmp);
        let (longest_s, longest_step) = steps.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0))?;
        let median_s = median(&sorted);
        Some(Self {
            mean_s: sorted.iter().sum::<f64>() / sorted.len() as f64,
            median_s,
            p95_s: sorted[(sorted.len() * 19).div_ceil(20) - 1],
            longest_s,
            longest_step,
            held_up: sorted.iter().filter(|s| **s >= MANY * median_s).count(),
        })
    }

    /// `18.9 ms in the mean, 18.3 ms in the median, 19 of 20 within 21.2 ms, the longest 33.1 ms`.
    pub fn text(&self) -> String {
        let [mean, median, p95, longest] =
            [self.mean_s, self.median_s, self.p95_s, self.longest_s].map(Seconds);
        format!("{mean} in the mean, {median} in the median, 19 of 20 within {p95}, the longest {longest}")
    }

    /// What to say of steps that took much longer than the others; none where none did.
    pub fn outliers(&self) -> Option<String> {
        let times = self.longest_s / self.median_s;
        let steps = if self.held_up == 1 { "step" } else { "steps" };
        (self.held_up > 0 && self.median_s > 0.0).then(|| {
            format!(
                "{} {steps} took {MANY} × the median or more; the longest, step {}, {times:.1} × ({})",
                self.held_up,
                self.longest_step,
                Seconds(self.longest_s)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::record;
    use super::*;
    use crossmesh_core::id::Rank;

    fn times(seconds: &[f64]) -> StepSpread {
        let metrics = (0..)
            .zip(seconds)
            .map(|(step, s)| StepMetrics::of(&[(Rank(0), record(step, 1.0, *s))].into(), 1, None).unwrap());
        StepSpread::of(&metrics.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn one_slow_step_in_twenty_is_seen_and_said() {
        let mut seconds = vec![0.018; 19];
        seconds.insert(7, 0.2);
        let times = times(&seconds);
        assert_eq!((times.median_s, times.p95_s, times.longest_s), (0.018, 0.018, 0.2));
        assert_eq!((times.longest_step, times.held_up), (8, 1));
        assert!(times.mean_s > 1.4 * times.median_s);
        assert_eq!(
            times.text(),
            "27.1 ms in the mean, 18.0 ms in the median, 19 of 20 within 18.0 ms, the longest 200 ms"
        );
        let said = times.outliers().unwrap();
        assert_eq!(said, "1 step took 4 × the median or more; the longest, step 8, 11.1 × (200 ms)");
    }

    #[test]
    fn even_steps_are_nothing_to_talk_about() {
        assert_eq!(times(&[0.01, 0.02, 0.03]).outliers(), None);
        assert_eq!(times(&[0.01]).p95_s, 0.01);
        assert_eq!(StepSpread::of(&[]), None);
    }
}
