//! Random graphs: on any team they compute what one rank computes, and their gradients are derivatives.

use std::collections::BTreeMap;
use std::sync::Arc;

use crossmesh_core::mesh::Mesh;
use crossmesh_testkit::sweep;

use super::budget::{again, frontier, within};
use super::build::Keep;
use super::derive::Passes;
use super::ops::attention::AttentionSpec;
use super::ops::linear::{LinearSpec, Parallel, TableSpec};
use super::ops::norm::NormSpec;
use super::*;
use crate::chain::Flow;
use crate::flat::{Flat, FlatMut};
use crate::group::{Counted, Group, Traffic, in_process};
use crate::kernels::Activation;
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::parameter::{Init, Parameter, Parameters, initial, shard_indices};
use crate::stage::{Microbatch, MicrobatchId, Recompute, Value};
use crate::stage_rank::StageRank;

type Buf = HostBuf<f64>;
type Members = Vec<Arc<dyn Group<Buf>>>;

/// Random numbers that follow from a seed.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.between(1, 100) <= percent
    }

    fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0
    }
}

/// A graph that can be built for any team.
#[derive(Debug, Clone)]
struct Recipe {
    /// Lengths of the axes.
    axes: Vec<usize>,
    /// The axis that splits rows between regions.
    rows_axis: Option<usize>,
    samples: usize,
    context: usize,
    width: usize,
    classes: usize,
    embeds: Option<usize>,
    steps: Vec<Piece>,
    end: End,
    recompute: Recompute,
    /// The reshard that gets a wrong gradient.
    spoiled: Option<usize>,
}

#[derive(Debug, Clone)]
enum Piece {
    Norm,
    Activate {
        again: bool,
    },
    /// Columns shared out along an axis and back to the trunk.
    Map {
        axis: usize,
        hidden: usize,
        dropout: bool,
    },
    Attend {
        axis: usize,
        heads: usize,
        head_dim: usize,
    },
    Linear,
    Dropout,
    /// The trunk plus a value of some time ago.
    Skip(usize),
    /// Joined with a value of some time ago, and back to as many columns.
    Join(usize),
}

#[derive(Debug, Clone, Copy)]
enum End {
    CrossEntropy { axis: usize },
    SquaredError,
}

fn recipe(seed: u64) -> Recipe {
    let mut d = Draws(seed);
    let mut axes = vec![];
    for _ in 0..d.between(1, 3) {
        let most = 8 / axes.iter().product::<usize>();
        axes.push(d.between(1, most.clamp(1, 4)));
    }
    let any = |d: &mut Draws| d.between(0, axes.len() - 1);
    let rows_axis = d.chance(50).then(|| any(&mut d));
    let mut steps = vec![];
    // A region has up to four ops, a join two.
    let mut left = 8_usize;
    while left > 0 {
        let axis = any(&mut d);
        let whole = rows_axis.is_none_or(|rows| rows == axis);
        let (piece, ops) = match d.between(0, 7) {
            0 => (Piece::Norm, 1),
            1 => (Piece::Activate { again: d.chance(50) }, 1),
            2 | 3 => (Piece::Map { axis, hidden: d.between(1, 7), dropout: d.chance(30) }, 4),
            4 if whole => (Piece::Attend { axis, heads: d.between(1, 5), head_dim: d.between(1, 3) }, 4),
            5 => (Piece::Linear, 1),
            6 => (if d.chance(50) { Piece::Skip(d.between(0, 5)) } else { Piece::Join(d.between(0, 5)) }, 2),
            _ => (Piece::Dropout, 1),
        };
        left = left.saturating_sub(ops);
        steps.push(piece);
    }
    let end = if d.chance(50) { End::CrossEntropy { axis: any(&mut d) } } else { End::SquaredError };
    let recompute = match d.between(0, 2) {
        0 => Recompute::Nothing,
        1 => Recompute::Attention,
        _ => Recompute::Within(d.between(0, 2000) as u64),
    };
    Recipe {
        rows_axis,
        samples: d.between(1, 3),
        context: d.between(1, 4),
        width: d.between(1, 6),
        classes: d.between(1, 7),
        embeds: d.chance(40).then(|| any(&mut d)),
        steps,
        end,
        recompute,
        axes,
        spoiled: None,
    }
}

