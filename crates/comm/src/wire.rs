//! The wire format: frames, each a header of [`HEADER_BYTES`] and a payload. `docs/wire-format.md` has the table.
//!
//! ```text
//!  0      4    5    6      8     12    16          24    28      32      36
//!  | magic | v | kind | 0  | job | tag | offset     | len | crc   | crc   | payload ...
//!                                                          payload  header
//! ```
//!
//! The header has a checksum of its own, so that nothing of it is believed before it is known to be whole. A payload
//! is bounded by [`MAX_PAYLOAD`]; decoding never allocates.

use crate::checksum;

/// `XMSH`, little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"XMSH");
pub const VERSION: u8 = 2;
pub const HEADER_BYTES: usize = 36;
/// The most a frame carries.
pub const MAX_PAYLOAD: u32 = 1 << 20;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// First on every connection: `tag` is the sender's rank.
    Hello = 1,
    /// Bytes `offset..offset + len` of the message `tag`.
    Data = 2,
    /// The receives whose tags are the payload (u32 each) may be sent.
    Ready = 3,
    /// Shared memory: the message's bytes from `offset` on lie in the sender's segment; payload: how many, and where.
    Offer = 4,
    /// Shared memory: the message's bytes below `offset` have been taken out of the sender's segment.
    Taken = 5,
    /// Still here. `tag` is the rank that the sender waits for, or none.
    Beat = 6,
    /// The job is over: `tag` is the culprit, the payload says why.
    Abort = 7,
    /// The sender is done with this connection; its end is no accident.
    Bye = 8,
    /// Shared memory: the file descriptor that comes along is segment `tag`; with a payload, memory of a GPU: its length.
    Segment = 9,
    /// The sender can map memory of the GPU whose number the payload is.
    Maps = 10,
    /// Shared memory: whole messages, each of them one run of bytes, lie in segment `tag`; payload: for each its tag, how many, and where.
    Offers = 11,
}

impl Kind {
    pub const ALL: [Kind; 11] = [
        Kind::Hello,
        Kind::Data,
        Kind::Ready,
        Kind::Offer,
        Kind::Taken,
        Kind::Beat,
        Kind::Abort,
        Kind::Bye,
        Kind::Segment,
        Kind::Maps,
        Kind::Offers,
    ];
}

/// The most that a frame of words lists, and says.
pub const MAX_TAGS_PER_FRAME: usize = 4096;
pub const MAX_REASON_BYTES: usize = 4096;
const MAX_OFFER_BYTES: usize = 4096;
/// The most messages that are offered by one frame, and the bytes that each of them takes there.
pub const MAX_OFFERS_PER_FRAME: usize = 1024;
pub const OFFER_RECORD_BYTES: usize = 16;

