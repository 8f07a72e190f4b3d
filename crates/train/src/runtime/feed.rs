//! Where the data of a job comes from, as its ranks see it.

use std::ops::Range;
use std::sync::Arc;

use super::passes::PassFailure;
pub use crate::data::Column;
use crate::data::{DataSet, Split};

/// Samples have numbers, from step to step. Which is which does not depend on who asks.
pub trait Feed: Send + Sync {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure>;
}

/// What a data set has.
pub struct Samples(pub Arc<dyn DataSet>);

impl Feed for Samples {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure> {
        Ok(self.0.read(port, samples, split)?)
    }
}
