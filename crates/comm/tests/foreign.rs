//! Programs on memory of the caller's: the very bytes, in place, for as long as a job has them.
#![allow(unsafe_code)]

mod common;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::{KINDS, Kind, link_pair, planned};
use crossmesh_comm::buffer::{Base, BindError, RankBuffers};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::engine::{Engine, EngineOptions, JobSpec};
use crossmesh_comm::memory::Memory;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::Strategy;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::Verified;

/// One tensor from r0 to r1: each of them has one buffer.
fn program(elements: usize) -> Verified {
    let layout = |mesh| format!("f32[{elements}]@{mesh}{{x:1}}(_)");
    let plan = planned(&[(&layout("A"), &layout("B"))], Strategy::SendRecv, None);
    Verified::plan(&plan, Addressing::Apart).unwrap()
}

fn bound(program: &Verified, rank: u32, memory: &Arc<Memory>) -> RankBuffers {
    let bases = vec![Base { memory: memory.clone(), at: 0 }];
    RankBuffers::bind(program.rank(Rank(rank)), bases).unwrap()
}

fn engines(kind: Kind) -> [Engine; 2] {
    let (a, b) = link_pair(kind, Rank(0), Rank(1));
    let engine = |me: u32, link| {
        let options = EngineOptions { deadline_ms: 20_000, ..Default::default() };
        Engine::new(Rank(me), vec![(Rank(1 - me), link)], Box::new(Monotonic), options).unwrap()
    };
    [engine(0, a), engine(1, b)]
}

/// Moves the tensor; each rank drops all it has of the memory but what its job keeps.
fn transfer(kind: Kind, program: &Verified, memories: [Arc<Memory>; 2], during: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for ((rank, memory), mut engine) in (0..).zip(memories).zip(engines(kind)) {
            let during = &during;
            scope.spawn(move || {
                let buffers = bound(program, rank, &memory);
                let handle = engine.start(JobSpec::new(0, &buffers).unwrap()).unwrap();
                assert!(memory.own().is_err(), "a job has it");
                drop((memory, buffers));
                during();
                engine.wait(handle).unwrap();
                engine.close();
            });
        }
    });
}

#[test]
fn a_callers_vector_is_sent_and_received_in_place() {
    const ELEMENTS: usize = 100_000;
    let program = program(ELEMENTS);
    for kind in KINDS {
        let vectors = [(0..ELEMENTS).map(|i| i as f32).collect(), vec![f32::NAN; ELEMENTS]];
        let addresses = vectors.each_ref().map(|v: &Vec<f32>| v.as_ptr().addr());
        let memories = vectors.map(|v| Arc::new(Memory::of_vec(v)));
        transfer(kind, &program, memories.clone(), || {});
        let vectors = memories.map(|memory| memory.into_vec::<f32>().unwrap());
        assert_eq!(vectors.each_ref().map(|v| v.as_ptr().addr()), addresses, "{kind:?}");
        assert!(vectors[1].iter().enumerate().all(|(i, x)| *x == i as f32), "{kind:?}");
    }
}

/// Bytes of somebody who counts how many of them are alive.
struct Tensor {
    bytes: NonNull<[u8]>,
    alive: Arc<AtomicUsize>,
}

// SAFETY: it has its bytes to itself.
unsafe impl Send for Tensor {}

impl Tensor {
    fn memory(bytes: usize, alive: &Arc<AtomicUsize>) -> Memory {
        alive.fetch_add(1, Ordering::SeqCst);
        let leaked = NonNull::from(Box::leak(vec![1u8; bytes].into_boxed_slice()));
        let owner = Self { bytes: leaked, alive: alive.clone() };
        // SAFETY: the bytes are the owner's alone, until it is dropped.
        unsafe { Memory::foreign(owner, leaked.cast(), bytes) }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the slice that was leaked.
        unsafe {
            self.bytes.as_mut().fill(0xff); // whoever still reads them gets the wrong ones
            drop(Box::from_raw(self.bytes.as_ptr()));
        }
    }
}

#[test]
fn a_handle_may_go_while_a_job_runs() {
    let program = program(1 << 20);
    for kind in KINDS {
        let alive = Arc::new(AtomicUsize::new(0));
        let memories = [(); 2].map(|()| Arc::new(Tensor::memory(4 << 20, &alive)));
        let kept = memories[1].clone();
        transfer(kind, &program, memories, || {
            assert_eq!(alive.load(Ordering::SeqCst), 2, "{kind:?}: freed under a job");
        });
        // What was sent is gone with the job, what was received is the caller's.
        assert_eq!(alive.load(Ordering::SeqCst), 1, "{kind:?}");
        assert!(kept.own().unwrap().elements::<u8>(0, 4 << 20).iter().all(|b| *b == 1), "{kind:?}");
        drop(kept);
        assert_eq!(alive.load(Ordering::SeqCst), 0, "{kind:?}");
    }
}

#[test]
fn memory_that_does_not_do_is_refused() {
    let program = program(100);
    let memory = Arc::new(Memory::of_vec(vec![0f32; 100]));
    let base = |at| Base { memory: memory.clone(), at };
    let bind = |bases| RankBuffers::bind(program.rank(Rank(0)), bases).err();
    assert_eq!(bind(vec![]), Some(BindError::Count { given: 0, needed: 1 }));
    assert_eq!(bind(vec![base(4)]), Some(BindError::Room { buffer: 0, bytes: 400, room: 396 }));
    assert_eq!(bind(vec![base(u64::MAX)]), Some(BindError::Room { buffer: 0, bytes: 400, room: 0 }));
    let there_and_back = planned(
        &[("u8[64]@A{x:1}=0(_)", "u8[64]@B{x:1}=1(_)"), ("u8[64]@B{x:1}=1(_)", "u8[64]@A{x:1}=0(_)")],
        Strategy::SendRecv,
        None,
    );
    let program = Verified::plan(&there_and_back, Addressing::Apart).unwrap();
    let bind = |bases| RankBuffers::bind(program.rank(Rank(0)), bases).err();
    assert_eq!(bind(vec![base(0), base(63)]), Some(BindError::Overlap { one: 0, other: 1 }));
    assert_eq!(bind(vec![base(0), base(64)]), None);
}

/// Memory that the system gave this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// 256 MiB out of a vector and into another take next to nothing beside the two. Alone in its process: see the name.
#[test]
fn z_a_large_tensor_needs_no_memory_beside_the_callers() {
    const ELEMENTS: usize = 64 << 20;
    if std::env::var_os("CROSSMESH_FOREIGN_CHILD").is_none() {
        let program = std::env::current_exe().unwrap();
        let name = "z_a_large_tensor_needs_no_memory_beside_the_callers";
        let status = std::process::Command::new(program)
            .args([name, "--exact", "--test-threads", "1"])
            .env("CROSSMESH_FOREIGN_CHILD", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let program = program(ELEMENTS);
    for kind in [Kind::Tcp, Kind::Shm] {
        let memories = [(); 2].map(|()| Arc::new(Memory::of_vec(vec![1f32; ELEMENTS])));
        let before = resident();
        let (peak, done) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    peak.fetch_max(resident() as usize, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            });
            transfer(kind, &program, memories.clone(), || {});
            done.store(true, Ordering::SeqCst);
        });
        let extra = (peak.load(Ordering::SeqCst) as u64).saturating_sub(before);
        assert!(extra < 16 << 20, "{kind:?}: {} MiB more", extra >> 20);
    }
}
