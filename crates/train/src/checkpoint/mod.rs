//! Checkpoints: what a run has learnt, on disk. Saved on one layout, loaded on any.
//!
//! The one idea: everything is boxes of named tensors. A rank's shard of a weight is a box; a run of it (ZeRO's moments, or the part that this
//! rank writes of what several hold) is a few boxes; a manifest says which box lies where; to load is to intersect boxes.
//!
//! ```text
//! checkpoints/step-00000100/    manifest.json           facts, files with their hashes, boxes
//!                               rank-000.safetensors    what rank 0 wrote: of replicas one writes, all of them in turn
//!                               rank-001.safetensors
//! ```
//!
//! Saving, on every rank, between two steps. Training goes on while [`Writing`] writes:
//!
//! ```text
//! let snapshot = Snapshot::take(step, rank, &[StageState { .. }])?;      a copy of what this rank writes
//! let writing = store.write(snapshot);                                   a thread: write, hash, fsync
//! ..steps.., until writing.is_finished() on all ranks (or at once)
//! let report = writing.report();                                         bytes: this rank's part of the manifest, or its error
//! gather the reports of all ranks on rank 0, in any order
//! rank 0: store.commit(&facts, &reports)?                                complete from here on; store.prune() removes older ones
//! ```
//!
//! ([`Draft`] takes the snapshot stage by stage, where stages cannot be lent together.) One save at a time: the next snapshot is written after the last one was committed. Loading, on every rank:
//!
//! ```text
//! let path = store.latest()?;                                            the newest complete one, whatever its state
//! let checkpoint = Checkpoint::open(&path)?;                             manifest, lengths
//! let restored = checkpoint.load(&mut [StageTarget { .. }], Convert::No)?;    checks hashes, reads the boxes it needs
//! ```
//!
//! [`hf`] speaks to other programs: one file as Hugging Face transformers has it. docs/checkpoint-format.md has the format.

#[cfg(not(target_endian = "little"))]
compile_error!("safetensors are little-endian, and numbers are written as they lie in memory");

mod error;
pub mod hf;
mod load;
mod owned;
mod parts;
mod snapshot;
mod source;
mod state;
mod store;
mod write;

pub use crossmesh_checkpoint::manifest::{
    BoxEntry, Facts, FileEntry, MANIFEST, Manifest, OptimizerFacts, SCHEMA, TensorEntry, VALUE,
};

pub use error::{CheckpointError, Fault};
pub use load::{Checkpoint, Restored};
pub use snapshot::{Draft, Snapshot};
pub use source::{Foreign, Source};
pub use state::{Convert, Moments, StageState, StageTarget};
pub use store::Store;
pub use write::Writing;
