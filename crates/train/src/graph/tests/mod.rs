//! Random graphs: on any team they compute what one rank computes, and their gradients are derivatives.

mod recipe;

use std::collections::BTreeMap;
use std::sync::Arc;

use crossmesh_testkit::sweep;

use self::recipe::{Data, Draws, End, Heads, NORMAL, Piece, Recipe, recipe};
use super::budget::{EXHAUSTIVE, again, candidates, frontier, within};
use super::build::Keep;
use super::derive::Passes;
use super::policy::{INPUT, OPS};
use super::*;
use crate::chain::Flow;
use crate::flat::{Flat, FlatMut};
use crate::group::{Counted, Group, Traffic, in_process};
use crate::kernels::cpu::{Cpu, HostBuf};
use crate::parameter::{Parameter, Parameters, initial, shard_indices};
use crate::stage::{Microbatch, MicrobatchId, Recompute, Value};
use crate::stage_rank::StageRank;

type Buf = HostBuf<f64>;
type Members = Vec<Arc<dyn Group<Buf>>>;

/// What one rank found.
struct Found {
    place: StageRank,
    loss: f64,
    /// The gradients of `h`, with the rows that are here, and of `asked`.
    dh: Vec<f64>,
    rows: std::ops::Range<usize>,
    d_asked: Vec<f64>,
    parameters: Vec<Parameter>,
    grads: Vec<f64>,
    traffic: Vec<Traffic>,
    /// From F to B, and of it what waits in a file.
    held: Elements,
    filed: Elements,
}

/// A step away from where gradients are taken: of what, and how far every element of it moves, by its index in the whole.
type Bump<'a> = (&'a str, &'a dyn Fn(usize) -> f64);

