//! From text to ids: bytes, or a tokenizer that somebody trained.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::DataError;
use super::reader::Piece;

/// What to put behind a document.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DocumentEnd {
    /// The one that the tokenizer has under a usual name.
    #[default]
    Usual,
    Token(String),
    Nothing,
}

impl FromStr for DocumentEnd {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(if text == "none" { Self::Nothing } else { Self::Token(text.to_string()) })
    }
}

/// Names under which tokenizers have the end of a document, the most telling ones first.
pub const USUAL_ENDS: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[SEP]"];

/// Which ids stand for a text.
pub struct Encoder {
    kind: Kind,
    vocab: usize,
    end: Option<u32>,
    checksum: u32,
}

enum Kind {
    Bytes,
    #[cfg(feature = "tokenizers")]
    Tokenizer(Box<tokenizers::Tokenizer>),
}

impl Encoder {
    /// A byte is an id; 256 ends a document, unless nothing should.
    pub fn bytes(end: &DocumentEnd) -> Result<Self, DataError> {
        let end = match end {
            DocumentEnd::Usual => Some(256),
            DocumentEnd::Nothing => None,
            DocumentEnd::Token(token) => {
                let hint = "leave it out (256 ends a document), or say `none`";
                return Err(DataError::value("end", token, "bytes have no such token", hint));
            }
        };
        Ok(Self { kind: Kind::Bytes, vocab: 256 + usize::from(end.is_some()), end, checksum: 0 })
    }

    /// A Hugging Face tokenizer.json.
    #[cfg(feature = "tokenizers")]
    pub fn tokenizer(file: &Path, end: &DocumentEnd) -> Result<Self, DataError> {
        let json = std::fs::read(file).map_err(DataError::io("read", file))?;
        let refuse = |reason: String| DataError::Tokenizer { file: file.to_path_buf(), reason };
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&json).map_err(|e| refuse(e.to_string()))?;
        // Some files ask to cut texts, or to fill them up: for sentences in a batch, not for documents.
        tokenizer.with_truncation(None).map_err(|e| refuse(e.to_string()))?;
        tokenizer.with_padding(None);
        let Some(last) = tokenizer.get_vocab(true).into_values().max() else {
            return Err(refuse("its vocabulary is empty".to_string()));
        };
        let id = |token: &str| tokenizer.token_to_id(token);
        let end = match end {
            DocumentEnd::Nothing => None,
            DocumentEnd::Token(token) => {
                let no_token = || DataError::NoEndToken { file: file.to_path_buf(), token: token.clone() };
                Some(id(token).ok_or_else(no_token)?)
            }
            DocumentEnd::Usual => {
                let (file, known) = (file.to_path_buf(), USUAL_ENDS.join(" "));
                let found = USUAL_ENDS.iter().find_map(|token| id(token));
                Some(found.ok_or(DataError::UnknownEndToken { file, known })?)
            }
        };
        let (kind, checksum) = (Kind::Tokenizer(Box::new(tokenizer)), crc32c::crc32c(&json));
        Ok(Self { kind, vocab: last as usize + 1, end, checksum })
    }

    #[cfg(not(feature = "tokenizers"))]
    pub fn tokenizer(file: &Path, _: &DocumentEnd) -> Result<Self, DataError> {
        Err(DataError::NoTokenizers { file: file.to_path_buf() })
    }

    /// Ids are below this.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The id that ends a document.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The crc32c of the tokenizer's file; 0 for bytes.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// The ids of a text that is no document: nothing ends it.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode(&Piece {
            file: "the prompt".into(),
            offset: 0,
            text: text.to_string(),
            first: true,
            last: false,
        })
    }

    /// The text of ids, without what ends documents. Bytes that are no character yet are shown as such.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let said: Vec<u32> = ids.iter().copied().filter(|id| Some(*id) != self.end).collect();
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = said.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            #[cfg(feature = "tokenizers")]
            Kind::Tokenizer(tokenizer) => {
                tokenizer.decode(&said, false).map_err(|error| DataError::Tokenizer {
                    file: "the tokenizer".into(),
                    reason: format!("it cannot put ids together: {error}"),
                })
            }
        }
    }

    pub(super) fn encode(&self, piece: &Piece) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(piece.text.bytes().map(u32::from).collect()),
            #[cfg(feature = "tokenizers")]
            Kind::Tokenizer(tokenizer) => match tokenizer.encode_fast(piece.text.as_str(), false) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(error) => {
                    let (file, offset) = (piece.file.clone(), piece.offset);
                    Err(DataError::Encode { file, offset, reason: error.to_string() })
                }
            },
        }
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_bytes() { "bytes" } else { "tokenizer" };
        write!(f, "Encoder({kind}, {} ids, end {:?})", self.vocab, self.end)
    }
}
