//! Passes as lists: they start and wait as ranks do, members of a group start the same calls in the same order, and F of one microbatch beside B of another hides
//! what ranks say to each other.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod grid;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crossmesh_core::step::lists::{Call, CallKind, GroupIndex, Item, List, Order, check_order, run};
use crossmesh_train::chain::{Chain, Model, Pace, PassLists, Setup};
use crossmesh_train::flat::FlatMut;
use crossmesh_train::graph::Axis;
use crossmesh_train::group::{Collective, Coming, Group, GroupError, ReduceOp, in_process};
use crossmesh_train::kernels::cpu::{Cpu, HostBuf};
use crossmesh_train::models::gpt::{Gpt, GptConfig, Residual};
use crossmesh_train::parameter::initial;
use crossmesh_train::stage::{Microbatch, MicrobatchId, Port, Recompute, Role, Stage, StageError, Value};
use crossmesh_train::stage_rank::{StageRank, shard_dims};
use grid::gpt_config;

type Buf = HostBuf<f64>;

/// A collective that began, with its kind and elements; or the one of this number was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Started(CallKind, usize),
    Waited(usize),
}

/// Writes down what a rank says to others.
struct Logged {
    group: Arc<dyn Group<Buf>>,
    log: Arc<Mutex<Vec<Event>>>,
}

impl Logged {
    /// Alone, a rank says nothing to anybody.
    fn say(&self, event: Event) {
        if self.group.size() > 1 {
            self.log.lock().unwrap().push(event);
        }
    }

    fn started(&self, kind: CallKind, elements: usize) -> usize {
        let log = self.log.lock().unwrap();
        let number = log.iter().filter(|event| matches!(event, Event::Started(..))).count();
        drop(log);
        self.say(Event::Started(kind, elements));
        number
    }
}

impl Group<Buf> for Logged {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn start(&self, what: Collective<'_>, buf: Buf) -> Result<Coming<Buf>, GroupError> {
        let kind = match what {
            Collective::AllReduce(_) => CallKind::AllReduce,
            Collective::AllGather(_) => CallKind::AllGather,
            Collective::ReduceScatter(_) => CallKind::ReduceScatter,
        };
        let number = self.started(kind, buf.len());
        let (coming, log) = (self.group.start(what, buf)?, Arc::clone(&self.log));
        Ok(Coming::new(move || {
            log.lock().unwrap().push(Event::Waited(number));
            coming.wait(&Cpu::<f64>::new(1))
        }))
    }

    fn all_reduce(&self, buf: &mut Buf, op: ReduceOp) -> Result<(), GroupError> {
        let number = self.started(CallKind::AllReduce, buf.len());
        self.say(Event::Waited(number));
        self.group.all_reduce(buf, op)
    }

    fn all_gather(&self, whole: &mut Buf, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.group.all_gather(whole, parts)
    }

    fn reduce_scatter(&self, whole: &mut Buf, parts: &[Range<usize>]) -> Result<(), GroupError> {
        self.group.reduce_scatter(whole, parts)
    }
}

struct Whole<'a>(&'a mut Buf);

impl crossmesh_train::flat::Gradients<Buf> for Whole<'_> {
    fn open(&mut self, _: usize) -> FlatMut<'_, Buf> {
        FlatMut::Whole(self.0)
    }

    fn close(&mut self, _: usize) -> Result<(), StageError> {
        Ok(())
    }
}

const SAMPLES: usize = 2;

/// How a model's units are cut and run.
#[derive(Debug, Clone)]
struct Case {
    config: GptConfig,
    tp: usize,
    units: Range<usize>,
    sequence_parallel: bool,
    recompute: Recompute,
}

impl Case {
    fn model(&self) -> Gpt {
        Gpt::new(self.config.clone()).unwrap()
    }

    fn setup(&self, position: usize) -> Setup {
        let mesh = format!("A{{tp:{}}}", self.tp).parse().unwrap();
        let mesh = Model::<Cpu<f64>>::mesh(&self.model(), &mesh);
        let place = StageRank::new(mesh, position).unwrap();
        let (sequence_parallel, recompute) = (self.sequence_parallel, self.recompute);
        Setup { place, sequence_parallel, recompute, ..Setup::alone(SAMPLES, 1) }
    }

