//! Angles of rotary positions.

use std::sync::{Arc, LazyLock};

use crate::graph::ops::rotary::Turns;
use crate::kernels::Rotary;
use crate::models::ConfigError;

/// How fast columns turn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// Column pair `i` of `n` turns by `theta^(-i/n)` a position.
    pub theta: f64,
    /// For contexts longer than a model was first trained on.
    pub scaling: Option<Llama3Scaling>,
}

/// Llama 3.1's: slow turns are slowed down further, fast ones are not, those between them in part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    pub factor: f64,
    /// Turns of fewer rounds than `low` in the old context are slow, of more than `high` fast.
    pub low: f64,
    pub high: f64,
    pub old_context: f64,
}

impl Default for RotaryConfig {
    fn default() -> Self {
        Self { theta: 10_000.0, scaling: None }
    }
}

impl RotaryConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !(self.theta.is_finite() && self.theta > 0.0) {
            let reason = "it is raised to powers";
            return Err(ConfigError::new("rope_theta", self.theta, reason, "use a positive number"));
        }
        match self.scaling {
            Some(s) if !(s.factor >= 1.0 && s.low > 0.0 && s.high > s.low && s.old_context > 0.0) => {
                let value = format!("{}, {}, {}, {}", s.factor, s.low, s.high, s.old_context);
                let reason = "they are a factor of at least 1, two rising numbers of turns, and a context";
                Err(ConfigError::new(
                    "rope_scaling",
                    value,
                    reason,
                    "rope_scaling = [8, 1, 4, 8192] is Llama 3.1's",
                ))
            }
            _ => Ok(()),
        }
    }

    /// By how much every pair of columns turns from one position to the next.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let half = head_dim / 2;
        let plain = (0..half).map(|i| self.theta.powf(-(i as f64) / half as f64));
        let Some(Llama3Scaling { factor, low, high, old_context }) = self.scaling else {
            return plain.collect();
        };
        plain
            .map(|frequency| {
                let rounds = old_context * frequency / std::f64::consts::TAU;
                let fast = ((rounds - low) / (high - low)).clamp(0.0, 1.0);
                frequency * (fast + (1.0 - fast) / factor)
            })
            .collect()
    }

    /// For all positions of a sample, once somebody asks.
    pub(crate) fn turns(self, head_dim: usize, positions: usize) -> Turns {
        Arc::new(LazyLock::new(Box::new(move || self.table(head_dim, positions))))
    }

    fn table(&self, head_dim: usize, positions: usize) -> Rotary {
        let frequencies = self.frequencies(head_dim);
        let angles = || (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f));
        let (cosines, sines) = (angles().map(f64::cos).collect(), angles().map(f64::sin).collect());
        Rotary { head_dim, positions, cosines, sines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_turns_are_slowed_down() {
        let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, old_context: 8192.0 };
        let plain = RotaryConfig { theta: 500_000.0, scaling: None };
        let scaled = RotaryConfig { scaling: Some(scaling), ..plain };
        let (plain, scaled) = (plain.frequencies(128), scaled.frequencies(128));
        assert_eq!((plain[0], scaled[0]), (1.0, 1.0));
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-12);
        assert!(plain.iter().zip(&scaled).all(|(a, b)| (1.0..=8.0 + 1e-12).contains(&(a / b))));
        let between = plain.iter().zip(&scaled).filter(|(a, b)| *a != *b && *a / *b < 7.999).count();
        assert!((3..12).contains(&between), "{between}");
    }

    #[test]
    fn bad_angles_are_refused() {
        let config = RotaryConfig { theta: 0.0, scaling: None };
        assert!(config.check().unwrap_err().to_string().contains("rope_theta"));
        let scaling = Llama3Scaling { factor: 8.0, low: 4.0, high: 1.0, old_context: 8192.0 };
        let config = RotaryConfig { scaling: Some(scaling), ..RotaryConfig::default() };
        assert!(config.check().unwrap_err().to_string().contains("rope_scaling"));
    }
}