const NORMAL: Init = Init::Normal { deviation: 0.7 };

impl Recipe {
    fn rows(&self) -> usize {
        self.samples * self.context
    }

    fn site(&self, id: u32) -> Site {
        Site { id, rate: 0.3, rows: self.context }
    }

    fn build(&self, team: Team, parameters: &mut Parameters<'_>) -> Unit<Cpu<f64>> {
        let mut b = Builder::new(team, parameters);
        b.spoiled.0 = self.spoiled;
        self.describe(&mut b);
        let mut unit = Unit::new(b, self.recompute);
        if let Recompute::Within(limit) = self.recompute {
            let choices = unit.choices().iter().map(|(held, again)| (held.bytes(8), *again)).collect();
            unit.choose(within(&[choices], limit)[0]);
        }
        unit
    }

    fn describe(&self, b: &mut Builder<'_, '_, Cpu<f64>>) {
        let whole = b.team.whole();
        let trunk = self.rows_axis.map_or(whole.clone(), |axis| whole.along(Axis(axis), Spread::Rows));
        let typed = b.matrix(self.rows(), self.width, trunk.clone());
        let mut x = b.take("h", typed);
        if let Some(axis) = self.embeds {
            let ids = b.ids("tokens", self.rows());
            let table = TableSpec {
                name: "table".into(),
                rows: self.classes,
                cols: self.width,
                init: NORMAL,
                axis: Axis(axis),
            };
            let rows = b.embed(ids, &table);
            let rows = b.positions(rows, "positions", self.context, NORMAL);
            x = b.residual(x, rows, Site { rate: 0.0, ..self.site(0) });
        }
        let mut past = vec![x];
        for (i, piece) in self.steps.iter().enumerate() {
            x = self.piece(b, x, &past, i, piece);
            past.push(x);
        }
        let x = b.want(x, &whole);
        let loss = match self.end {
            End::CrossEntropy { axis } => {
                let table = TableSpec {
                    name: "head".into(),
                    rows: self.classes,
                    cols: self.width,
                    init: NORMAL,
                    axis: Axis(axis),
                };
                let targets = b.ids("targets", self.rows());
                let logits = b.times_table(x, &table);
                b.cross_entropy(logits, targets, self.classes, self.context)
            }
            End::SquaredError => {
                let target = b.matrix(self.rows(), self.width, whole);
                let target = b.data("wanted", target);
                b.squared_error(x, target, self.context * self.width)
            }
        };
        b.give("loss", loss);
    }

