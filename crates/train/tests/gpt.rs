//! Decoders, GPT-2's and Llama's: parallel equals single rank, in every way it can be cut; and it learns.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Job, Outcome, Single, StageSpec, Whole, assert_same, run};
use crossmesh_train::chain::{Chain, Model, Outline, Setup};
use crossmesh_train::deal::{Runs, Share};
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::optim::schedule::Schedule;
use crossmesh_train::optim::{Optimizer, OptimizerConfig, StepNumbers, clip_scale, norm_piece};
use crossmesh_train::parameter::initial;
use crossmesh_train::stage::{MicrobatchId, Recompute, Stage, Value};
use crossmesh_train::stage_rank::StageRank;

/// Nothing here divides by 2 or 3: heads, vocabulary, hidden columns, tokens.
fn config(tied: bool, dropout: f64) -> GptConfig {
    GptConfig { tied, dropout, hidden: 31, ..GptConfig::new(13, 7, 20, 4, 5) }
}

/// A Llama with so many heads of keys and values.
fn llama(kv_heads: usize) -> GptConfig {
    let heads = 2 * kv_heads;
    GptConfig { dropout: 0.1, ..GptConfig::llama((13, 7), 4 * heads, 3, (heads, kv_heads), 11) }
}

fn batch(config: &GptConfig, samples: usize, microbatches: usize) -> Vec<BTreeMap<String, Whole>> {
    let ids = |salt: usize, m: usize| {
        let id = |i: usize| ((i * 7 + m * 5 + salt + i * i * 3) % config.vocab) as i32;
        Whole::Ids((0..samples * config.context).map(id).collect())
    };
    let microbatch =
        |m| BTreeMap::from([("tokens".to_string(), ids(0, m)), ("targets".to_string(), ids(4, m))]);
    (0..microbatches).map(microbatch).collect()
}

/// The same model and batch on one rank.
fn single(config: &GptConfig) -> Outcome {
    run(&Gpt::new(config.clone()).unwrap(), &Job::alone(config.layers + 2, 4), &batch(config, 4, 2))
}

/// Stages with so many blocks each, on these meshes.
fn job(config: &GptConfig, stages: &[(&str, usize)]) -> Job {
    let blocks: Vec<usize> = stages.iter().map(|s| s.1).collect();
    let ranges = Gpt::new(config.clone()).unwrap().split(&blocks).unwrap();
    let spec = |((mesh, _), units): (&(&str, usize), _)| StageSpec { mesh: mesh.to_string(), units };
    Job { stages: stages.iter().zip(ranges).map(spec).collect(), ..Job::alone(0, 4) }
}

fn check(config: &GptConfig, job: &Job, wanted: &Outcome) {
    let got = run(&Gpt::new(config.clone()).unwrap(), job, &batch(config, 4, 2));
    assert_same(&got, wanted, &format!("{job:?}"));
}

#[test]
fn gradients_are_derivatives_of_the_loss() {
    for tied in [true, false] {
        let config = config(tied, 0.1);
        let model = Gpt::new(config.clone()).unwrap();
        let mut single = Single::new(&model, 2);
        // Larger weights than at the start: gradients that matter.
        single.params.iter_mut().for_each(|x| *x *= 4.0);
        single.check_gradients(2, &batch(&config, 2, 1)[0], 1e-6);
    }
}

#[test]
fn tensor_parallel_equals_single_rank() {
    for (tied, dropout) in [(true, 0.0), (false, 0.1)] {
        let config = config(tied, dropout);
        let wanted = single(&config);
        for mesh in
            ["A{dp:1,tp:1}", "A{tp:2}", "A{tp:3}", "A{dp:2,tp:2}", "A{dp:2,tp:3}", "A{dp:4}", "A{dp:3,tp:2}"]
        {
            for sequence_parallel in [false, true] {
                let job = Job { sequence_parallel, ..job(&config, &[(mesh, 4)]) };
                check(&config, &job, &wanted);
            }
        }
    }
}

/// More ranks than heads: some have none, and still take part.
#[test]
fn ranks_without_heads() {
    let config = GptConfig { dropout: 0.1, ..GptConfig::new(5, 6, 8, 1, 2) };
    let model = Gpt::new(config.clone()).unwrap();
    let data = batch(&config, 4, 1);
    let wanted = run(&model, &Job::alone(3, 4), &data);
    for sequence_parallel in [false, true] {
        let job = Job { sequence_parallel, ..job(&config, &[("A{tp:3}", 1)]) };
        assert_same(&run(&model, &job, &data), &wanted, "three ranks, two heads");
    }
}

