//! Why a checkpoint cannot be opened, converted or loaded: with the file, the tensor and the box it is about.

use std::path::{Path, PathBuf};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    #[error("cannot {what} {}: {cause}{}", path.display(), hint(cause))]
    Io { what: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("{}: {what}", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "{}: its pickle names `{global}`, which is not needed to describe tensors\nhint: nothing of it was run; do not load this file with torch either",
        path.display()
    )]
    Global { path: PathBuf, global: String },
    #[error("{}: {found} is not the schema `{wanted}`\nhint: another version of crossmesh wrote it", path.display())]
    Schema { path: PathBuf, found: String, wanted: &'static str },
    #[error("{}: no checkpoint that is known\nhint: {hint}", path.display())]
    Unknown { path: PathBuf, hint: String },
    #[error("{}: {} found\n{}", path.display(), count(problems.len()), list(problems))]
    Problems { path: PathBuf, problems: Vec<String> },
    #[error("{}: it became shorter while it was read: {wanted} bytes at {at} are not there\nhint: somebody is writing to it; nothing is to be kept of what was read", path.display())]
    Shrank { path: PathBuf, at: u64, wanted: u64 },
    #[error("{}: it changed while it was read\nhint: somebody is writing to it; nothing is to be kept of what was read", path.display())]
    Changed { path: PathBuf },
    #[error("stopped: {} keeps what was written\nhint: the same command goes on from there; remove that folder to give it up", partial.display())]
    Stopped { partial: PathBuf },
    #[error("name map `{map}`: {what}")]
    Map { map: String, what: String },
    #[error("tensor `{tensor}`: {what}")]
    Tensor { tensor: String, what: String },
    #[error("{what}")]
    Target { what: String },
}

impl CheckpointError {
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { what, path, cause }
    }

    pub fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn target(what: impl Into<String>) -> Self {
        Self::Target { what: what.into() }
    }
}

fn hint(cause: &std::io::Error) -> &'static str {
    use std::io::ErrorKind as Kind;
    match cause.kind() {
        Kind::NotFound => "\nhint: look at the path; a relative one starts where the program was started",
        Kind::PermissionDenied => "\nhint: give this user the right to, or take another place",
        Kind::StorageFull | Kind::QuotaExceeded | Kind::ReadOnlyFilesystem => {
            "\nhint: make room there, or write elsewhere"
        }
        _ => "",
    }
}

fn count(n: usize) -> String {
    format!("{n} problem{}", if n == 1 { "" } else { "s" })
}

/// The first few of many say enough.
fn list(problems: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut lines: Vec<String> = problems.iter().take(SHOWN).map(|p| format!("  {p}")).collect();
    if problems.len() > SHOWN {
        lines.push(format!("  and {} more", problems.len() - SHOWN));
    }
    lines.join("\n")
}
