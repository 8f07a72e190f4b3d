//! The U-Transformer: cut anywhere, split any way, it is the same model; and it learns.

mod common;

use std::collections::BTreeMap;
use std::ops::Range;

use common::{Job, Outcome, Single, StageSpec, Whole, assert_same, run};
use crossmesh_train::chain::{Chain, Setup};
use crossmesh_train::deal::{Runs, Share};
use crossmesh_train::group::Alone;
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::kernels::random::Stream;
use crossmesh_train::models::unet::{Unet, UnetConfig};
use crossmesh_train::optim::{Optimizer, OptimizerConfig, StepNumbers};
use crossmesh_train::stage::{MicrobatchId, Recompute, Stage};

fn config() -> UnetConfig {
    UnetConfig {
        image: 4,
        image_channels: 2,
        base: 6,
        multipliers: vec![1, 2],
        blocks: 1,
        attention: vec![true, false],
        heads: 3,
        groups: 3,
        context_rows: 5,
        context_width: 7,
        epsilon: 1e-5,
    }
}

fn noise(name: &str, len: usize) -> Vec<f64> {
    (0..len as u64).map(|i| Stream::named(2, name).normal(i)).collect()
}

fn batch(config: &UnetConfig, samples: usize, microbatches: usize) -> Vec<BTreeMap<String, Whole>> {
    let microbatch = |m: usize| {
        let real = |name: &str, each: usize| {
            (name.to_string(), Whole::Real(noise(&format!("{name}{m}"), samples * each)))
        };
        let image = config.image * config.image * config.image_channels;
        let time = (0..samples).map(|s| ((17 + 31 * s + 101 * m) % 1000) as i32).collect();
        BTreeMap::from([
            real("image", image),
            real("noise", image),
            real("context", config.context_rows * config.context_width),
            ("time".to_string(), Whole::Ids(time)),
        ])
    };
    (0..microbatches).map(microbatch).collect()
}

fn single() -> Outcome {
    let model = Unet::new(config()).unwrap();
    run(&model, &Job::alone(model.len(), 4), &batch(&config(), 4, 2))
}

/// Stages that end before these units, on these meshes.
fn job(stages: &[(&str, usize)]) -> Job {
    let mut start = 0;
    let spec = |(mesh, end): &(&str, usize)| {
        let units: Range<usize> = start..*end;
        start = *end;
        StageSpec { mesh: mesh.to_string(), units }
    };
    Job { stages: stages.iter().map(spec).collect(), ..Job::alone(0, 4) }
}

fn check(job: &Job, wanted: &Outcome) {
    let model = Unet::new(config()).unwrap();
    assert_same(&run(&model, job, &batch(&config(), 4, 2)), wanted, &format!("{job:?}"));
}

#[test]
fn gradients_are_derivatives_of_the_loss() {
    let model = Unet::new(config()).unwrap();
    Single::new(&model, 2).check_gradients(2, &batch(&config(), 2, 1)[0], 1e-6);
}

#[test]
fn tensor_and_data_parallel_equal_single_rank() {
    let wanted = single();
    let units = Unet::new(config()).unwrap().len();
    for mesh in ["A{dp:1,tp:1}", "A{tp:2}", "A{tp:3}", "A{dp:2,tp:2}", "A{dp:4}", "A{dp:3}"] {
        for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
            check(&Job { recompute, ..job(&[(mesh, units)]) }, &wanted);
        }
    }
}

/// More ranks than groups and heads.
#[test]
fn ranks_with_nothing_to_split() {
    let units = Unet::new(config()).unwrap().len();
    check(&job(&[("A{tp:4}", units)]), &single());
}

/// Two stages, cut before every unit; three and four, with skips over stages in between.
#[test]
fn stages_cut_anywhere_equal_one() {
    let wanted = single();
    let units = Unet::new(config()).unwrap().len();
    for cut in 1..units {
        let late_weights = cut % 2 == 0;
        check(&Job { late_weights, ..job(&[("A{dp:1}", cut), ("B{dp:1}", units)]) }, &wanted);
    }
    for recompute in [Recompute::Nothing, Recompute::Attention, Recompute::Everything] {
        let three = [("A{dp:2}", 2), ("B{tp:2}", 6), ("C{dp:2,tp:2}", units)];
        check(&Job { recompute, ..job(&three) }, &wanted);
        let four = [("A{tp:3}", 3), ("B{dp:4}", 4), ("C{tp:2}", 5), ("D{dp:2}", units)];
        check(&Job { recompute, late_weights: true, ..job(&four) }, &wanted);
    }
}

