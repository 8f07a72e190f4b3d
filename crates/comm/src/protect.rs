//! Frames that nobody on the way can change, repeat or, where it is asked for, read.
//!
//! ```text
//! handshake: secret + both hellos (ranks, nonces)  -->  a session, of this connection alone
//! session    -->  a key for each direction, an id
//!
//!  0       4     8          16         24                              24 + length
//!  | magic | length | session | counter | frame: header and payload      | tag (16 B) |
//!                                        sign: as it is
//!                                        encrypt: AES-256-GCM
//! ```
//!
//! The counter of a direction starts at 0 and is the nonce, so none serves twice under a key; the tag covers all of the record.
//! What is not the very next frame of the very session is refused, by name: changed, repeated, out of order, foreign.
//!
//! The keys come from the job's secret and both sides' randomness. Whoever learns the secret later and has recorded everything
//! can read it: a secret is for one job.

use std::fmt;
use std::str::FromStr;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};

use crate::environment::Variables;
use crate::wire::{HEADER_BYTES, MAX_PAYLOAD, WireError};

/// The variable that says it to ranks which somebody else started.
pub const PROTECT_VARIABLE: &str = "CROSSMESH_PROTECT";

/// `XMSP`, little-endian.
const MAGIC: u32 = u32::from_le_bytes(*b"XMSP");
pub(crate) const PREFIX_BYTES: usize = 24;
pub(crate) const TAG_BYTES: usize = 16;

/// What is done to frames between hosts. Inside a host they never leave the machine's memory, and nothing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protect {
    /// Checksums, against accidents.
    #[default]
    None,
    /// A keyed tag: nobody can change a frame. Everybody on the way can read it.
    Sign,
    /// Nobody can change it or read it.
    Encrypt,
}

impl Protect {
    pub const ALL: [Self; 3] = [Self::None, Self::Sign, Self::Encrypt];

    /// What the environment asks for; nothing where it is silent.
    pub fn from_variables(variables: &Variables) -> Result<Self, UnknownProtect> {
        variables.get(PROTECT_VARIABLE).map_or(Ok(Self::None), |text| text.parse())
    }

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn of_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protect| protect.code() == code)
    }
}

impl fmt::Display for Protect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["none", "sign", "encrypt"][self.code() as usize])
    }
}

/// A word that is none of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no way to protect a connection\nhint: none, sign or encrypt")]
pub struct UnknownProtect(pub String);

impl FromStr for Protect {
    type Err = UnknownProtect;

    fn from_str(text: &str) -> Result<Self, UnknownProtect> {
        Self::ALL.into_iter().find(|p| p.to_string() == text).ok_or_else(|| UnknownProtect(text.into()))
    }
}

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Dialer,
    Listener,
}

/// What both ends of a connection know after their handshake, and nobody else.
#[derive(Clone)]
pub struct Session {
    protect: Protect,
    key: [u8; 32],
    side: Side,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({}, {:?})", self.protect, self.side)
    }
}

impl Session {
    pub(crate) fn new(protect: Protect, key: [u8; 32], side: Side) -> Self {
        Self { protect, key, side }
    }

    pub fn protect(&self) -> Protect {
        self.protect
    }

    /// For the two directions; none where nothing is protected.
    pub(crate) fn ends(&self) -> Option<(Sealer, Opener)> {
        let (ours, theirs) = match self.side {
            Side::Dialer => ("dialer", "listener"),
            Side::Listener => ("listener", "dialer"),
        };
        Some((Sealer { end: self.end(ours)?, next: 0 }, Opener { end: self.end(theirs)?, next: 0 }))
    }

    /// What the frames of one side are protected by.
    fn end(&self, from: &str) -> Option<End> {
        let derive = |what: &str| blake3::derive_key(&format!("crossmesh 1 {what} of the {from}"), &self.key);
        let lock = match self.protect {
            Protect::None => return None,
            Protect::Sign => Lock::Sign(derive("signing key")),
            Protect::Encrypt => {
                let key = UnboundKey::new(&AES_256_GCM, &derive("encryption key"));
                Lock::Encrypt(Box::new(LessSafeKey::new(key.expect("the key has the cipher's length"))))
            }
        };
        let session = u64::from_le_bytes(*derive("session").first_chunk().expect("32 bytes"));
        Some(End { lock, session })
    }
}

enum Lock {
    Sign([u8; 32]),
    Encrypt(Box<LessSafeKey>),
}

/// One direction of a connection.
struct End {
    lock: Lock,
    session: u64,
}

