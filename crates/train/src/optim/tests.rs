use super::*;
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::kernels::random::Stream;
use crate::parameter::{Declaration, Init, Parameters};

fn noise(name: &str, len: usize) -> HostBuf<f64> {
    (0..len as u64).map(|i| Stream::named(1, name).normal(i)).collect::<Vec<_>>().into()
}

/// A matrix split over tp, a bias that everybody has, a matrix that everybody has.
fn parameters(place: &StageRank) -> Vec<Parameter> {
    let mut parameters = Parameters::new::<f64>(place);
    for (name, shape, split, decay) in
        [("a", &[6, 5][..], Some(0), true), ("b", &[7], None, false), ("c", &[3, 3], None, true)]
    {
        let (name, init, summed_over) = (name.to_string(), Init::Zeros, &[][..]);
        let split: Vec<_> = split.map(|dim| (dim, "tp")).into_iter().collect();
        parameters.declare(Declaration { name, shape, split: &split, init, decay, summed_over });
    }
    parameters.into_list()
}

const CONFIGS: [OptimizerConfig; 2] =
    [OptimizerConfig::ADAMW, OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.05 }];

fn numbers(step: u64) -> StepNumbers {
    StepNumbers { learning_rate: 0.01 / (1 + step) as f64, grad_scale: 0.7 }
}

/// ZeRO-1: shards stepped apart are the parameters stepped together.
#[test]
fn shards_together_are_the_whole() {
    let cpu = Cpu::<f64>::new(1);
    let list = parameters(&StageRank::alone());
    let len = list.last().unwrap().range.end;
    let all = Runs::whole(len);
    for config in CONFIGS {
        let mut whole = noise("p", len);
        let mut sharded = noise("p", len);
        let mut optimizer = Optimizer::new(&cpu, config, &list, Share::whole(len));
        let shards = [0..17, 17..17, 17..31, 31..len];
        let share = |shard| Share { runs: Runs::new([shard]), axes: vec![0] };
        let mut parts: Vec<_> = shards.map(|s| Optimizer::new(&cpu, config, &list, share(s))).into();
        for step in 0..4 {
            let grads = noise(&format!("g{step}"), len);
            optimizer.step(&cpu, numbers(step), (&mut whole, &all), (&grads, &all));
            for part in &mut parts {
                part.step(&cpu, numbers(step), (&mut sharded, &all), (&grads, &all));
            }
        }
        assert_eq!(whole[..], sharded[..], "{config:?}");
        assert_eq!(optimizer.steps(), 4);
        assert_eq!(optimizer.moments()[0][17..31], parts[2].moments()[0][..]);
    }
}

/// Without gradients, decay alone moves weights, and only those that decay.
#[test]
fn only_matrices_decay() {
    let cpu = Cpu::<f64>::new(1);
    let list = parameters(&StageRank::alone());
    let len = list.last().unwrap().range.end;
    let all = Runs::whole(len);
    for config in CONFIGS {
        let (before, mut after) = (noise("p", len), noise("p", len));
        let mut optimizer = Optimizer::new(&cpu, config, &list, Share::whole(len));
        let grads = HostBuf::from(vec![0.0; len]);
        optimizer.step(&cpu, numbers(0), (&mut after, &all), (&grads, &all));
        for p in &list {
            let unchanged = before[p.range.clone()] == after[p.range.clone()];
            assert_eq!(unchanged, !p.decay, "{} with {config:?}", p.name);
        }
    }
}

/// A run of steps, interrupted and resumed, is the uninterrupted run.
#[test]
fn resumes_where_it_was() {
    let cpu = Cpu::<f64>::new(1);
    let list = parameters(&StageRank::alone());
    let len = list.last().unwrap().range.end;
    let all = Runs::whole(len);
    for config in CONFIGS {
        let (mut straight, mut broken) = (noise("p", len), noise("p", len));
        let mut first = Optimizer::new(&cpu, config, &list, Share::whole(len));
        let mut second = Optimizer::new(&cpu, config, &list, Share::whole(len));
        for step in 0..5 {
            let grads = noise(&format!("g{step}"), len);
            first.step(&cpu, numbers(step), (&mut straight, &all), (&grads, &all));
            second.step(&cpu, numbers(step), (&mut broken, &all), (&grads, &all));
            let mut fresh = Optimizer::new(&cpu, config, &list, Share::whole(len));
            assert_eq!(fresh.moments().len(), fresh.moment_names().len());
            for (to, from) in fresh.resume(second.steps()).iter_mut().zip(second.moments()) {
                to.copy_from_slice(from);
            }
            second = fresh;
        }
        assert_eq!(straight[..], broken[..], "{config:?}");
    }
}

/// The pieces of all ranks are the norm of the whole, whatever the mesh.
#[test]
fn norm_pieces_add_up() {
    let cpu = Cpu::<f64>::new(1);
    let alone = StageRank::alone();
    let list = parameters(&alone);
    let whole = noise("g", list.last().unwrap().range.end);
    let wanted: f64 = whole.iter().map(|x| x * x).sum();
    for tp in 1..4 {
        let mesh: crossmesh_core::mesh::Mesh = format!("A{{tp:{tp}}}").parse().unwrap();
        let piece = |rank: usize| {
            let place = StageRank::new(mesh.clone(), rank).unwrap();
            let own = parameters(&place);
            let shard = |p: &Parameter, all: &Parameter| -> Vec<f64> {
                let indices = crate::parameter::shard_indices(&p.layout, place.coord());
                indices.iter().map(|&i| whole[all.range.clone()][i as usize]).collect()
            };
            let grads: Vec<f64> = own.iter().zip(&list).flat_map(|(p, all)| shard(p, all)).collect();
            let half = grads.len() / 2;
            let grads = HostBuf::from(grads);
            let (both, all) = ([0..half, half..grads.len()], Runs::whole(grads.len()));
            let piece = |part| norm_piece(&cpu, &own, &place, &Runs::new([part]), (&grads, &all), &[]);
            both.map(piece).iter().sum::<f64>()
        };
        let sum: f64 = (0..tp).map(piece).sum();
        assert!((sum - wanted).abs() < 1e-12 * wanted, "tp {tp}: {sum} instead of {wanted}");
    }
    let all = Runs::whole(whole.len());
    let without = norm_piece(&cpu, &list, &alone, &all, (&whole, &all), &["b"]);
    let b: f64 = whole[list[1].range.clone()].iter().map(|x| x * x).sum();
    assert!((without + b - wanted).abs() < 1e-12 * wanted);
}

#[test]
fn clips_to_the_largest_norm() {
    assert_eq!(clip_scale(0.0, 1.0), 1.0);
    assert_eq!(clip_scale(0.25, 1.0), 1.0);
    assert_eq!(clip_scale(16.0, 1.0), 0.25);
}
