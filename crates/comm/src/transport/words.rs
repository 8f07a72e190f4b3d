//! Words between engines as frames, and back.

use crossmesh_core::id::Rank;
use crossmesh_core::printable::printable;

use super::{Control, Event};
use crate::wire::{Header, Kind, MAX_REASON_BYTES, MAX_TAGS_PER_FRAME, NOBODY, WireError};

/// The longest payload of these frames.
#[cfg(feature = "mpi")]
pub const MAX_WORD_BYTES: usize = MAX_TAGS_PER_FRAME * 4;

/// The frame of a word. A farewell goes behind everything else.
pub fn control_frame(control: Control) -> (Header, Vec<u8>) {
    match control {
        Control::Beat { waits_for } => {
            (Header::bare(Kind::Beat, 0, waits_for.map_or(NOBODY, |r| r.0)), vec![])
        }
        Control::Abort { culprit, reason } => {
            let mut payload = reason.into_bytes();
            payload.truncate(MAX_REASON_BYTES);
            (Header::of(Kind::Abort, 0, culprit.0, 0, &payload), payload)
        }
        Control::Bye => (Header::bare(Kind::Bye, 0, 0), vec![]),
    }
}

/// The frames that announce receives.
pub fn ready_frames(job: u32, tags: &[u32]) -> impl Iterator<Item = (Header, Vec<u8>)> {
    tags.chunks(MAX_TAGS_PER_FRAME).map(move |tags| {
        let payload: Vec<u8> = tags.iter().flat_map(|t| t.to_le_bytes()).collect();
        (Header::of(Kind::Ready, job, 0, 0, &payload), payload)
    })
}

/// What a frame from `peer` says to the engine; none if it is of another kind.
pub fn event_of(header: &Header, payload: &[u8], peer: Rank) -> Result<Option<Event>, WireError> {
    let rank = |word: u32| (word != NOBODY).then_some(Rank(word));
    Ok(Some(match header.kind {
        Kind::Ready => {
            let (tags, odd) = payload.as_chunks::<4>();
            if !odd.is_empty() {
                return Err(header.unexpected("tags are 4 B each"));
            }
            Event::Ready { job: header.job, tags: tags.iter().map(|t| u32::from_le_bytes(*t)).collect() }
        }
        Kind::Beat => Event::Beat { waits_for: rank(header.tag) },
        Kind::Abort => {
            let reason = printable(&String::from_utf8_lossy(&payload[..payload.len().min(MAX_REASON_BYTES)]));
            Event::Abort { culprit: rank(header.tag).unwrap_or(peer), reason }
        }
        Kind::Bye => Event::Bye,
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_is_cut_and_cleaned() {
        let (_, payload) = control_frame(Control::Abort { culprit: Rank(1), reason: "\x1b".repeat(5000) });
        let header = Header::of(Kind::Abort, 0, 1, 0, &payload);
        let Ok(Some(Event::Abort { culprit: Rank(1), reason })) = event_of(&header, &payload, Rank(2)) else {
            panic!("an abort")
        };
        assert_eq!(reason, r"\u{1b}".repeat(MAX_REASON_BYTES));
    }
}
