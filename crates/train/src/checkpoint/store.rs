//! The folder of a run's checkpoints: what is complete in it, what is left over, what may go.
//!
//! ```text
//! step-00000100/              complete: it has its manifest, and it got this name last
//! step-00000200/
//! .step-00000300.partial/     being written, or left by a crash; the next save removes it
//! step-00000400.set-aside/    from before the run went back to 200 and came to save 300
//! ```
//!
//! A checkpoint is complete when its folder is renamed, and the manifest is in it by then. Whatever happens before leaves what was complete as
//! it was.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crossmesh_checkpoint::manifest::{Facts, MANIFEST, Manifest};

use super::error::{CheckpointError, Fault};
use super::load::Checkpoint;
use super::snapshot::Snapshot;
use super::write::{Report, Writing, sync_folder};

/// A folder of checkpoints.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
    keep: NonZeroUsize,
}

impl Store {
    /// A folder, which need not exist yet, that keeps the last `keep` checkpoints. All ranks see the same one.
    pub fn new(folder: impl Into<PathBuf>, keep: NonZeroUsize) -> Self {
        Self { folder: folder.into(), keep }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a snapshot beside training. Rank 0's thread first removes what crashed attempts at other steps left, so the save before has to
    /// be committed (or given up) by then.
    pub fn write(&self, snapshot: Snapshot) -> Writing {
        let store = self.clone();
        let (first, step) = (snapshot.part.rank == 0, snapshot.part.step);
        Writing::start(snapshot, move || {
            let folder = store.partial(step);
            fs::create_dir_all(&folder).map_err(CheckpointError::io("create", &folder))?;
            if first {
                store.clean(step)?;
            }
            Ok(folder)
        })
    }

    /// On rank 0, with the reports of all ranks: checks that together they are the whole state, writes the manifest, and makes the checkpoint
    /// complete. Returns where it is. [`Store::prune`] then removes the oldest ones. Takes a few synchronisations of the disk, so it may have a thread of
    /// its own.
    pub fn commit(&self, facts: &Facts, reports: &[Vec<u8>]) -> Result<PathBuf, CheckpointError> {
        let partial = self.partial(facts.step);
        self.seal(facts, reports, &partial).inspect_err(|_| {
            // Half a checkpoint may be what fills the disk.
            let _ = fs::remove_dir_all(&partial);
        })?;
        self.set_aside(facts.step)?;
        let complete = self.complete(facts.step);
        replace(&partial, &complete)?;
        sync_folder(&self.folder)?;
        Ok(complete)
    }

    /// All that is left to do before it gets its name.
    fn seal(&self, facts: &Facts, reports: &[Vec<u8>], partial: &Path) -> Result<(), CheckpointError> {
        let manifest = assemble(facts, reports)?;
        tidy(partial, &manifest)?;
        write_synced(&partial.join(MANIFEST), manifest.to_text().as_bytes())?;
        sync_folder(partial)
    }

    /// The steps that have a complete checkpoint, oldest first.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = Vec::new();
        for name in self.names()? {
            let step = name.strip_prefix("step-").and_then(|n| n.parse::<u64>().ok());
            // `step-5` is somebody else's: what is saved of step 5 has another name.
            let step = step.filter(|step| self.complete(*step) == self.folder.join(&name));
            steps.extend(step.filter(|_| self.folder.join(&name).join(MANIFEST).is_file()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest complete checkpoint, whether or not its files are still what they were.
    pub fn latest(&self) -> Result<Option<PathBuf>, CheckpointError> {
        Ok(self.steps()?.last().map(|&step| self.complete(step)))
    }

    /// The newest checkpoint whose files are all what they were, and what is wrong with the newer ones. For those who asked for it: whoever goes
    /// back to an older one should be told.
    pub fn latest_loadable(&self) -> Result<(Option<Checkpoint>, Vec<Fault>), CheckpointError> {
        let mut faults = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            let path = self.complete(step);
            match Checkpoint::open(&path).and_then(|c| c.verify().map(|()| c)) {
                Ok(checkpoint) => return Ok((Some(checkpoint), faults)),
                Err(error) => faults.push(Fault { path, error }),
            }
        }
        Ok((None, faults))
    }

    /// Where the complete checkpoint of a step is, or would be.
    pub fn complete(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:08}"))
    }

    fn partial(&self, step: u64) -> PathBuf {
        self.folder.join(format!(".step-{step:08}.partial"))
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let io = |error| CheckpointError::io("list", &self.folder)(error);
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            entries => entries.map_err(io)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry.map_err(io)?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Removes what crashed attempts left, but for the step that is being written.
    fn clean(&self, writing: u64) -> Result<(), CheckpointError> {
        for name in self.names()? {
            let step = name.strip_prefix(".step-").and_then(|n| n.strip_suffix(".partial"));
            if step.is_some_and(|s| s.parse::<u64>().is_ok_and(|s| s != writing)) {
                remove(&self.folder.join(name))?;
            }
        }
        Ok(())
    }

    /// Checkpoints of later steps belong to a run that went back: the next start has to go on from this one, not from them. They are kept under
    /// another name.
    fn set_aside(&self, step: u64) -> Result<(), CheckpointError> {
        for later in self.steps()?.into_iter().filter(|&s| s > step) {
            let from = self.complete(later);
            let to = from.with_extension("set-aside");
            if to.exists() {
                remove(&to)?;
            }
            fs::rename(&from, &to).map_err(CheckpointError::io("rename", &from))?;
        }
        Ok(())
    }

    /// Removes the oldest complete ones. Where that fails there are more than there should be, and none is lost.
    pub fn prune(&self) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        let old = steps.len().saturating_sub(self.keep.get());
        steps[..old].iter().try_for_each(|&step| {
            // First out of sight, so that nobody finds half of one.
            let (path, hidden) = (self.complete(step), self.partial(step));
            fs::rename(&path, &hidden).map_err(CheckpointError::io("rename", &path))?;
            remove(&hidden)
        })
    }
}

/// The manifest that all reports make.
fn assemble(facts: &Facts, reports: &[Vec<u8>]) -> Result<Manifest, CheckpointError> {
    let mut parts = Vec::with_capacity(reports.len());
    for bytes in reports {
        let report: Report = serde_json::from_slice(bytes).map_err(|error| CheckpointError::Parts {
            step: facts.step,
            what: format!("a report is damaged: {error}"),
        })?;
        let rank = report.rank;
        parts.push(report.outcome.map_err(|why| CheckpointError::Rank { rank, why })?);
    }
    super::parts::assemble(facts, parts)
}

/// Whether all files are where the manifest will say; what else is there (an earlier attempt had more ranks) goes.
fn tidy(folder: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    for file in &manifest.files {
        let path = folder.join(&file.name);
        let found = fs::metadata(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::damaged(
                &path,
                "a rank has written it, and it is not here\nhint: all hosts need the same folder",
            ),
            _ => CheckpointError::io("look at", &path)(error),
        })?;
        if found.len() != file.bytes {
            let what = format!("it is {} bytes long, and its rank wrote {}", found.len(), file.bytes);
            return Err(CheckpointError::damaged(&path, what));
        }
    }
    for entry in fs::read_dir(folder).map_err(CheckpointError::io("list", folder))? {
        let path = entry.map_err(CheckpointError::io("list", folder))?.path();
        let known = |f: &crossmesh_checkpoint::manifest::FileEntry| {
            path.file_name().is_some_and(|n| n == f.name.as_str())
        };
        if !manifest.files.iter().any(known) {
            fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?;
        }
    }
    Ok(())
}

/// Renames a folder, over one of that name if there is one, without a moment in which there is none.
fn replace(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let io = |error| CheckpointError::io("rename", from)(error);
    if !to.exists() {
        return fs::rename(from, to).map_err(io);
    }
    match renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE) {
        Ok(()) => remove(from),
        // Not every file system can swap two names; NFS cannot.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            let aside = to.with_extension("set-aside");
            if aside.exists() {
                remove(&aside)?;
            }
            fs::rename(to, &aside).and_then(|()| fs::rename(from, to)).map_err(io)?;
            remove(&aside)
        }
        Err(error) => Err(io(error.into())),
    }
}

fn remove(folder: &Path) -> Result<(), CheckpointError> {
    fs::remove_dir_all(folder).map_err(CheckpointError::io("remove", folder))
}

/// Writes a small file; when it returns, its bytes are on disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    use std::io::Write;
    let written = fs::File::create(path).and_then(|mut f| f.write_all(bytes).and_then(|()| f.sync_all()));
    written.map_err(CheckpointError::io("write", path))
}
