//! Words of a protected connection. They are a stream, cut into records ([`crate::protect`]) as they are written, since a message may be
//! longer than a record, or much shorter than a frame of tensors:
//!
//! ```text
//! "ready" "tell ..."  --seal-->  record record  --socket-->  record record  --open-->  "ready" "tell ..."
//! ```

use crate::protect::{Opener, PREFIX_BYTES, Prefix, Sealer, Session};
use crate::wire::{MAX_PAYLOAD, WireError};

/// What one connection's words pass through, both ways.
pub struct Guard {
    sealer: Sealer,
    opener: Opener,
    /// Known to be genuine, and not understood yet.
    pub words: Vec<u8>,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guard({} B)", self.words.len())
    }
}

impl Guard {
    /// None where both sides agreed on no protection.
    pub fn new(session: &Session) -> Option<Self> {
        let (sealer, opener) = session.ends()?;
        Some(Self { sealer, opener, words: vec![] })
    }

    /// Appends the words to what is to be written.
    pub fn seal(&mut self, words: &[u8], output: &mut Vec<u8>) {
        for part in words.chunks(MAX_PAYLOAD as usize) {
            let mut record = [&[0; PREFIX_BYTES], part].concat();
            self.sealer.seal(&mut record);
            output.extend_from_slice(&record);
        }
    }

    /// Takes the records that are whole out of what was read.
    pub fn open(&mut self, input: &mut Vec<u8>) -> Result<(), WireError> {
        let mut at = 0;
        while let Some(prefix) = Prefix::of_words(&input[at..])? {
            let end = at + prefix.record_bytes();
            let Some(record) = input.get_mut(at..end) else { break };
            self.words.extend_from_slice(self.opener.open(&prefix, record)?);
            at = end;
        }
        input.drain(..at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protect::{Protect, Side};

    fn ends(protect: Protect, key: u8) -> (Guard, Guard) {
        let end = |side| Guard::new(&Session::new(protect, [key; 32], side)).unwrap();
        (end(Side::Dialer), end(Side::Listener))
    }

    proptest! {
        /// However the words were written, and however they arrive.
        #[test]
        fn words_come_out_as_they_went_in(
            said in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..6),
            step in 1usize..300,
            encrypt: bool,
        ) {
            let protect = if encrypt { Protect::Encrypt } else { Protect::Sign };
            let (mut here, mut there) = ends(protect, 1);
            let (mut written, mut input) = (vec![], vec![]);
            said.iter().for_each(|words| here.seal(words, &mut written));
            for bytes in written.chunks(step) {
                input.extend_from_slice(bytes);
                there.open(&mut input).unwrap();
            }
            prop_assert_eq!(&there.words, &said.concat());
            prop_assert!(input.is_empty());
        }
    }

    #[test]
    fn what_is_longer_than_a_record_takes_several() {
        let (mut here, mut there) = ends(Protect::Encrypt, 1);
        let words: Vec<u8> = (0..2 * MAX_PAYLOAD + 5).map(|i| i as u8).collect();
        let mut written = vec![];
        here.seal(&words, &mut written);
        there.open(&mut written).unwrap();
        assert!(there.words == words && written.is_empty());
    }

    #[test]
    fn what_was_changed_or_repeated_or_is_foreign_is_refused() {
        for protect in [Protect::Sign, Protect::Encrypt] {
            let (mut here, mut there) = ends(protect, 1);
            let mut first = vec![];
            here.seal(b"ready", &mut first);
            let mut changed = first.clone();
            *changed.last_mut().unwrap() ^= 1;
            assert_eq!(there.open(&mut changed), Err(WireError::Changed { frame: 0 }));
            assert_eq!(there.open(&mut first.clone()), Ok(()));
            assert_eq!(there.open(&mut first), Err(WireError::Replayed { frame: 0, next: 1 }));
            let mut foreign = vec![];
            ends(protect, 2).0.seal(b"ready", &mut foreign);
            assert_eq!(there.open(&mut foreign), Err(WireError::OtherSession { frame: 0 }));
            let mut plain = crate::rendezvous::message::Say::Bye.to_bytes();
            plain.resize(PREFIX_BYTES, 0);
            assert!(matches!(there.open(&mut plain), Err(WireError::Magic(_))));
            assert_eq!(there.words, b"ready");
        }
    }
}