    fn piece(&self, b: &mut Builder<'_, '_, Cpu<f64>>, x: Val, past: &[Val], i: usize, piece: &Piece) -> Val {
        let name = |what: &str| format!("{i}.{what}");
        let width = self.width;
        let linear = |b: &mut Builder<'_, '_, _>,
                      x,
                      what: &str,
                      ins: &[usize],
                      outs: &[usize],
                      parallel,
                      in_attention| {
            let name = &format!("{i}.{what}");
            b.linear(
                x,
                &LinearSpec {
                    name,
                    ins,
                    outs,
                    parallel,
                    init: NORMAL,
                    bias: true,
                    transposed: false,
                    in_attention,
                },
            )
        };
        let earlier = |back: usize| past[past.len() - 1 - back % past.len()];
        match *piece {
            Piece::Norm => b.layer_norm(x, &NormSpec { name: &name("norm"), epsilon: 0.1 }),
            Piece::Activate { again: true } => b.activate_again(x, Activation::Silu),
            Piece::Activate { again: false } => b.activate(x, Activation::Gelu),
            Piece::Map { axis, hidden, dropout } => {
                let over = [(Axis(axis), 0)];
                let h = linear(b, x, "up", &[width], &[hidden], Parallel::Columns(&over), false);
                let h = b.activate(h, Activation::Gelu);
                let y = linear(b, h, "down", &[hidden], &[width], Parallel::Summands(&over), false);
                let rate = if dropout { 0.3 } else { 0.0 };
                b.residual(x, y, Site { rate, ..self.site(10 + i as u32) })
            }
            Piece::Attend { axis, heads, head_dim } => {
                let axis = Axis(axis);
                let outs = [3, heads, head_dim];
                let (columns, summands) = ([(axis, 1)], [(axis, 0)]);
                let p = linear(b, x, "qkv", &[width], &outs, Parallel::Columns(&columns), true);
                let (queries, keys) = (self.context, self.context);
                let dropout = (40 + i as u32, 0.2);
                let spec = AttentionSpec {
                    axis,
                    group_axis: None,
                    layer: 0,
                    heads,
                    kv_heads: heads,
                    head_dim,
                    queries,
                    keys,
                    causal: true,
                    dropout,
                };
                let h = b.self_attention(p, spec);
                let ins = [heads, head_dim];
                let y = linear(b, h, "out", &ins, &[width], Parallel::Summands(&summands), false);
                b.residual(x, y, Site { rate: 0.0, ..self.site(0) })
            }
            Piece::Linear => linear(b, x, "map", &[width], &[width], Parallel::None, false),
            Piece::Dropout => b.dropout(x, self.site(70 + i as u32)),
            Piece::Skip(back) => b.residual(x, earlier(back), Site { rate: 0.0, ..self.site(0) }),
            Piece::Join(back) => {
                let both = b.concat(x, earlier(back));
                linear(b, both, "join", &[2 * width], &[width], Parallel::None, false)
            }
        }
    }

    /// How many reshards between ranks there are.
    fn num_reshards(&self) -> usize {
        let mesh = mesh(&self.axes);
        let place = StageRank::over(mesh, 0).unwrap();
        let mut parameters = Parameters::new::<f64>(&place);
        let mut b = Builder::new(team(self, &place), &mut parameters);
        self.describe(&mut b);
        b.spoiled.1
    }

    /// Everything that comes in, whole.
    fn data(&self, seed: u64) -> Data {
        let mut d = Draws(seed ^ 0xd00d);
        let mut reals = || (0..self.rows() * self.width).map(|_| d.real()).collect::<Vec<f64>>();
        let (h, wanted) = (reals(), reals());
        let mut ids =
            || (0..self.rows()).map(|_| d.between(0, self.classes - 1) as i32).collect::<Vec<i32>>();
        Data { h, wanted, tokens: ids(), targets: ids() }
    }
}

struct Data {
    h: Vec<f64>,
    wanted: Vec<f64>,
    tokens: Vec<i32>,
    targets: Vec<i32>,
}

/// What one rank found.
struct Found {
    place: StageRank,
    loss: f64,
    /// The gradient of `h`, and its rows.
    dh: Vec<f64>,
    rows: std::ops::Range<usize>,
    parameters: Vec<Parameter>,
    grads: Vec<f64>,
    traffic: Vec<Traffic>,
    /// From F to B.
    held: Elements,
}

const NAMES: [&str; 3] = ["x", "y", "z"];

fn mesh(axes: &[usize]) -> Mesh {
    let axes: Vec<String> = axes.iter().zip(NAMES).map(|(len, name)| format!("{name}:{len}")).collect();
    format!("A{{{}}}", axes.join(",")).parse().unwrap()
}

fn team(recipe: &Recipe, place: &StageRank) -> Team {
    let axis = |name: &&str| TeamAxis { name: (*name).into(), along: place.along(name) };
    Team { axes: NAMES[..recipe.axes.len()].iter().map(axis).collect() }
}

