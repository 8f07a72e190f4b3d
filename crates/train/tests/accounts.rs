//! What a job holds and sends is what the checker and the formulas say.

mod grid;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::program::{OpKind, RankProgram};
use crossmesh_core::schedule::memory::peaks;
use crossmesh_core::schedule::{Costs, Footprint, time};
use crossmesh_core::step::lower_lists;
use crossmesh_train::chain::{Limits, Model, Outline, Setup};
use crossmesh_train::graph::{Action, Policies, Rule};
use crossmesh_train::job::{Dealt, Job, Over};
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::{Gpt, GptConfig, Residual};
use crossmesh_train::record::StepRecord;
use crossmesh_train::runtime::{in_threads, step_lists};
use crossmesh_train::stage::Recompute;
use crossmesh_train::wiring::{Wiring, setup};
use grid::{Case, Kind, Outcome, adamw, gpt_config, plain, run};

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
    let serial = GptConfig { layers: 6, ..gpt_config(true, 0.1) };
    let ladder = GptConfig { residual: Residual::Ladder, ..serial.clone() };
    // Heads that share keys, and norms without a mean; nothing of it divides but its heads.
    let llama = GptConfig { dropout: 0.1, ..GptConfig::llama((13, 7), 24, 6, (4, 2), 31) };
    let all = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zbv", "v-half", "v-min"];
    let cases = all.into_iter().map(|schedule| (schedule, &serial));
    let llamas = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv"].map(|schedule| (schedule, &llama));
    for (schedule, config) in cases.chain([("1f1b", &ladder), ("zbv", &ladder)]).chain(llamas) {
        let kind = Kind::Gpt(config.clone());
        let within = ["1f1b", "zbv"].contains(&schedule).then_some(Recompute::Within(9_000));
        let others = [Recompute::Nothing, Recompute::Attention, Recompute::Everything];
        for recompute in others.into_iter().chain(within) {
            let meshes = ["A{tp:2}", "B{dp:2}"];
            let case =
                Case { kind: kind.clone(), recompute, microbatches: 6, ..Case::gpt(schedule, &meshes) };
            holds_what_is_promised(&case);
        }
    }
}

/// Every rank, in every step.
fn holds_what_is_promised(case: &Case) {
    let job = case.job::<f64>(adamw());
    let outcome = run::<f64>(case, adamw(), 2);
    for (rank, records) in outcome.records.iter().enumerate() {
        let wanted = promised(&job, case, rank / 2, rank % 2);
        for record in records {
            assert_eq!(record.activation_bytes, wanted, "{case:?}: rank {rank}, step {}", record.step);
        }
    }
}

/// What a stage would hold within a limit, before it is given one, is what it holds then: from F to B no more than the limit, unless that is less than the least.
#[test]
fn limits_hold_what_outlines_say() {
    let gpt = GptConfig { layers: 3, ..gpt_config(true, 0.1) };
    let llama = GptConfig::llama((13, 7), 24, 3, (4, 2), 31);
    for config in [gpt, llama] {
        let model = Gpt::new(config).unwrap();
        let model: &dyn Model<Cpu<f64>> = &model;
        for (strands, offloaded) in [(1, false), (2, false), (1, true), (2, true)] {
            let setup = Setup { strands, offloaded, ..Setup::alone(4, 1) };
            let limits = Limits::new(model, 0..4, &setup).unwrap();
            let least = limits.held::<Cpu<f64>>(0).after_forward;
            let most = limits.held::<Cpu<f64>>(u64::MAX).after_forward;
            assert!(offloaded || least < most / 2, "{least} of {most}");
            for limit in [0, least, least + 1, (least + most) / 2, most.saturating_sub(1), most, u64::MAX] {
                let recompute = Recompute::Within(limit);
                let outline = Outline::new(model, 0..4, &Setup { recompute, ..setup.clone() }).unwrap();
                let held = limits.held::<Cpu<f64>>(limit);
                assert_eq!(held, outline.activations, "{strands} strands, {limit}");
                assert!(held.after_forward <= limit.max(least), "{strands} strands: {held:?} in {limit}");
            }
        }
    }
}