/// No rank, where a frame could name one.
pub const NOBODY: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub job: u32,
    pub tag: u32,
    pub offset: u64,
    pub len: u32,
    /// Of the payload: crc32c.
    pub payload_crc: u32,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    #[error(
        "a frame starts with {0:#010x}, not with the magic number\nhint: something else speaks on this connection"
    )]
    Magic(u32),
    #[error("a frame of wire version {0}, this is version {VERSION}\nhint: run the same release everywhere")]
    Version(u8),
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    #[error("a frame of {0} B, more than {MAX_PAYLOAD} B")]
    TooLong(u32),
    #[error("a frame's {part} has checksum {found:#010x}, its sender computed {sent:#010x}")]
    Checksum { part: &'static str, found: u32, sent: u32 },
    #[error("{kind:?} with tag {tag} of job {job} has no place here: {why}")]
    Unexpected { kind: Kind, job: u32, tag: u32, why: &'static str },
    #[error("frame {frame} was changed on the way")]
    Changed { frame: u64 },
    #[error("frame {frame} came again, replayed by somebody on the way: frame {next} is next")]
    Replayed { frame: u64, next: u64 },
    #[error("frame {frame} came where frame {next} is next: frames were held back or reordered on the way")]
    Skipped { frame: u64, next: u64 },
    #[error("frame {frame} is of another session: of an earlier connection, or of another job")]
    OtherSession { frame: u64 },
    #[error("an unprotected frame came over a connection that is protected")]
    Unprotected,
}

impl Header {
    /// A frame without payload.
    pub fn bare(kind: Kind, job: u32, tag: u32) -> Self {
        Self { kind, job, tag, offset: 0, len: 0, payload_crc: 0 }
    }

    /// A frame with this payload.
    pub fn of(kind: Kind, job: u32, tag: u32, offset: u64, payload: &[u8]) -> Self {
        let len = u32::try_from(payload.len()).expect("payloads are bounded");
        Self { kind, job, tag, offset, len, payload_crc: checksum::crc32c(payload) }
    }

    /// That the frame has no place here, and why.
    pub fn unexpected(&self, why: &'static str) -> WireError {
        WireError::Unexpected { kind: self.kind, job: self.job, tag: self.tag, why }
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[8..12].copy_from_slice(&self.job.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = checksum::crc32c(&bytes[..32]);
        bytes[32..36].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if word(0) != MAGIC {
            return Err(WireError::Magic(word(0)));
        }
        if bytes[4] != VERSION {
            return Err(WireError::Version(bytes[4]));
        }
        let found = checksum::crc32c(&bytes[..32]);
        if found != word(32) {
            return Err(WireError::Checksum { part: "header", found, sent: word(32) });
        }
        let kind = Kind::ALL.into_iter().find(|k| *k as u8 == bytes[5]).ok_or(WireError::Kind(bytes[5]))?;
        let len = word(24);
        if len > MAX_PAYLOAD {
            return Err(WireError::TooLong(len));
        }
        let offset = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
        Ok(Self { kind, job: word(8), tag: word(12), offset, len, payload_crc: word(28) })
    }

    /// That the fields which say nothing for this kind are zero, and that its payload is no longer than such payloads are.
    pub fn check_fields(&self) -> Result<(), WireError> {
        let (longest, has_job, has_tag, has_offset) = match self.kind {
            Kind::Hello => (0, true, true, false),
            Kind::Data => (MAX_PAYLOAD as usize, true, true, true),
            Kind::Ready => (4 * MAX_TAGS_PER_FRAME, true, false, false),
            Kind::Offer => (MAX_OFFER_BYTES, true, true, true),
            Kind::Offers => (OFFER_RECORD_BYTES * MAX_OFFERS_PER_FRAME, true, true, false),
            Kind::Taken => (0, true, true, true),
            Kind::Beat => (0, false, true, false),
            Kind::Segment => (8, false, true, false),
            Kind::Maps => (16, false, false, false),
            Kind::Abort => (MAX_REASON_BYTES, false, true, false),
            Kind::Bye => (0, false, false, false),
        };
        if self.len as usize > longest {
            return Err(self.unexpected("its payload is longer than such frames are"));
        }
        let stray =
            (!has_job && self.job != 0) || (!has_tag && self.tag != 0) || (!has_offset && self.offset != 0);
        if stray { Err(self.unexpected("a field that says nothing is not zero")) } else { Ok(()) }
    }

    pub fn check_payload(&self, found: u32) -> Result<(), WireError> {
        match found == self.payload_crc {
            true => Ok(()),
            false => Err(WireError::Checksum { part: "payload", found, sent: self.payload_crc }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arb_header() -> impl Strategy<Value = Header> {
        let kind = prop::sample::select(Kind::ALL.to_vec());
        (kind, any::<u32>(), any::<u32>(), any::<u64>(), 0..=MAX_PAYLOAD, any::<u32>()).prop_map(
            |(kind, job, tag, offset, len, payload_crc)| Header { kind, job, tag, offset, len, payload_crc },
        )
    }

    proptest! {
        #[test]
        fn encoding_and_decoding_undo_each_other(header in arb_header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_is_noticed(header in arb_header(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_is_refused(bytes in prop::array::uniform32(any::<u8>())) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            prop_assert!(Header::decode(&header).is_err());
        }
    }

    /// Every field at the place that docs/wire-format.md gives it.
    #[test]
    fn the_header_is_as_documented() {
        let header = Header { kind: Kind::Taken, job: 1, tag: 2, offset: 3, len: 4, payload_crc: 5 };
        let expected =
            "584d5348 02 05 0000 01000000 02000000 0300000000000000 04000000 05000000".replace(' ', "");
        let bytes = header.encode();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex[..64], expected);
        assert_eq!(bytes[32..36], crc32c::crc32c(&bytes[..32]).to_le_bytes());
        assert_eq!(Kind::ALL.map(|k| k as u8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    }

    #[test]
    fn a_length_beyond_the_bound_is_refused() {
        let header = Header { len: MAX_PAYLOAD + 1, ..Header::bare(Kind::Data, 0, 0) };
        assert_eq!(Header::decode(&header.encode()), Err(WireError::TooLong(MAX_PAYLOAD + 1)));
    }
}