#[test]
fn stages_in_sequence_equal_one() {
    for (tied, dropout) in [(true, 0.1), (false, 0.0)] {
        let config = config(tied, dropout);
        let wanted = single(&config);
        for blocks in [&[4][..], &[2, 2], &[0, 4], &[3, 0, 1], &[1, 1, 2], &[1, 1, 1, 1], &[0, 2, 2, 0]] {
            let stages: Vec<_> = blocks.iter().map(|&n| ("S{dp:1}", n)).collect();
            for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
                for late_weights in [false, true] {
                    check(&config, &Job { recompute, late_weights, ..job(&config, &stages) }, &wanted);
                }
            }
        }
    }
}

/// (dp 2 x tp 2) feeding (dp 4) feeding (tp 3), and the like.
#[test]
fn unequal_stages_equal_one_rank() {
    let config = config(true, 0.1);
    let wanted = single(&config);
    let shapes = [
        &[("A{dp:2,tp:2}", 1), ("B{dp:4}", 2), ("C{tp:3}", 1)][..],
        &[("A{tp:3}", 2), ("B{dp:2}", 1), ("C{dp:1}", 0), ("D{dp:2,tp:3}", 1)],
        &[("A{dp:3}", 2), ("B{tp:2}", 2)],
    ];
    for stages in shapes {
        for sequence_parallel in [false, true] {
            for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
                let job = Job { sequence_parallel, recompute, late_weights: true, ..job(&config, stages) };
                check(&config, &job, &wanted);
            }
        }
    }
}

/// Threads share out work, not sums.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let config = GptConfig { dropout: 0.1, ..GptConfig::new(50, 70, 60, 2, 4) };
    let model = Gpt::new(config.clone()).unwrap();
    let data = batch(&config, 3, 1).remove(0);
    let wanted = Single::with_threads(&model, 3, 1).gradients(3, &data);
    for threads in [2, 3, 7] {
        let got = Single::with_threads(&model, 3, threads).gradients(3, &data);
        assert!(got == wanted, "{threads} threads");
    }
}

/// Microbatches are parts of a batch: cut differently, it is the same batch.
#[test]
fn microbatches_add_up_to_the_batch() {
    let config = config(true, 0.1);
    let model = Gpt::new(config.clone()).unwrap();
    let data = batch(&config, 8, 1);
    let wanted = run(&model, &Job::alone(6, 8), &data);
    for samples in [1, 2, 4] {
        let cut = |m: usize| {
            let part = |whole: &Whole| match whole {
                Whole::Ids(ids) => {
                    let len = samples * config.context;
                    Whole::Ids(ids[m * len..(m + 1) * len].to_vec())
                }
                Whole::Real(_) => unreachable!("tokens are ids"),
            };
            data[0].iter().map(|(name, whole)| (name.clone(), part(whole))).collect()
        };
        let parts: Vec<BTreeMap<String, Whole>> = (0..8 / samples).map(cut).collect();
        let got = run(&model, &Job { late_weights: true, ..Job::alone(6, samples) }, &parts);
        assert_same(&got, &wanted, &format!("{samples} samples a microbatch"));
    }
}

/// Megatron's count: 8bsh(t-1)/t elements a layer, sequence parallel or not.
#[test]
fn tensor_parallel_traffic_follows_the_formula() {
    let config = GptConfig::new(12, 6, 12, 3, 6);
    let model = Gpt::new(config.clone()).unwrap();
    let data = batch(&config, 4, 1);
    for t in [2, 3] {
        for sequence_parallel in [false, true] {
            // Only blocks on the stage in the middle.
            let mesh = format!("B{{tp:{t}}}");
            let stages = [("A{dp:1}", 0), (mesh.as_str(), 3), ("C{dp:1}", 0)];
            let got = run(&model, &Job { sequence_parallel, ..job(&config, &stages) }, &data);
            let bsh = (4 * config.context * config.width) as u64;
            for traffic in &got.traffic[1] {
                assert_eq!(traffic.elements, 3 * 8 * bsh * (t - 1) / t, "tp {t}");
                assert_eq!(traffic.all_reduces, if sequence_parallel { 0 } else { 12 });
                assert_eq!(traffic.all_gathers, if sequence_parallel { 12 } else { 0 });
            }
            let again = Job { sequence_parallel, recompute: Recompute::Everything, ..job(&config, &stages) };
            let got = run(&model, &again, &data);
            assert_eq!(got.traffic[1][0].elements, 3 * 12 * bsh * (t - 1) / t, "forward twice");
        }
    }
}

