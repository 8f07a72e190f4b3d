//! Where ranks have their tensors: `--memory host`, `cuda`, or `cuda:0,2-3` for some of them.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_cuda::{CudaError, Gpu};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Memory {
    #[default]
    Host,
    Cuda,
    /// Of these ranks; the others' is the host's.
    CudaOf(Vec<RangeInclusive<u32>>),
}

impl Memory {
    pub fn is_on_gpu(&self, rank: Rank) -> bool {
        match self {
            Memory::Host => false,
            Memory::Cuda => true,
            Memory::CudaOf(ranges) => ranges.iter().any(|range| range.contains(&rank.0)),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no memory\nhint: host, cuda, or cuda:0,2-3 for some ranks")]
pub struct NoMemory(String);

impl FromStr for Memory {
    type Err = NoMemory;

    fn from_str(text: &str) -> Result<Self, NoMemory> {
        let bad = || NoMemory(text.into());
        let ranks = match text {
            "host" => return Ok(Memory::Host),
            "cuda" => return Ok(Memory::Cuda),
            _ => text.strip_prefix("cuda:").ok_or_else(bad)?,
        };
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(first..=last)
        };
        ranks.split(',').map(range).collect::<Option<_>>().map(Memory::CudaOf).ok_or_else(bad)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Host => f.write_str("host"),
            Memory::Cuda => f.write_str("cuda"),
            Memory::CudaOf(ranges) => {
                let text = |range: &RangeInclusive<u32>| match range.start() == range.end() {
                    true => range.start().to_string(),
                    false => format!("{}-{}", range.start(), range.end()),
                };
                write!(f, "cuda:{}", ranges.iter().map(text).collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// The GPU of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuChoice {
    /// Which of the machine's ranks it is, of those that have one.
    pub index: usize,
    /// Ranks may share a GPU.
    pub share: bool,
}

impl GpuChoice {
    pub fn open(self) -> Result<Arc<Gpu>, CudaError> {
        Gpu::choose(self.index, self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_read_as_it_is_written() {
        for text in ["host", "cuda", "cuda:0", "cuda:0,2-3,7"] {
            assert_eq!(text.parse::<Memory>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:3-1", "cuda:a", "cuda:1,"] {
            assert_eq!(text.parse::<Memory>(), Err(NoMemory(text.into())));
        }
        let some: Memory = "cuda:0,2-3".parse().unwrap();
        assert_eq!(
            (0..5).map(|r| some.is_on_gpu(Rank(r))).collect::<Vec<_>>(),
            [true, false, true, true, false]
        );
    }
}
