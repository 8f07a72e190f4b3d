//! What a job holds and sends is what the checker and the formulas say.

mod grid;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::schedule::memory::peaks;
use crossmesh_core::schedule::{Costs, Footprint, time};
use crossmesh_train::chain::Outline;
use crossmesh_train::job::Dealt;
use crossmesh_train::job::Job;
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::GptConfig;
use crossmesh_train::record::StepRecord;
use crossmesh_train::runtime::in_threads;
use crossmesh_train::stage::Recompute;
use crossmesh_train::wiring::setup;
use grid::{Case, Kind, adamw, gpt_config, plain, run};

/// The most bytes that a rank holds, by the schedule's checker.
fn promised(job: &Job, case: &Case, device: usize, position: usize) -> u64 {
    let model = case.kind.model::<f64>();
    let placement = job.schedule.placement();
    let bytes = |(stage, units): (_, &std::ops::Range<usize>)| {
        let here = placement.device(stage).index() == device;
        let setup = setup(job, stage, if here { position } else { 0 }).unwrap();
        let held = Outline::new::<Cpu<f64>>(&*model, units.clone(), &setup).unwrap().activations;
        (held.after_forward, held.after_backward_input)
    };
    let held: Vec<(u64, u64)> = placement.stages().zip(&job.stages).map(bytes).collect();
    let costs = Costs::even(placement.num_stages(), 1.0, 1.0, 1.0, 0.0).unwrap();
    let timed = time(&job.schedule, &costs).unwrap();
    peaks(&job.schedule, &timed, &Footprint::exact(&held))[device].amount as u64
}

#[test]
fn ranks_hold_what_the_checker_says() {
    let kind = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    for schedule in
        ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zbv", "v-half", "v-min"]
    {
        for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
            let meshes = ["A{tp:2}", "B{dp:2}"];
            let case =
                Case { kind: kind.clone(), recompute, microbatches: 6, ..Case::gpt(schedule, &meshes) };
            let job = case.job::<f64>(adamw());
            let outcome = run::<f64>(&case, adamw(), 2);
            for (rank, records) in outcome.records.iter().enumerate() {
                let wanted = promised(&job, &case, rank / 2, rank % 2);
                for record in records {
                    assert_eq!(
                        record.activation_bytes, wanted,
                        "{case:?}: rank {rank}, step {}",
                        record.step
                    );
                }
            }
        }
    }
}

/// Of BPipe, early stages hold no more than the limit; what the last one keeps for the first lies in buffers of the crossing.
#[test]
fn evicting_ranks_hold_what_the_checker_says() {
    let kind = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    let meshes = ["A{tp:2}", "B{dp:2}", "C{tp:2}", "D{dp:2}"];
    for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
        let case = Case { kind: kind.clone(), recompute, microbatches: 8, ..Case::gpt("bpipe", &meshes) };
        let plain = Case { schedule: "1f1b", ..case.clone() };
        let (job, plain_job) = (case.job::<f64>(adamw()), plain.job::<f64>(adamw()));
        let outcome = run::<f64>(&case, adamw(), 2);
        for (rank, records) in outcome.records.iter().enumerate() {
            let (device, position) = (rank / 2, rank % 2);
            let alone = promised(&plain_job, &plain, device, position);
            let wanted = if device == 3 { alone } else { promised(&job, &case, device, position) };
            assert_eq!(device == 0, wanted < alone, "{case:?}: rank {rank} holds {wanted}, or {alone}");
            for record in records {
                assert_eq!(record.activation_bytes, wanted, "{case:?}: rank {rank}, step {}", record.step);
            }
        }
    }
}

#[test]
fn windows_of_microbatches() {
    let held = |schedule: &'static str| -> Vec<usize> {
        let meshes = ["A{dp:1}", "B{dp:1}", "C{dp:1}", "D{dp:1}"];
        let case = Case { microbatches: 8, ..Case::gpt(schedule, &meshes) };
        run::<f64>(&case, plain(), 1).records.iter().map(|r| r[0].peaks[0].microbatches).collect()
    };
    assert_eq!(held("1f1b"), [4, 3, 2, 1]);
    assert_eq!(held("eager-1f1b"), [7, 5, 3, 1]);
    assert_eq!(held("gpipe"), [8, 8, 8, 8]);
    assert_eq!(held("bpipe"), [3, 3, 2, 1]);
}

/// What every rank sends in a step, where links are so slow that no byte is sent in vain.
fn sent(case: &Case) -> Vec<u64> {
    let mut job = case.job::<f64>(plain());
    let ranks = job.ranks().len() as u32;
    job.cluster = Cluster::of_hosts(vec![Host { local_bytes_per_s: 1e6, ..Host::with_devices(ranks) }]);
    let model = case.kind.model::<f64>();
    let records =
        in_threads::<f64, StepRecord>(&*model, &job, &case.feed(), |trainer| trainer.step()).unwrap();
    records.iter().map(|r| r.bytes_sent).collect()
}

/// Sizes that divide: what each rank sends is the formula, and not about that.
fn divisible(layers: usize) -> Kind {
    Kind::Gpt(GptConfig { hidden: 48, tied: false, ..GptConfig::new(12, 6, 24, layers, 6) })
}

