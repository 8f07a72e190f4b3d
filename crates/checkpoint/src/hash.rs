//! Hashes of files, on all cores.
//!
//! BLAKE3 is a tree over pieces of the input, so the pieces of all files are hashed by whichever thread is free, and then joined. The result is the
//! plain hash of the file, as any other program computes it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use blake3::hazmat::{HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};
use blake3::{Hash, Hasher};

use crate::error::CheckpointError;

/// What a thread takes at a time: a power of two, so that it is a subtree.
const PIECE_BYTES: u64 = 1 << 20;

/// A file to be hashed.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub file: &'a File,
    pub path: &'a Path,
    pub bytes: u64,
}

/// The chaining value of a piece.
type Value = [u8; 32];

/// The hash of every file, or the first one that could not be read.
pub fn hash_files(inputs: &[Input<'_>], threads: usize) -> Result<Vec<Hash>, CheckpointError> {
    let pieces: Vec<(usize, u64)> = inputs
        .iter()
        .enumerate()
        .flat_map(|(i, input)| (0..input.bytes.div_ceil(PIECE_BYTES)).map(move |p| (i, p * PIECE_BYTES)))
        .collect();
    let results: Vec<OnceLock<Result<Value, CheckpointError>>> =
        pieces.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, pieces.len().max(1)) {
            scope.spawn(|| {
                let mut bytes = vec![0; PIECE_BYTES as usize];
                while let Some(&(i, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let place = pieces.partition_point(|p| *p < (i, at));
                    let _ = results[place].set(piece(&inputs[i], at, &mut bytes));
                }
            });
        }
    });
    let mut results = results.into_iter().map(|r| r.into_inner().expect("every piece was taken"));
    inputs
        .iter()
        .map(|input| {
            let count = input.bytes.div_ceil(PIECE_BYTES) as usize;
            let values = results.by_ref().take(count).collect::<Result<Vec<_>, _>>()?;
            Ok(join_root(&values, input.bytes))
        })
        .collect()
}

fn piece(input: &Input<'_>, at: u64, buffer: &mut [u8]) -> Result<Value, CheckpointError> {
    let bytes = &mut buffer[..PIECE_BYTES.min(input.bytes - at) as usize];
    input.file.read_exact_at(bytes, at).map_err(CheckpointError::io("read", input.path))?;
    if input.bytes <= PIECE_BYTES {
        return Ok(*blake3::hash(bytes).as_bytes());
    }
    Ok(Hasher::new().set_input_offset(at).update(bytes).finalize_non_root())
}

/// The hash of a file from the values of its pieces; a file of one piece has its hash for a value.
fn join_root(values: &[Value], bytes: u64) -> Hash {
    match values {
        [] => blake3::hash(&[]),
        [hash] => Hash::from_bytes(*hash),
        _ => {
            let (left, right) = halves(values, bytes);
            merge_subtrees_root(&left, &right, Mode::Hash)
        }
    }
}

fn join(values: &[Value], bytes: u64) -> Value {
    match values {
        [value] => *value,
        _ => {
            let (left, right) = halves(values, bytes);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    }
}

/// The left subtree is a power of two, so it ends where a piece ends.
fn halves(values: &[Value], bytes: u64) -> (Value, Value) {
    let left = left_subtree_len(bytes);
    let (a, b) = values.split_at((left / PIECE_BYTES) as usize);
    (join(a, left), join(b, bytes - left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn is_the_plain_hash_of_every_file() {
        let piece = PIECE_BYTES as usize;
        let sizes = [0, 1, 1024, piece - 1, piece, piece + 1, 3 * piece, 5 * piece + 17, 8 * piece];
        let files: Vec<(Vec<u8>, File)> = sizes
            .iter()
            .map(|&size| {
                let bytes: Vec<u8> = (0..size).map(|i| (i * i / 7 + size) as u8).collect();
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&bytes).unwrap();
                (bytes, file)
            })
            .collect();
        let inputs: Vec<Input<'_>> = files
            .iter()
            .map(|(bytes, file)| Input { file, path: Path::new("x"), bytes: bytes.len() as u64 })
            .collect();
        for threads in [1, 3] {
            let hashes = hash_files(&inputs, threads).unwrap();
            let wanted: Vec<Hash> = files.iter().map(|(bytes, _)| blake3::hash(bytes)).collect();
            assert_eq!(hashes, wanted);
        }
    }
}
