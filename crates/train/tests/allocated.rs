//! What ranks hold in bf16 between two steps, by ZeRO's stage, counted by the allocator: the formula, and no more than what passes need beside it.
//!
//! Of Ψ weights on N ranks, in bytes: 2 of a weight, 4 of its gradient, 12 of what it is rounded from and its two moments.
//!
//! ```text
//! stage 0   18 Ψ
//! stage 1    6 Ψ + 12 Ψ / N
//! stage 2    2 Ψ + 16 Ψ / N     and a unit's gradients
//! stage 3        18 Ψ / N       and a unit's gradients, and two units' weights
//! ```

mod grid;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossmesh_train::chain::parameters;
use crossmesh_train::job::Dealt;
use crossmesh_train::kernels::cpu::CpuBf16;
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::runtime::in_threads_on;
use grid::{Case, Kind, adamw};

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

const RANKS: usize = 4;
const LAYERS: usize = 16;
/// Bytes of a rank that do not grow with its weights.
const FIXED: f64 = 2e6;

/// Deep and narrow, a row a rank: weights are nearly all that there is.
fn config() -> GptConfig {
    GptConfig::llama((8, 2), 128, LAYERS, (4, 2), 384)
}

/// Bytes of all ranks together between two steps.
fn held(stage: usize) -> f64 {
    let case = Case {
        kind: Kind::Gpt(config()),
        dealt: Dealt::zero(stage),
        microbatches: 2,
        samples: RANKS,
        bucket_bytes: 1 << 18,
        ..Case::gpt("gpipe", &["A{dp:4}"])
    };
    let (model, job) = (case.kind.model_on::<CpuBf16>(), case.job::<f32>(adamw()));
    let before = LIVE.load(Ordering::SeqCst);
    let all_here = Barrier::new(RANKS);
    let ranks = in_threads_on(
        || CpuBf16::new(1),
        &*model,
        &job,
        &case.feed(),
        |trainer| {
            (0..2).try_for_each(|_| trainer.step().map(drop))?;
            all_here.wait();
            let live = LIVE.load(Ordering::SeqCst);
            all_here.wait();
            Ok((live, trainer.kept().bytes::<CpuBf16>()))
        },
    );
    let ranks = ranks.unwrap();
    let kept: usize = ranks.iter().map(|(_, kept)| kept).sum();
    let live = ranks[0].0 - before;
    assert!(live >= kept, "stage {stage}: the allocator counts {live} B where ranks keep {kept}");
    live as f64
}

/// One test: tests of a process share its allocator.
#[test]
fn ranks_hold_the_formula() {
    let model = crossmesh_train::models::gpt::Gpt::new(config()).unwrap();
    let list = parameters::<CpuBf16>(&model);
    let all = list.last().unwrap().range.end as f64;
    let block =
        list.iter().filter(|p| p.name.starts_with("model.layers.0.")).map(|p| p.range.len()).sum::<usize>()
            as f64;
    let n = RANKS as f64;
    let formula = [18.0 * all, 6.0 * all + 12.0 * all / n, 2.0 * all + 16.0 * all / n, 18.0 * all / n];
    // What passes need beside it, and keep at hand: gradients of a unit, in 4 bytes, and weights of two, in 2.
    let beside = [0.0, 0.0, 4.0 * block, (4.0 + 2.0 * 2.0) * block];
    for (stage, (formula, beside)) in formula.into_iter().zip(beside).enumerate() {
        let live = held(stage) / n;
        assert!(live >= formula, "stage {stage}: {live} B held, formula {formula}");
        // Plans, names, an engine and a row's activations: as much whatever is trained.
        assert!(
            live <= formula + beside + FIXED,
            "stage {stage}: {live} B held, formula {formula} + {beside}"
        );
    }
}
