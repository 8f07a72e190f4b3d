//! Two chunks a device in a V: ZBV, and the schedules of Pipeline Parallelism with Controllable Memory.
//!
//! The latter repeat a building block, the passes of one microbatch, every six slots (F, F, B, B, W, W on each device):
//! ```text
//! V-Min, p = 3, one microbatch       device 0   F.....f..b...........B      F, B of chunk 0; f, b of chunk 1
//!                                    device 1   .F...f....b.........B.
//!                                    device 2   ..F.f......b.......B..
//! ```
//! Where each of its four legs (down, up, down, up) has a slope: the steeper, the longer activations live, and the more
//! room there is to fill. V-Min's slopes are 1, 1, 1, 1, V-Half's 2, 1, 2, 1 and V-ZB's 4, 2, 4, 2. W goes where there is a
//! free slot. The block's order is then followed with the true costs ([`Dispatch`]), which closes the gaps at both ends
//! without raising its peak.

use crate::id::{MicrobatchId, StageId};
use crate::schedule::memory::{peaks, within};
use crate::schedule::{Costs, Footprint, PassKind, time};

use super::dispatch::{Dispatch, Fill, Memory, Ranks};
use super::{GenerateError, Name, Pass, Placement, Schedule, Spec, named};

/// Which building block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    Min,
    Half,
    ZeroBubble,
}

/// Slots of a block: what each device does for one microbatch.
const INTERVAL: u32 = 6;

impl Block {
    fn name(self) -> Name {
        match self {
            Block::Min => Name::VMin,
            Block::Half => Name::VHalf,
            Block::ZeroBubble => Name::VZb,
        }
    }

    /// When device `i` of `p` runs F and F of chunk 1, B of chunk 1 and B. The gap before the first B keeps blocks that
    /// are repeated from colliding. algorithms.md B9.
    fn offsets(self, p: u32, i: u32) -> [u32; 4] {
        match self {
            Block::Min => {
                let gap = if p.is_multiple_of(3) { 2 } else { 0 };
                [i, 2 * p - 1 - i, 2 * p + gap + i, 4 * p + gap - 1 - i]
            }
            Block::Half => {
                let gap = if p.is_multiple_of(2) { 3 } else { 0 };
                [2 * i, 3 * p - 2 - i, 3 * p + gap + 2 * i - 1, 6 * p + gap - 2 - i]
            }
            Block::ZeroBubble => [4 * i, 6 * p - 5 - 2 * i, 6 * p - 4 + 4 * i, 12 * p - 9 - 2 * i],
        }
    }

    /// The passes of device `i`, in the order of their slots.
    fn order(self, placement: &Placement, i: u32, microbatches: u32) -> Vec<Pass> {
        let p = placement.num_devices() as u32;
        let (down, up) = (StageId(i), StageId(2 * p - 1 - i));
        let passes = [(PassKind::F, down), (PassKind::F, up), (PassKind::B, up), (PassKind::B, down)];
        let mut slots: Vec<(u64, Pass)> = Vec::with_capacity(4 * microbatches as usize);
        for m in 0..microbatches {
            for (offset, (kind, stage)) in self.offsets(p, i).into_iter().zip(passes) {
                let slot = u64::from(offset) + u64::from(INTERVAL) * u64::from(m);
                slots.push((slot, Pass::new(kind, stage, MicrobatchId(m))));
            }
        }
        slots.sort_unstable();
        with_weights(&slots)
    }
}

/// Puts each W, oldest first, into the first slot that is free behind its B.
fn with_weights(slots: &[(u64, Pass)]) -> Vec<Pass> {
    let mut order = Vec::with_capacity(slots.len() * 3 / 2);
    let mut waiting = std::collections::VecDeque::new();
    let mut now = 0;
    for &(slot, pass) in slots {
        let free = (slot - now) as usize;
        order.extend(waiting.drain(..free.min(waiting.len())));
        order.push(pass);
        if pass.kind == PassKind::B {
            waiting.push_back(pass.with_kind(PassKind::W));
        }
        now = slot + 1;
    }
    order.extend(waiting);
    order
}

pub fn block(
    block: Block,
    spec: &Spec,
    placement: Placement,
    costs: &Costs,
) -> Result<Schedule, GenerateError> {
    let listed: Vec<Vec<Pass>> =
        (0..spec.devices).map(|i| block.order(&placement, i, spec.microbatches)).collect();
    let plain = named(block.name(), spec, placement, listed)?;
    shortest(followed(plain, costs)?, costs)
}

/// A schedule, and others that follow its order but overtake what waits. None holds more than it does with even costs.
fn followed(plain: Schedule, costs: &Costs) -> Result<Vec<Schedule>, GenerateError> {
    let placement = plain.placement().clone();
    let footprint = from_f_to_w(&placement);
    let even = Costs::even(placement.num_stages(), 1.0, 1.0, 1.0, 0.0)?;
    let held = peaks(&plain, &time(&plain, &even)?, &footprint);
    let caps = vec![held.iter().map(|p| p.amount).fold(0.0, f64::max); held.len()];
    let memory = Some(Memory { footprint: &footprint, caps: &caps });
    let mut schedules = Vec::new();
    // Orders that are good with even costs are often good with others, and the other way round.
    for costs in [&even, costs] {
        for fill in Fill::ALL {
            let microbatches = plain.num_microbatches();
            let dispatch = Dispatch { placement: &placement, microbatches, costs, memory, split: true, fill };
            if let Some(orders) = dispatch.run(Ranks::Listed(plain.devices())) {
                let routes = plain.routes().clone();
                let name = plain.name();
                schedules.push(Schedule::new(name, placement.clone(), routes, microbatches, orders)?);
            }
        }
    }
    schedules.insert(0, plain);
    Ok(schedules)
}

