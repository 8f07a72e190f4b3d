//! Messages that are waited for, and how much of each has come.
//!
//! There may be ten thousand small ones, each of which is looked up when something of it comes, while the tensors themselves wash
//! everything else out of the caches. So what is looked at lies in the order in which messages are announced, which is about the order in
//! which they come, and the processor fetches the next one by itself. A hash map alone took half of what a small message costs here.
//!
//! ```text
//! job 7      tags from 100:  | 0 | 1 | 2 | 3 | ...     which place; tags far from the others are in a hash map
//! places     | arriving | arriving | arriving | ...    a free one is taken by a later message, the longest free first
//! ```

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use rustc_hash::FxHashMap;

use super::{Expected, Message};

/// A table has at most so many entries for each of its messages, and some more.
const MAX_SPARSE: usize = 16;
const SOME_MORE: usize = 64;
const NONE: u32 = u32::MAX;

/// A message that is arriving.
pub struct Arriving {
    pub message: Message,
    pub expected: Expected,
    /// In place.
    pub arrived: u64,
    /// In place, or in the peer's segment for us to take; [`ALL`] where that was said of the whole at once.
    pub promised: u64,
}

/// No part of a message ends there: once all of it is promised, even of one without any bytes, nothing more of it may come.
pub const ALL: u64 = u64::MAX;

/// Where a message stands, until it is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(u32);

#[derive(Default)]
pub struct Arrivals {
    /// Jobs that wait for something.
    jobs: Vec<ByTag>,
    slots: Vec<Option<Arriving>>,
    free: VecDeque<Slot>,
}

/// The messages of a job.
#[derive(Default)]
struct ByTag {
    job: u32,
    left: usize,
    /// Entry `i` is of tag `first + i`.
    first: u32,
    table: Vec<u32>,
    /// Those that the table would be too long for.
    far: FxHashMap<u32, u32>,
}

impl ByTag {
    fn get(&self, tag: u32) -> Option<u32> {
        let near = tag.checked_sub(self.first).and_then(|at| self.table.get(at as usize)).copied();
        let slot = near.filter(|slot| *slot != NONE);
        if slot.is_some() || self.far.is_empty() { slot } else { self.far.get(&tag).copied() }
    }

    fn insert(&mut self, tag: u32, slot: u32) {
        if self.table.is_empty() {
            self.first = tag;
        }
        self.left += 1;
        match tag.checked_sub(self.first).map(|at| at as usize) {
            Some(at) if at < self.table.len() => self.table[at] = slot,
            Some(at) if at < MAX_SPARSE * self.left + SOME_MORE => {
                self.table.resize(at, NONE);
                self.table.push(slot);
            }
            _ => _ = self.far.insert(tag, slot),
        }
    }

    fn remove(&mut self, tag: u32) {
        self.left -= 1;
        let near = tag.checked_sub(self.first).and_then(|at| self.table.get_mut(at as usize));
        match near {
            Some(slot) if *slot != NONE => *slot = NONE,
            _ => _ = self.far.remove(&tag),
        }
    }
}

impl Arrivals {
    /// From now on a message is waited for, that was not before.
    pub fn insert(&mut self, message: Message, expected: Expected) {
        debug_assert!(self.find(&message).is_none(), "{message:?} is announced once");
        let arriving = Some(Arriving { message, expected, arrived: 0, promised: 0 });
        let slot = match self.free.pop_front() {
            Some(Slot(slot)) => {
                self.slots[slot as usize] = arriving;
                slot
            }
            None => {
                self.slots.push(arriving);
                u32::try_from(self.slots.len() - 1).expect("programs have fewer messages than 2^32")
            }
        };
        let known = self.jobs.iter().position(|tags| tags.job == message.job);
        let job = known.unwrap_or_else(|| {
            self.jobs.push(ByTag { job: message.job, ..ByTag::default() });
            self.jobs.len() - 1
        });
        self.jobs[job].insert(message.tag, slot);
    }

    pub fn find(&self, message: &Message) -> Option<Slot> {
        self.jobs.iter().find(|tags| tags.job == message.job)?.get(message.tag).map(Slot)
    }

    #[cfg(any(test, feature = "mpi"))]
    pub fn get(&self, message: &Message) -> Option<&Arriving> {
        self.find(message).map(|slot| &self[slot])
    }

    /// It is no longer waited for.
    pub fn remove(&mut self, slot: Slot) -> Arriving {
        let arriving = self.slots[slot.0 as usize].take().expect("a slot is found, and removed once");
        let Message { job, tag } = arriving.message;
        let place = self.jobs.iter().position(|tags| tags.job == job).expect("it was waited for");
        self.jobs[place].remove(tag);
        if self.jobs[place].left == 0 {
            self.jobs.swap_remove(place);
        }
        self.free.push_back(slot);
        arriving
    }
}

impl Index<Slot> for Arrivals {
    type Output = Arriving;

    fn index(&self, slot: Slot) -> &Arriving {
        self.slots[slot.0 as usize].as_ref().expect("a slot is of a message until that is removed")
    }
}

impl IndexMut<Slot> for Arrivals {
    fn index_mut(&mut self, slot: Slot) -> &mut Arriving {
        self.slots[slot.0 as usize].as_mut().expect("a slot is of a message until that is removed")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::memory::place::Lent;
    use crate::memory::{Memory, Place};
    use crate::view::View;

    #[expect(unsafe_code, reason = "a place that nobody looks at")]
    fn expected(memory: &Arc<Memory>, bytes: u64) -> Expected {
        let place = Place { memory: memory.clone(), view: View::empty() };
        // SAFETY: nothing is read or written.
        Expected { place: unsafe { Lent::of(&place) }.clone(), bytes, combine: None }
    }

    proptest! {
        /// Near or far from each other, in whatever order they come and go, it finds what a map finds.
        #[test]
        fn it_is_a_map(
            steps in prop::collection::vec((0u32..3, 0u32..40, any::<bool>()), 0..300),
            stride in prop::sample::select(vec![1u32, 7, 1000, 100_000_000]),
            first in prop::sample::select(vec![0u32, 5, u32::MAX - 50]),
        ) {
            let memory = Arc::new(Memory::private(1).unwrap());
            let (mut arrivals, mut map) = (Arrivals::default(), BTreeMap::new());
            for (number, (job, tag, insert)) in (0..).zip(steps) {
                let message = Message { job, tag: first.wrapping_add(tag.wrapping_mul(stride)) };
                prop_assert_eq!(arrivals.get(&message).map(|a| a.expected.bytes), map.get(&message).copied());
                match (arrivals.find(&message), insert) {
                    (None, true) => {
                        arrivals.insert(message, expected(&memory, number));
                        map.insert(message, number);
                    }
                    (Some(slot), false) => {
                        prop_assert_eq!(arrivals.remove(slot).message, message);
                        map.remove(&message);
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(arrivals.jobs.iter().map(|job| job.left).sum::<usize>(), map.len());
        }
    }
}
