//! The learning rate over the steps: up in a line, then down along a cosine.

/// Warm-up and cosine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    pub peak: f64,
    /// Steps on the way up; the step after them has the peak.
    pub warmup_steps: u64,
    /// The step that would reach `floor`; from there on it stays.
    pub total_steps: u64,
    pub floor: f64,
}

impl Schedule {
    /// The same rate always.
    pub fn constant(rate: f64) -> Self {
        Self { peak: rate, warmup_steps: 0, total_steps: 0, floor: rate }
    }

    /// The rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        if step >= self.total_steps {
            return self.floor;
        }
        let done = (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64;
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_and_falls() {
        let schedule = Schedule { peak: 1.0, warmup_steps: 4, total_steps: 14, floor: 0.1 };
        let rates: Vec<f64> = (0..16).map(|step| schedule.at(step)).collect();
        assert_eq!(rates[..5], [0.2, 0.4, 0.6, 0.8, 1.0]);
        assert!(rates[4..15].windows(2).all(|w| w[1] < w[0]), "{rates:?}");
        assert!((rates[9] - 0.55).abs() < 1e-12, "half way");
        assert_eq!(rates[14..], [0.1, 0.1]);
        assert_eq!(Schedule::constant(0.3).at(7), 0.3);
    }
}