    /// A rank's lists, where it computes and sends so fast: operations, and bytes.
    fn lists(&self, position: usize, operations_per_s: f64, bytes_per_s: f64) -> PassLists {
        let others = self.tp as f64 - 1.0;
        let call = |_: Axis, kind: CallKind, bytes: u64| {
            let times = if kind == CallKind::AllReduce { 2.0 } else { 1.0 };
            let sent = times * bytes as f64 * others / self.tp as f64;
            let ns = (sent / bytes_per_s * 1e9).round() as u64;
            (self.tp > 1).then_some(Call { group: GroupIndex(0), kind, bytes, ns, program: 0 })
        };
        let pace = Pace { operations_per_s, call: &call };
        let model = self.model();
        let model: &dyn Model<Cpu<f64>> = &model;
        PassLists::of(model, self.units.clone(), &self.setup(position), &pace).unwrap()
    }

    /// What every rank said to the others in F, in B and in W.
    fn logs(&self) -> Vec<[Vec<Event>; 3]> {
        let rank = |group: Arc<dyn Group<Buf>>| self.log(group);
        let rank = &rank;
        std::thread::scope(|scope| {
            let threads: Vec<_> = in_process::<f64>(self.tp)
                .into_iter()
                .map(|group| scope.spawn(move || rank(group)))
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect()
        })
    }

    fn log(&self, group: Arc<dyn Group<Buf>>) -> [Vec<Event>; 3] {
        let log = Arc::new(Mutex::new(vec![]));
        let setup = self.setup(group.rank());
        let coord = setup.place.coord().to_vec();
        let logged = Arc::new(Logged { group, log: Arc::clone(&log) });
        let mut chain =
            Chain::new(&self.model(), self.units.clone(), Arc::new(Cpu::new(1)), logged, setup).unwrap();
        let params: Buf = initial::<f64>(chain.parameters(), &coord, 3).into();
        let microbatch =
            Microbatch { id: MicrobatchId(0), step: 0, first_sample: 0, batch_samples: SAMPLES as u64 };
        let reals = |len: usize| (0..len).map(|i| (i % 11) as f64 * 0.1).collect::<Vec<f64>>();
        let len = |port: &Port| shard_dims(&port.layout, &coord).iter().product::<usize>();
        let value = |port: &Port| match port.role {
            Role::Data => Value::Ids((0..len(port)).map(|i| (i % 5) as i32).collect()),
            _ => Value::Real(reals(len(port)).into()),
        };
        let inputs = chain.inputs().iter().map(value).collect();
        chain.forward(microbatch, &mut &params, inputs).unwrap();
        let taken = || std::mem::take(&mut *log.lock().unwrap());
        let forward = taken();
        let outputs = chain.outputs().iter().filter(|p| p.role == Role::Activation);
        let grads = outputs.map(|p| reals(len(p)).into()).collect();
        chain.backward_input(MicrobatchId(0), &mut &params, grads).unwrap();
        let backward = taken();
        let mut sums: Buf = vec![0.0; params.len()].into();
        chain.backward_weight(MicrobatchId(0), &mut Whole(&mut sums)).unwrap();
        [forward, backward, taken()]
    }
}

/// Starts and waits of a list, as a log has them.
fn events(list: &List) -> Vec<Event> {
    let event = |item: &Item| match *item {
        Item::Start(call) => {
            let Call { kind, bytes, .. } = list.calls()[call];
            Some(Event::Started(kind, bytes as usize / size_of::<f64>()))
        }
        Item::Wait(call) => Some(Event::Waited(call)),
        Item::Compute { .. } => None,
    };
    list.items().iter().filter_map(event).collect()
}

fn llama(layers: usize) -> GptConfig {
    GptConfig { dropout: 0.1, ..GptConfig::llama((13, 7), 24, layers, (4, 2), 31) }
}

fn on_a_ladder(config: GptConfig) -> GptConfig {
    GptConfig { residual: Residual::Ladder, ..config }
}

/// Decoders of both families, serial and on a ladder, whole and a stage of them, in every way to share out and to remember.
fn cases() -> Vec<Case> {
    let gpt = GptConfig { layers: 3, ..gpt_config(true, 0.1) };
    let configs = [gpt.clone(), on_a_ladder(gpt), llama(3), on_a_ladder(llama(3))];
    let mut cases = vec![];
    for config in configs {
        for (tp, units) in [(1, 0..5), (2, 0..5), (2, 1..4), (4, 2..5), (3, 0..4)] {
            if tp == 3 && config.family != gpt_config(true, 0.1).family {
                continue;
            }
            for sequence_parallel in [false, true] {
                for recompute in [
                    Recompute::Nothing,
                    Recompute::Attention,
                    Recompute::Everything,
                    Recompute::Within(9_000),
                ] {
                    let (config, units) = (config.clone(), units.clone());
                    cases.push(Case { config, tp, units, sequence_parallel, recompute });
                }
            }
        }
    }
    cases
}

