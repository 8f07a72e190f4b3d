//! The obvious slow oracle: every element is labelled with the parts of its sum that are in it (part 0 alone where
//! values are whole), and plans and programs are carried out one transfer, one element at a time.

use std::collections::{BTreeSet, HashMap};

use crossmesh_core::id::{Rank, TransferId};
use crossmesh_core::program::{Holds, Program};
use crossmesh_core::region::Region;
use crossmesh_core::reshard::{Placed, Plan};

use crate::interpret::{Sends, interpret};
use crate::seed::Seed;

/// A global element, and the parts added up in it.
pub type Element = (u32, Vec<u64>);
pub type Parts = BTreeSet<u32>;

/// Every element of a box.
pub fn elements(region: &Region) -> Vec<Vec<u64>> {
    let mut out = vec![vec![]];
    for span in region.spans() {
        out = out
            .iter()
            .flat_map(|prefix: &Vec<u64>| {
                (span.start..span.end).map(move |x| prefix.iter().copied().chain([x]).collect())
            })
            .collect();
    }
    out
}

/// The elements a rank holds under a layout, with its part of the sum.
fn shard(placed: &Placed, tensor: u32, rank: Rank) -> HashMap<Element, Parts> {
    let Some(position) = placed.ranks.iter().position(|r| *r == rank) else { return HashMap::new() };
    let coord = placed.layout.mesh().coord(position);
    let part = Parts::from([placed.layout.contribution_at(&coord) as u32]);
    let boxes = placed.layout.shard_at(&coord);
    boxes.iter().flat_map(elements).map(|e| ((tensor, e), part.clone())).collect()
}

/// What every rank has at the start, or should have at the end.
fn shards(plan: &Plan, side: impl Fn(usize) -> Placed) -> Vec<HashMap<Element, Parts>> {
    let tensors = 0..plan.problem.reshards.len();
    let of = |rank: u32| tensors.clone().flat_map(|t| shard(&side(t), t as u32, Rank(rank))).collect();
    (0..plan.problem.topology.num_ranks() as u32).map(of).collect()
}

fn sources(plan: &Plan) -> Vec<HashMap<Element, Parts>> {
    shards(plan, |t| plan.problem.reshards[t].src.clone())
}

fn targets(plan: &Plan) -> Vec<HashMap<Element, Parts>> {
    let mut targets = shards(plan, |t| plan.problem.reshards[t].dst.clone());
    for ((tensor, _), parts) in targets.iter_mut().flatten() {
        let contributions = plan.problem.reshards[*tensor as usize].src.layout.num_contributions();
        *parts = (0..contributions as u32).collect();
    }
    targets
}

/// Carries out a plan in an order drawn from the seed, and compares every destination shard. For whole values this
/// answers yes exactly if the plan is right. Sums that depend on luck may come out right here all the same.
pub fn replay(plan: &Plan, seed: u64) -> Result<(), String> {
    let order = runnable_order(plan, seed)?;
    let mut replay =
        Replay { plan, own: sources(plan), targets: targets(plan), cells: HashMap::new(), arrived: vec![] };
    replay.arrived = vec![HashMap::new(); replay.own.len()];
    for id in order {
        replay.step(id)?;
    }
    replay.compare()
}

/// One of the orders that `after`, the channels and the boxes that sums add up in allow.
fn runnable_order(plan: &Plan, seed: u64) -> Result<Vec<TransferId>, String> {
    let mut seed = Seed(seed);
    let n = plan.transfers().len();
    let mut waits: Vec<Vec<usize>> =
        plan.transfers().iter().map(|t| plan.after(t).iter().map(|a| a.index()).collect()).collect();
    let mut last_on_channel = HashMap::new();
    let mut last_in_box = HashMap::new();
    for (i, t) in plan.transfers().iter().enumerate() {
        waits[i].extend(last_on_channel.insert((t.src, t.dst, t.lane), i));
        let previous = last_in_box.insert((t.tensor, t.dst, plan.region(t)), i);
        waits[i].extend(previous.filter(|_| t.reduce));
    }
    let mut done = vec![false; n];
    let mut order = Vec::new();
    while order.len() < n {
        let ready: Vec<usize> = (0..n).filter(|&i| !done[i] && waits[i].iter().all(|&w| done[w])).collect();
        if ready.is_empty() {
            return Err("the transfers wait for each other".into());
        }
        let next = ready[seed.below(ready.len())];
        done[next] = true;
        order.push(TransferId::at(next));
    }
    Ok(order)
}

struct Replay<'a> {
    plan: &'a Plan,
    own: Vec<HashMap<Element, Parts>>,
    targets: Vec<HashMap<Element, Parts>>,
    /// Sums: what is in each box of each rank.
    cells: HashMap<(u32, Rank, Region), HashMap<Element, Parts>>,
    /// By rank: how often each wanted element has come to be there in full.
    arrived: Vec<HashMap<Element, u32>>,
}

