//! Where a device has the memory that it keeps for a stage: slots, of which every microbatch takes the lowest free one.

use crate::id::MicrobatchId;

/// By slot, whose memory was put there last, and whether it is there still.
#[derive(Debug, Default)]
pub(super) struct Slots(Vec<(MicrobatchId, bool)>);

impl Slots {
    pub fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// Takes the lowest free slot, and says whose memory was there before.
    pub fn take(&mut self, microbatch: MicrobatchId) -> (u32, Option<MicrobatchId>) {
        let Some(slot) = self.0.iter().position(|(_, taken)| !taken) else {
            self.0.push((microbatch, true));
            return (self.len() - 1, None);
        };
        let (before, _) = std::mem::replace(&mut self.0[slot], (microbatch, true));
        (slot as u32, Some(before))
    }

    /// Frees a microbatch's slot, and says which it was.
    pub fn free(&mut self, microbatch: MicrobatchId) -> Option<u32> {
        let slot = self.0.iter().position(|(there, taken)| *taken && *there == microbatch)?;
        self.0[slot].1 = false;
        Some(slot as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken() {
        let (mut slots, m) = (Slots::default(), MicrobatchId);
        assert_eq!((slots.take(m(0)), slots.take(m(1)), slots.take(m(2))), ((0, None), (1, None), (2, None)));
        assert_eq!((slots.free(m(1)), slots.free(m(0)), slots.free(m(0))), (Some(1), Some(0), None));
        assert_eq!((slots.take(m(3)), slots.take(m(4))), ((0, Some(m(0))), (1, Some(m(1)))));
        assert_eq!((slots.take(m(5)), slots.len()), ((3, None), 4));
    }
}
