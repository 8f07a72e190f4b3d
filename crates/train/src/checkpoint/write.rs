//! Writing beside training: a thread that writes a snapshot, hashes it on the way, and does not end before the disk has it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use super::error::CheckpointError;
use super::parts::RankPart;
use super::snapshot::Snapshot;

/// Hashed and written at once: fits the cache.
const BLOCK_BYTES: usize = 1 << 18;

/// A snapshot on its way to the disk.
#[derive(Debug)]
pub struct Writing {
    rank: u32,
    step: u64,
    thread: JoinHandle<Result<RankPart, CheckpointError>>,
}

/// What a rank says when it has written, or could not.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub rank: u32,
    pub outcome: Result<RankPart, String>,
}

impl Writing {
    pub(super) fn start(
        snapshot: Snapshot,
        prepare: impl FnOnce() -> Result<PathBuf, CheckpointError> + Send + 'static,
    ) -> Self {
        let (rank, step) = (snapshot.part.rank, snapshot.part.step);
        let run = move || {
            snapshot.check_finite()?;
            write(snapshot, &prepare()?)
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(run);
        Self { rank, step, thread: thread.expect("a thread to write checkpoints") }
    }

    /// The step whose state is being written.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether [`Writing::report`] would not wait.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the disk; then this rank's part of the manifest, or why there is none, as bytes for rank 0.
    pub fn report(self) -> Vec<u8> {
        let outcome = match self.thread.join() {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_) => Err("the thread that writes it panicked".into()),
        };
        serde_json::to_vec(&Report { rank: self.rank, outcome }).expect("a report is a document")
    }
}

/// Writes a rank's file into a folder. When it returns, file and name are on disk.
fn write(mut snapshot: Snapshot, folder: &Path) -> Result<RankPart, CheckpointError> {
    let path = folder.join(&snapshot.part.file.name);
    let mut file = File::create(&path).map_err(CheckpointError::io("create", &path))?;
    let mut hasher = blake3::Hasher::new();
    for block in [&snapshot.header, &snapshot.body].into_iter().flat_map(|b| b.chunks(BLOCK_BYTES)) {
        hasher.update(block);
        file.write_all(block).map_err(CheckpointError::io("write", &path))?;
    }
    file.sync_all().map_err(CheckpointError::io("write", &path))?;
    sync_folder(folder)?;
    snapshot.part.file.blake3 = hasher.finalize().to_hex().to_string();
    Ok(snapshot.part)
}

/// Makes the names in a folder last.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(CheckpointError::io("write", folder))
}
