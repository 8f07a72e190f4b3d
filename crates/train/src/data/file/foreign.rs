//! Token files of other programs, read in place.
//!
//! ```text
//! nanoGPT      NAME.bin               ids of two bytes, and nothing else
//! Megatron-LM  NAME.bin + NAME.idx    ids; the index has their width, and how long every sequence is
//! ```
//!
//! Neither says how large the vocabulary is, so the file is looked through once when it is opened. Neither has a checksum: an id beyond what was found then is
//! an error when it is read, and nothing else would be noticed. `crossmesh data pack` makes files that are checked.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::header::Width;
use crate::data::DataError;

/// What an index of Megatron-LM starts with.
const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Behind the magic: version, width, sequences, documents.
const INDEX_HEADER: usize = 9 + 8 + 1 + 8 + 8;
/// Read at once when a file is looked through.
const BLOCK_BYTES: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub struct ForeignFile {
    path: PathBuf,
    file: File,
    width: Width,
    tokens: u64,
    vocab: u64,
}

impl ForeignFile {
    /// Whether a path is meant as such a file: its name, or the name without its ending, as Megatron-LM has it.
    pub fn is_meant(path: &Path) -> bool {
        path.extension().is_some_and(|ending| ending == "bin")
            || (!path.exists() && with(path, ".bin").exists())
    }