/// A tiny GPT on a tiny periodic text: what comes next is certain, so the loss goes to zero.
#[test]
fn learns_a_periodic_text() {
    let config = GptConfig { dropout: 0.0, ..GptConfig::new(11, 16, 32, 2, 4) };
    let model = Gpt::new(config.clone()).unwrap();
    let samples = 4;
    let mut single = Single::new(&model, samples);
    let text = |start: usize| -> Whole {
        let token = |i: usize| [3, 1, 4, 1, 5, 9, 2, 6][i % 8];
        let sample = move |s: usize| (0..16).map(move |i| token(start + 3 * s + i));
        Whole::Ids((0..samples).flat_map(sample).collect())
    };
    let mut losses = Vec::new();
    let schedule = Schedule { peak: 0.01, warmup_steps: 5, total_steps: 60, floor: 0.001, decay_steps: None };
    let cpu = Cpu::new(1);
    let all = Runs::whole(single.params.len());
    let parameters = single.chain.parameters().to_vec();
    let mut optimizer = Optimizer::new(&cpu, OptimizerConfig::ADAMW, &parameters, Share::whole(all.len()));
    for step in 0..60 {
        let start = step as usize;
        let data = BTreeMap::from([("tokens".into(), text(start)), ("targets".into(), text(start + 1))]);
        losses.push(single.loss(samples, &data));
        single.chain.forget(MicrobatchId(0));
        let grads = HostBuf::from(single.gradients(samples, &data));
        let norm = norm_piece(&cpu, &parameters, &StageRank::alone(), &all, (&grads, &all), &[]);
        let grad_scale = clip_scale(norm, 1.0);
        let numbers = StepNumbers { learning_rate: schedule.at(step), grad_scale };
        optimizer.step(&cpu, numbers, (&mut single.params, &all), (&grads, &all));
    }
    let (first, last) = (losses[0], *losses.last().unwrap());
    assert!((first - 11f64.ln()).abs() < 0.2, "at first every token is as likely as any: {first}");
    assert!(last < 0.05, "{losses:?}");
}

#[test]
fn a_llamas_gradients_are_derivatives_of_the_loss() {
    for tied in [false, true] {
        let config = GptConfig { tied, ..llama(3) };
        let mut single = Single::new(&Gpt::new(config.clone()).unwrap(), 2);
        single.params.iter_mut().for_each(|x| *x *= 4.0);
        single.check_gradients(2, &batch(&config, 2, 1)[0], 1e-6);
    }
}

/// Heads of keys and values over ranks, few and many, evenly and not; rows split or not; kept or computed again.
#[test]
fn a_parallel_llama_equals_one_rank() {
    let mut jobs = 0;
    for kv_heads in 1..=4 {
        let config = llama(kv_heads);
        let wanted = single(&config);
        for tp in 1..=4 {
            let meshes = [format!("A{{tp:{tp}}}"), format!("B{{dp:2,tp:{tp}}}")];
            let legal = tp <= kv_heads || tp % kv_heads == 0;
            for sequence_parallel in [false, true] {
                let recompute = if sequence_parallel { Recompute::Attention } else { Recompute::Nothing };
                let stages = [(meshes[0].as_str(), 2), (meshes[1].as_str(), 1)];
                let job = Job { sequence_parallel, recompute, ..job(&config, &stages) };
                if legal {
                    check(&config, &job, &wanted);
                    jobs += 1;
                }
            }
        }
    }
    assert_eq!(jobs, 28);
}

#[test]
fn a_llama_that_cannot_be_shared_out_is_refused() {
    let config = llama(3);
    let place = StageRank::new("A{tp:4}".parse().unwrap(), 0).unwrap();
    let setup = Setup { place, ..Setup::alone(4, 1) };
    let error = Outline::new::<Cpu<f64>>(&Gpt::new(config).unwrap(), 0..1, &setup).unwrap_err().to_string();
    assert!(error.contains("kv_heads = 3: 4 ranks along tp are more"), "{error}");
    assert!(error.contains("hint: use up to 3 ranks along tp, or a multiple such as 6"), "{error}");
    let place = StageRank::new("A{tp:6}".parse().unwrap(), 0).unwrap();
    let (model, setup) = (Gpt::new(llama(3)).unwrap(), Setup { place, ..Setup::alone(4, 1) });
    let error = Outline::new::<Cpu<f64>>(&model, 0..1, &setup).unwrap_err().to_string();
    assert!(error.contains("the mesh A{tp:6} does not say how"), "{error}");
    let error = Gpt::new(GptConfig::llama((13, 7), 24, 1, (4, 3), 8)).unwrap_err().to_string();
    assert!(error.contains("kv_heads = 3: 4 heads of queries"), "{error}");
}