/// Start by start and wait by wait, what a rank did is what its lists say. Of a pass that is run a second time nobody waits for what the stage behind would read: the
/// list waits for that at its end.
#[test]
fn lists_say_what_ranks_do() {
    let mut said = 0;
    for case in cases() {
        for (position, [forward, backward, weights]) in case.logs().into_iter().enumerate() {
            let lists = case.lists(position, 1e9, 1e9);
            let what = format!("{case:?}, rank {position}");
            assert_eq!(events(&lists.forward), forward, "F of {what}");
            let mut planned = events(&lists.backward);
            if case.recompute == Recompute::Everything {
                planned.retain(|event| matches!(event, Event::Started(..)) || backward.contains(event));
            }
            assert_eq!(planned, backward, "B of {what}");
            assert_eq!((events(&lists.weights), weights), (vec![], vec![]), "W of {what}");
            assert!(lists.forward.is_settled() && lists.backward.is_settled(), "{what}");
            said += forward.len() + backward.len();
        }
    }
    assert!(said > 1_500, "{said}");
}

#[test]
fn members_start_the_same_calls_in_the_same_order() {
    let mut calls = 0;
    for case in cases() {
        let lists: Vec<PassLists> = (0..case.tp).map(|position| case.lists(position, 1e9, 1e9)).collect();
        let all: Vec<usize> = (0..case.tp).collect();
        let forward: Vec<&List> = lists.iter().map(|l| &l.forward).collect();
        let backward: Vec<&List> = lists.iter().map(|l| &l.backward).collect();
        let groups: Vec<Vec<usize>> = if case.tp > 1 { vec![all] } else { vec![] };
        check_order(&forward, &groups).unwrap_or_else(|e| panic!("F of {case:?}: {e}"));
        check_order(&backward, &groups).unwrap_or_else(|e| panic!("B of {case:?}: {e}"));
        // As one, in an order that was chosen by the first of them: so do they all, and the lists come to their end.
        let order = Order::of(&[&lists[0].forward, &lists[0].backward, &lists[0].weights]);
        let merged: Vec<List> =
            lists.iter().map(|l| order.applied_to(&[&l.forward, &l.backward, &l.weights])).collect();
        let merged: Vec<&List> = merged.iter().collect();
        run(&merged, &groups).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        calls += merged[0].calls().len();
    }
    assert!(calls > 700, "{calls}");
}

/// What came of a pair of passes on the ranks of a stage, as shares of the longer of computing and sending.
#[derive(Debug)]
struct Pair {
    /// One behind the other, and as one.
    plain: f64,
    paired: f64,
    /// As one, where W comes behind its B and not where others wait.
    fused: f64,
    /// What no order could do without: the longest of what a rank computes, what it sends, and F or B by itself.
    bound: f64,
}

/// F of a microbatch, B of another and W of one before, where calls take `ratio` of what is computed.
fn pair(case: &Case, ratio: f64) -> Pair {
    let rate = 1e9;
    let of_all = |lists: &PassLists| [&lists.forward, &lists.backward, &lists.weights].map(Clone::clone);
    let first = of_all(&case.lists(0, rate, 1e9));
    let [compute, comm] =
        [List::compute_ns, List::comm_ns].map(|of| first.iter().map(of).sum::<u64>() as f64);
    // Calls are as much slower as it takes.
    let bytes_per_s = 1e9 * comm / (ratio * compute);
    let lists: Vec<[List; 3]> = (0..case.tp).map(|p| of_all(&case.lists(p, rate, bytes_per_s))).collect();
    let refs: Vec<[&List; 3]> = lists.iter().map(|l| [&l[0], &l[1], &l[2]]).collect();
    let group = [(0..case.tp).collect::<Vec<usize>>()];
    let end = |order: &Order| -> f64 {
        let merged: Vec<List> = refs.iter().map(|lists| order.applied_to(lists)).collect();
        let ran = run(&merged.iter().collect::<Vec<_>>(), &group).unwrap();
        ran.end_ns() as f64
    };
    let alone = |list: usize| -> f64 {
        let of_ranks: Vec<&List> = refs.iter().map(|lists| lists[list]).collect();
        run(&of_ranks, &group).unwrap().end_ns() as f64
    };
    let compute = lists.iter().map(|l| l.iter().map(List::compute_ns).sum::<u64>()).max().unwrap() as f64;
    let comm = lists[0].iter().map(List::comm_ns).sum::<u64>() as f64;
    let ideal = compute.max(comm);
    let both: Vec<List> = lists.iter().map(|[_, backward, weights]| backward.clone().then(weights)).collect();
    let fused: Vec<[&List; 2]> = lists.iter().zip(&both).map(|(l, both)| [&l[0], both]).collect();
    let fused_order = Order::of(&fused[0]);
    let fused: Vec<List> = fused.iter().map(|lists| fused_order.applied_to(lists)).collect();
    let fused = run(&fused.iter().collect::<Vec<_>>(), &group).unwrap().end_ns() as f64;
    Pair {
        plain: end(&Order::one_by_one(&refs[0])) / ideal,
        fused: fused / ideal,
        paired: end(&Order::of(&refs[0])) / ideal,
        bound: ideal.max(alone(0)).max(alone(1)) / ideal,
    }
}