    pub fn open(path: &Path) -> Result<Self, DataError> {
        let path = if path.extension().is_some_and(|e| e == "bin") {
            path.to_path_buf()
        } else {
            with(path, ".bin")
        };
        let file = File::open(&path).map_err(DataError::io("read", &path))?;
        let bytes = file.metadata().map_err(DataError::io("read", &path))?.len();
        let index = path.with_extension("idx");
        let (width, tokens) = match index.exists() {
            true => read_index(&index)?,
            false => (Width::U16, bytes / 2),
        };
        if bytes != tokens * width.bytes() {
            let reason = match index.exists() {
                true => format!(
                    "it has {bytes} bytes, and {} speaks of {tokens} ids of {} bytes",
                    index.display(),
                    width.bytes()
                ),
                false => format!("it has {bytes} bytes, no multiple of the two that an id has"),
            };
            return Err(DataError::TokenFile { file: path, reason, hint: "copy it again, with its index" });
        }
        let mut opened = Self { path, file, width, tokens, vocab: u64::MAX };
        opened.vocab = opened.look_through()?;
        Ok(opened)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// One more than the largest id.
    pub fn vocab(&self) -> u64 {
        self.vocab
    }

    /// Some of the ids.
    pub fn read(&self, ids: Range<u64>) -> Result<Vec<u32>, DataError> {
        let width = self.width.bytes();
        let mut bytes = vec![0; ((ids.end - ids.start) * width) as usize];
        self.file.read_exact_at(&mut bytes, ids.start * width).map_err(DataError::io("read", &self.path))?;
        let read: Vec<u32> = self.width.ids(&bytes).collect();
        match read.iter().find(|id| u64::from(**id) >= self.vocab) {
            None => Ok(read),
            Some(id) => {
                let reason = format!(
                    "it has the id {id} now, and had none beyond {} when it was opened",
                    self.vocab - 1
                );
                Err(DataError::TokenFile {
                    file: self.path.clone(),
                    reason,
                    hint: "leave it alone while it is trained on",
                })
            }
        }
    }

    fn look_through(&self) -> Result<u64, DataError> {
        let (mut largest, each) = (0, BLOCK_BYTES / self.width.bytes());
        for start in (0..self.tokens).step_by(each as usize) {
            let ids = self.read(start..(start + each).min(self.tokens))?;
            largest = largest.max(ids.into_iter().max().unwrap_or(0));
        }
        Ok(u64::from(largest) + 1)
    }
}

fn with(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Width and number of the ids that an index speaks of.
fn read_index(path: &Path) -> Result<(Width, u64), DataError> {
    let bytes = std::fs::read(path).map_err(DataError::io("read", path))?;
    let refuse = |reason: String| DataError::TokenFile {
        file: path.to_path_buf(),
        reason,
        hint: "it has to be the .idx that Megatron-LM's preprocess_data.py wrote",
    };
    if bytes.len() < INDEX_HEADER || !bytes.starts_with(MAGIC) {
        return Err(refuse("it does not start as an index of Megatron-LM does".into()));
    }
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let (version, code, sequences, documents) = (number(9), bytes[17], number(18), number(26));
    if version != 1 {
        return Err(refuse(format!("it is of version {version}, not 1")));
    }
    let width = match code {
        8 => Width::U16,
        4 => Width::U32,
        other => return Err(refuse(format!("its ids are of type {other}, not 8 (uint16) or 4 (int32)"))),
    };
    // Lengths of four bytes, pointers of eight, documents of eight.
    let wanted = sequences.checked_mul(12).and_then(|n| n.checked_add(documents.checked_mul(8)?));
    if wanted.and_then(|n| n.checked_add(INDEX_HEADER as u64)) != Some(bytes.len() as u64) {
        return Err(refuse(format!(
            "it has {} bytes, which {sequences} sequences and {documents} documents do not make",
            bytes.len()
        )));
    }
    let (lengths, pointers) = bytes[INDEX_HEADER..].split_at(4 * sequences as usize);
    let mut tokens = 0u64;
    for (length, pointer) in lengths.chunks_exact(4).zip(pointers.chunks_exact(8)) {
        let length = i32::from_le_bytes(length.try_into().expect("four bytes"));
        let pointer = u64::from_le_bytes(pointer.try_into().expect("eight bytes"));
        if length < 0 || pointer != tokens * width.bytes() {
            return Err(refuse(format!(
                "the sequence at byte {pointer}, of {length} ids, is not behind the one before it"
            )));
        }
        tokens += length as u64;
    }
    Ok((width, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(code: u8, lengths: &[i32], width: u64) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(1u64.to_le_bytes());
        bytes.push(code);
        bytes.extend((lengths.len() as u64).to_le_bytes());
        bytes.extend((lengths.len() as u64 + 1).to_le_bytes());
        lengths.iter().for_each(|l| bytes.extend(l.to_le_bytes()));
        let mut at = 0u64;
        for length in lengths {
            bytes.extend(at.to_le_bytes());
            at += *length as u64 * width;
        }
        (0..=lengths.len() as u64).for_each(|d| bytes.extend(d.to_le_bytes()));
        bytes
    }

    #[test]
    fn files_of_nanogpt_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.bin");
        let ids: Vec<u16> = (0..1000).map(|i| (i * 37 % 611) as u16).collect();
        std::fs::write(&path, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        assert!(ForeignFile::is_meant(&path) && !ForeignFile::is_meant(&folder.path().join("x.tokens")));
        let file = ForeignFile::open(&path).unwrap();
        assert_eq!((file.tokens(), file.vocab()), (1000, 611));
        assert_eq!(file.read(10..13).unwrap(), [370, 407, 444]);
        std::fs::write(&path, [1, 0, 2]).unwrap();
        let error = ForeignFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("3 bytes, no multiple of the two"), "{error}");
        assert!(file.read(0..1).unwrap() == [1], "the file that is open is the one that was written over");
    }

    #[test]
    fn files_of_megatron_are_read_by_their_index() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let write = |ids: &[u32], lengths: &[i32], code: u8| {
            let wide = code == 4;
            let bytes =
                |id: &u32| if wide { id.to_le_bytes().to_vec() } else { (*id as u16).to_le_bytes().to_vec() };
            std::fs::write(at("d.bin"), ids.iter().flat_map(bytes).collect::<Vec<u8>>()).unwrap();
            std::fs::write(at("d.idx"), index(code, lengths, if wide { 4 } else { 2 })).unwrap();
        };
        for code in [4, 8] {
            write(&[5, 6, 7, 8, 9], &[2, 3], code);
            for name in ["d.bin", "d"] {
                assert!(ForeignFile::is_meant(&at(name)));
                let file = ForeignFile::open(&at(name)).unwrap();
                assert_eq!((file.tokens(), file.vocab(), file.read(1..4).unwrap()), (5, 10, vec![6, 7, 8]));
            }
        }
        let refused = |word: &str| {
            let error = ForeignFile::open(&at("d.bin")).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("\nhint: "), "{error}");
        };
        write(&[5, 6, 7, 8], &[2, 3], 8);
        refused("speaks of 5 ids of 2 bytes");
        std::fs::write(at("d.idx"), index(5, &[2, 3], 8)).unwrap();
        refused("its ids are of type 5");
        std::fs::write(at("d.idx"), index(8, &[2, 3], 4)).unwrap();
        refused("is not behind the one before it");
        let mut bytes = index(8, &[2, 3], 2);
        bytes.pop();
        std::fs::write(at("d.idx"), bytes).unwrap();
        refused("2 sequences and 3 documents do not make");
        std::fs::write(at("d.idx"), b"hello").unwrap();
        refused("does not start as an index");
    }
}
