//! Which slabs are written, so that a second start goes on where a killed one stopped.
//!
//! A line of sixteen bytes follows every slab's bytes: its number, its checksum, and a check of the line itself. What a
//! process has written survives its death, though not that of the machine: a journal of another boot counts for nothing.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::CheckpointError;
use crate::zip::crc32;

pub const NAME: &str = ".crossmesh-journal";
const LINE: usize = 16;

/// A journal that is written to.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: std::path::PathBuf,
}

/// Which slabs an earlier start has written, with their checksums.
pub type Done = Vec<Option<u32>>;

impl Journal {
    /// Opens the journal of a folder for this very conversion, or begins one. None where the folder's is of another.
    pub fn open(
        folder: &Path,
        identity: &[u8; 32],
        slabs: usize,
    ) -> Result<Option<(Self, Done)>, CheckpointError> {
        let path = folder.join(NAME);
        let io = |what| CheckpointError::io(what, &path);
        let file =
            OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(io("write"))?;
        // Whoever holds it is at work; a process that dies lets go.
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let what = format!("{}: another conversion is writing here", folder.display());
            return Err(CheckpointError::target(what));
        }
        let mut journal = Self { file, path };
        let mut bytes = Vec::new();
        journal.file.read_to_end(&mut bytes).map_err(CheckpointError::io("read", &journal.path))?;
        let head = Self::head(identity);
        if bytes.is_empty() {
            journal.append(&head)?;
            return Ok(Some((journal, vec![None; slabs])));
        }
        let Some(lines) = bytes.strip_prefix(&head[..]) else { return Ok(None) };
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
        Ok(Some((journal, done)))
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