impl End {
    fn prefix(&self, len: u32, counter: u64) -> [u8; PREFIX_BYTES] {
        let mut bytes = [0; PREFIX_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..24].copy_from_slice(&counter.to_le_bytes());
        bytes
    }
}

fn sign(key: &[u8; 32], prefix: &[u8; PREFIX_BYTES], frame: &[u8]) -> [u8; TAG_BYTES] {
    let hash = blake3::Hasher::new_keyed(key).update(prefix).update(frame).finalize();
    *hash.as_bytes().first_chunk().expect("32 bytes")
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Protects what goes out.
pub(crate) struct Sealer {
    end: End,
    next: u64,
}

impl Sealer {
    /// Makes a record of room for a prefix and a frame.
    pub fn seal(&mut self, record: &mut Vec<u8>) {
        let (prefix, frame) = record.split_at_mut(PREFIX_BYTES);
        let fresh = self.end.prefix(frame.len() as u32, self.next);
        prefix.copy_from_slice(&fresh);
        let tag = match &self.end.lock {
            Lock::Sign(key) => sign(key, &fresh, frame),
            Lock::Encrypt(key) => {
                let tag = key.seal_in_place_separate_tag(nonce(self.next), Aad::from(fresh), frame);
                *tag.expect("a frame is far below the cipher's limit")
                    .as_ref()
                    .first_chunk()
                    .expect("16 bytes")
            }
        };
        record.extend_from_slice(&tag);
        self.next += 1;
    }
}

/// What a prefix says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    len: u32,
    session: u64,
    counter: u64,
}

impl Prefix {
    /// Of as many bytes as there are; none if these are too few.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, WireError> {
        Self::of_at_least(HEADER_BYTES as u32, bytes)
    }

    /// The same of a record of words, which may be shorter than a frame.
    pub fn of_words(bytes: &[u8]) -> Result<Option<Self>, WireError> {
        Self::of_at_least(1, bytes)
    }

    fn of_at_least(shortest: u32, bytes: &[u8]) -> Result<Option<Self>, WireError> {
        let Some(bytes) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let long = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("eight bytes"));
        let (magic, len) = (long(0) as u32, (long(0) >> 32) as u32);
        match magic {
            MAGIC => {}
            crate::wire::MAGIC => return Err(WireError::Unprotected),
            other => return Err(WireError::Magic(other)),
        }
        if !(shortest..=HEADER_BYTES as u32 + MAX_PAYLOAD).contains(&len) {
            return Err(WireError::TooLong(len));
        }
        Ok(Some(Self { len, session: long(8), counter: long(16) }))
    }

    /// How long the record is.
    pub fn record_bytes(&self) -> usize {
        PREFIX_BYTES + self.len as usize + TAG_BYTES
    }
}

/// Lets in what the peer protected.
pub(crate) struct Opener {
    end: End,
    next: u64,
}

impl Opener {
    /// The frame of a whole record, if it is the next of this session.
    pub fn open<'a>(&mut self, prefix: &Prefix, record: &'a mut [u8]) -> Result<&'a [u8], WireError> {
        let frame = prefix.counter;
        if prefix.session != self.end.session {
            return Err(WireError::OtherSession { frame });
        }
        let (_, rest) = record.split_at_mut(PREFIX_BYTES);
        let (body, tag) = rest.split_at_mut(prefix.len as usize);
        let tag: [u8; TAG_BYTES] = *tag.first_chunk().expect("the record is whole");
        if !self.is_genuine(prefix, body, tag) {
            return Err(WireError::Changed { frame });
        }
        // Somebody who cannot make frames may still send old ones again, or keep some back.
        if frame != self.next {
            let next = self.next;
            return Err(if frame < next {
                WireError::Replayed { frame, next }
            } else {
                WireError::Skipped { frame, next }
            });
        }
        self.next += 1;
        Ok(body)
    }

    fn is_genuine(&self, prefix: &Prefix, body: &mut [u8], tag: [u8; TAG_BYTES]) -> bool {
        let expected = self.end.prefix(prefix.len, prefix.counter);
        match &self.end.lock {
            Lock::Sign(key) => is_equal(sign(key, &expected, body), tag),
            Lock::Encrypt(key) => {
                let (nonce, aad) = (nonce(prefix.counter), Aad::from(expected));
                key.open_in_place_separate_tag(nonce, aad, Tag::from(tag), body, 0..).is_ok()
            }
        }
    }
}