/// 8 b s h (t - 1) / t elements for every layer and microbatch (Korthikanti et al., 2022), whether or not the sequence is split. Where it
/// is, the gradients of the norms (4 h a layer) are summed once a step, since no rank has seen all rows.
#[test]
fn tensor_parallel_layers_send_the_formula() {
    let (b, s, h) = (2u64, 6, 24);
    for (mesh, t) in [("A{tp:2}", 2u64), ("A{tp:3}", 3)] {
        for sequence_parallel in [false, true] {
            let case = |layers| Case {
                kind: divisible(layers),
                samples: b as usize,
                sequence_parallel,
                ..Case::gpt("gpipe", &[mesh])
            };
            let (two, three) = (sent(&case(2)), sent(&case(3)));
            let per_layer = 8 * b * s * h * (t - 1) / t * size_of::<f64>() as u64;
            let microbatches = u64::from(case(2).microbatches);
            for (rank, (less, more)) in two.iter().zip(three).enumerate() {
                let norms =
                    if sequence_parallel { 2 * 4 * h * (t - 1) / t * size_of::<f64>() as u64 } else { 0 };
                let wanted = microbatches * per_layer + norms;
                assert_eq!(more - less, wanted, "tp {t}, {sequence_parallel}, rank {rank}");
            }
        }
    }
}

/// P (d - 1) / d elements, times 2 where gradients are summed for all or dealt out and weights gathered again (ZeRO-1); times m + 1 where
/// every microbatch's are dealt out (ZeRO-2); times 3 m where weights are gathered for its F and B too (ZeRO-3).
#[test]
fn data_parallel_ranks_send_the_formula() {
    let d = 2;
    let case = |zero, layers| Case {
        kind: divisible(layers),
        samples: 2,
        dealt: Dealt::zero(zero),
        bucket_bytes: u64::MAX,
        ..Case::gpt("gpipe", &["A{dp:2}"])
    };
    let (h, f, m) = (24u64, 48, u64::from(case(0, 1).microbatches));
    let block = 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h;
    for (zero, times) in [(0, 2), (1, 2), (2, m + 1), (3, 3 * m)] {
        let (one, two) = (sent(&case(zero, 1)), sent(&case(zero, 2)));
        let wanted = times * block * (d - 1) / d * size_of::<f64>() as u64;
        assert!(one.iter().zip(two).all(|(a, b)| b - a == wanted), "ZeRO {zero}: {one:?}, {wanted}");
    }
}

/// Between stages travel activations one way and gradients the other, each once.
#[test]
fn edges_send_their_tensors_once() {
    let case = Case { kind: divisible(4), samples: 2, ..Case::gpt("1f1b", &["A{dp:1}", "B{dp:2}"]) };
    let longer = Case { microbatches: 2 * case.microbatches, ..case.clone() };
    let (short, long) = (sent(&case), sent(&longer));
    let tensor = 2 * 6 * 24 * size_of::<f64>() as u64;
    let extra: Vec<u64> = short.iter().zip(&long).map(|(a, b)| b - a).collect();
    let each = u64::from(case.microbatches) * tensor;
    assert_eq!(extra, [each, each / 2, each / 2]);
}

/// A byte crosses in place of a tensor, and passes run as ever.
#[test]
fn signals_are_a_byte_each() {
    let case = Case { kind: divisible(4), samples: 2, ..Case::gpt("1f1b", &["A{dp:1}", "B{dp:2}"]) };
    let model = case.kind.model::<f64>();
    let records = |microbatches| {
        let mut job = Case { microbatches, ..case.clone() }.job::<f64>(plain());
        job.signal = true;
        in_threads::<f64, StepRecord>(&*model, &job, &case.feed(), |trainer| trainer.step()).unwrap()
    };
    let (few, many) = (records(4), records(8));
    assert!(few.iter().chain(&many).all(|r| r.loss.is_finite()));
    let extra: u64 = few.iter().zip(&many).map(|(a, b)| b.bytes_sent - a.bytes_sent).sum();
    // Of every further microbatch, one to each rank of the second stage, and one back.
    assert_eq!(extra, 4 * 3);
}

#[test]
fn evicted_memory_is_a_byte_where_signals_are() {
    let case = |microbatches| Case {
        kind: divisible(4),
        samples: 2,
        microbatches,
        ..Case::gpt("bpipe", &["A{dp:1}", "B{dp:1}", "C{dp:1}", "D{dp:1}"])
    };
    let records = |microbatches| {
        let mut job = case(microbatches).job::<f64>(plain());
        job.signal = true;
        let moves = job.schedule.devices().iter().flatten().filter(|p| p.kind.is_move()).count() as u64;
        let model = case(microbatches).kind.model::<f64>();
        let feed = case(microbatches).feed();
        let records = in_threads::<f64, StepRecord>(&*model, &job, &feed, |t| t.step()).unwrap();
        assert!(records.iter().all(|r| r.loss.is_finite()));
        (records.iter().map(|r| r.bytes_sent).sum::<u64>(), moves)
    };
    let ((few, few_moves), (many, many_moves)) = (records(6), records(12));
    // Of every further microbatch, one over each edge, and one back; and one for every move.
    assert_eq!(many - few, 6 * 6 + many_moves - few_moves);
}
