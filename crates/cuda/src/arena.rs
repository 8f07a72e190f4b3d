//! Device memory that is used again and again.
//!
//! A step asks for the same sizes microbatch after microbatch, and asking the driver takes longer than most kernels run and waits for all of them. So a
//! block that is dropped goes to a shelf by its size, where the next request of that size finds it. All who use an arena queue their work on one stream:
//! whoever takes a block writes to it behind whatever its last user still has queued.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{CudaError, DeviceMemory, Gpu};

/// Sizes are multiples of this: what vectors and products want addresses to be multiples of, with room.
const UNIT_BYTES: u64 = 512;

/// See the module.
#[derive(Debug)]
pub struct Arena {
    gpu: Arc<Gpu>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: BTreeMap<u64, Vec<DeviceMemory>>,
    bytes: Usage,
}

/// Bytes of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// That blocks have now, and had at most.
    pub used: u64,
    pub peak: u64,
    /// That the driver gave, the shelf's with them.
    pub held: u64,
    /// How often the driver was asked.
    pub allocations: u64,
}

impl Arena {
    pub fn new(gpu: &Arc<Gpu>) -> Arc<Self> {
        Arc::new(Self { gpu: Arc::clone(gpu), state: Mutex::default() })
    }

    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least so many bytes, with whatever its last user left in it; none for no bytes.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<Block, CudaError> {
        let room = bytes.next_multiple_of(UNIT_BYTES);
        if room == 0 {
            return Ok(Block { memory: None, home: Arc::clone(self) });
        }
        let used = self.lock().idle.get_mut(&room).and_then(Vec::pop);
        let memory = match used {
            Some(memory) => memory,
            None => {
                let memory = self.gpu.allocate(room, false)?;
                let mut state = self.lock();
                state.bytes.allocations += 1;
                state.bytes.held += room;
                memory
            }
        };
        let mut state = self.lock();
        state.bytes.used += room;
        state.bytes.peak = state.bytes.peak.max(state.bytes.used);
        Ok(Block { memory: Some(memory), home: Arc::clone(self) })
    }

    /// Gives what nobody uses back to the driver. Nothing that was queued may still touch it.
    pub fn trim(&self) {
        let idle = std::mem::take(&mut self.lock().idle);
        let freed: u64 = idle.values().flatten().map(DeviceMemory::bytes).sum();
        self.lock().bytes.held -= freed;
    }

    pub fn usage(&self) -> Usage {
        self.lock().bytes
    }
}

/// Memory of an arena.
#[derive(Debug)]
pub struct Block {
    memory: Option<DeviceMemory>,
    home: Arc<Arena>,
}

impl Block {
    /// 0 where there is none.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMemory::address)
    }

    pub fn bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, DeviceMemory::bytes)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let mut state = self.home.lock();
            state.bytes.used -= memory.bytes();
            state.idle.entry(memory.bytes()).or_default().push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standin::{Call, StandIn};

    fn arena(bytes: u64) -> (Arc<Arena>, crate::standin::Record) {
        let (driver, record) = StandIn::new(bytes);
        (Arena::new(&Gpu::new(Box::new(driver))), record)
    }

    #[test]
    fn a_second_step_asks_the_driver_for_nothing() {
        let (arena, record) = arena(1 << 20);
        let step = || {
            let (a, b) = (arena.take(1000).unwrap(), arena.take(1025).unwrap());
            drop(a);
            let c = arena.take(999).unwrap();
            assert_ne!(b.address(), c.address());
            arena.take(0).unwrap();
        };
        step();
        let after_one = record.calls();
        assert_eq!(after_one.len(), 2, "{after_one:?}");
        (0..5).for_each(|_| step());
        assert_eq!(record.calls(), after_one);
        let usage = arena.usage();
        assert_eq!((usage.used, usage.peak, usage.held, usage.allocations), (0, 2560, 2560, 2));
        arena.trim();
        assert_eq!(arena.usage().held, 0);
        drop(arena);
        assert_eq!(record.broken(), Vec::<String>::new());
        assert_eq!(record.calls().iter().filter(|call| matches!(call, Call::Free { .. })).count(), 2);
    }

    #[test]
    fn a_full_card_is_an_error_and_trimming_makes_room() {
        let (arena, record) = arena(4096);
        drop(arena.take(3000).unwrap());
        let error = arena.take(2048).unwrap_err();
        assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
        arena.trim();
        let block = arena.take(2048).unwrap();
        assert_eq!((block.bytes(), arena.usage().used), (2048, 2048));
        drop((block, arena));
        assert_eq!(record.broken(), Vec::<String>::new());
    }

    /// Blocks in use never overlap, whatever is taken and dropped.
    #[test]
    fn blocks_in_use_are_apart() {
        let (arena, record) = arena(64 << 20);
        let (mut held, mut seed) = (Vec::<Block>::new(), 7u64);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if !held.is_empty() && seed >> 63 == 1 {
                held.swap_remove((seed >> 20) as usize % held.len());
                continue;
            }
            let block = arena.take((seed >> 40) % 5000).unwrap();
            let range = |b: &Block| b.address()..b.address() + b.bytes();
            let new = range(&block);
            assert!(
                held.iter().map(range).all(|r| r.end <= new.start || new.end <= r.start || new.is_empty())
            );
            held.push(block);
        }
        drop((held, arena));
        assert_eq!(record.broken(), Vec::<String>::new());
    }
}
