//! Why a checkpoint cannot be opened, converted or loaded: with the file, the tensor and the box it is about.

use std::path::{Path, PathBuf};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    #[error("cannot {what} {}: {cause}", path.display())]
    Io { what: &'static str, path: PathBuf, cause: std::io::Error },
    #[error("{}: {what}", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error(
        "{}: its pickle names `{global}`, which is not needed to describe tensors\nhint: nothing of it was run; do not load this file with torch either",
        path.display()
    )]
    Global { path: PathBuf, global: String },
    #[error("{}: no checkpoint that is known\nhint: {hint}", path.display())]
    Unknown { path: PathBuf, hint: String },
    #[error("{}: {} found\n{}", path.display(), count(problems.len()), list(problems))]
    Problems { path: PathBuf, problems: Vec<String> },
    #[error("{}: it became shorter while it was read: {wanted} bytes at {at} are not there\nhint: somebody is writing to it; nothing was kept of this conversion", path.display())]
    Shrank { path: PathBuf, at: u64, wanted: u64 },
    #[error("{}: it changed while it was read\nhint: somebody is writing to it; nothing was kept of this conversion", path.display())]
    Changed { path: PathBuf },
    #[error("name map `{map}`: {what}")]
    Map { map: String, what: String },
    #[error("tensor `{tensor}`: {what}")]
    Tensor { tensor: String, what: String },
    #[error("{what}")]
    Target { what: String },
}

impl CheckpointError {
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { what, path, cause }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn target(what: impl Into<String>) -> Self {
        Self::Target { what: what.into() }
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
