//! The learning rate over the steps: up in a line, then down along a cosine; or level, and down in a line at the end.

/// Warm-up, and what comes after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    pub peak: f64,
    /// Steps on the way up; the step after them has the peak.
    pub warmup_steps: u64,
    /// The step that would reach `floor`; from there on it stays.
    pub total_steps: u64,
    pub floor: f64,
    /// None: along a cosine all the way. Else it stays at the peak, and falls in a line over the last so many steps (warm-up, stable, decay;
    /// Hu et al., 2024: a run can be made longer, and decayed from any checkpoint before).
    pub decay_steps: Option<u64>,
}

impl Schedule {
    /// The same rate always.
    pub fn constant(rate: f64) -> Self {
        Self { peak: rate, warmup_steps: 0, total_steps: 0, floor: rate, decay_steps: None }
    }

    /// The rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / (self.warmup_steps + 1) as f64;
        }
        if step >= self.total_steps {
            return self.floor;
        }
        if let Some(decay) = self.decay_steps {
            let first = self.total_steps.saturating_sub(decay);
            let done = step.saturating_sub(first) as f64 / decay.max(1) as f64;
            return self.peak + (self.floor - self.peak) * done;
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
        let schedule =
            Schedule { peak: 1.0, warmup_steps: 4, total_steps: 14, floor: 0.1, decay_steps: None };
        let rates: Vec<f64> = (0..16).map(|step| schedule.at(step)).collect();
        assert_eq!(rates[..5], [0.2, 0.4, 0.6, 0.8, 1.0]);
        assert!(rates[4..15].windows(2).all(|w| w[1] < w[0]), "{rates:?}");
        assert!((rates[9] - 0.55).abs() < 1e-12, "half way");
        assert_eq!(rates[14..], [0.1, 0.1]);
        assert_eq!(Schedule::constant(0.3).at(7), 0.3);
    }

    #[test]
    fn stays_level_until_it_decays() {
        let schedule =
            Schedule { peak: 1.0, warmup_steps: 1, total_steps: 10, floor: 0.0, decay_steps: Some(4) };
        let rates: Vec<f64> = (0..12).map(|step| schedule.at(step)).collect();
        assert_eq!(rates, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    }
}