/// The middle of the U sees no skip; they go around it.
#[test]
fn skips_go_straight_to_the_stage_that_needs_them() {
    let model = Unet::new(config()).unwrap();
    let stage = |units: Range<usize>| {
        let chain = Chain::<Cpu<f64>>::new(
            &model,
            units,
            Cpu::new(1).into(),
            std::sync::Arc::new(Alone),
            Setup::alone(4, 1),
        );
        let chain = chain.unwrap();
        let names =
            |ports: &[crossmesh_train::stage::Port]| ports.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
        (names(chain.inputs()), names(chain.outputs()))
    };
    // stem, down 0, shrink, down 1 | mid | up 1, up 1, grow, up 0, up 0, end
    let (inputs, outputs) = stage(0..4);
    assert_eq!(inputs, ["image", "time", "context"]);
    assert_eq!(outputs, ["temb", "skip.0", "skip.1", "skip.2", "h", "skip.3"]);
    assert_eq!(
        stage(4..5),
        (vec!["h".into(), "temb".into(), "context".into()], vec!["temb".into(), "h".into()])
    );
    let (inputs, outputs) = stage(5..11);
    assert_eq!(inputs, ["h", "skip.3", "temb", "skip.2", "skip.1", "context", "skip.0", "noise"]);
    assert_eq!(outputs, ["loss"]);
}

#[test]
fn refuses_what_it_cannot_build() {
    let error = |change: fn(&mut UnetConfig)| {
        let mut config = config();
        change(&mut config);
        Unet::new(config).unwrap_err().to_string()
    };
    assert!(error(|c| c.groups = 4).starts_with("groups = 4: 6 channels do not divide among them"));
    assert!(error(|c| c.image = 5).contains("2 levels halve it 1 times"));
    assert!(error(|c| c.attention = vec![]).contains("there are 2 levels"));
    assert!(error(|c| c.heads = 0).starts_with("heads = 0"));
    assert!(error(|c| c.multipliers = vec![1, 0]).contains("level 1 has no channels"));
    let setup = Setup { sequence_parallel: true, ..Setup::alone(4, 1) };
    let model = Unet::new(config()).unwrap();
    let chain = Chain::<Cpu<f64>>::new(&model, 0..1, Cpu::new(1).into(), std::sync::Arc::new(Alone), setup);
    assert!(chain.err().unwrap().to_string().contains("no sequence to split"));
}

/// Noise added to a few images of stripes is found again.
#[test]
fn learns_to_see_noise() {
    let config = UnetConfig { image_channels: 1, ..config() };
    let model = Unet::new(config.clone()).unwrap();
    let samples = 4;
    let mut single = Single::new(&model, samples);
    let mut data = batch(&config, samples, 1).remove(0);
    let Whole::Real(noise) = data["noise"].clone() else { unreachable!("noise is real") };
    let stripe = |i: usize| if (i + i / 16).is_multiple_of(2) { 1.0 } else { -1.0 };
    let noisy = noise.iter().enumerate().map(|(i, n)| 0.6 * stripe(i) + 0.8 * n).collect();
    data.insert("image".into(), Whole::Real(noisy));
    let parameters = single.chain.parameters().to_vec();
    let cpu = Cpu::new(1);
    let config = OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(&cpu, config, &parameters, Share::whole(single.params.len()));
    let mut losses = Vec::new();
    for _ in 0..60 {
        losses.push(single.loss(samples, &data));
        single.chain.forget(MicrobatchId(0));
        let grads = HostBuf::from(single.gradients(samples, &data));
        let numbers = StepNumbers { learning_rate: 0.01, grad_scale: 1.0 };
        let all = Runs::whole(grads.len());
        optimizer.step(&cpu, numbers, (&mut single.params, &all), (&grads, &all));
    }
    assert!(losses.last().unwrap() * 10.0 < losses[0], "{losses:?}");
}
