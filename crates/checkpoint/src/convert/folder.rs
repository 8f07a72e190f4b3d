//! The folder that is not there until all of it is: written beside the target's name, synchronised, renamed.
//!
//! ```text
//! .out.partial/    being written, or left by a process that was killed
//!   journal          which slabs are written; whoever holds its lock is at work
//!   files/           is renamed to out/
//! out/             complete
//! ```

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::journal::{self, Done, Journal};
use crate::error::CheckpointError;

const FILES: &str = "files";

/// A target that is being written.
#[derive(Debug)]
pub struct Folder {
    target: PathBuf,
    partial: PathBuf,
    files: PathBuf,
}

impl Folder {
    pub fn new(target: &Path) -> Result<Self, CheckpointError> {
        let name = target.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
            CheckpointError::target(format!("`{}` is no name of a folder to write", target.display()))
        })?;
        let partial = target.with_file_name(format!(".{name}.partial"));
        let folder = Self { target: target.to_path_buf(), files: partial.join(FILES), partial };
        folder.is_free()?;
        Ok(folder)
    }

    /// That nothing has the target's name, or an empty folder.
    fn is_free(&self) -> Result<(), CheckpointError> {
        let target = &self.target;
        let there = std::fs::symlink_metadata(target);
        let taken = there.is_ok();
        // What a link leads to could not be replaced by a rename.
        let empty = there.is_ok_and(|m| m.is_dir())
            && std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_none());
        if taken && !empty {
            self.sweep();
            let what = format!("{}: it is there already\nhint: remove it, or name another", target.display());
            return Err(CheckpointError::target(what));
        }
        Ok(())
    }

    /// Takes away what is left where somebody was killed after the rename.
    fn sweep(&self) {
        let journal = self.partial.join(journal::NAME);
        if !self.files.exists() && journal.exists() && journal::is_nobodys(&journal) {
            self.remove();
        }
    }

    pub fn path(&self) -> &Path {
        &self.files
    }

    /// Where it is while it is being written.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Begins, or goes on where the same conversion was stopped.
    pub fn begin(
        &self,
        identity: &[u8; 32],
        slabs: usize,
        files: &[(&str, u64)],
    ) -> Result<(Journal, Done), CheckpointError> {
        let (mut journal, done) = Journal::open(&self.partial, identity, slabs)?;
        // Whoever held it before may have come to the end.
        if let Err(error) = self.is_free() {
            self.remove();
            return Err(error);
        }
        if let Some(done) = done.filter(|_| self.has_all(files)) {
            return Ok((journal, done));
        }
        // What lies there is of another conversion, or somebody took files away, or nothing is there yet.
        self.clear();
        std::fs::create_dir(&self.files).map_err(CheckpointError::io("make the folder", &self.files))?;
        journal.restart(identity)?;
        Ok((journal, vec![None; slabs]))
    }

    fn has_all(&self, files: &[(&str, u64)]) -> bool {
        let bytes = |name: &str| std::fs::metadata(self.files.join(name)).ok().map(|m| m.len());
        files.iter().all(|(name, len)| bytes(name) == Some(*len))
    }

    /// A file of this length. Its room is taken at once where the file system can: a full disk is noticed first.
    pub fn make_file(&self, name: &str, bytes: u64) -> Result<PathBuf, CheckpointError> {
        let path = self.files.join(name);
        if let Some(parent) = Path::new(name).parent().filter(|p| !p.as_os_str().is_empty()) {
            std::fs::create_dir_all(self.files.join(parent))
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
        let entries = std::fs::read_dir(&self.files).into_iter().flatten().flatten();
        entries.filter_map(|e| e.metadata().ok()).map(|m| m.blocks() * 512).sum()
    }

    fn parent(&self) -> &Path {
        self.target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// Complete from here on. All files are synchronised already.
    pub fn finish(&self) -> Result<(), CheckpointError> {
        self.publish()?;
        self.remove();
        Ok(())
    }

    /// One rename: whoever is killed before it leaves no target, and after it a whole one.
    fn publish(&self) -> Result<(), CheckpointError> {
        sync(&self.files)?;
        std::fs::rename(&self.files, &self.target).map_err(CheckpointError::io("rename to", &self.target))?;
        sync(self.parent())
    }

    /// Leaves nothing behind.
    pub fn remove(&self) {
        self.clear();
        // That it cannot be removed is less than the error that is under way. Where another has begun meanwhile, it keeps what is its own.
        let _ = std::fs::remove_file(self.partial.join(journal::NAME));
        let _ = std::fs::remove_dir(&self.partial);
    }

    /// All but the journal, whose lock is held.
    fn clear(&self) {
        for entry in std::fs::read_dir(&self.partial).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|t| t.is_dir());
            let _ = match is_folder {
                _ if entry.file_name() == journal::NAME => Ok(()),
                true => std::fs::remove_dir_all(entry.path()),
                false => std::fs::remove_file(entry.path()),
            };
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn killed_behind_the_rename_the_target_is_clean_and_the_rest_is_swept() {
        let scratch = tempfile::tempdir().unwrap();
        let target = scratch.path().join("out");
        let folder = Folder::new(&target).unwrap();
        let (journal, done) = folder.begin(&[7; 32], 3, &[("a", 5)]).unwrap();
        assert_eq!(done, [None; 3]);
        folder.make_file("a", 5).unwrap();
        folder.publish().unwrap();
        // As far as a killed process comes; its lock goes with it.
        drop(journal);
        let names = |path: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(path).unwrap();
            let mut names: Vec<String> =
                entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&target), ["a"]);
        assert_eq!(names(scratch.path()), [".out.partial", "out"]);
        assert!(Folder::new(&target).unwrap_err().to_string().contains("it is there already"));
        assert_eq!(names(scratch.path()), ["out"]);
    }

    #[test]
    fn whoever_comes_while_another_writes_is_told_and_touches_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let target = scratch.path().join("out");
        let (one, two) = (Folder::new(&target).unwrap(), Folder::new(&target).unwrap());
        let held = one.begin(&[1; 32], 1, &[("a", 5)]).unwrap();
        one.make_file("a", 5).unwrap();
        let error = two.begin(&[2; 32], 1, &[]).unwrap_err().to_string();
        assert!(error.contains("another conversion is writing here"), "{error}");
        one.publish().unwrap();
        drop(held);
        // It looked before there was a target, and comes after.
        let error = two.begin(&[2; 32], 1, &[]).unwrap_err().to_string();
        assert!(error.contains("it is there already"), "{error}");
        assert!(target.join("a").exists() && !scratch.path().join(".out.partial").exists());
    }
}
