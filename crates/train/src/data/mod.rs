//! Data: samples that have numbers.
//!
//! Sample `n` of a run (step × batch + place in the batch) is the same one on every layout: which tokens, which noise, is decided by the
//! data set's seed and `n` alone. So a rank reads just the samples and the ports that it needs, no rank tells another what it read, and
//! the position to be saved in a checkpoint is a number.
//!
//! ```text
//! order        which window is sample n: a new permutation every epoch, without a table
//! text         UTF-8 files and folders to ids: bytes, or a tokenizer.json
//! file         token files: packed once, read in place, checked where read (docs/token-file.md); those of nanoGPT and Megatron-LM
//! mixture      several streams, drawn from by weight
//! tokens       windows of a stream of ids as samples of a language model
//! language     a synthetic language whose entropy is known
//! images       synthetic noisy images whose best possible loss is known
//! ```

mod error;
pub mod file;
pub mod images;
pub mod language;
pub mod mixture;
pub mod order;
pub mod text;
pub mod tokens;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use error::DataError;

use crate::chain::{Model, Shape, Tensor};
use crate::kernels::Kernels;
use crate::stage::Role;

/// What samples are for. No token, and no draw of a random number, is in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    Training,
    Validation,
}

/// Samples in a row of one port, row-major `[samples, dims..]`.
#[derive(Debug, Clone, PartialEq)]
pub enum Column {
    Ids(Vec<i32>),
    Real(Vec<f64>),
}

/// What a data set has for a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feature {
    pub port: &'static str,
    /// Of one sample.
    pub dims: Vec<usize>,
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Integers from 0 to below `classes`.
    Ids {
        classes: usize,
    },
    Real,
}

/// Samples to train on.
pub trait DataSet: Send + Sync {
    /// What it has, by port.
    fn features(&self) -> Vec<Feature>;

    /// Samples of an epoch; `None`: there is no end of new ones.
    fn num_samples(&self, split: Split) -> Option<u64>;

    /// One port of the samples with these numbers. Numbers go on from epoch to epoch.
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, DataError>;

    /// The mean loss that no model can go below, where it is known.
    fn reachable_loss(&self) -> Option<f64> {
        None
    }

    /// What it is, in a few words, for reports.
    fn describe(&self) -> String;
}

/// Whether a data set has all that a model reads, before the first step.
pub fn check_model<K: Kernels>(data: &dyn DataSet, model: &dyn Model<K>) -> Result<(), DataError> {
    let interfaces = (0..model.num_units()).map(|unit| model.interface(unit));
    let read: Vec<Tensor> = interfaces.flat_map(|i| i.reads).filter(|t| t.role == Role::Data).collect();
    check(data, &read)
}

/// Whether a data set has these tensors: as many dims of the same lengths, and no id that the model does not know.
pub fn check(data: &dyn DataSet, tensors: &[Tensor]) -> Result<(), DataError> {
    let features = data.features();
    for tensor in tensors {
        let Some(feature) = features.iter().find(|f| f.port == tensor.name) else {
            let (port, known) = (tensor.name.clone(), names(&features));
            return Err(DataError::NoPort { data: data.describe(), port, known });
        };
        let (wanted_dims, known_ids) = match &tensor.shape {
            Shape::Ids { dims, classes } => (dims.clone(), Some(*classes)),
            Shape::Samples(dims) => (dims.clone(), None),
            Shape::Rows { rows, cols } => (vec![*rows, *cols], None),
            Shape::Number => (vec![], None),
        };
        let same_kind = matches!(feature.kind, Kind::Ids { .. }) == known_ids.is_some();
        if feature.dims != wanted_dims || !same_kind {
            return Err(DataError::Shape {
                data: data.describe(),
                port: tensor.name.clone(),
                has: shown(matches!(feature.kind, Kind::Ids { .. }), &feature.dims),
                wanted: shown(known_ids.is_some(), &wanted_dims),
            });
        }
        if let (Kind::Ids { classes: has }, Some(knows)) = (feature.kind, known_ids)
            && has > knows
        {
            let (data, port) = (data.describe(), tensor.name.clone());
            return Err(DataError::Vocabulary { data, port, has, knows });
        }
    }
    Ok(())
}

fn names(features: &[Feature]) -> String {
    features.iter().map(|f| f.port).collect::<Vec<_>>().join(", ")
}

/// `ids[64]`, `numbers[8,8,1]`.
fn shown(ids: bool, dims: &[usize]) -> String {
    let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    format!("{}[{}]", if ids { "ids" } else { "numbers" }, dims.join(","))
}

/// For a data set that was asked for a port it does not have.
fn no_port(data: &dyn DataSet, port: &str) -> DataError {
    DataError::NoPort { data: data.describe(), port: port.to_string(), known: names(&data.features()) }
}