/// Runs a recipe on a mesh of these lengths, a thread a rank.
fn run(recipe: &Recipe, axes: &[usize], data: &Data, bump: Option<(&str, usize, f64)>) -> Vec<Found> {
    let mesh = mesh(axes);
    let mut groups: BTreeMap<(usize, Vec<u32>), Members> = BTreeMap::new();
    let mut ranks = vec![];
    for position in 0..mesh.len() {
        let place = StageRank::over(mesh.clone(), position).unwrap();
        let mut mine = vec![];
        for (axis, &len) in axes.iter().enumerate() {
            let mut others = place.coord().to_vec();
            let at = std::mem::replace(&mut others[axis], 0) as usize;
            let group = groups.entry((axis, others)).or_insert_with(|| in_process::<f64>(len));
            mine.push(Arc::new(Counted::new(Arc::clone(&group[at]))));
        }
        ranks.push((place, mine));
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|(place, groups)| scope.spawn(move || run_rank(recipe, place, &groups, data, bump)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

fn run_rank(
    recipe: &Recipe,
    place: StageRank,
    counted: &[Arc<Counted<Buf>>],
    data: &Data,
    bump: Option<(&str, usize, f64)>,
) -> Found {
    let groups: Vec<Arc<dyn Group<Buf>>> = counted.iter().map(|g| Arc::clone(g) as _).collect();
    let groups = &groups[..];
    let mut parameters = Parameters::new::<f64>(&place);
    let unit = recipe.build(team(recipe, &place), &mut parameters);
    let mut parameters = parameters.into_list();
    parameters.iter_mut().for_each(|p| p.init = NORMAL);
    let mut params = initial::<f64>(&parameters, place.coord(), 5);
    if let Some((name, index, by)) = bump {
        let parameter = parameters.iter().find(|p| p.name == name).expect("a parameter");
        params[parameter.range.start + index] += by;
    }
    let kernels = Cpu::new(1);
    let rows = recipe.rows_axis.map_or(0..recipe.rows(), |axis| place.along(NAMES[axis]).part(recipe.rows()));
    let microbatch =
        Microbatch { id: MicrobatchId(0), step: 3, first_sample: 0, batch_samples: recipe.samples as u64 };
    let params: Buf = params.into();
    let ctx = |params| Ctx {
        kernels: &kernels,
        groups,
        params,
        microbatch,
        first_sample: 0,
        seed: 9,
        mode: Mode::Train,
        cache: None,
    };
    let width = recipe.width;
    let mut flow = Flow::default();
    flow.put_real("h", data.h[rows.start * width..rows.end * width].to_vec().into());
    flow.put_real("wanted", data.wanted.clone().into());
    flow.put("tokens", Value::Ids(data.tokens.clone()));
    flow.put("targets", Value::Ids(data.targets.clone()));
    let mut frame = unit.forward(&ctx(Some(Flat::Whole(&params))), &mut flow).unwrap();
    let Some(Value::Loss(loss)) = flow.take("loss") else { panic!("no loss") };
    assert_eq!(frame.elements(), unit.remembered().after_forward, "held after F");
    let mut back = Flow::default();
    unit.backward_input(&ctx(Some(Flat::Whole(&params))), &mut back, &mut frame).unwrap();
    assert_eq!(frame.elements(), unit.remembered().after_backward_input, "held after B");
    let dh = back.take_real("h").to_vec();
    let mut grads: Buf = vec![0.0; params.len()].into();
    unit.backward_weight(&ctx(None), &mut frame, &mut FlatMut::Whole(&mut grads)).unwrap();
    assert_eq!(frame.elements(), Elements::default(), "held after W");
    let traffic = counted.iter().map(|group| group.traffic()).collect();
    Found {
        place,
        loss,
        dh,
        rows,
        parameters,
        grads: grads.to_vec(),
        traffic,
        held: unit.remembered().after_forward,
    }
}

/// Gradients by name: of the input, and of the weights, summed as their layouts say.
fn whole(recipe: &Recipe, found: &[Found]) -> Result<BTreeMap<String, Vec<f64>>, String> {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-10 * (1.0 + a.abs().max(b.abs()));
    let mut all = BTreeMap::new();
    let mut dh: Vec<Option<f64>> = vec![None; recipe.rows() * recipe.width];
    for rank in found {
        for (i, &x) in rank.dh.iter().enumerate() {
            let old = dh[rank.rows.start * recipe.width + i].replace(x);
            if old.is_some_and(|old| !close(old, x)) {
                return Err(format!("replicas of dh differ: {old:?} and {x}"));
            }
        }
        if !close(rank.loss, found[0].loss) {
            return Err(format!("losses differ: {} and {}", rank.loss, found[0].loss));
        }
    }
    all.insert("h".to_string(), dh.into_iter().map(|x| x.expect("all rows are somewhere")).collect());
    for (p, parameter) in found[0].parameters.iter().enumerate() {
        let mut parts: BTreeMap<(u64, usize), f64> = BTreeMap::new();
        for rank in found {
            let own = &rank.parameters[p];
            let part = own.grad.contribution_at(rank.place.coord());
            let indices = shard_indices(&own.grad, rank.place.coord());
            for (i, &x) in indices.iter().zip(&rank.grads[own.range.clone()]) {
                let old = parts.insert((*i, part), x);
                if old.is_some_and(|old| !close(old, x)) {
                    return Err(format!("replicas of {} differ: {old:?} and {x}", own.name));
                }
            }
        }
        let mut sums = vec![0.0; parameter.layout.volume() as usize];
        parts.into_iter().for_each(|((i, _), x)| sums[i as usize] += x);
        all.insert(parameter.name.clone(), sums);
    }
    Ok(all)
}

/// Whether a team of ranks finds what one rank finds.
fn equals_one_rank(recipe: &Recipe, data: &Data) -> Result<(), String> {
    let alone = run(recipe, &vec![1; recipe.axes.len()], data, None);
    let team = run(recipe, &recipe.axes, data, None);
    let close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-10 * (1e-6 + scale);
    if !close(alone[0].loss, team[0].loss, alone[0].loss.abs()) {
        return Err(format!("the loss is {} instead of {}", team[0].loss, alone[0].loss));
    }
    let (wanted, got) = (whole(recipe, &alone)?, whole(recipe, &team)?);
    for (name, wanted) in &wanted {
        let scale = wanted.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        for (i, (a, b)) in wanted.iter().zip(&got[name]).enumerate() {
            if !close(*a, *b, scale) {
                return Err(format!("the gradient of {name}[{i}] is {b} instead of {a}"));
            }
        }
    }
    Ok(())
}

#[test]
fn random_graphs_equal_one_rank() {
    for seed in 0..sweep::count(200) as u64 {
        let recipe = recipe(seed);
        if let Err(why) = equals_one_rank(&recipe, &recipe.data(seed)) {
            panic!("seed {seed}: {why}\n{recipe:?}");
        }
    }
}

/// A reshard whose gradient moves otherwise than the rule says is noticed, wherever it is.
#[test]
fn no_other_rule_for_gradients_of_reshards_is_right() {
    let (mut spoiled, mut seed) = (0, 0);
    while spoiled < 200 {
        seed += 1;
        // Large enough for every rank to have a part in everything; and nothing comes through a norm of a single column.
        let drawn = recipe(seed);
        let (width, context, classes) = (drawn.width + 2, drawn.context + 4, drawn.classes + 4);
        let mut recipe = Recipe { end: End::SquaredError, width, context, classes, ..drawn };
        for piece in &mut recipe.steps {
            match piece {
                Piece::Map { hidden: parts, .. } | Piece::Attend { heads: parts, .. } => *parts += 4,
                _ => {}
            }
        }
        let data = recipe.data(seed);
        for number in 0.. {
            recipe.spoiled = Some(number);
            if recipe.num_reshards() <= number {
                break;
            }
            assert!(equals_one_rank(&recipe, &data).is_err(), "seed {seed}, reshard {number}\n{recipe:?}");
            spoiled += 1;
        }
    }
}

#[test]
fn gradients_are_derivatives() {
    let mut compared = 0;
    for seed in 0..sweep::count(200) as u64 / 4 {
        let recipe = recipe(seed);
        let data = recipe.data(seed);
        let ones = vec![1; recipe.axes.len()];
        let alone = run(&recipe, &ones, &data, None);
        let gradients = whole(&recipe, &alone).unwrap();
        let loss =
            |name: &str, index: usize, by: f64| run(&recipe, &ones, &data, Some((name, index, by)))[0].loss;
        for parameter in &alone[0].parameters {
            let (name, len) = (&parameter.name, parameter.range.len());
            let scale = gradients[name].iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            let index = seed as usize % len;
            let step = 1e-5;
            let difference = (loss(name, index, step) - loss(name, index, -step)) / (2.0 * step);
            let error = (gradients[name][index] - difference).abs();
            assert!(
                error <= 1e-6 * (scale + 1e-2),
                "seed {seed}: {name}[{index}]: {} instead of {difference}\n{recipe:?}",
                gradients[name][index]
            );
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared} derivatives");
}

/// Whatever is dropped and computed again: no bit changes, nothing is sent twice, and no more is held than allowed.
#[test]
fn budgets_change_no_bit_and_send_nothing_twice() {
    let mut frugal = 0;
    for seed in 0..sweep::count(200) as u64 / 4 {
        let plain = Recipe { recompute: Recompute::Nothing, ..recipe(seed) };
        let data = plain.data(seed);
        let wanted = run(&plain, &plain.axes, &data, None);
        let most = wanted.iter().map(|f| f.held.bytes(8)).max().unwrap();
        for limit in [0, most / 2, most * 3 / 4, u64::MAX] {
            let recipe = Recipe { recompute: Recompute::Within(limit), ..plain.clone() };
            let found = run(&recipe, &recipe.axes, &data, None);
            for (a, b) in found.iter().zip(&wanted) {
                let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{recipe:?}");
                assert_eq!((bits(&a.dh), bits(&a.grads)), (bits(&b.dh), bits(&b.grads)), "{recipe:?}");
                assert_eq!(a.traffic, b.traffic, "{recipe:?}");
                assert!(a.held.bytes(8) <= b.held.bytes(8), "{recipe:?}");
                frugal += usize::from(a.held.bytes(8) < b.held.bytes(8));
            }
        }
    }
    assert!(frugal > 50, "{frugal} ranks held less");
}

/// Of all sets of ops that could be dropped, none that fits a limit computes less again than the one that is taken.
#[test]
fn the_kept_set_is_that_of_an_exhaustive_search() {
    let mut compared = 0;
    for seed in 0..sweep::count(200) as u64 / 4 {
        let recipe = Recipe { axes: vec![1; recipe(seed).axes.len()], ..recipe(seed) };
        let place = StageRank::over(mesh(&recipe.axes), 0).unwrap();
        let mut parameters = Parameters::new::<f64>(&place);
        let mut b = Builder::<Cpu<f64>>::new(team(&recipe, &place), &mut parameters);
        recipe.describe(&mut b);
        let able = |n: &usize| {
            let node = &b.nodes[*n];
            !node.same && node.op.can_run_again() && !node.op.is_loss() && node.keep != Keep::Never
        };
        let able: Vec<usize> = (0..b.nodes.len()).filter(able).collect();
        if able.len() > 10 {
            continue;
        }
        let never: Vec<bool> = b.nodes.iter().map(|node| node.keep == Keep::Never).collect();
        let all: Vec<(u64, f64)> = (0..1usize << able.len())
            .map(|set| {
                let mut dropped = never.clone();
                able.iter().enumerate().for_each(|(i, &n)| dropped[n] |= set >> i & 1 == 1);
                let passes = Passes::dropping(&b, dropped);
                let held: Elements = passes.after_forward.iter().map(|&slot| passes.slots[slot]).sum();
                (held.bytes(8), again(&b, &passes))
            })
            .collect();
        let choices: Vec<(u64, f64)> = frontier(&b, 8).iter().map(|c| (c.held.bytes(8), c.again)).collect();
        let (least, most) = (all.iter().map(|c| c.0).min().unwrap(), all.iter().map(|c| c.0).max().unwrap());
        for limit in [least, (least + most) / 2, (least + 3 * most) / 4, most] {
            let best = all.iter().filter(|c| c.0 <= limit).map(|c| c.1).fold(f64::INFINITY, f64::min);
            let taken = choices[within(std::slice::from_ref(&choices), limit)[0]];
            assert!(taken.0 <= limit && taken.1 == best, "{recipe:?}: {taken:?} for {best} within {limit}");
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
}