/// Two heads of keys on four ranks: all of them have queries, and pairs of them the same keys.
#[test]
fn no_rank_idles_for_want_of_keys() {
    let model = Gpt::new(GptConfig::llama((16, 4), 32, 1, (8, 2), 12)).unwrap();
    let mesh = Model::<Cpu<f64>>::mesh(&model, &"A{dp:2,tp:4}".parse().unwrap());
    for position in 0..8 {
        let place = StageRank::new(mesh.clone(), position).unwrap();
        let setup = Setup { place, ..Setup::alone(2, 1) };
        let outline = Outline::new::<Cpu<f64>>(&model, 1..2, &setup).unwrap();
        let of = |name: &str| {
            let p = outline.parameters.iter().find(|p| p.name.contains(name)).unwrap();
            (p.grad.to_string(), p.range.len())
        };
        let at = |text: &str| text.replace('@', "@A{dp:2,kv:2,g:2}");
        assert_eq!(of("q_proj"), (at("f64[2,4,4,32]@(kv,g,_,_ | sum dp)"), 2 * 4 * 32));
        assert_eq!(of("k_proj"), (at("f64[2,4,32]@(kv,_,_ | sum dp+g)"), 4 * 32));
        assert_eq!(of("v_proj"), (at("f64[2,4,32]@(kv,_,_ | sum dp+g)"), 4 * 32));
        assert_eq!(of("o_proj"), (at("f64[32,2,4,4]@(_,kv,g,_ | sum dp)"), 32 * 2 * 4));
        assert_eq!(of("up_proj"), (at("f64[12,32]@(kv+g,_ | sum dp)"), 3 * 32));
    }
}

/// rows x (4d + 2 H h + 2 KV h + H + 2 + 3f) elements, nothing recomputed.
#[test]
fn a_llama_block_keeps_the_formula() {
    let (d, heads, kv_heads, f) = (512, 8, 2, 1376);
    let model = Gpt::new(GptConfig::llama((64, 16), d, 1, (heads, kv_heads), f)).unwrap();
    let outline = Outline::new::<Cpu<f64>>(&model, 1..2, &Setup::alone(3, 1)).unwrap();
    let h = d / heads;
    let row = 4 * d + 2 * heads * h + 2 * kv_heads * h + heads + 2 + 3 * f;
    assert_eq!(row, 7_466);
    assert_eq!(outline.activations.after_forward, (3 * 16 * row * size_of::<f64>()) as u64);
    // And a block that ran: what is in its buffers, counted.
    let (samples, context) = (2, 16);
    let group = crossmesh_train::group::in_process::<f64>(1).remove(0);
    let setup = Setup::alone(samples, 1);
    let mut chain = Chain::new(&model, 1..2, Arc::new(Cpu::new(1)), group, setup).unwrap();
    let params: common::Buf = initial::<f64>(chain.parameters(), &[0, 0], 3).into();
    let rows = samples * context;
    let hidden: Vec<f64> = (0..rows * d).map(|i| (i % 17) as f64 * 0.1 - 0.8).collect();
    let microbatch = Single::microbatch(samples);
    chain.forward(microbatch, &mut &params, vec![Value::Real(hidden.into())]).unwrap();
    assert_eq!(chain.live().bytes, (rows * 7_466 * size_of::<f64>()) as u64);
}

#[test]
fn llama_3_8b_has_its_parameters() {
    let config = GptConfig::llama((128_256, 64), 4096, 32, (32, 8), 14_336);
    let model = Gpt::new(config).unwrap();
    let outline = |units| Outline::new::<Cpu<f32>>(&model, units, &Setup::alone(1, 1)).unwrap();
    let all =
        outline(0..1).num_elements() + 32 * outline(1..2).num_elements() + outline(33..34).num_elements();
    assert_eq!(all, 8_030_261_248);
}