/// Where what waits for B is in a file, the checker counts what waits for W alone; and so much is in memory.
#[test]
fn offloading_ranks_hold_what_the_checker_says() {
    let folder = tempfile::tempdir().unwrap();
    let gpt = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    let llama = Kind::Gpt(GptConfig::llama((13, 7), 24, 6, (4, 2), 31));
    for kind in [gpt, llama] {
        for schedule in ["gpipe", "1f1b", "zb-h1", "zbv"] {
            let offload = Some(folder.path().to_path_buf());
            let meshes = ["A{tp:2}", "B{dp:2}"];
            holds_what_is_promised(&Case { kind: kind.clone(), offload, ..Case::gpt(schedule, &meshes) });
        }
    }
}

/// What policies keep, compute again and offload, unit by unit, is what the checker counts; and no bit is another.
#[test]
fn ranks_with_policies_hold_what_the_checker_says() {
    let folder = tempfile::tempdir().unwrap();
    let rule = |ops: &[&'static str], action| Rule { ops: ops.to_vec(), action };
    let of = |unit: usize| match unit % 4 {
        0 => vec![rule(&["attention", "norm", "activate", "gate"], Action::Recompute)],
        1 => vec![
            rule(&["linear"], Action::Offload),
            rule(&["norm"], Action::Recompute),
            rule(&[], Action::Keep),
        ],
        2 => vec![rule(&[], Action::Recompute)],
        _ => vec![rule(&["input", "attention"], Action::Keep)],
    };
    let gpt = Kind::Gpt(GptConfig { layers: 6, ..gpt_config(true, 0.1) });
    let llama = Kind::Gpt(GptConfig { dropout: 0.1, ..GptConfig::llama((13, 7), 24, 6, (4, 2), 31) });
    let bits =
        |outcome: &Outcome| -> Vec<u64> { outcome.weights.values().flatten().map(|x| x.to_bits()).collect() };
    for kind in [gpt, llama] {
        for (schedule, meshes) in [
            ("1f1b", &["A{tp:2}", "B{dp:2}"][..]),
            ("zbv", &["A{tp:2}", "B{dp:2}"]),
            ("bpipe", &["A{tp:2}", "B{dp:2}", "C{tp:2}", "D{dp:2}"]),
        ] {
            let plain = Case {
                kind: kind.clone(),
                microbatches: 8,
                fixed_order: true,
                ..Case::gpt(schedule, meshes)
            };
            let (offload, policies) =
                (Some(folder.path().to_path_buf()), Policies::new((0..8).map(of).collect()));
            let case = Case { policies, offload, ..plain.clone() };
            if schedule != "bpipe" {
                holds_what_is_promised(&case);
            }
            let (with, without) = (run::<f64>(&case, adamw(), 2), run::<f64>(&plain, adamw(), 2));
            assert!(bits(&with) == bits(&without), "{case:?}");
            let most = |outcome: &Outcome| outcome.records.iter().map(|r| r[1].activation_bytes).sum::<u64>();
            assert!(most(&with) < most(&without), "{} of {}", most(&with), most(&without));
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

/// What the step's program sends with everything that ranks do inside their passes, by rank.
fn listed(case: &Case) -> Vec<u64> {
    let mut job = case.job::<f64>(plain());
    let ranks = job.ranks().len() as u32;
    job.cluster = Cluster::of_hosts(vec![Host { local_bytes_per_s: 1e6, ..Host::with_devices(ranks) }]);
    let model = case.kind.model::<f64>();
    let wiring = Wiring::new(&*model, &job).unwrap();
    let lists = step_lists(&*model, &job, &wiring).unwrap();
    let lowered = lower_lists(&wiring.lowered, &lists).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    let sends = |rank: &RankProgram| {
        rank.ops.iter().filter(|op| matches!(op.kind, OpKind::Send { .. })).map(|op| op.bytes).sum()
    };
    lowered.program.ranks.iter().map(sends).collect()
}

/// The program that is simulated sends what ranks send, byte for byte: tensor parallelism with and without split rows and strands, ZeRO of all stages and
/// between them, recomputation, tied weights, pipelines. And it is proven: it comes to its end, and every part of a pass begins with the sums it reads.
#[test]
fn the_simulated_program_sends_what_ranks_send() {
    let tp = |mesh| Case { kind: divisible(2), samples: 2, ..Case::gpt("gpipe", &[mesh]) };
    let zero = |zero, mesh| Case { dealt: Dealt::zero(zero), samples: 4, ..tp(mesh) };
    let full = Recompute::Everything;
    let dealt = |p: &[&str], g: &[&str], o: &[&str]| {
        let over = |axes: &[&str]| Over::Axes(axes.iter().map(|a| a.to_string()).collect());
        Dealt { parameters: over(p), gradients: over(g), states: over(o) }
    };
    let ladder = match divisible(2) {
        Kind::Gpt(config) => Kind::Gpt(GptConfig { residual: Residual::Ladder, ..config }),
        other => other,
    };
    let mixed = dealt(&["dpi"], &["dpi"], &["dpo", "dpi"]);
    let cases = [
        tp("A{tp:2}"),
        tp("A{tp:3}"),
        Case { sequence_parallel: true, ..tp("A{tp:2}") },
        Case { recompute: full, ..tp("A{tp:2}") },
        Case { kind: ladder, ..tp("A{tp:2}") },
        Case { strands: 2, ..tp("A{tp:2}") },
        zero(0, "A{dp:2}"),
        zero(1, "A{dp:2}"),
        zero(2, "A{dp:2}"),
        zero(3, "A{dp:2}"),
        Case { recompute: full, ..zero(3, "A{dp:4}") },
        Case { bucket_bytes: 1, ..zero(1, "A{dp:2}") },
        Case { fixed_order: true, ..zero(2, "A{dp:2}") },
        zero(1, "A{dp:2,tp:2}"),
        Case { dealt: mixed, samples: 4, ..tp("A{dpo:2,dpi:2}") },
        Case { kind: divisible(2), samples: 2, ..Case::gpt("1f1b", &["A{tp:2}", "B{tp:2}"]) },
        Case { samples: 4, dealt: Dealt::zero(1), ..Case::gpt("zb-h1", &["A{dp:2}", "B{tp:2}"]) },
        Case::gpt("1f1b", &["A{tp:1}", "B{dp:1}"]),
    ];
    for case in cases {
        let (program, ranks) = (listed(&case), sent(&case));
        assert!(ranks.iter().sum::<u64>() > 0, "{case:?}");
        assert_eq!(program, ranks, "{case:?}");
    }
}

/// Sizes that divide: what each rank sends is the formula, and not about that.
fn divisible(layers: usize) -> Kind {
    Kind::Gpt(GptConfig { hidden: 48, tied: false, ..GptConfig::new(12, 6, 24, layers, 6) })
}

/// 8 b s h (t - 1) / t elements for every layer and microbatch (Korthikanti et al., 2022), whether or not the sequence is split, or branches are on a
/// ladder. Where one of them is so, the gradients of the norms (4 h a layer) are summed once a step, since no rank has all of them.
#[test]
fn tensor_parallel_layers_send_the_formula() {
    let (b, s, h) = (2u64, 6, 24);
    for (mesh, t) in [("A{tp:2}", 2u64), ("A{tp:3}", 3)] {
        for (sequence_parallel, residual) in [
            (false, Residual::Serial),
            (true, Residual::Serial),
            (false, Residual::Ladder),
            (true, Residual::Ladder),
        ] {
            let case = |layers| Case {
                kind: match divisible(layers) {
                    Kind::Gpt(config) => Kind::Gpt(GptConfig { residual, ..config }),
                    other => other,
                },
                samples: b as usize,
                sequence_parallel,
                ..Case::gpt("gpipe", &[mesh])
            };
            let (two, three) = (sent(&case(2)), sent(&case(3)));
            let per_layer = 8 * b * s * h * (t - 1) / t * size_of::<f64>() as u64;
            let microbatches = u64::from(case(2).microbatches);
            for (rank, (less, more)) in two.iter().zip(three).enumerate() {
                let summed = sequence_parallel || residual == Residual::Ladder;
                let norms = if summed { 2 * 4 * h * (t - 1) / t * size_of::<f64>() as u64 } else { 0 };
                let wanted = microbatches * per_layer + norms;
                assert_eq!(more - less, wanted, "tp {t}, {sequence_parallel}, {residual:?}, rank {rank}");
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
