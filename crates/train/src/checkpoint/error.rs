//! What goes wrong with checkpoints. Every message names the file, what is wrong with it, and a hint where there is one.

use std::io;
use std::path::{Path, PathBuf};

use crossmesh_core::dtype::DType;

/// A checkpoint that cannot be written, read or believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    #[error("cannot {what} {}: {cause}{}", path.display(), hint(cause))]
    Io { what: &'static str, path: PathBuf, cause: io::Error },
    #[error("{}: {what}", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{}: there is no checkpoint here\nhint: a checkpoint is a folder with a manifest.json", path.display())]
    NotThere { path: PathBuf },
    #[error("rank {rank} could not save: {why}")]
    Rank { rank: u32, why: String },
    #[error("the parts of step {step} do not make a checkpoint: {what}")]
    Parts { step: u64, what: String },
    #[error("{}: it has no tensor `{name}`{}", path.display(), near.as_ref().map(|n| format!("\nhint: it has `{n}`")).unwrap_or_default())]
    NoTensor { path: PathBuf, name: String, near: Option<String> },
    #[error(
        "{}: the model has no use for {count} of its tensors, such as `{name}`: they would be lost\nhint: train the model that was saved; `crossmesh checkpoint show` tells its sizes",
        path.display()
    )]
    LeftOut { path: PathBuf, name: String, count: usize },
    #[error("{}: `{name}` has the shape {found:?}, the model {wanted:?}", path.display())]
    Shape { path: PathBuf, name: String, found: Vec<u64>, wanted: Vec<u64> },
    #[error("{}: it holds {found}, and {wanted} is wanted\nhint: go on with train.dtype = \"{found}\", or convert it first: `crossmesh checkpoint convert --to crossmesh --dtype {wanted}`", path.display())]
    DType { path: PathBuf, found: DType, wanted: DType },
    #[error("{}: it holds the moments {found:?}, and the optimizer has {wanted:?}\nhint: go on with the optimizer it was saved with", path.display())]
    Optimizer { path: PathBuf, found: Vec<String>, wanted: Vec<String> },
    #[error(
        "`{key}` of step {step} has {value} in it, and is not saved\nhint: go on from an earlier checkpoint, with a lower learning rate or `optimizer.clip`"
    )]
    NotFinite { key: String, step: u64, value: f64 },
    #[error("{what}")]
    State { what: String },
    #[error("{}: {what}", path.display())]
    Model { path: PathBuf, what: String },
    #[error(transparent)]
    Format(crossmesh_checkpoint::CheckpointError),
}

impl From<crossmesh_checkpoint::CheckpointError> for CheckpointError {
    fn from(error: crossmesh_checkpoint::CheckpointError) -> Self {
        use crossmesh_checkpoint::CheckpointError as Format;
        match error {
            Format::Io { what, path, cause } => Self::Io { what, path, cause },
            Format::Damaged { path, what } => Self::Damaged { path, what },
            other => Self::Format(other),
        }
    }
}

impl CheckpointError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Io { what, path: path.to_path_buf(), cause }
    }

    pub(super) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }
}

fn hint(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\nhint: make room there, keep fewer checkpoints, or write elsewhere"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\nhint: every rank has to be able to write there"
        }
        io::ErrorKind::NotFound => {
            "\nhint: look at the path; a relative one starts where the program was started"
        }
        _ => "",
    }
}

/// A checkpoint that was passed over, and why.
#[derive(Debug)]
pub struct Fault {
    pub path: PathBuf,
    pub error: CheckpointError,
}
