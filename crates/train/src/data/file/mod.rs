//! Token files: ids packed once, read in place, checked where they are read.
//!
//! docs/token-file.md has the format. The ids are in blocks of 64 KiB with a checksum each, so that a rank that reads windows here and there
//! checks the blocks it touches, once, and never has to read the whole file first:
//!
//! ```text
//! header 64 B | ids, 2 or 4 B each: block | block | .. | documents' starts | checksums of the blocks
//! ```
//!
//! Ids are read by position and not through a mapping: the system's cache holds them for all ranks of a host either way, a rank's own memory
//! holds none of them, and a file that is cut short under a running job is an error with a name instead of a signal.

mod foreign;
mod header;
mod pack;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

pub use foreign::ForeignFile;
use header::{BLOCK_BYTES, HEADER_BYTES, Places};
pub use header::{Encoding, Header, Width};
pub use pack::{PackProgress, Packed, pack};

use super::DataError;

/// A token file that was opened.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    header: Header,
    places: Places,
    /// The checksum of every block, and whether it was found right.
    blocks: Vec<(u32, AtomicBool)>,
}

impl TokenFile {
    /// Believes the header and the table of checksums, once they are right; ids are checked when they are read.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io("read", path))?;
        let found = file.metadata().map_err(DataError::io("read", path))?;
        let refuse = |reason: String, hint| DataError::TokenFile { file: path.to_path_buf(), reason, hint };
        if !found.is_file() {
            return Err(refuse("it is no file".to_string(), NOT_PACKED));
        }
        let mut bytes = [0; HEADER_BYTES as usize];
        let len = found.len();
        if len < HEADER_BYTES {
            let reason = format!("it has {len} bytes, and the header alone has {HEADER_BYTES}");
            return Err(refuse(reason, NOT_PACKED));
        }
        file.read_exact_at(&mut bytes, 0).map_err(DataError::io("read", path))?;
        let header = Header::parse(&bytes).map_err(|(reason, hint)| refuse(reason, hint))?;
        let places = header.places().ok_or_else(|| refuse("its sizes overflow".to_string(), AGAIN))?;
        if places.end != len {
            let reason = format!("it has {len} bytes where its header says {}", places.end);
            return Err(refuse(reason, AGAIN));
        }
        let mut table = vec![0; (places.end - places.blocks) as usize];
        file.read_exact_at(&mut table, places.blocks).map_err(DataError::io("read", path))?;
        if crc32c::crc32c(&table) != header.blocks_crc {
            let reason = format!("the checksums from byte {} on are damaged", places.blocks);
            return Err(refuse(reason, AGAIN));
        }
        let crc = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let blocks = table.chunks_exact(4).map(|b| (crc(b), AtomicBool::new(false))).collect();
        Ok(Self { path: path.to_path_buf(), file, header, places, blocks })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn bytes(&self) -> u64 {
        self.places.end
    }

    /// Some of the ids.
    ///
    /// # Panics
    /// Beyond the last one.
    pub fn read(&self, ids: Range<u64>) -> Result<Vec<u32>, DataError> {
        assert!(
            ids.start <= ids.end && ids.end <= self.header.tokens,
            "ids {ids:?} of {}",
            self.header.tokens
        );
        let width = self.header.width.bytes();
        let (start, end) = (ids.start * width, ids.end * width);
        for block in start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) {
            self.check_block(block as usize)?;
        }
        let mut bytes = vec![0; (end - start) as usize];
        self.read_at(&mut bytes, HEADER_BYTES + start)?;
        Ok(self.header.width.ids(&bytes).collect())
    }

    /// Where documents start, in ids.
    pub fn documents(&self) -> Result<Vec<u64>, DataError> {
        let mut bytes = vec![0; (self.places.blocks - self.places.documents) as usize];
        self.read_at(&mut bytes, self.places.documents)?;
        if crc32c::crc32c(&bytes) != self.header.documents_crc {
            return Err(self.damaged("the documents' starts", self.places.documents));
        }
        let starts = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")));
        let starts: Vec<u64> = starts.collect();
        let ascend = starts.windows(2).all(|w| w[0] < w[1]);
        if !ascend || starts.first().is_some_and(|s| *s != 0) || starts.last() >= Some(&self.header.tokens) {
            return Err(self.damaged("the documents' starts", self.places.documents));
        }
        Ok(starts)
    }

    /// Reads and checks all of it.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<(), DataError> {
        self.documents()?;
        let ids_end = HEADER_BYTES + self.header.tokens * self.header.width.bytes();
        let mut padding = vec![0; (self.places.documents - ids_end) as usize];
        self.read_at(&mut padding, ids_end)?;
        if padding.iter().any(|b| *b != 0) {
            return Err(self.damaged("the padding", ids_end));
        }
        for block in 0..self.blocks.len() {
            self.check_block(block)?;
            progress((block as u64 + 1) * BLOCK_BYTES);
        }
        Ok(())
    }

    fn check_block(&self, block: usize) -> Result<(), DataError> {
        let (crc, checked) = &self.blocks[block];
        if checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let width = self.header.width;
        let start = block as u64 * BLOCK_BYTES;
        let len = (self.header.tokens * width.bytes() - start).min(BLOCK_BYTES);
        let mut bytes = vec![0; len as usize];
        self.read_at(&mut bytes, HEADER_BYTES + start)?;
        if crc32c::crc32c(&bytes) != *crc {
            return Err(self.damaged("the block of ids", HEADER_BYTES + start));
        }
        if let Some(at) = width.ids(&bytes).position(|id| u64::from(id) >= self.header.vocab) {
            let at = HEADER_BYTES + start + at as u64 * width.bytes();
            let reason = format!("the id at byte {at} is beyond its vocabulary of {}", self.header.vocab);
            return Err(DataError::TokenFile { file: self.path.clone(), reason, hint: AGAIN });
        }
        checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> Result<(), DataError> {
        self.file.read_exact_at(bytes, at).map_err(|cause| match cause.kind() {
            io::ErrorKind::UnexpectedEof => {
                let reason =
                    format!("it was cut short while in use, before byte {}", at + bytes.len() as u64);
                DataError::TokenFile { file: self.path.clone(), reason, hint: AGAIN }
            }
            _ => DataError::io("read", &self.path)(cause),
        })
    }

    fn damaged(&self, what: &str, at: u64) -> DataError {
        let reason = format!("{what} at byte {at} is not what was written");
        DataError::TokenFile { file: self.path.clone(), reason, hint: AGAIN }
    }
}

const NOT_PACKED: &str = "make one from text with `crossmesh data pack`";
const AGAIN: &str = "the file is damaged; copy it again, or pack it again with `crossmesh data pack`";