impl Replay<'_> {
    fn step(&mut self, id: TransferId) -> Result<(), String> {
        let t = &self.plan.transfers()[id.index()];
        let region = self.plan.region(t);
        let wanted = &self.targets[t.dst.index()];
        let elements: Vec<Element> = elements(region).into_iter().map(|e| (t.tensor, e)).collect();
        let delivered = elements.iter().all(|e| wanted.contains_key(e));
        let mut carried = Vec::new();
        for e in elements {
            let value =
                self.value(id, &e).ok_or_else(|| format!("{} does not hold {e:?} for {id}", t.src))?;
            carried.push((e, value));
        }
        let own = &self.own[t.dst.index()];
        let cell = self.cells.entry((t.tensor, t.dst, region.clone())).or_default();
        for (e, value) in carried {
            let held =
                cell.get(&e).or_else(|| own.get(&e).filter(|_| self.plan.transfers()[id.index()].reduce));
            let mut sum = value;
            if let Some(held) = held.filter(|_| t.reduce) {
                if !held.is_disjoint(&sum) {
                    return Err(format!("{id} adds to {e:?} on {} a second time", t.dst));
                }
                sum.extend(held);
            }
            if t.then_own {
                let part = own.get(&e).ok_or_else(|| format!("{} has no part of {e:?}", t.dst))?;
                if !part.is_disjoint(&sum) {
                    return Err(format!("{} adds its own part to {e:?} a second time", t.dst));
                }
                sum.extend(part);
            }
            if delivered && sum == wanted[&e] {
                *self.arrived[t.dst.index()].entry(e.clone()).or_default() += 1;
            }
            cell.insert(e, sum);
        }
        Ok(())
    }

    /// What the sender has of an element: what the transfers it waits for left, else what it held from the start.
    fn value(&self, id: TransferId, e: &Element) -> Option<Parts> {
        let t = &self.plan.transfers()[id.index()];
        let mut named: Vec<TransferId> = self.plan.after(t).to_vec();
        named.sort_unstable();
        let brought =
            named.iter().rev().map(|a| &self.plan.transfers()[a.index()]).filter(|a| a.dst == t.src);
        let brought = brought
            .filter_map(|a| self.cells.get(&(a.tensor, a.dst, self.plan.region(a).clone()))?.get(e))
            .next();
        brought.or_else(|| self.own[t.src.index()].get(e)).cloned()
    }

    fn compare(&self) -> Result<(), String> {
        for (rank, wanted) in self.targets.iter().enumerate() {
            for (e, parts) in wanted {
                let whole = parts.len() == 1;
                let kept = u32::from(whole && self.own[rank].contains_key(e));
                let times = kept + self.arrived[rank].get(e).copied().unwrap_or(0);
                if times != 1 {
                    return Err(format!("r{rank} has {e:?} {times} times"));
                }
            }
        }
        for ((_, rank, region), cell) in &self.cells {
            let wanted = &self.targets[rank.index()];
            let delivered = cell.keys().all(|e| wanted.contains_key(e));
            if delivered && cell.iter().any(|(e, parts)| *parts != wanted[e]) {
                return Err(format!("{rank} ends up with an unfinished sum in {region}"));
            }
        }
        Ok(())
    }
}

/// Carries out a program that a plan was lowered to, with both kinds of sends and in several orders drawn from the seed. Its goals must
/// be the destinations of the plan, and hold the same bits every time.
pub fn run_program(plan: &Plan, program: &Program, seed: u64) -> Result<(), String> {
    let wanted: Vec<BTreeSet<Element>> =
        targets(plan).into_iter().map(|elements| elements.into_keys().collect()).collect();
    let mut goals: Vec<BTreeSet<Element>> = vec![BTreeSet::new(); wanted.len()];
    for (rank, ranked) in program.ranks.iter().enumerate() {
        for tile in ranked.tiles.iter().filter(|t| t.holds == Holds::Goal) {
            goals[rank].extend(elements(&program.boxes[tile.region]).into_iter().map(|e| (tile.tensor, e)));
        }
    }
    if goals != wanted {
        return Err("the program has other goals than the plan has destinations".into());
    }
    let mut first = None;
    for (i, sends) in (0..).zip(Sends::ALL.into_iter().cycle().take(4)) {
        let outcome = interpret(program, sends, seed.wrapping_add(i << 32))?;
        if *first.get_or_insert_with(|| outcome.clone()) != outcome {
            return Err("a sum depends on the order of messages".into());
        }
    }
    Ok(())
}
