//! Where the data of a job comes from, as its ranks see it.

use std::ops::Range;

use super::passes::PassFailure;

/// Samples in a row of one port, row-major `[samples, dims..]`.
#[derive(Debug, Clone, PartialEq)]
pub enum Column {
    Ids(Vec<i32>),
    Real(Vec<f64>),
}

/// Samples have numbers, from step to step. Which is which does not depend on who asks.
pub trait Feed: Send + Sync {
    fn read(&self, port: &str, samples: Range<u64>) -> Result<Column, PassFailure>;
}
