//! What a process needs beside its tensors, by the system's account. One test: it has the process to itself.

use std::sync::Arc;

use crossmesh_comm::memory::{Memory, Place};
use crossmesh_comm::usage::Meter;
use crossmesh_comm::view::View;
use crossmesh_core::region::Region;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const MIB: u64 = 1 << 20;

fn whole(memory: &Arc<Memory>) -> Place {
    let region = Region::whole(&[memory.len()]);
    Place { memory: memory.clone(), view: View::of_box(0, &region, &region, 1).unwrap() }
}

fn touch(memory: Memory) -> Arc<Memory> {
    let memory = Arc::new(memory);
    let place = whole(&memory);
    (0..memory.len()).step_by(MIB as usize).for_each(|at| place.unpack(at, &[1; MIB as usize], None));
    memory
}

/// A segment that another process made, as far as its name tells, and all of whose bytes were read.
fn of_a_peer(bytes: u64) -> Arc<Memory> {
    let segment = memfd_create("crossmesh.1", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&segment, bytes).unwrap();
    fcntl_add_seals(&segment, SealFlags::SHRINK).unwrap();
    let memory = Arc::new(Memory::of_peer(segment).unwrap());
    assert_ne!(whole(&memory).checksum_of_all(), 1);
    memory
}

trait Checksum {
    fn checksum_of_all(&self) -> u32;
}

impl Checksum for Place {
    fn checksum_of_all(&self) -> u32 {
        let mut sum = 0;
        for at in (0..self.bytes()).step_by(MIB as usize) {
            let mut bytes = vec![];
            self.pack(at..at + MIB, &mut bytes);
            sum |= crc32c::crc32c(&bytes);
        }
        sum
    }
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
    assert!((28 * MIB..30 * MIB).contains(&extra), "{} KiB", extra >> 10);
    drop((tensors, peers, staging));
}
