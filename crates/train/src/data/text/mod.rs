//! Text: UTF-8 files and folders, as ids.
//!
//! A file is a document. Documents follow each other in the order of their paths, each ended by a token that occurs nowhere else. Files are
//! read in [pieces](reader) and encoded side by side, in an order that no number of threads changes:
//!
//! ```text
//! files -> pieces of 256 KiB -> encoder (bytes, or a tokenizer.json) -> ids, and where documents start
//! ```

pub mod encoder;
pub mod reader;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use encoder::{DocumentEnd, Encoder};
use reader::{Piece, pieces};
pub use reader::{TextFile, find_files};

use super::DataError;

/// Pieces that every thread encodes before the ids are handed on: memory is bounded by it.
const PIECES_A_THREAD: usize = 4;

/// Text that a rank tokenizes when it starts. Beyond this, every rank would take minutes and hundreds of megabytes for it.
pub const MOST_BYTES: u64 = 64 << 20;

/// A run of ids of one file.
#[derive(Debug)]
pub struct Run {
    /// Whether a document starts here.
    pub starts: bool,
    /// With the end of the document, where it ends here.
    pub ids: Vec<u32>,
    /// Bytes of text behind it, over all files.
    pub bytes_done: u64,
}

/// Encodes files, and hands their ids on in order.
pub fn encode_files(
    files: &[TextFile],
    encoder: &Encoder,
    threads: usize,
    take: &mut dyn FnMut(Run) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut pieces = files.iter().flat_map(pieces);
    let mut bytes_done = 0;
    loop {
        let batch: Vec<Piece> =
            pieces.by_ref().take(PIECES_A_THREAD * threads.max(1)).collect::<Result<_, _>>()?;
        if batch.is_empty() {
            return Ok(());
        }
        for (piece, ids) in batch.iter().zip(encode_batch(&batch, encoder, threads)) {
            let mut ids = ids?;
            if piece.last {
                ids.extend(encoder.end());
            }
            bytes_done += piece.text.len() as u64;
            take(Run { starts: piece.first, ids, bytes_done })?;
        }
    }
}

/// The ids of every piece, in the order of the pieces.
fn encode_batch(
    batch: &[Piece],
    encoder: &Encoder,
    threads: usize,
) -> impl Iterator<Item = Result<Vec<u32>, DataError>> {
    let threads = threads.clamp(1, batch.len());
    let share =
        |thread: usize| batch.iter().skip(thread).step_by(threads).map(|p| encoder.encode(p)).collect();
    let mut shares: Vec<std::vec::IntoIter<_>> = if threads == 1 {
        vec![share(0)].into_iter().map(|s: Vec<_>| s.into_iter()).collect()
    } else {
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..threads).map(|t| scope.spawn(move || share(t))).collect();
            let ended =
                started.into_iter().map(|t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
            ended.map(|s: Vec<_>| s.into_iter()).collect()
        })
    };
    (0..batch.len()).map(move |i| shares[i % threads].next().expect("every piece was encoded"))
}

/// All of some texts in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    pub ids: Ids,
    /// Ids are below this.
    pub vocab: usize,
    pub documents: u64,
    /// What it was made from.
    pub inputs: Vec<PathBuf>,
}

/// Ids, as narrow as they can be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ids {
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Text {
    /// Files and folders, tokenized here and now: up to [`MOST_BYTES`].
    pub fn read(inputs: &[PathBuf], encoder: &Encoder, threads: usize) -> Result<Self, DataError> {
        let files = find_files(inputs)?;
        let bytes = files.iter().map(|f| f.bytes).sum();
        if bytes > MOST_BYTES {
            return Err(DataError::TooLarge { data: names(inputs), bytes, most: MOST_BYTES });
        }
        let vocab = encoder.vocab();
        let (mut ids, mut documents) = (Ids::new(vocab), 0);
        encode_files(&files, encoder, threads, &mut |run| {
            ids.extend(&run.ids);
            documents += u64::from(run.starts);
            Ok(())
        })?;
        Ok(Self { ids, vocab, documents, inputs: inputs.to_vec() })
    }
}

/// Paths, for people.
pub fn names(inputs: &[PathBuf]) -> String {
    inputs.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Ids {
    fn new(vocab: usize) -> Self {
        if vocab <= 1 << 16 { Self::U16(vec![]) } else { Self::U32(vec![]) }
    }

    fn extend(&mut self, new: &[u32]) {
        match self {
            // Ids are below the vocabulary, which fits.
            Self::U16(ids) => ids.extend(new.iter().map(|id| *id as u16)),
            Self::U32(ids) => ids.extend(new),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::U16(ids) => ids.len(),
            Self::U32(ids) => ids.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        match self {
            Self::U16(ids) => ids[range].iter().map(|id| u32::from(*id)).collect(),
            Self::U32(ids) => ids[range].to_vec(),
        }
    }
}