/// Blocks in a row, and nothing else: heads that divide, as models have them.
fn blocks(config: GptConfig, sequence_parallel: bool) -> Case {
    let units = 1..1 + config.layers;
    Case { config, tp: 2, units, sequence_parallel, recompute: Recompute::Nothing }
}

const RATIOS: [f64; 6] = [0.1, 0.25, 0.5, 1.0, 1.5, 3.0];

fn families(layers: usize) -> [(&'static str, GptConfig); 3] {
    let gpt = GptConfig { hidden: 256, ..GptConfig::new(64, 32, 64, layers, 4) };
    let llama = GptConfig::llama((64, 32), 64, layers, (4, 2), 176);
    [("GPT", gpt), ("Llama", llama.clone()), ("ladder", on_a_ladder(llama))]
}

/// F of a microbatch beside B of another, with W of an earlier one where both wait: what no other list computes beside is at most what the calls take longer than all
/// that is computed, and a twentieth. Of lists of a dozen blocks; the fewer blocks, the more weigh the first segment, beside which nothing is under way, and the last call.
#[test]
fn pairs_of_passes_hide_what_ranks_say() {
    for (name, config) in families(12) {
        for ratio in RATIOS {
            let pair = pair(&blocks(config.clone(), false), ratio);
            println!("{name:6} comm/compute {ratio:4}: {pair:.3?}");
            assert!(pair.paired <= 1.05, "{name}, {ratio}: {pair:?}");
            assert!(pair.paired >= pair.bound - 1e-9, "{name}, {ratio}: {pair:?}");
        }
    }
    // With rows split, a sum is dealt out and what comes of it gathered with next to nothing to compute between: the gather begins when the op that computes then is
    // done. That is as good where either is much longer than the other. Where they are alike it is not: then no moment of either may be lost.
    for (name, config) in families(12) {
        for ratio in RATIOS {
            let pair = pair(&blocks(config.clone(), true), ratio);
            println!("{name:6} rows split, comm/compute {ratio:4}: {pair:.3?}");
            let most = if (1.0..2.0).contains(&ratio) { 1.25 } else { 1.05 };
            assert!(pair.paired <= most && pair.paired < pair.plain, "{name}, {ratio}: {pair:?}");
        }
    }
    // What it is worth where calls take half as long as what is computed.
    let [(_, gpt), (_, llama), _] = families(12);
    for config in [gpt, llama] {
        let pair = pair(&blocks(config, false), 0.5);
        assert!(pair.plain > 1.45 && pair.paired < 1.05, "{pair:?}");
    }
}

/// Where the bound fails: a single block has hardly anything to do beside its first product and its last call; and it gets nearer with every block. However many blocks
/// there are, where W comes behind its B nothing is left for who waits in the end: B and W with the calls of B are longer than all that is computed.
#[test]
fn short_lists_have_nothing_to_hide_behind() {
    for (name, config) in families(12) {
        let pair = pair(&blocks(config, false), 1.0);
        println!("{name:6}: W behind its B, calls as long as what is computed: {:.3}", pair.fused);
        assert!(pair.fused > 1.05 && pair.fused >= pair.paired, "{name}: {pair:?}");
    }
    for (name, _) in families(1) {
        let of = |layers: usize| {
            let (_, config) = families(layers).into_iter().find(|(n, _)| *n == name).unwrap();
            RATIOS.map(|ratio| pair(&blocks(config.clone(), false), ratio).paired)
        };
        let worst = [1, 2, 4, 8, 16].map(|layers| of(layers).into_iter().fold(0.0, f64::max));
        println!(
            "{name:6}: 1, 2, 4, 8 and 16 blocks take up to {worst:.3?} of the longer of computing and sending"
        );
        assert!(worst[0] > 1.05, "{name}: {worst:?}");
        assert!(worst.is_sorted_by(|a, b| a >= b), "{name}: {worst:?}");
    }
}
