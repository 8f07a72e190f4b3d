//! Planners too simple to be wrong, so that there are plans to check before and beside the real ones.

use crossmesh_core::id::{Rank, RegionId, TransferId};
use crossmesh_core::reshard::pieces::{Pieces, Tile};
use crossmesh_core::reshard::{Plan, Problem};

/// How receivers get a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Each from the first holder.
    Direct,
    /// The first from the first holder, the others each from the one before.
    Chain,
    /// As a chain, but with every piece behind the one before, whoever sends it.
    Ordered,
}

/// Plans every tensor piece by piece. Partial sums are added up at the first receiver, along a line of holders that
/// ends there, or at a holder that passes the sum on, each in its way; the other receivers get the whole values from
/// the first.
pub fn plan(problem: &Problem, way: Delivery) -> Plan {
    let mut plan = Plan::new(problem.clone(), format!("simple {way:?}"), 1 << 20);
    let mut last: Option<TransferId> = None;
    for (tensor, reshard) in (0..).zip(&problem.reshards) {
        let pieces = Pieces::of(reshard).expect("test problems are small");
        let partial = reshard.src.layout.num_contributions() > 1;
        for piece in pieces.pieces {
            let holders = &pieces.src_tiles[piece.src_tile as usize];
            let receivers = &pieces.dst_tiles[piece.dst_tile as usize].ranks;
            let region = plan.add_region(piece.region);
            let order = last.filter(|_| way == Delivery::Ordered);
            last = match partial {
                true => add_up(&mut plan, tensor, region, holders, receivers, (order, way)),
                false => spread(&mut plan, tensor, region, holders, receivers, (order, way)),
            }
            .or(last);
        }
    }
    plan
}

fn spread(
    plan: &mut Plan,
    tensor: u32,
    region: RegionId,
    holders: &Tile,
    receivers: &[Rank],
    (order, way): (Option<TransferId>, Delivery),
) -> Option<TransferId> {
    let mut from = (holders.ranks[0], None);
    let mut last = None;
    for &to in receivers.iter().filter(|r| !holders.ranks.contains(r)) {
        let after: Vec<TransferId> = from.1.into_iter().chain(order).collect();
        let id = plan.add(tensor, from.0, to, region, &after);
        last = Some(id);
        if way != Delivery::Direct {
            from = (to, Some(id));
        }
    }
    last
}

fn add_up(
    plan: &mut Plan,
    tensor: u32,
    region: RegionId,
    holders: &Tile,
    receivers: &[Rank],
    (order, way): (Option<TransferId>, Delivery),
) -> Option<TransferId> {
    // A receiver that has a part of its own, if there is one: it needs no message to itself.
    let own = receivers.iter().find(|r| holders.ranks.contains(r));
    let first = *own.or(receivers.first())?;
    // One holder of every part, the first receiver last if it is one of them.
    let mut line: Vec<(u32, Rank)> = Vec::new();
    for (&rank, &part) in holders.ranks.iter().zip(&holders.contributions) {
        match line.iter_mut().find(|(p, _)| *p == part) {
            Some(known) if rank == first => known.1 = rank,
            Some(_) => {}
            None => line.push((part, rank)),
        }
    }
    line.sort_by_key(|(part, rank)| (*rank == first, *part));
    let mut stops: Vec<Rank> = line.iter().map(|(_, rank)| *rank).collect();
    if stops.last() != Some(&first) {
        stops.push(first);
    }
    let hops: Vec<(Rank, Rank)> = match way {
        Delivery::Direct => stops[..stops.len() - 1].iter().map(|&from| (from, first)).collect(),
        Delivery::Chain => stops.windows(2).map(|pair| (pair[0], pair[1])).collect(),
        Delivery::Ordered => {
            let (hub, parts) = line.split_last()?;
            let to_hub = parts.iter().map(|(_, from)| (*from, hub.1));
            to_hub.chain((hub.1 != first).then_some((hub.1, first))).collect()
        }
    };
    let mut whole: Vec<TransferId> = Vec::new();
    for (from, to) in hops {
        let brought = whole.iter().copied().filter(|id| plan.transfers()[id.index()].dst == from);
        let after: Vec<TransferId> = brought.chain(order).collect();
        let id = plan.add(tensor, from, to, region, &after);
        plan.transfer_mut(id).reduce = true;
        whole.push(id);
    }
    whole.retain(|id| plan.transfers()[id.index()].dst == first);
    let mut last = whole.last().copied();
    for &to in receivers.iter().filter(|r| **r != first) {
        last = Some(plan.add(tensor, first, to, region, &whole));
    }
    last
}
