//! Buffers for payloads that are not one run of bytes in a tensor: packed before they are sent, unpacked when they came.
//!
//! All links of a rank share them, and what is in use is bounded, so that memory does not grow with the number of peers.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What may be in use each way before the next has to wait.
const BUDGET_BYTES: u64 = 2 << 20;
/// Buffers kept for the next time.
const KEPT: usize = 4;

/// Which way a payload goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heading {
    Out,
    In,
}

#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<Vec<u8>>,
    /// In use, out and in.
    used: [u64; 2],
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn has_room(&self, way: Heading) -> bool {
        self.state().used[way as usize] < BUDGET_BYTES
    }

    /// An empty buffer, for a payload of `len` bytes.
    pub fn take(&self, way: Heading, len: u64) -> Vec<u8> {
        let mut state = self.state();
        state.used[way as usize] += len;
        let mut buffer = state.free.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// The payload of `len` bytes has been dealt with.
    pub fn give_back(&self, way: Heading, len: u64, buffer: Vec<u8>) {
        let mut state = self.state();
        state.used[way as usize] -= len;
        if state.free.len() < KEPT {
            state.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_is_bounded_each_way() {
        let pool = Pool::default();
        let taken: Vec<_> = (0..4).map(|_| pool.take(Heading::Out, BUDGET_BYTES / 4)).collect();
        assert!(!pool.has_room(Heading::Out) && pool.has_room(Heading::In));
        taken.into_iter().for_each(|buffer| pool.give_back(Heading::Out, BUDGET_BYTES / 4, buffer));
        assert!(pool.has_room(Heading::Out));
    }
}