/// In constant time, as blake3's hashes compare.
fn is_equal(a: [u8; TAG_BYTES], b: [u8; TAG_BYTES]) -> bool {
    let padded = |tag: [u8; TAG_BYTES]| {
        let mut bytes = [0; 32];
        bytes[..TAG_BYTES].copy_from_slice(&tag);
        blake3::Hash::from_bytes(bytes)
    };
    padded(a) == padded(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends(protect: Protect, key: u8) -> (Sealer, Opener) {
        let (sealer, _) = Session::new(protect, [key; 32], Side::Dialer).ends().unwrap();
        let (_, opener) = Session::new(protect, [key; 32], Side::Listener).ends().unwrap();
        (sealer, opener)
    }

    fn sealed(sealer: &mut Sealer, frame: &[u8]) -> Vec<u8> {
        let mut record = [&[0; PREFIX_BYTES][..], frame].concat();
        sealer.seal(&mut record);
        record
    }

    fn open(opener: &mut Opener, mut record: Vec<u8>) -> Result<Vec<u8>, WireError> {
        let prefix = Prefix::parse(&record)?.expect("whole");
        if prefix.record_bytes() != record.len() {
            return Err(WireError::Changed { frame: prefix.counter }); // a connection would wait for the rest
        }
        opener.open(&prefix, &mut record).map(<[u8]>::to_vec)
    }

    fn arb_protect() -> impl Strategy<Value = Protect> {
        prop::sample::select(vec![Protect::Sign, Protect::Encrypt])
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            protect in arb_protect(),
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 36..3000), 1..5),
        ) {
            let (mut sealer, mut opener) = ends(protect, 1);
            for frame in frames {
                let record = sealed(&mut sealer, &frame);
                let hidden = !record.windows(36).any(|bytes| bytes == &frame[..36]);
                prop_assert_eq!(hidden, protect == Protect::Encrypt);
                prop_assert_eq!(open(&mut opener, record), Ok(frame));
            }
        }

        #[test]
        fn a_flipped_bit_is_noticed(protect in arb_protect(), len in 36usize..400, at in any::<prop::sample::Index>()) {
            let (mut sealer, mut opener) = ends(protect, 1);
            let mut record = sealed(&mut sealer, &vec![7; len]);
            let bit = at.index(record.len() * 8);
            record[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(open(&mut opener, record).is_err());
        }
    }

    #[test]
    fn what_is_not_the_next_frame_of_the_session_is_named() {
        for protect in [Protect::Sign, Protect::Encrypt] {
            let (mut sealer, mut opener) = ends(protect, 1);
            let records: Vec<Vec<u8>> = (0..3).map(|i| sealed(&mut sealer, &[i; 40])).collect();
            assert_eq!(open(&mut opener, records[0].clone()), Ok(vec![0; 40]));
            let says = |opener: &mut Opener, record: &[u8], what: &str| {
                let error = open(opener, record.to_vec()).unwrap_err().to_string();
                assert!(error.starts_with(what), "{protect}: {error}");
            };
            says(&mut opener, &records[0], "frame 0 came again");
            says(&mut opener, &records[2], "frame 2 came where frame 1 is next");
            let mut changed = records[1].clone();
            changed[30] ^= 1;
            says(&mut opener, &changed, "frame 1 was changed on the way");
            // Moving an old frame to where a new one is due is a change, too.
            let mut renumbered = records[0].clone();
            renumbered[16] = 1;
            says(&mut opener, &renumbered, "frame 1 was changed on the way");
            let foreign = sealed(&mut ends(protect, 2).0, &[9; 40]);
            says(&mut opener, &foreign, "frame 0 is of another session");
            let own = sealed(&mut Session::new(protect, [1; 32], Side::Listener).ends().unwrap().0, &[9; 40]);
            says(&mut opener, &own, "frame 0 is of another session");
            says(
                &mut opener,
                &[&crate::wire::MAGIC.to_le_bytes()[..], &[0; 60]].concat(),
                "an unprotected frame",
            );
            // Nothing of this has changed what is next.
            assert_eq!(open(&mut opener, records[1].clone()), Ok(vec![1; 40]));
        }
    }

    #[test]
    fn words_and_ways_undo_each_other() {
        for protect in Protect::ALL {
            assert_eq!(protect.to_string().parse(), Ok(protect));
            assert_eq!(Protect::of_code(protect.code()), Some(protect));
        }
        assert_eq!("aes".parse::<Protect>(), Err(UnknownProtect("aes".into())));
        assert!(Session::new(Protect::None, [1; 32], Side::Dialer).ends().is_none());
    }
}
