//! The folder that is not there until all of it is: written beside the target's name, synchronised, renamed.
//!
//! ```text
//! .out.partial/    being written, or left by a process that was killed
//! out/             complete
//! ```

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::journal::{self, Done, Journal};
use crate::error::CheckpointError;

/// A target that is being written.
#[derive(Debug)]
pub struct Folder {
    target: PathBuf,
    partial: PathBuf,
}

impl Folder {
    pub fn new(target: &Path) -> Result<Self, CheckpointError> {
        let name = target.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
            CheckpointError::target(format!("`{}` is no name of a folder to write", target.display()))
        })?;
        let taken = std::fs::symlink_metadata(target).is_ok();
        let empty = std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
        if taken && !empty {
            let what = format!("{}: it is there already\nhint: remove it, or name another", target.display());
            return Err(CheckpointError::target(what));
        }
        let partial = target.with_file_name(format!(".{name}.partial"));
        Ok(Self { target: target.to_path_buf(), partial })
    }

    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Begins, or goes on where the same conversion was stopped.
    pub fn begin(
        &self,
        identity: &[u8; 32],
        slabs: usize,
        files: &[(&str, u64)],
    ) -> Result<(Journal, Done), CheckpointError> {
        self.make()?;
        if let Some((journal, done)) = Journal::open(&self.partial, identity, slabs)?
            && (done.iter().all(Option::is_none) || self.has_all(files))
        {
            return Ok((journal, done));
        }
        // What lies there is of another conversion, or somebody took files away.
        self.remove();
        self.make()?;
        Journal::open(&self.partial, identity, slabs)?.ok_or_else(|| {
            CheckpointError::target(format!("{}: somebody else writes here", self.partial.display()))
        })
    }

    fn has_all(&self, files: &[(&str, u64)]) -> bool {
        let bytes = |name: &str| std::fs::metadata(self.partial.join(name)).ok().map(|m| m.len());
        files.iter().all(|(name, len)| bytes(name) == Some(*len))
    }

    fn make(&self) -> Result<(), CheckpointError> {
        match std::fs::create_dir(&self.partial) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                Err(CheckpointError::Io { what: "make the folder", path: self.partial.clone(), cause: error })
            }
            _ => Ok(()),
        }
    }

    /// A file of this length. Its room is taken at once where the file system can: a full disk is noticed first.
    pub fn make_file(&self, name: &str, bytes: u64) -> Result<PathBuf, CheckpointError> {
        let path = self.partial.join(name);
        if let Some(parent) = Path::new(name).parent().filter(|p| !p.as_os_str().is_empty()) {
            std::fs::create_dir_all(self.partial.join(parent))
                .map_err(CheckpointError::io("make the folder", &path))?;
        }
        let io = |what| CheckpointError::io(what, &path);
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io("write"))?;
        file.set_len(bytes).map_err(io("write"))?;
        if bytes > 0 {
            let taken = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
            if let Err(error) = taken
                && error != rustix::io::Errno::OPNOTSUPP
                && error != rustix::io::Errno::NOSYS
            {
                return Err(CheckpointError::Io { what: "find room for", path, cause: error.into() });
            }
        }
        Ok(path)
    }

    /// Refuses before the first byte what cannot fit.
    pub fn has_room(&self, bytes: u64) -> Result<(), CheckpointError> {
        let parent = self.parent();
        // Where nobody says how much is left, writing will tell.
        let Ok(stat) = rustix::fs::statvfs(parent) else { return Ok(()) };
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let have = self.partial_bytes();
        if bytes > free.saturating_add(have) {
            let what = format!(
                "{}: {bytes} bytes are to be written, and the disk has room for {free}\nhint: make room, or write elsewhere",
                self.target.display()
            );
            return Err(CheckpointError::target(what));
        }
        Ok(())
    }

    /// What an earlier start has taken already.
    fn partial_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let entries = std::fs::read_dir(&self.partial).into_iter().flatten().flatten();
        entries.filter_map(|e| e.metadata().ok()).map(|m| m.blocks() * 512).sum()
    }

    fn parent(&self) -> &Path {
        self.target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Complete from here on. All files are synchronised already.
    pub fn finish(&self) -> Result<(), CheckpointError> {
        let journal = self.partial.join(journal::NAME);
        std::fs::remove_file(&journal).map_err(CheckpointError::io("remove", &journal))?;
        sync(&self.partial)?;
        std::fs::rename(&self.partial, &self.target)
            .map_err(CheckpointError::io("rename to", &self.target))?;
        sync(self.parent())
    }

    /// Leaves nothing behind.
    pub fn remove(&self) {
        // That it cannot be removed is less than the error that is under way.
        let _ = std::fs::remove_dir_all(&self.partial);
    }
}

fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let file = File::open(folder).map_err(CheckpointError::io("open", folder))?;
    rustix::fs::fsync(file.as_fd()).map_err(|e| CheckpointError::Io {
        what: "synchronise",
        path: folder.to_path_buf(),
        cause: e.into(),
    })
}
