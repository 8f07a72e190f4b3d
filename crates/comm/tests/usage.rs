//! What a process needs beside its tensors, by the system's account. One test: it has the process to itself.

use crossmesh_comm::lab::usage::Meter;
use crossmesh_comm::memory::Memory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const MIB: u64 = 1 << 20;

fn touch(memory: Memory) -> Memory {
    let len = memory.len() as usize;
    memory.own().unwrap().elements_mut::<u8>(0, len).fill(1);
    memory
}

/// A segment that another process made, as far as its name tells, and all of whose bytes were read.
fn of_a_peer(bytes: u64) -> Memory {
    let segment = memfd_create("crossmesh.1", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&segment, bytes).unwrap();
    fcntl_add_seals(&segment, SealFlags::SHRINK).unwrap();
    let memory = Memory::of_peer(segment).unwrap();
    let mut page = [1; 4096];
    for at in (0..bytes).step_by(page.len()) {
        memory.read_of_peer(at, &mut page);
        assert_eq!(page, [0; 4096]);
    }
    memory
}

#[test]
fn what_is_taken_in_a_run_is_seen_and_nothing_else() {
    let mut meter = Meter::start().expect("Linux tells");
    let tensors = [touch(Memory::shared(40 * MIB).unwrap()), touch(Memory::private(8 * MIB).unwrap())];
    // Taken and given back before the run.
    drop(touch(Memory::private(50 * MIB).unwrap()));
    meter.begin();
    let peers = of_a_peer(64 * MIB);
    let staging = touch(Memory::shared(4 * MIB).unwrap());
    // Taken and given back within it: the high-water mark remembers.
    drop(touch(Memory::private(24 * MIB).unwrap()));
    meter.end();
    let extra = meter.extra_bytes(48 * MIB);
    // The system counts resident pages in batches, and pages of the heap that were there before may have been given back.
    assert!((26 * MIB..30 * MIB).contains(&extra), "{} KiB", extra >> 10);
    drop((tensors, peers, staging));
}
