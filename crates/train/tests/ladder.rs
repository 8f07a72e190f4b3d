//! A ladder: every branch reads the residual stream without the branch just before it, whose sum over ranks is under way meanwhile.

mod grid;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crossmesh_train::chain::{Chain, Model, Setup};
use crossmesh_train::flat::FlatMut;
use crossmesh_train::group::{Collective, Coming, Group, GroupError, ReduceOp, in_process};
use crossmesh_train::job::Dealt;
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::models::gpt::{Gpt, GptConfig, Residual};
use crossmesh_train::parameter::initial;
use crossmesh_train::runtime::{TrainError, in_threads};
use crossmesh_train::stage::{Microbatch, MicrobatchId, Recompute, Stage as _, Value};
use crossmesh_train::stage_rank::StageRank;
use grid::{Case, Kind, compare, gpt_config, plain};

fn on_a_ladder(config: GptConfig) -> Kind {
    Kind::Gpt(GptConfig { residual: Residual::Ladder, ..config })
}

fn llama() -> GptConfig {
    GptConfig::llama((13, 7), 24, 3, (4, 2), 31)
}

#[test]
fn every_layout_equals_one_rank() {
    let cases = [
        Case::gpt("gpipe", &["A{tp:2}"]),
        Case { sequence_parallel: true, ..Case::gpt("1f1b", &["A{dp:2,tp:2}"]) },
        Case { recompute: Recompute::Everything, ..Case::gpt("1f1b", &["A{tp:2}", "B{dp:2}", "C{tp:2}"]) },
        Case {
            recompute: Recompute::Attention,
            dealt: Dealt::zero(2),
            ..Case::gpt("zb-h1", &["A{dp:2,tp:2}"])
        },
        Case { recompute: Recompute::Within(1 << 14), ..Case::gpt("interleaved", &["A{tp:2}", "B{dp:2}"]) },
        Case { strands: 2, ..Case::gpt("1f1b", &["A{tp:2}", "B{dp:2}"]) },
        Case { dealt: Dealt::zero(3), ..Case::gpt("1f1b", &["A{dp:2,tp:2}"]) },
    ];
    for config in [gpt_config(true, 0.1), gpt_config(false, 0.0), llama()] {
        for case in cases.clone() {
            compare(&Case { kind: on_a_ladder(config.clone()), ..case });
        }
    }
    // More ranks than heads of keys, and heads that do not divide.
    compare(&Case { kind: on_a_ladder(llama()), ..Case::gpt("gpipe", &["A{tp:4}"]) });
    compare(&Case { kind: on_a_ladder(gpt_config(true, 0.1)), ..Case::gpt("gpipe", &["A{tp:3}"]) });
}

/// The first loss where the weights whose names end so are zero.
fn loss_without(residual: Residual, ends: &[&str]) -> f64 {
    let case = Case {
        kind: Kind::Gpt(GptConfig { residual, ..llama() }),
        microbatches: 1,
        ..Case::gpt("gpipe", &["A{dp:1}"])
    };
    let job = case.job::<f64>(plain());
    let losses = in_threads::<f64, f64>(&*case.kind.model::<f64>(), &job, &case.feed(), |trainer| {
        trainer.each_stage::<TrainError>(|mut stage| {
            let mut weights = stage.params();
            // Larger than they begin, so that what a branch reads shows.
            weights.iter_mut().for_each(|w| *w *= 20.0);
            for p in stage.parameters.iter().filter(|p| ends.iter().any(|end| p.name.ends_with(end))) {
                weights[p.range.clone()].fill(0.0);
            }
            stage.replace(&weights, 0, None);
            Ok(())
        })?;
        Ok(trainer.step()?.loss)
    });
    losses.unwrap()[0]
}

/// Attention reads what attention added, and feed-forward maps what these did: with the others silent, a ladder is a plain model. A branch does not read
/// the one just before it: then it is not.
#[test]
fn a_branch_reads_all_but_the_one_before() {
    let both = |ends: &[&str]| [Residual::Serial, Residual::Ladder].map(|r| loss_without(r, ends));
    let far = |[a, b]: [f64; 2]| (a - b).abs() > 1e-3 * a;
    for silent in ["o_proj.weight", "down_proj.weight"] {
        let [serial, ladder] = both(&[silent]);
        assert!((serial - ladder).abs() <= 1e-12 * serial, "{silent}: {ladder} for {serial}");
    }
    assert!(far(both(&[])));
    // Of one block alone, its map does not read its attention; and the next block's attention not the map.
    let of_blocks = |attention: usize, map: usize| {
        let silent = |name: &'static str, but: usize| {
            (0..3).filter(move |l| *l != but).map(move |l| format!("layers.{l}.{name}"))
        };
        let names = silent("self_attn.o_proj.weight", attention).chain(silent("mlp.down_proj.weight", map));
        let names: Vec<String> = names.collect();
        both(&names.iter().map(String::as_str).collect::<Vec<_>>())
    };
    for (attention, map, reads) in [(1, 1, false), (1, 0, false), (2, 0, true), (0, 1, true)] {
        let [serial, ladder] = of_blocks(attention, map);
        let same = (serial - ladder).abs() <= 1e-12 * serial;
        let as_it_should = if reads { same } else { far([serial, ladder]) };
        assert!(as_it_should, "attention {attention}, map {map}: {ladder} for {serial}");
    }
}

