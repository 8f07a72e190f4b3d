//! What the ranks of a job compute with: the host, or GPUs.

use std::fmt;

use anyhow::{Context, Result};
use crossmesh_core::dtype::DType;
use crossmesh_cuda::{Card, CudaError, Gpu};
use crossmesh_train::config::Device;

use super::Training;
use crate::output;

/// The GPUs of this machine, where ranks compute with them.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpus {
    pub cards: Vec<Card>,
    dtype: DType,
    /// Whether ranks of other machines have theirs there.
    joined: bool,
}

impl Gpus {
    /// What all GPUs of the job compute in a second at most, where that is known.
    pub fn operations_per_s(&self, ranks: usize) -> Option<f64> {
        let count = if self.joined { ranks } else { ranks.min(self.cards.len()) };
        Some(self.cards.first()?.peak_flops(self.dtype == DType::Bf16)? * count as f64)
    }
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> =
            self.cards.iter().map(|card| format!("{} ({})", card.ordinal, card.name)).collect();
        write!(f, "on GPU {}", names.join(", "))?;
        match self.operations_per_s(1) {
            Some(peak) => write!(f, "; MFU is of {:.0} TFLOP/s each, dense {}", peak / 1e12, self.dtype),
            None => f.write_str("; MFU is of cluster.flops, since the card's peak is not known"),
        }
    }
}

/// The GPUs to compute with, or none where the host does: what the config asks for, or with `auto` what there is. A GPU that was asked for and cannot be
/// had is an error here, before a rank is started.
pub fn choose(training: &Training, joined: bool, share: bool) -> Result<Option<Gpus>> {
    let (config, ranks) = (&training.config, training.resolved.job.ranks().len());
    let found = || -> Result<Gpus, CudaError> {
        let cards = Gpu::cards()?;
        if !joined && !share && ranks > cards.len() {
            return Err(CudaError::Taken { ranks, count: cards.len() });
        }
        Ok(Gpus { cards, dtype: config.train.precision.dtype(), joined })
    };
    match config.train.device {
        Device::Cpu => Ok(None),
        Device::Cuda => found().map(Some).context("train.device = \"cuda\""),
        Device::Auto => {
            let why = match (config.check_gpu(), found()) {
                (Ok(()), Ok(gpus)) => return Ok(Some(gpus)),
                (Err(error), _) => error.to_string(),
                (_, Err(error)) => error.to_string(),
            };
            let first = why.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
            output::remark(&format!("train.device = \"auto\": the host computes ({first})"));
            Ok(None)
        }
    }
}
