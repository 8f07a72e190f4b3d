//! What a rank holds whose activations wait in a file, counted by the allocator: what waits for W, what is on its way to the file and back, and no more.
//!
//! ```text
//! F of a microbatch   | F unit 0 | F unit 1 | ..        in memory: units that wait to be written, at most PENDING and one that is
//! between passes      |                                 nothing
//! B, then W           | B unit 1 | B unit 0 |           what each unit leaves for W
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossmesh_testkit::machine::eventually;
use crossmesh_train::chain::{Chain, Model, Outline, Setup};
use crossmesh_train::kernels::cpu::{Cpu, CpuBf16};
use crossmesh_train::kernels::scalar::Scalar as _;
use crossmesh_train::kernels::{BufSlice, Buffer as _, Kernels};
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::stage::{Microbatch, MicrobatchId, Stage as _, Value};
use crossmesh_train::tier::{PENDING, Tier};

/// Counts what is allocated.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[expect(unsafe_code, reason = "an allocator that counts")]
// SAFETY: everything is the system's allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

const SAMPLES: usize = 4;
const MICROBATCHES: u32 = 6;
const LAYERS: usize = 3;
/// Names, lists, and what threads keep.
const FIXED: u64 = 100_000;

/// Holds a stage of blocks against its outline, through F of all microbatches, then B of all, then W of all.
fn holds_the_formula<K: Kernels>(kernels: K, trim: fn(&K), config: &GptConfig, what: &str) {
    let model = Gpt::new(config.clone()).unwrap();
    let model: &dyn Model<K> = &model;
    let kernels = Arc::new(kernels);
    let setup = Setup { offloaded: true, ..Setup::alone(SAMPLES, 1) };
    let units = 1..1 + LAYERS;
    let outline = Outline::new(model, units.clone(), &setup).unwrap();
    let in_memory = Outline::new(model, units.clone(), &Setup { offloaded: false, ..setup.clone() }).unwrap();
    let (kept, left) = (in_memory.activations.after_forward, outline.activations.after_backward_input);
    assert_eq!(outline.activations.after_forward, 0, "{what}");
    // The formula of what is under way: of the largest unit, as many as may wait to be written, the one that is written, and the one that is packed or read.
    assert_eq!(outline.in_flight, (PENDING as u64 + 2) * (kept / LAYERS as u64), "{what}: blocks are alike");

    let folder = tempfile::tempdir().unwrap();
    let tier = Arc::new(Tier::open(folder.path()).unwrap());
    let group = in_process_alone::<K>();
    let chain = Chain::new(model, units, Arc::clone(&kernels), group, setup).unwrap();
    let mut chain = chain.offloaded_to(Arc::clone(&tier));
    let filled = |len: usize| {
        let mut buf = kernels.buffer(len);
        kernels.fill(K::Real::from_f64(0.01), (&mut buf).into(), len);
        buf
    };
    let params = filled(outline.num_elements());
    let hidden = || filled(SAMPLES * config.context * config.width);
    // What kernels keep at hand for the next pass is nobody's.
    let live = || {
        trim(&kernels);
        LIVE.load(Ordering::SeqCst) as u64
    };
    let microbatch = |id: u32| Microbatch {
        id: MicrobatchId(id),
        step: 0,
        first_sample: 0,
        batch_samples: u64::from(MICROBATCHES) * SAMPLES as u64,
    };
    let before = live();
    let mut outputs = BTreeMap::new();
    for id in 0..MICROBATCHES {
        let given = chain.forward(microbatch(id), &mut &params, vec![Value::Real(hidden())]).unwrap();
        outputs.insert(id, given.into_iter().map(real).next().unwrap());
        assert_eq!(chain.live().bytes, 0, "{what}: none of it is in memory");
    }
    let handed = u64::from(MICROBATCHES) * outputs.values().map(|b| bytes::<K>(&*kernels, b)).max().unwrap();
    let written = eventually(Duration::from_secs(40), || live() <= before + handed + FIXED);
    let over = live().saturating_sub(before + handed);
    assert!(written, "{what}: {over} B stay behind {MICROBATCHES} microbatches that would be {kept} B each");
    assert!(u64::from(MICROBATCHES) * kept > 10 * FIXED, "{what}: {kept} B a microbatch are worth a look");
    let waiting = tier.most_waiting();
    assert!(waiting >= kept / LAYERS as u64 && waiting <= outline.in_flight, "{what}: {waiting}");

    outputs.clear();
    for id in 0..MICROBATCHES {
        drop(chain.backward_input(MicrobatchId(id), &mut &params, vec![hidden()]).unwrap());
        assert_eq!(chain.live().bytes, u64::from(id + 1) * left, "{what}: for W");
        let held = live().saturating_sub(before);
        let wanted = u64::from(id + 1) * left;
        assert!(held >= wanted && held <= wanted + FIXED, "{what}: {held} B, formula {wanted}");
    }
    let mut sums = kernels.wide(params.len());
    (0..MICROBATCHES).for_each(|id| chain.backward_weight(MicrobatchId(id), &mut &mut sums).unwrap());
    drop(sums);
    assert!(live() <= before + FIXED, "{what}: {} B are left", live() - before);
}

fn in_process_alone<K: Kernels>() -> Arc<dyn crossmesh_train::group::Group<K::Buf>> {
    Arc::new(crossmesh_train::group::Alone)
}

fn real<B: crossmesh_train::kernels::Buffer>(value: Value<B>) -> B {
    match value {
        Value::Real(buf) => buf,
        other => panic!("{other:?}"),
    }
}

fn bytes<K: Kernels>(kernels: &K, buf: &K::Buf) -> u64 {
    std::mem::size_of_val(&*kernels.elems(BufSlice { buf, start: 0 }, buf.len())) as u64
}

/// One test: tests of a process share its allocator.
#[test]
fn offloading_holds_the_formula() {
    let gpt = GptConfig { dropout: 0.1, ..GptConfig::new(16, 32, 64, LAYERS, 4) };
    let llama = GptConfig::llama((16, 32), 64, LAYERS, (4, 2), 160);
    for (name, config) in [("GPT", gpt), ("Llama", llama)] {
        holds_the_formula(Cpu::<f64>::new(1), Cpu::trim, &config, &format!("{name} in f64"));
        holds_the_formula(Cpu::<f32>::new(1), Cpu::trim, &config, &format!("{name} in f32"));
        holds_the_formula(CpuBf16::new(1), CpuBf16::trim, &config, &format!("{name} in bf16"));
    }
}
