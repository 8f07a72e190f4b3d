//! Files of text, read piece by piece.
//!
//! A piece ends behind a line break that stands between two characters that are no blanks. That is where tokenizers of the GPT-2 and later
//! kinds end a word too, so pieces tokenize to what the file would. (One that puts a blank before a text, as SentencePiece does, puts
//! one before every piece.) A line longer than a piece is cut between two characters.
//!
//! Of a file that is called `.jsonl`, every line is a document: a JSON object with a member `text`.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::DataError;

/// The most text of a piece: large enough to keep a thread busy, and small enough to hold many.
pub const PIECE_BYTES: usize = 256 << 10;

/// A file of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFile {
    pub path: PathBuf,
    pub bytes: u64,
}

/// Files as they are named, and what folders hold, down to the last, by path. Names that start with a dot are left out, and so are links
/// to folders inside of folders.
pub fn find_files(inputs: &[PathBuf]) -> Result<Vec<TextFile>, DataError> {
    let mut files = Vec::new();
    for input in inputs {
        let found = fs::metadata(input).map_err(DataError::io("read", input))?;
        if found.is_dir() {
            let before = files.len();
            walk(input, &mut files)?;
            if files.len() == before {
                return Err(DataError::EmptyFolder { folder: input.clone() });
            }
        } else {
            files.push(text_file(input, &found)?);
        }
    }
    Ok(files)
}

fn walk(folder: &Path, files: &mut Vec<TextFile>) -> Result<(), DataError> {
    let entries = fs::read_dir(folder).map_err(DataError::io("list", folder))?;
    let mut entries: Vec<_> = entries.collect::<Result<_, _>>().map_err(DataError::io("list", folder))?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries.iter().filter(|e| !e.file_name().as_encoded_bytes().starts_with(b".")) {
        let path = entry.path();
        let kind = entry.file_type().map_err(DataError::io("read", &path))?;
        let found = fs::metadata(&path).map_err(DataError::io("read", &path))?;
        if kind.is_dir() {
            walk(&path, files)?;
        } else if !found.is_dir() {
            files.push(text_file(&path, &found)?);
        }
    }
    Ok(())
}

fn text_file(path: &Path, found: &fs::Metadata) -> Result<TextFile, DataError> {
    if !found.is_file() {
        let cause = ErrorKind::InvalidInput.into();
        return Err(DataError::Io { doing: "read a file from", file: path.to_path_buf(), cause });
    }
    if found.len() == 0 {
        return Err(DataError::EmptyFile { file: path.to_path_buf() });
    }
    Ok(TextFile { path: path.to_path_buf(), bytes: found.len() })
}

/// Some text of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub file: PathBuf,
    /// Of the first byte.
    pub offset: u64,
    pub text: String,
    /// Whether a document starts here, and whether it ends.
    pub first: bool,
    pub last: bool,
}

/// The pieces of a file.
pub struct Pieces<'a> {
    file: &'a TextFile,
    size: usize,
    opened: Option<File>,
    /// What was read and is in no piece yet.
    rest: Vec<u8>,
    offset: u64,
    done: bool,
}

impl<'a> Pieces<'a> {
    pub fn new(file: &'a TextFile) -> Self {
        Self::of_size(file, PIECE_BYTES)
    }

    /// # Panics
    /// Below four bytes, which a character may have.
    pub fn of_size(file: &'a TextFile, size: usize) -> Self {
        assert!(size >= 4, "pieces of {size} bytes");
        Self { file, size, opened: None, rest: vec![], offset: 0, done: false }
    }

    fn fill(&mut self) -> Result<bool, DataError> {
        let path = &self.file.path;
        let file = match &mut self.opened {
            Some(file) => file,
            closed => closed.insert(File::open(path).map_err(DataError::io("read", path))?),
        };
        let wanted = (self.size - self.rest.len()) as u64;
        let got = file.take(wanted).read_to_end(&mut self.rest).map_err(DataError::io("read", path))?;
        Ok((got as u64) < wanted)
    }

    fn read(&mut self) -> Result<Piece, DataError> {
        let last = self.fill()?;
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(text) => text,
            // The last character goes on in the next piece.
            Err(error) if error.error_len().is_none() && !last => {
                let valid = &self.rest[..error.valid_up_to()];
                std::str::from_utf8(valid).expect("it was valid up to there")
            }
            Err(error) => {
                let (file, byte) = (self.file.path.clone(), self.rest[error.valid_up_to()]);
                let offset = self.offset + error.valid_up_to() as u64;
                return Err(DataError::NotUtf8 { file, offset, byte });
            }
        };
        let end = if last { whole.len() } else { cut(whole).unwrap_or(whole.len()) };
        let text = whole[..end].to_string();
        self.rest.drain(..end);
        let first = self.offset == 0;
        let piece = Piece { file: self.file.path.clone(), offset: self.offset, text, first, last };
        self.offset += end as u64;
        self.done = last;
        Ok(piece)
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let piece = self.read();
        if piece.is_err() || self.done {
            (self.done, self.opened) = (true, None);
        }
        Some(piece)
    }
}

/// All pieces of a file.
pub fn pieces(file: &TextFile) -> Box<dyn Iterator<Item = Result<Piece, DataError>> + '_> {
    match file.path.extension().is_some_and(|ending| ending == "jsonl") {
        true => Box::new(Lines { file, opened: None, offset: 0, done: false }),
        false => Box::new(Pieces::new(file)),
    }
}

/// The documents of a file of JSON lines.
struct Lines<'a> {
    file: &'a TextFile,
    opened: Option<BufReader<File>>,
    offset: u64,
    done: bool,
}

#[derive(serde::Deserialize)]
struct Document {
    text: String,
}

impl Lines<'_> {
    fn read(&mut self) -> Result<Option<Piece>, DataError> {
        let path = &self.file.path;
        let reader = match &mut self.opened {
            Some(reader) => reader,
            closed => closed.insert(BufReader::new(File::open(path).map_err(DataError::io("read", path))?)),
        };
        loop {
            let mut line = vec![];
            let bytes = reader.read_until(b'\n', &mut line).map_err(DataError::io("read", path))?;
            let offset = self.offset;
            self.offset += bytes as u64;
            if bytes == 0 {
                return Ok(None);
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            let Document { text } = serde_json::from_slice(&line).map_err(|error| DataError::Json {
                file: path.clone(),
                offset,
                reason: error.to_string(),
            })?;
            return Ok(Some(Piece { file: path.clone(), offset, text, first: true, last: true }));
        }
    }
}

impl Iterator for Lines<'_> {
    type Item = Result<Piece, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let piece = self.read().transpose();
        self.done = !matches!(piece, Some(Ok(_)));
        piece
    }
}

/// Behind the last line break between two characters that are no blanks.
fn cut(text: &str) -> Option<usize> {
    let blank = |c: Option<char>| c.is_none_or(char::is_whitespace);
    let fits = |at: &usize| !blank(text[..*at].chars().next_back()) && !blank(text[at + 1..].chars().next());
    text.rmatch_indices('\n').map(|(at, _)| at).find(fits).map(|at| at + 1)
}