/// ZBV, in the memory of 1F1B: the published order, and what dispatching by kind makes of these costs: backwards first, and
/// forwards of chunk 1 before those of chunk 0. algorithms.md B8.
pub fn zbv(spec: &Spec, placement: Placement, costs: &Costs) -> Result<Schedule, GenerateError> {
    // From first to last; the first of W is run before the forwards behind it if W is in its turn.
    const ORDERS: [fn(PassKind, u32) -> u32; 3] = [
        |kind, chunk| {
            place([(PassKind::B, 0), (PassKind::B, 1), (PassKind::F, 1), (PassKind::W, 0)], kind, chunk)
        },
        |kind, chunk| {
            place([(PassKind::B, 1), (PassKind::B, 0), (PassKind::F, 1), (PassKind::W, 0)], kind, chunk)
        },
        |kind, chunk| {
            place([(PassKind::F, 1), (PassKind::F, 0), (PassKind::B, 1), (PassKind::B, 0)], kind, chunk)
        },
    ];
    let footprint = from_f_to_w(&placement);
    let whole = 2.0 * f64::from(spec.devices);
    // The caps of a spec are in whole shares of a device's layers, and of its own count.
    let caps: Vec<f64> = match &spec.caps {
        Some(caps) => caps.iter().map(|cap| (2.0 * cap).min(whole)).collect(),
        None => vec![whole; spec.devices as usize],
    };
    let memory = Some(Memory { footprint: &footprint, caps: &caps });
    let published: Vec<Vec<Pass>> =
        (0..spec.devices).map(|i| zbv_order(spec.devices, i, spec.microbatches)).collect();
    let mut candidates = followed(named(Name::Zbv, spec, placement.clone(), published)?, costs)?;
    for fill in Fill::ALL {
        for (rank, reserve) in ORDERS.into_iter().flat_map(|rank| [(rank, 1.0), (rank, 0.0)]) {
            let microbatches = spec.microbatches;
            let dispatch = Dispatch { placement: &placement, microbatches, costs, memory, split: true, fill };
            // With an activation kept free for the last chunk the oldest microbatch always passes; without, it may not.
            if let Some(orders) = dispatch.run(Ranks::Classes { rank, reserve }) {
                candidates.push(named(Name::Zbv, spec, placement.clone(), orders)?);
            }
        }
    }
    if let Some(caps) = &spec.caps {
        let shares = Footprint::shares(&placement);
        let fits = |s: &Schedule| time(s, costs).is_ok_and(|timed| within(s, &timed, &shares, caps).is_ok());
        candidates.sort_by_key(|schedule| !fits(schedule));
        let fitting = candidates.iter().filter(|schedule| fits(schedule)).count();
        candidates.truncate(fitting.max(1));
    }
    shortest(candidates, costs)
}

/// The published order: down the V, up it beside further forwards, then backwards with W right behind them, and at the end
/// W where there is nothing else.
fn zbv_order(p: u32, i: u32, microbatches: u32) -> Vec<Pass> {
    use PassKind::{B, F, W};
    // Fewer microbatches than fill the V are those of a longer step.
    let filled = microbatches.max(2 * p - 1);
    let stages = [StageId(i), StageId(2 * p - 1 - i)];
    let mut next = [[0u32; 2]; 3];
    let mut order: Vec<Pass> = Vec::new();
    let mut push = |times: u32, passes: &[(PassKind, usize)]| {
        for &(kind, chunk) in (0..times).flat_map(|_| passes) {
            let m = &mut next[kind as usize][chunk];
            if *m < filled {
                order.push(Pass::new(kind, stages[chunk], MicrobatchId(*m)));
                *m += 1;
            }
        }
    };
    push(2 * (p - i) - 1, &[(F, 0)]);
    push(i, &[(F, 1), (F, 0)]);
    push(p - i, &[(F, 1), (B, 1), (W, 1)]);
    push(filled - p, &[(F, 0), (B, 0), (W, 0), (F, 1), (B, 1), (W, 1)]);
    push(i, &[(B, 0), (B, 1)]);
    push(p - i, &[(B, 0), (W, 0)]);
    push(filled, &[(W, 1)]);
    push(filled, &[(W, 0)]);
    order.retain(|pass| pass.microbatch.0 < microbatches);
    order
}

/// Where a kind and chunk stand in the list; what it does not name stands behind. W is named for both chunks.
fn place(list: [(PassKind, u32); 4], kind: PassKind, chunk: u32) -> u32 {
    let chunk = if kind == PassKind::W { 0 } else { chunk };
    list.iter().position(|entry| *entry == (kind, chunk)).unwrap_or(list.len()) as u32
}

/// These schedules count an activation until its W: no share of it goes with B.
fn from_f_to_w(placement: &Placement) -> Footprint {
    Footprint::units(placement).keeping(1.0)
}

/// The schedule that ends first; of equals the first one.
pub fn shortest(candidates: Vec<Schedule>, costs: &Costs) -> Result<Schedule, GenerateError> {
    let mut best: Option<(f64, Schedule)> = None;
    for schedule in candidates {
        let makespan = time(&schedule, costs)?.makespan;
        if best.as_ref().is_none_or(|(shortest, _)| makespan < *shortest * (1.0 - 1e-12)) {
            best = Some((makespan, schedule));
        }
    }
    Ok(best.expect("there is a candidate").1)
}
