//! Breaks a good plan in one place, and says which laws may be named for it.

use crossmesh_core::id::{Rank, TransferId};
use crossmesh_core::region::{Region, Span};
use crossmesh_core::reshard::shards::Shards;
use crossmesh_core::reshard::{Plan, Transfer};
use crossmesh_core::verify::Law;

use crate::seed::Seed;

/// Ways to break a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    Drop,
    Duplicate,
    RedirectDst,
    RedirectSrc,
    Shrink,
    /// A forwarder no longer waits for what it forwards.
    Hasten,
    /// What was forwarded now waits for its forwarder, instead of the other way round.
    Reverse,
    /// Both wait for each other.
    Cycle,
}

impl Mutation {
    pub const ALL: [Mutation; 8] = [
        Mutation::Drop,
        Mutation::Duplicate,
        Mutation::RedirectDst,
        Mutation::RedirectSrc,
        Mutation::Shrink,
        Mutation::Hasten,
        Mutation::Reverse,
        Mutation::Cycle,
    ];
}

/// The broken plan and the laws it may be said to break; none where the plan has no place to break this way.
pub fn mutate(plan: &Plan, mutation: Mutation, seed: &mut Seed) -> Option<(Plan, Vec<Law>)> {
    use Law::*;
    let mut draft = Draft::of(plan);
    let n = draft.transfers.len();
    if n == 0 {
        return None;
    }
    let i = seed.below(n);
    let t = draft.transfers[i].clone();
    let reshard = &plan.problem.reshards[t.tensor as usize];
    let partial = reshard.src.layout.num_contributions() > 1;
    let num_ranks = plan.problem.topology.num_ranks();
    let (src, dst) = (Shards::new(&reshard.src, num_ranks), Shards::new(&reshard.dst, num_ranks));
    let laws = match mutation {
        Mutation::Drop => {
            draft.remove(i);
            vec![Coverage, Causality, Race]
        }
        Mutation::Duplicate => {
            if !dst.contains(t.dst, &t.region) {
                return None; // in transit: twice is a waste, not a mistake
            }
            draft.transfers.push(t);
            if partial { vec![Coverage, Causality, Race] } else { vec![Coverage] }
        }
        Mutation::RedirectDst => {
            // A part that takes another way to where its sum is finished is still counted once.
            let meets_sum = |r: &Rank| {
                draft
                    .transfers
                    .iter()
                    .any(|u| u.dst == *r && u.tensor == t.tensor && u.region.overlaps(&t.region))
            };
            let others =
                ranks(num_ranks).filter(|r| *r != t.src && *r != t.dst && !(partial && meets_sum(r)));
            let others: Vec<Rank> = others.collect();
            draft.transfers[i].dst = *others.get(seed.below(others.len()))?;
            if partial {
                vec![Coverage, Causality, Race, Malformed, Deadlock]
            } else {
                vec![Coverage, Causality, Race]
            }
        }
        Mutation::RedirectSrc => {
            let brought = |r: &Rank| t.after.iter().any(|a| draft.transfers[*a].dst == *r);
            let strangers = ranks(num_ranks).filter(|r| *r != t.dst && *r != t.src && !brought(r));
            let strangers: Vec<Rank> = strangers.filter(|r| !src.contains(*r, &t.region)).collect();
            draft.transfers[i].src = *strangers.get(seed.below(strangers.len()))?;
            vec![Causality]
        }
        Mutation::Shrink => {
            draft.transfers[i].region = shrunk(&t.region, seed)?;
            if partial { vec![Coverage, Causality, Race, Malformed] } else { vec![Coverage, Causality, Race] }
        }
        Mutation::Hasten | Mutation::Reverse => {
            let (i, a) = draft.some_need(&src, t.tensor, seed)?;
            draft.transfers[i].after.retain(|x| *x != a);
            if mutation == Mutation::Reverse {
                draft.transfers[a].after.push(i);
            }
            if partial { vec![Causality, Coverage, Race, Deadlock] } else { vec![Causality] }
        }
        Mutation::Cycle => {
            let a = match t.after.first() {
                Some(a) => *a,
                None if n > 1 => {
                    let a = (i + 1 + seed.below(n - 1)) % n;
                    draft.transfers[i].after.push(a);
                    a
                }
                None => i,
            };
            if !draft.transfers[a].after.contains(&i) {
                draft.transfers[a].after.push(i);
            }
            vec![Deadlock]
        }
    };
    Some((draft.plan(plan), laws))
}