/// Writes down when collectives begin and when somebody waits for them.
struct Logged {
    group: Arc<dyn Group<HostBuf<f64>>>,
    log: Arc<Mutex<Vec<(char, usize)>>>,
}

impl Group<HostBuf<f64>> for Logged {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, what: Collective<'_>, buf: HostBuf<f64>) -> Result<Coming<HostBuf<f64>>, GroupError> {
        let mut log = self.log.lock().unwrap();
        let number = log.iter().filter(|(event, _)| *event == 's').count();
        log.push(('s', number));
        let (coming, log) = (self.group.start(what, buf)?, Arc::clone(&self.log));
        Ok(Coming::new(move || {
            log.lock().unwrap().push(('w', number));
            coming.wait(&Cpu::<f64>::new(1))
        }))
    }

    fn all_reduce(&self, buf: &mut HostBuf<f64>, op: ReduceOp) -> Result<(), GroupError> {
        self.group.all_reduce(buf, op)
    }

    fn all_gather(&self, whole: &mut HostBuf<f64>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.group.all_gather(whole, parts)
    }

    fn reduce_scatter(&self, whole: &mut HostBuf<f64>, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.group.reduce_scatter(whole, parts)
    }
}

/// The log of a rank of tp 2, of F and of B of all blocks but no embedding and no head.
fn log_of(residual: Residual, layers: usize) -> [Vec<(char, usize)>; 2] {
    let model = Gpt::new(GptConfig { residual, layers, ..llama() }).unwrap();
    let rank = |group: Arc<dyn Group<HostBuf<f64>>>| {
        let log = Arc::new(Mutex::new(vec![]));
        let mesh = Model::<Cpu<f64>>::mesh(&model, &"A{tp:2}".parse().unwrap());
        let setup = Setup { place: StageRank::new(mesh, group.rank()).unwrap(), ..Setup::alone(2, 1) };
        let coord = setup.place.coord().to_vec();
        let logged = Arc::new(Logged { group, log: Arc::clone(&log) });
        let mut chain = Chain::new(&model, 1..1 + layers, Arc::new(Cpu::new(1)), logged, setup).unwrap();
        let params: HostBuf<f64> = initial::<f64>(chain.parameters(), &coord, 3).into();
        let len = 2 * 7 * 24;
        let values = |salt: usize| (0..len).map(|i| ((i * 7 + salt) % 11) as f64 * 0.1).collect::<Vec<f64>>();
        let microbatch = Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: 2 };
        let out = chain.forward(microbatch, &mut &params, vec![Value::Real(values(1).into())]).unwrap();
        let forward = std::mem::take(&mut *log.lock().unwrap());
        let grads = (0..out.len()).map(|i| values(2 + i).into()).collect();
        chain.backward_input(MicrobatchId(0), &mut &params, grads).unwrap();
        let backward = std::mem::take(&mut *log.lock().unwrap());
        let mut sums: HostBuf<f64> = vec![0.0; params.len()].into();
        chain.backward_weight(MicrobatchId(0), &mut Whole(&mut sums)).unwrap();
        [forward, backward]
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let spawn = |group| scope.spawn(move || rank(group));
        let threads: Vec<_> = in_process::<f64>(2).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join().unwrap()).next_back().unwrap()
    })
}

struct Whole<'a>(&'a mut HostBuf<f64>);

impl crossmesh_train::flat::Gradients<HostBuf<f64>> for Whole<'_> {
    fn open(&mut self, _: usize) -> FlatMut<'_, HostBuf<f64>> {
        FlatMut::Whole(self.0)
    }

    fn close(&mut self, _: usize) -> Result<(), crossmesh_train::stage::StageError> {
        Ok(())
    }
}

/// Nobody waits for a branch's sum before the next branch has computed and begun its own: in F, and in B.
#[test]
fn sums_are_under_way_while_the_next_branch_computes() {
    let layers = 3;
    let [forward, backward] = log_of(Residual::Serial, layers);
    let one_by_one: Vec<_> = (0..2 * layers).flat_map(|i| [('s', i), ('w', i)]).collect();
    assert_eq!((forward, backward), (one_by_one.clone(), one_by_one));
    let [forward, backward] = log_of(Residual::Ladder, layers);
    let overlapped = |count: usize| -> Vec<(char, usize)> {
        let next = |i: usize| (i + 1 < count).then_some(('s', i + 1));
        [('s', 0)].into_iter().chain((0..count).flat_map(|i| next(i).into_iter().chain([('w', i)]))).collect()
    };
    assert_eq!(forward, overlapped(2 * layers));
    // Both branches of the first block read the same stream: its gradient is one sum, behind the one that the first of them needs.
    let last = 2 * layers - 2;
    assert_eq!(backward, [overlapped(last), vec![('s', last), ('w', last)]].concat());
}
