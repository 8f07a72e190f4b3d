//! Checkpoints of any format, for any parallelism.
//!
//! ```text
//! folder  --open-->  Catalog: boxes of named tensors at places of files  --check-->  problems
//!                       |  names: the same boxes under other names (maps/*.toml)
//!                       |  target: where the boxes shall be
//!                    Conversion  --explain-->  which bytes come from where
//!                       |  run: read, write, synchronise, rename
//!                    folder
//! ```
//!
//! Nothing here executes what a file says: pickles are read as words. Nothing is trusted: what does not fit together is
//! refused with the file, the tensor and the box.

#[cfg(not(target_endian = "little"))]
compile_error!("checkpoints are little-endian, and numbers are copied as they lie in files");

pub mod catalog;
pub mod convert;
mod copy;
mod crc;
pub mod diff;
pub mod element;
pub mod error;
pub mod hash;
mod load;
pub mod manifest;
pub mod model;
pub mod names;
mod open;
mod pickle;
mod request;
pub mod safetensors;
pub mod target;
mod zip;

pub use catalog::{Catalog, Format, Problem, ProblemKind, StoredBox, Tensor, row_major};
pub use convert::{Conversion, Explanation, Limits, Progress, Report, RunOptions};
pub use element::Element;
pub use error::CheckpointError;
pub use load::{BoxReader, Loaded, Want, load, rounds};
pub use names::{NameMap, Naming, Parallel, Renamed};
pub use open::{is_ours, open, open_within};
pub use request::{Planned, Request};
pub use target::{Cut, Spec};
