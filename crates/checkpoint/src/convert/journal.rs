//! Which slabs are written, so that a second start goes on where a killed one stopped.
//!
//! A line of sixteen bytes follows every slab's bytes: its number, what it adds to the checksum of its box, and a check of the line itself. What a
//! process has written survives its death, though not that of the machine: a journal of another boot counts for nothing.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::crc::crc32;
use crate::error::CheckpointError;

pub const NAME: &str = "journal";
/// So often somebody else may come to its end just when this one begins.
const TRIES: usize = 100;
const LINE: usize = 16;

/// A journal that is written to.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
}

/// Which slabs an earlier start has written, and what each adds to the checksum of its box.
pub type Done = Vec<Option<u32>>;

impl Journal {
    /// Opens the journal of a folder for this very conversion, or begins one; the folder is made where it is not there. No slabs are told where
    /// the folder's is of another.
    pub fn open(
        folder: &Path,
        identity: &[u8; 32],
        slabs: usize,
    ) -> Result<(Self, Option<Done>), CheckpointError> {
        let (mut file, path) = Self::locked(folder)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(CheckpointError::io("read", &path))?;
        let journal = Self { file, path };
        let Some(lines) = bytes.strip_prefix(&Self::head(identity)[..]) else { return Ok((journal, None)) };
        let mut done = vec![None; slabs];
        for line in lines.as_chunks::<LINE>().0 {
            let (head, check) = line.split_at(12);
            if crc32(head).to_le_bytes() != check {
                break;
            }
            let slab = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
            let crc = u32::from_le_bytes(head[8..].try_into().expect("four bytes"));
            if let Some(place) = usize::try_from(slab).ok().and_then(|slab| done.get_mut(slab)) {
                *place = Some(crc);
            }
        }
        Ok((journal, Some(done)))
    }

    /// The file, with a lock on it: whoever holds it is at work, and a process that dies lets go.
    fn locked(folder: &Path) -> Result<(File, PathBuf), CheckpointError> {
        let path = folder.join(NAME);
        for _ in 0..TRIES {
            match std::fs::create_dir(folder) {
                Err(cause) if cause.kind() != ErrorKind::AlreadyExists => {
                    let path = folder.to_path_buf();
                    return Err(CheckpointError::Io { what: "make the folder", path, cause });
                }
                _ => {}
            }
            let file = match OpenOptions::new().create(true).read(true).append(true).open(&path) {
                // Somebody has just come to an end, and took it away.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened.map_err(CheckpointError::io("write", &path))?,
            };
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                break;
            }
            let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
            let (mine, there) = (file.metadata().ok().map(id), std::fs::metadata(&path).ok().map(id));
            if mine.is_some() && mine == there {
                return Ok((file, path));
            }
        }
        let what = format!("{}: another conversion is writing here", folder.display());
        Err(CheckpointError::target(what))
    }

    /// Begins anew.
    pub fn restart(&mut self, identity: &[u8; 32]) -> Result<(), CheckpointError> {
        self.file.set_len(0).map_err(CheckpointError::io("write", &self.path))?;
        self.append(&Self::head(identity))
    }

    /// Holds the folder for as long as it lives, also when the journal is closed.
    pub fn lock(&self) -> Result<File, CheckpointError> {
        self.file.try_clone().map_err(CheckpointError::io("write", &self.path))
    }

    fn head(identity: &[u8; 32]) -> Vec<u8> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let mut head = b"crossmesh.journal/1\n".to_vec();
        head.extend(blake3::hash(&[&identity[..], &boot].concat()).as_bytes());
        head
    }

    pub fn wrote(&mut self, slab: usize, crc: u32) -> Result<(), CheckpointError> {
        let mut line = (slab as u64).to_le_bytes().to_vec();
        line.extend(crc.to_le_bytes());
        line.extend(crc32(&line).to_le_bytes());
        self.append(&line)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.file.write_all(bytes).map_err(CheckpointError::io("write", &self.path))
    }
}

/// Whether nobody holds it.
pub fn is_nobodys(journal: &Path) -> bool {
    let locked = |file: File| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    File::open(journal).is_ok_and(locked)
}
