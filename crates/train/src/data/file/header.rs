//! The first 64 bytes of a token file, and what lies where behind them.

use super::{AGAIN, NOT_PACKED};

pub const HEADER_BYTES: u64 = 64;

/// Of ids, with a checksum of their own.
pub const BLOCK_BYTES: u64 = 64 << 10;

const MAGIC: &[u8; 8] = b"XMTOKENS";
const VERSION: u32 = 1;
const NO_END: u32 = u32::MAX;

/// How ids are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    U16,
    U32,
}

impl Width {
    /// The narrowest.
    pub fn of_vocab(vocab: u64) -> Self {
        if vocab <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    pub fn bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
        }
    }

    pub(super) fn ids(self, bytes: &[u8]) -> impl Iterator<Item = u32> {
        bytes.chunks_exact(self.bytes() as usize).map(move |b| match self {
            Self::U16 => u32::from(u16::from_le_bytes([b[0], b[1]])),
            Self::U32 => u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        })
    }

    /// Ids that fit, as they are stored.
    pub(super) fn put(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::U16 => ids.iter().for_each(|id| bytes.extend((*id as u16).to_le_bytes())),
            Self::U32 => ids.iter().for_each(|id| bytes.extend(id.to_le_bytes())),
        }
    }
}

/// What ids stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Bytes,
    /// The crc32c of the tokenizer.json.
    Tokenizer(u32),
}

/// What the header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub width: Width,
    /// Ids are below this.
    pub vocab: u64,
    pub tokens: u64,
    pub documents: u64,
    pub encoding: Encoding,
    /// The id that ends a document.
    pub end: Option<u32>,
    pub(super) blocks_crc: u32,
    pub(super) documents_crc: u32,
}

/// Where the parts behind the ids start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    pub documents: u64,
    pub blocks: u64,
    pub end: u64,
}

impl Header {
    pub(super) fn places(&self) -> Option<Places> {
        let ids = self.tokens.checked_mul(self.width.bytes())?;
        let documents = HEADER_BYTES.checked_add(ids)?.checked_next_multiple_of(8)?;
        let blocks = documents.checked_add(self.documents.checked_mul(8)?)?;
        let end = blocks.checked_add(ids.div_ceil(BLOCK_BYTES) * 4)?;
        Some(Places { documents, blocks, end })
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let (encoding, tokenizer_crc) = match self.encoding {
            Encoding::Bytes => (1, 0),
            Encoding::Tokenizer(crc) => (2, crc),
        };
        let mut bytes = MAGIC.to_vec();
        let u32s = |numbers: &[u32], bytes: &mut Vec<u8>| {
            numbers.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        };
        u32s(&[VERSION, self.width.bytes() as u32], &mut bytes);
        [self.vocab, self.tokens, self.documents].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        let end = self.end.unwrap_or(NO_END);
        u32s(&[encoding, tokenizer_crc, end, self.blocks_crc, self.documents_crc], &mut bytes);
        let crc = crc32c::crc32c(&bytes);
        u32s(&[crc], &mut bytes);
        bytes.try_into().expect("the fields add up")
    }

    /// What the bytes say; or why not, and what to do.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES as usize]) -> Result<Self, (String, &'static str)> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[..8] != *MAGIC {
            let reason = format!(
                "it starts with {:?} and not with \"XMTOKENS\"",
                bytes[..8].escape_ascii().to_string()
            );
            return Err((reason, NOT_PACKED));
        }
        if crc32c::crc32c(&bytes[..60]) != u32_at(60) {
            return Err(("its header is damaged".to_string(), AGAIN));
        }
        if u32_at(8) != VERSION {
            let reason = format!("it has version {}, and this program reads version {VERSION}", u32_at(8));
            return Err((reason, "pack it again with this program"));
        }
        let width = match u32_at(12) {
            2 => Width::U16,
            4 => Width::U32,
            other => return Err((format!("its ids have {other} bytes, and not 2 or 4"), AGAIN)),
        };
        let encoding = match u32_at(40) {
            1 => Encoding::Bytes,
            2 => Encoding::Tokenizer(u32_at(44)),
            other => return Err((format!("its encoding {other} is not known"), AGAIN)),
        };
        Ok(Self {
            width,
            vocab: u64_at(16),
            tokens: u64_at(24),
            documents: u64_at(32),
            encoding,
            end: Some(u32_at(48)).filter(|end| *end != NO_END),
            blocks_crc: u32_at(52),
            documents_crc: u32_at(56),
        })
    }
}