/// Changes something or other, once or twice; the plan may be none the worse for it.
pub fn scramble(plan: &Plan, seed: &mut Seed) -> Plan {
    let mut draft = Draft::of(plan);
    for _ in 0..1 + seed.below(2) {
        let n = draft.transfers.len();
        if n == 0 {
            break;
        }
        let (i, j) = (seed.below(n), seed.below(n));
        let rank = Rank(seed.below(plan.problem.topology.num_ranks()) as u32);
        let t = &mut draft.transfers[i];
        match seed.below(10) {
            0 if rank != t.dst => t.src = rank,
            1 if rank != t.src => t.dst = rank,
            2 if !t.after.contains(&j) => t.after.push(j),
            3 if !t.after.is_empty() => {
                t.after.swap_remove(j % t.after.len());
            }
            4 => draft.swap(i, j),
            5 => t.region = shrunk(&t.region, seed).unwrap_or(t.region.clone()),
            6 => draft.remove(i),
            7 => draft.split(i, seed),
            8 if plan.problem.reshards[t.tensor as usize].src.layout.num_contributions() > 1 => {
                match seed.one_in(3) {
                    true => t.then_own = !t.then_own,
                    false => t.reduce = !t.reduce,
                }
            }
            _ => draft.transfers[i].after.reverse(),
        }
    }
    draft.plan(plan)
}

fn ranks(num_ranks: usize) -> impl Iterator<Item = Rank> {
    (0..num_ranks as u32).map(Rank)
}

/// The box without its first or last slice along some dim.
fn shrunk(region: &Region, seed: &mut Seed) -> Option<Region> {
    let long: Vec<usize> = (0..region.num_dims()).filter(|d| region.spans()[*d].len() > 1).collect();
    let dim = *long.get(seed.below(long.len()))?;
    let Span { start, end } = region.spans()[dim];
    let span = if seed.one_in(2) { Span::new(start + 1, end) } else { Span::new(start, end - 1) };
    Some(region.with_span(dim, span))
}

/// A plan that can be edited.
struct Draft {
    transfers: Vec<DraftTransfer>,
}

#[derive(Clone)]
struct DraftTransfer {
    tensor: u32,
    src: Rank,
    dst: Rank,
    region: Region,
    reduce: bool,
    then_own: bool,
    after: Vec<usize>,
}

impl Draft {
    fn of(plan: &Plan) -> Self {
        let draft = |t: &Transfer| DraftTransfer {
            tensor: t.tensor,
            src: t.src,
            dst: t.dst,
            region: plan.region(t).clone(),
            reduce: t.reduce,
            then_own: t.then_own,
            after: plan.after(t).iter().map(|a| a.index()).collect(),
        };
        Self { transfers: plan.transfers().iter().map(draft).collect() }
    }

    fn remove(&mut self, i: usize) {
        self.transfers.remove(i);
        for t in &mut self.transfers {
            t.after.retain(|a| *a != i);
            t.after.iter_mut().filter(|a| **a > i).for_each(|a| *a -= 1);
        }
    }

    /// Exchanges two transfers' places in the list; what they say stays.
    fn swap(&mut self, i: usize, j: usize) {
        self.transfers.swap(i, j);
        for a in self.transfers.iter_mut().flat_map(|t| &mut t.after) {
            *a = if *a == i {
                j
            } else if *a == j {
                i
            } else {
                *a
            };
        }
    }

    /// Makes two transfers of one, each with a part of the box; who waited for it waits for both.
    fn split(&mut self, i: usize, seed: &mut Seed) {
        let region = self.transfers[i].region.clone();
        let Some(less) = shrunk(&region, seed) else { return };
        let rest = region.subtract(&less).swap_remove(0);
        let new = self.transfers.len();
        for t in &mut self.transfers {
            if t.after.contains(&i) {
                t.after.push(new);
            }
        }
        self.transfers.push(DraftTransfer { region: rest, ..self.transfers[i].clone() });
        self.transfers[i].region = less;
    }

    /// A transfer and one it cannot do without: the only one to bring some of its box, or a part of its sum.
    fn some_need(&self, src: &Shards, tensor: u32, seed: &mut Seed) -> Option<(usize, usize)> {
        let mut needs = Vec::new();
        for (i, t) in self.transfers.iter().enumerate().filter(|(_, t)| t.tensor == tensor) {
            if src.overlaps(t.src, &t.region) && !src.is_partial() {
                continue;
            }
            let brings = |a: &&usize| {
                let a = &self.transfers[**a];
                a.tensor == tensor && a.dst == t.src && a.region.overlaps(&t.region)
            };
            let brought: Vec<usize> = t.after.iter().filter(brings).copied().collect();
            let alone = |a: &usize| {
                src.is_partial()
                    || brought
                        .iter()
                        .all(|b| b == a || !self.transfers[*b].region.overlaps(&self.transfers[*a].region))
            };
            needs.extend(brought.iter().filter(|a| alone(a)).map(|a| (i, *a)));
        }
        needs.get(seed.below(needs.len())).copied()
    }

    fn plan(self, like: &Plan) -> Plan {
        let mut plan = Plan::new(like.problem.clone(), like.strategy.clone(), like.chunk_bytes);
        for t in self.transfers {
            let region = plan.add_region(t.region);
            let after: Vec<TransferId> = t.after.iter().map(|a| TransferId::at(*a)).collect();
            let id = plan.add(t.tensor, t.src, t.dst, region, &after);
            plan.transfer_mut(id).reduce = t.reduce;
            plan.transfer_mut(id).then_own = t.then_own;
        }
        plan
    }
}