/// Runs a recipe, a thread a rank.
fn run(recipe: &Recipe, data: &Data, bump: Option<Bump<'_>>) -> Vec<Found> {
    let mesh = recipe.mesh();
    let mut groups: BTreeMap<(usize, Vec<u32>), Members> = BTreeMap::new();
    let mut ranks = vec![];
    for position in 0..mesh.len() {
        let place = StageRank::over(mesh.clone(), position).unwrap();
        let mut mine = vec![];
        for axis in 0..recipe.axes.len() {
            let along = place.along(recipe.name(axis));
            let mut others = place.coord().to_vec();
            place.meant(recipe.name(axis)).into_iter().for_each(|i| others[i] = 0);
            let group = groups.entry((axis, others)).or_insert_with(|| in_process::<f64>(along.size));
            mine.push(Arc::new(Counted::new(Arc::clone(&group[along.rank]))));
        }
        ranks.push((place, mine, bumped(data, bump)));
    }
    let moved = |place: &StageRank, parameters: &[Parameter], params: &mut [f64]| {
        let Some((name, by)) = bump else { return };
        for parameter in parameters.iter().filter(|p| p.name == name) {
            let indices = shard_indices(&parameter.layout, place.coord());
            let values = &mut params[parameter.range.clone()];
            indices.iter().zip(values).for_each(|(&i, x)| *x += by(i as usize));
        }
    };
    let ranks = ranks.into_iter().map(|(place, groups, data)| {
        let mut parameters = Parameters::new::<f64>(&place);
        let unit = recipe.build(recipe.team(&place), &mut parameters);
        let mut parameters = parameters.into_list();
        parameters.iter_mut().for_each(|p| p.init = NORMAL);
        let mut params = initial::<f64>(&parameters, place.coord(), 5);
        moved(&place, &parameters, &mut params);
        (Rank { place, unit, parameters, params: params.into() }, groups, data)
    });
    let ranks: Vec<_> = ranks.collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|(rank, groups, data)| scope.spawn(move || rank.run(recipe, &groups, &data)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

/// The data, where it is what moves.
fn bumped(data: &Data, bump: Option<Bump<'_>>) -> Data {
    let mut data = data.clone();
    if let Some((name, by)) = bump {
        let moved = |x: &mut [f64]| x.iter_mut().enumerate().for_each(|(i, x)| *x += by(i));
        match name {
            "h" => moved(&mut data.h),
            "asked" => moved(&mut data.asked),
            _ => {}
        }
    }
    data
}

struct Rank {
    place: StageRank,
    unit: Unit<Cpu<f64>>,
    parameters: Vec<Parameter>,
    params: Buf,
}

impl Rank {
    fn run(self, recipe: &Recipe, counted: &[Arc<Counted<Buf>>], data: &Data) -> Found {
        let Self { place, unit, parameters, params } = self;
        let groups: Vec<Arc<dyn Group<Buf>>> = counted.iter().map(|g| Arc::clone(g) as _).collect();
        let kernels = Cpu::new(1);
        let along = recipe.rows_axis.map(|axis| place.along(recipe.name(axis)));
        let rows = along.map_or(0..recipe.rows(), |along| along.part(recipe.rows()));
        let batch_samples = recipe.samples as u64;
        let microbatch = Microbatch { id: MicrobatchId(0), step: 3, first_sample: 0, batch_samples };
        let ctx = |params| Ctx {
            kernels: &kernels,
            groups: &groups,
            params,
            microbatch,
            first_sample: 0,
            seed: 9,
            mode: Mode::Train,
            cache: None,
        };
        let mut flow = flow(recipe, data, &rows);
        let mut frame = unit.forward(&ctx(Some(Flat::Whole(&params))), &mut flow).unwrap();
        let Some(Value::Loss(loss)) = flow.take("loss") else { panic!("no loss") };
        let Remembered { after_forward, filed, .. } = unit.remembered();
        assert_eq!(frame.elements(), after_forward, "held after F");
        away_and_back(&unit, &mut frame, |frame| assert_eq!(frame.elements() + filed, after_forward));
        let mut back = Flow::default();
        unit.backward_input(&ctx(Some(Flat::Whole(&params))), &mut back, &mut frame).unwrap();
        back.settle(&kernels).unwrap();
        assert_eq!(frame.elements(), unit.remembered().after_backward_input, "held after B");
        let dh = back.take_real("h").to_vec();
        let d_asked = match back.take("asked") {
            Some(Value::Real(d)) => d.to_vec(),
            Some(other) => panic!("the gradient of `asked` is {other:?}"),
            None => vec![0.0; data.asked.len()],
        };
        let mut grads: Buf = vec![0.0; params.len()].into();
        unit.backward_weight(&ctx(None), &mut frame, &mut FlatMut::Whole(&mut grads)).unwrap();
        assert_eq!(frame.elements(), Elements::default(), "held after W");
        let traffic = counted.iter().map(|group| group.traffic()).collect();
        let grads = grads.to_vec();
        Found { place, loss, dh, rows, d_asked, parameters, grads, traffic, held: after_forward, filed }
    }
}

/// What is to wait in a file leaves, and comes back.
fn away_and_back(unit: &Unit<Cpu<f64>>, frame: &mut Frame<Buf>, meanwhile: impl Fn(&Frame<Buf>)) {
    let (mut numbers, mut ids) = (vec![], vec![]);
    unit.each_filed(frame, &mut |item| match item {
        Item::Real(buf) => numbers.push(std::mem::replace(buf, vec![].into())),
        Item::Ids(list) => ids.push(std::mem::take(list)),
    });
    meanwhile(frame);
    let (mut numbers, mut ids) = (numbers.into_iter(), ids.into_iter());
    unit.each_filed(frame, &mut |item| match item {
        Item::Real(buf) => *buf = numbers.next().expect("as many as left"),
        Item::Ids(list) => *list = ids.next().expect("as many as left"),
    });
}

/// What comes into the graph, on a rank with these rows.
fn flow(recipe: &Recipe, data: &Data, rows: &std::ops::Range<usize>) -> Flow<Buf> {
    let width = recipe.width;
    let mut flow = Flow::default();
    flow.put_real("h", data.h[rows.start * width..rows.end * width].to_vec().into());
    flow.put_real("asked", data.asked.clone().into());
    flow.put_real("wanted", data.wanted.clone().into());
    flow.put("tokens", Value::Ids(data.tokens.clone()));
    flow.put("targets", Value::Ids(data.targets.clone()));
    flow.put("times", Value::Ids(data.times.clone()));
    flow
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
        if rank.d_asked.iter().zip(&found[0].d_asked).any(|(a, b)| !close(*a, *b)) {
            return Err(format!("replicas of d_asked differ: {:?} and {:?}", rank.d_asked, found[0].d_asked));
        }
        if !close(rank.loss, found[0].loss) {
            return Err(format!("losses differ: {} and {}", rank.loss, found[0].loss));
        }
    }
    all.insert("h".to_string(), dh.into_iter().map(|x| x.expect("all rows are somewhere")).collect());
    all.insert("asked".to_string(), found[0].d_asked.clone());
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
    let alone = run(&recipe.alone(), data, None);
    let team = run(recipe, data, None);
    let close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 1e-10 * (1e-6 + scale);
    if !close(alone[0].loss, team[0].loss, alone[0].loss.abs()) {
        return Err(format!("the loss is {} instead of {}", team[0].loss, alone[0].loss));
    }
    let (wanted, got) = (whole(recipe, &alone)?, whole(recipe, &team)?);
    let largest = |values: &[f64]| values.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    // A gradient that is nothing but rounding, as that of a single key, is held against the others.
    let least = 1e-3 * wanted.values().map(|values| largest(values)).fold(0.0, f64::max);
    for (name, wanted) in &wanted {
        let scale = largest(wanted).max(least);
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
    for seed in sweep::first()..sweep::count(200) as u64 {
        let recipe = recipe(seed);
        if let Err(why) = equals_one_rank(&recipe, &recipe.data(seed)) {
            panic!("seed {seed}: {why}\n{recipe:?}");
        }
    }
}

/// Large enough for every rank to have a part in everything, and for every gradient to be something: nothing comes through a norm of a single column, nor to scores of a
/// single key, nor to what is no number.
fn roomy(drawn: Recipe) -> Recipe {
    let (width, context, classes) = (drawn.width + 2, drawn.context + 4, drawn.classes + 4);
    let (axes, cut) = (drawn.axes.clone(), drawn.cut);
    let keys = drawn.keys + 2;
    let mut recipe = Recipe { end: End::SquaredError, width, context, classes, keys, ..drawn };
    for piece in &mut recipe.steps {
        match piece {
            Piece::Map { hidden: parts, .. }
            | Piece::Gated { hidden: parts, .. }
            | Piece::Cross { heads: parts, .. }
            | Piece::Attend { heads: parts, .. } => *parts += 4,
            Piece::Convolve { groups, timed, .. } => (*groups, *timed) = (*groups + 4, false),
            Piece::Grouped { heads, kv_heads, group, .. } => {
                *group += 4;
                *kv_heads = match (heads, cut) {
                    (Heads::Along(_), _) => *kv_heads + 4,
                    (Heads::Over(kv, _), _) => axes[*kv],
                    (Heads::Cut, cut) => cut.expect("an axis is cut").1[0],
                };
            }
            _ => {}
        }
    }
    recipe
}

/// A reshard whose gradient moves otherwise than the rule says is noticed, wherever it is.
#[test]
fn no_other_rule_for_gradients_of_reshards_is_right() {
    let (mut spoiled, mut seed) = (0, 0);
    while spoiled < sweep::count(200) {
        seed += 1;
        let mut recipe = roomy(recipe(seed));
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

/// Central differences, on all ranks: of every tensor two elements, and all at once along a line.
#[test]
fn gradients_are_derivatives() {
    let (mut compared, mut on_several) = (0, 0);
    for seed in sweep::first()..sweep::count(50) as u64 {
        let recipe = recipe(seed);
        let data = recipe.data(seed);
        let team = run(&recipe, &data, None);
        let gradients = whole(&recipe, &team).unwrap();
        for (t, (name, gradient)) in gradients.iter().enumerate() {
            let scale = gradient.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            let mut d = Draws(seed ^ (t as u64) << 32);
            let mut lines: Vec<Vec<f64>> = vec![gradient.iter().map(|_| d.real()).collect()];
            let only = |one: usize| (0..gradient.len()).map(|i| f64::from(u8::from(i == one))).collect();
            lines.extend((0..2).map(|_| only(d.between(0, gradient.len() - 1))));
            for line in lines {
                let long = line.iter().map(|x| x * x).sum::<f64>().sqrt();
                let step = 1e-5 / long;
                let loss = |by: f64| run(&recipe, &data, Some((name, &|i| by * line[i])))[0].loss;
                let difference = (loss(step) - loss(-step)) / 2e-5;
                let wanted = gradient.iter().zip(&line).map(|(g, x)| g * x).sum::<f64>() / long;
                assert!(
                    (wanted - difference).abs() <= 1e-6 * (scale + 1e-2),
                    "seed {seed}: {name} along {line:?}: {wanted} instead of {difference}\n{recipe:?}",
                );
                compared += 1;
                on_several += usize::from(team.len() > 1);
            }
        }
    }
    assert!(
        compared > 10 && on_several * 2 > compared,
        "{compared} derivatives, {on_several} on several ranks"
    );
}

/// Whatever is dropped and computed again: no bit changes, nothing is sent twice, and no more is held than allowed.
#[test]
fn budgets_change_no_bit_and_send_nothing_twice() {
    let mut frugal = 0;
    for seed in 0..sweep::count(200) as u64 / 4 {
        let plain = Recipe { recompute: Recompute::Nothing, ..recipe(seed) };
        let data = plain.data(seed);
        let wanted = run(&plain, &data, None);
        let most = wanted.iter().map(|f| f.held.bytes::<Cpu<f64>>()).max().unwrap();
        for limit in [0, most / 2, most * 3 / 4, u64::MAX] {
            let recipe = Recipe { recompute: Recompute::Within(limit), ..plain.clone() };
            let found = run(&recipe, &data, None);
            for (a, b) in found.iter().zip(&wanted) {
                same_bits(a, b, &recipe);
                assert!(a.held.bytes::<Cpu<f64>>() <= b.held.bytes::<Cpu<f64>>(), "{recipe:?}");
                frugal += usize::from(a.held.bytes::<Cpu<f64>>() < b.held.bytes::<Cpu<f64>>());
            }
        }
    }
    assert!(frugal > 50, "{frugal} ranks held less");
}

/// The same numbers, from the same messages.
fn same_bits(a: &Found, b: &Found, recipe: &Recipe) {
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let all = |f: &Found| [bits(&[f.loss]), bits(&f.dh), bits(&f.d_asked), bits(&f.grads)];
    assert_eq!(all(a), all(b), "{recipe:?}");
    assert_eq!(a.traffic, b.traffic, "{recipe:?}");
}

/// So it is with rules for ops, whatever they say; and rules can name all ops that there are.
#[test]
fn policies_change_no_bit_and_send_nothing_twice() {
    let (mut again, mut filed) = (0, 0);
    let mut seen = std::collections::BTreeSet::from([INPUT]);
    for seed in sweep::first()..sweep::count(200) as u64 {
        let plain = Recipe { recompute: Recompute::Nothing, ..recipe(seed) };
        seen.extend(plain.named_ops());
        if seed % 4 > 0 {
            continue;
        }
        let data = plain.data(seed);
        let wanted = run(&plain, &data, None);
        for round in 0..3 {
            let (rules, offloaded) = (plain.rules(seed ^ (round << 40)), round > 0);
            let recipe = Recipe { rules, offloaded, ..plain.clone() };
            for (a, b) in run(&recipe, &data, None).iter().zip(&wanted) {
                same_bits(a, b, &recipe);
                again += usize::from(a.held != b.held);
                filed += usize::from(a.filed != Elements::default() && a.filed != a.held);
                assert!(offloaded || a.filed == Elements::default(), "{recipe:?}");
            }
        }
    }
    assert!(again > 50 && filed > 50, "{again} ranks held other things, {filed} some of it in a file");
    assert!(OPS.iter().all(|op| seen.contains(op)), "no graph has all of {seen:?}");
}

/// What rules say of a value decides where it is: everything of a unit, one way and the other.
#[test]
fn policies_for_everything_keep_nothing_or_all() {
    let plain = Recipe { recompute: Recompute::Nothing, ..recipe(4).alone() };
    let rule =
        |action| Recipe { rules: vec![Rule { ops: vec![], action }], offloaded: true, ..plain.clone() };
    let found = |recipe: Recipe| run(&recipe, &recipe.data(4), None).remove(0);
    let [kept, again, filed] = [Action::Keep, Action::Recompute, Action::Offload].map(|a| found(rule(a)));
    let plain = found(plain.clone());
    assert_eq!((kept.held, kept.filed), (plain.held, Elements::default()));
    assert_eq!((filed.held, filed.filed), (plain.held, plain.held));
    assert!(again.held.elems < plain.held.elems, "{:?} of {:?}", again.held, plain.held);
}

/// Of all sets of ops that could be dropped, none that fits a limit computes less again than the one that is taken: the limits compared.
fn none_is_better(b: &Builder<'_, '_, Cpu<f64>>, what: &str) -> usize {
    let able = candidates(b);
    let never: Vec<bool> = b.nodes.iter().map(|node| node.keep == Keep::Never).collect();
    let all: Vec<(u64, f64)> = (0..1usize << able.len())
        .map(|set| {
            let mut dropped = never.clone();
            able.iter().enumerate().for_each(|(i, &n)| dropped[n] |= set >> i & 1 == 1);
            let passes = Passes::dropping(b, dropped);
            let held: Elements = passes.after_forward.iter().map(|&slot| passes.slots[slot]).sum();
            (held.bytes::<Cpu<f64>>(), again(b, &passes))
        })
        .collect();
    let choices: Vec<(u64, f64)> =
        frontier(b).iter().map(|c| (c.held.bytes::<Cpu<f64>>(), c.again)).collect();
    let (least, most) = (all.iter().map(|c| c.0).min().unwrap(), all.iter().map(|c| c.0).max().unwrap());
    let limits = (0..=8).map(|step| least + (most - least) * step / 8);
    for limit in limits.clone() {
        let best = all.iter().filter(|c| c.0 <= limit).map(|c| c.1).fold(f64::INFINITY, f64::min);
        let taken = choices[within(std::slice::from_ref(&choices), limit)[0]];
        assert!(taken.0 <= limit && taken.1 == best, "{what}: {taken:?} for {best} within {limit}");
    }
    limits.count()
}

/// With up to 14 ops to decide about; of large graphs, whose sets are many, a few unless more are asked for.
#[test]
fn the_kept_set_is_that_of_an_exhaustive_search() {
    let (mut compared, mut large) = (0, 0);
    for seed in 0..sweep::count(200) as u64 / 4 {
        let recipe = recipe(seed).alone();
        let place = StageRank::over(recipe.mesh(), 0).unwrap();
        let mut parameters = Parameters::new::<f64>(&place);
        let mut b = Builder::<Cpu<f64>>::new(recipe.team(&place), &mut parameters);
        recipe.describe(&mut b);
        let ops = candidates(&b).len();
        large += usize::from((11..=14).contains(&ops));
        if ops <= 10 || (ops <= 14 && large <= sweep::count(4)) {
            compared += none_is_better(&b, &format!("{recipe:?}"));
        }
    }
    assert!(compared > 100 && large >= 4, "{compared}, {large} large ones");
}

/// So it is for blocks of models, serial and on a ladder: none has so many ops that it is not searched in full. (All sets of a Llama's are compared where many cases
/// are asked for.)
#[test]
fn blocks_of_models_are_searched_in_full() {
    use crate::models::gpt::{Gpt, GptConfig, Residual};
    let llama = GptConfig { dropout: 0.1, ..GptConfig::llama((13, 7), 24, 2, (4, 2), 31) };
    let gpt = GptConfig { dropout: 0.1, hidden: 31, ..GptConfig::new(13, 7, 20, 2, 4) };
    for residual in [Residual::Serial, Residual::Ladder] {
        for (config, many) in [(&gpt, false), (&llama, true)] {
            let model = Gpt::new(GptConfig { residual, ..config.clone() }).unwrap();
            for mesh in ["A{tp:1}", "A{tp:2}"] {
                let mesh = crate::chain::Model::<Cpu<f64>>::mesh(&model, &mesh.parse().unwrap());
                let place = StageRank::new(mesh, 0).unwrap();
                let setup = crate::chain::Setup { place, ..crate::chain::Setup::alone(2, 1) };
                let mut parameters = Parameters::new::<f64>(&setup.place);
                let b: Builder<'_, '_, Cpu<f64>> = model.block(&setup, &mut parameters);
                let ops = candidates(&b).len();
                assert!(ops <= EXHAUSTIVE, "{ops} of {residual:?} {config:?}");
                assert!(ops > 8 && frontier(&b).len() > 4, "{ops}, {}", frontier(&b).len());
                if !many || sweep::count(200) > 200 {
                    none_is_better(&b, &format!("{residual:?} {config:?}"));
                }
            }
        }
    }
}
