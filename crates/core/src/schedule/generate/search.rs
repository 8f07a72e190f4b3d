//! `search`: the best order that can be found for these costs, caps and hops in a bounded number of steps.
//!
//! It starts from every named schedule that fits, follows each with the true costs, and then improves the shortest: a pass on
//! the critical path that waits only for its device's turn is moved ahead of others, as long as the step gets shorter. So
//! it is never worse than the best named one, and always the same for the same input.

use crate::id::{DeviceId, MicrobatchId};
use crate::schedule::memory::within;
use crate::schedule::{Costs, Footprint, PassKind, Timed, time};

use super::dispatch::{Dispatch, Fill, Memory, Ranks};
use super::{Backward, GenerateError, Name, Pass, Placement, Routes, Schedule, Spec, generate};

/// Timings that improving may spend.
pub const SEARCH_STEPS: u32 = 2000;
/// Passes that all timings together may look at; bounds the steps for large schedules.
const SEARCH_PASSES: usize = 16 << 20;
/// Starting points that are improved.
const IMPROVED: usize = 3;
/// How many places a pass may be moved ahead at once.
const REACH: usize = 12;

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub schedule: Schedule,
    pub makespan: f64,
    /// The named schedule that it came from.
    pub start: Name,
    /// Every named schedule that fits, with its makespan.
    pub named: Vec<(Name, f64)>,
    /// Timings spent on improving.
    pub steps: u32,
}

struct Start {
    name: Name,
    schedule: Schedule,
    timed: Timed,
}

pub fn search(spec: &Spec, steps: u32) -> Result<Found, GenerateError> {
    let caps = spec.checked_caps()?;
    let mut starts = Vec::new();
    let mut named = Vec::new();
    for (name, spec) in variants(spec) {
        let schedule = match generate(name, &spec) {
            Ok(schedule) => schedule,
            Err(
                GenerateError::OverCap(_)
                | GenerateError::NotAMultiple { .. }
                | GenerateError::TooFew { .. }
                | GenerateError::Slices { .. },
            ) => continue,
            Err(error) => return Err(error),
        };
        let costs = spec.costs(schedule.placement())?;
        let timed = time(&schedule, &costs)?;
        named.push((name, timed.makespan));
        let others = followed(name, &spec, &schedule, &costs)?;
        keep_shortest(&mut starts, [Start { name, schedule, timed }].into_iter().chain(others));
    }
    keep_shortest(&mut starts, one_at_a_time(spec)?);
    let mut best: Option<Start> = None;
    let mut spent = 0;
    for start in starts {
        let share = steps / IMPROVED as u32;
        let (start, used) = improve(spec, start, caps, share)?;
        spent += used;
        if best.as_ref().is_none_or(|b| start.timed.makespan < b.timed.makespan * (1.0 - 1e-12)) {
            best = Some(start);
        }
    }
    let Start { name: start, schedule, timed } = best.expect("one microbatch at a time always fits");
    let schedule = schedule.renamed(Name::Search.name());
    Ok(Found { schedule, makespan: timed.makespan, start, named, steps: spent })
}

/// Only the shortest are worth their memory. A stable sort: of equals, the earlier ones.
fn keep_shortest(starts: &mut Vec<Start>, more: impl IntoIterator<Item = Start>) {
    starts.extend(more);
    starts.sort_by(|a, b| a.timed.makespan.total_cmp(&b.timed.makespan));
    starts.truncate(IMPROVED);
}

/// The named schedules with the chunks and backwards that the spec leaves open.
fn variants(spec: &Spec) -> Vec<(Name, Spec)> {
    let chunks = |name| match (spec.chunks, name) {
        (None, Name::Interleaved1F1B) => vec![2, 3, 4],
        (asked, name) => name.chunks(asked).into_iter().collect(),
    };
    let mut variants = Vec::new();
    for name in Name::ALL.into_iter().filter(|name| *name != Name::Search) {
        let both = [Backward::Fused, Backward::Split];
        let backwards: Vec<Backward> = both
            .into_iter()
            .filter(|b| spec.backward.is_none_or(|asked| asked == *b) && name.backward(Some(*b)).is_ok())
            .collect();
        for chunks in chunks(name) {
            for &backward in &backwards {
                let spec = Spec { chunks: Some(chunks), backward: Some(backward), ..spec.clone() };
                variants.push((name, spec));
            }
        }
    }
    variants
}

/// The schedule's order followed with the true costs, where passes overtake what waits.
fn followed(
    name: Name,
    spec: &Spec,
    schedule: &Schedule,
    costs: &Costs,
) -> Result<Vec<Start>, GenerateError> {
    let Some(split) = is_split(schedule) else { return Ok(vec![]) };
    let placement = schedule.placement();
    let footprint = Footprint::shares(placement);
    let memory = spec.checked_caps()?.map(|caps| Memory { footprint: &footprint, caps });
    let mut starts = Vec::new();
    for fill in Fill::ALL {
        let microbatches = spec.microbatches;
        let dispatch = Dispatch { placement, microbatches, costs, memory, split, fill };
        let Some(orders) = dispatch.run(Ranks::Listed(schedule.devices())) else { continue };
        let schedule = with_orders(schedule, orders)?;
        let timed = time(&schedule, costs)?;
        starts.push(Start { name, schedule, timed });
        if !split {
            break;
        }
    }
    Ok(starts)
}

/// Whether all backwards are split (`true`) or fused (`false`); `None` where they differ or activations are moved.
fn is_split(schedule: &Schedule) -> Option<bool> {
    let kinds = |wanted: &[PassKind]| schedule.devices().iter().flatten().all(|p| wanted.contains(&p.kind));
    match (kinds(&[PassKind::F, PassKind::BW]), kinds(&[PassKind::F, PassKind::B, PassKind::W])) {
        (true, _) => Some(false),
        (_, true) => Some(true),
        _ => None,
    }
}

fn with_orders(schedule: &Schedule, orders: Vec<Vec<Pass>>) -> Result<Schedule, GenerateError> {
    let placement = schedule.placement().clone();
    let routes = Routes::model_order(placement.num_stages());
    Ok(Schedule::new(schedule.name(), placement, routes, schedule.num_microbatches(), orders)?)
}

/// What fits wherever anything fits: a microbatch leaves before the next one comes.
fn one_at_a_time(spec: &Spec) -> Result<Option<Start>, GenerateError> {
    let placement = Placement::round_robin(spec.devices, spec.chunks.unwrap_or(1))?;
    super::super::bounded(placement.num_stages(), spec.microbatches)?;
    let Ok(costs) = spec.costs(&placement) else { return Ok(None) };
    let split = spec.backward == Some(Backward::Split);
    let backward: &[PassKind] = if split { &[PassKind::B, PassKind::W] } else { &[PassKind::BW] };
    let order = |device: DeviceId| {
        let stages = placement.stages_on(device);
        let one = |m| {
            let pass = move |kind, stage| Pass::new(kind, stage, MicrobatchId(m));
            let forwards = stages.iter().map(move |s| pass(PassKind::F, *s));
            let backwards = stages.iter().rev();
            forwards.chain(backwards.flat_map(move |s| backward.iter().map(move |kind| pass(*kind, *s))))
        };
        (0..spec.microbatches).flat_map(one).collect()
    };
    let orders = placement.devices().map(order).collect();
    let schedule = super::named(Name::Search, spec, placement.clone(), orders)?;
    let timed = time(&schedule, &costs)?;
    Ok(Some(Start { name: Name::Search, schedule, timed }))
}

/// Moves passes of the critical path ahead until nothing helps or the steps are spent.
fn improve(
    spec: &Spec,
    mut best: Start,
    caps: Option<&[f64]>,
    steps: u32,
) -> Result<(Start, u32), GenerateError> {
    let bound = SEARCH_PASSES / IMPROVED / best.schedule.num_passes().max(1);
    let steps = steps.min(u32::try_from(bound).unwrap_or(u32::MAX));
    let plain = best.schedule.devices().iter().flatten().all(|pass| !pass.kind.is_move());
    if !plain {
        return Ok((best, 0));
    }
    let costs = spec.costs(best.schedule.placement())?;
    let footprint = Footprint::shares(best.schedule.placement());
    let mut spent = 0;
    'again: loop {
        for (device, from, to) in moves(&best, &costs) {
            if spent == steps {
                break 'again;
            }
            spent += 1;
            let mut orders = best.schedule.devices().to_vec();
            orders[device.index()][to..=from].rotate_right(1);
            let schedule = with_orders(&best.schedule, orders)?;
            let Ok(timed) = time(&schedule, &costs) else { continue };
            let fits = caps.is_none_or(|caps| within(&schedule, &timed, &footprint, caps).is_ok());
            if fits && shorter(&timed, &best.timed) {
                best = Start { name: best.name, schedule, timed };
                continue 'again;
            }
        }
        break;
    }
    Ok((best, spent))
}

/// Ends earlier; or at the same time, but its passes do on average.
fn shorter(timed: &Timed, than: &Timed) -> bool {
    let slack = 1e-9 * than.makespan;
    let sum = |t: &Timed| t.spans.iter().flatten().map(|s| s.end).sum::<f64>();
    timed.makespan < than.makespan - slack
        || (timed.makespan <= than.makespan + slack && sum(timed) < sum(than) * (1.0 - 1e-9))
}

/// Moves worth a try: device, and from where to where. Walks back from the last pass over what each waited for; where that was
/// only the device's turn, the pass could go ahead of those before it.
fn moves(start: &Start, costs: &Costs) -> Vec<(DeviceId, usize, usize)> {
    let Start { schedule, timed, .. } = start;
    let slack = 1e-9 * timed.makespan;
    let span = |(device, place): (DeviceId, usize)| timed.spans[device.index()][place];
    let mut at = last(timed);
    let mut moves = Vec::new();
    while let Some(here @ (device, place)) = at {
        let pass = schedule.devices()[device.index()][place];
        let start = span(here).start;
        let turn = place.checked_sub(1).map(|before| (device, before));
        let waited = turn.is_some_and(|before| span(before).end >= start - slack);
        if waited {
            let earliest = earliest_place(schedule, device, place);
            moves.extend((earliest..place).rev().take(REACH).map(|to| (device, place, to)));
        }
        at = if waited { turn } else { latest_need(schedule, timed, costs, pass) };
    }
    moves
}

fn last(timed: &Timed) -> Option<(DeviceId, usize)> {
    let ends = timed
        .spans
        .iter()
        .enumerate()
        .filter_map(|(d, spans)| spans.last().map(|span| (span.end, DeviceId::at(d), spans.len() - 1)));
    ends.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))).map(|(_, device, place)| (device, place))
}

/// Right behind the last of what it needs on its own device.
fn earliest_place(schedule: &Schedule, device: DeviceId, place: usize) -> usize {
    let mut earliest = 0;
    schedule.each_need(schedule.devices()[device.index()][place], |need| {
        if let Some((home, at)) = schedule.place(need.pass).filter(|(home, _)| *home == device) {
            debug_assert!(home == device && at < place, "the order was checked");
            earliest = earliest.max(at + 1);
        }
    });
    earliest
}

fn latest_need(schedule: &Schedule, timed: &Timed, costs: &Costs, pass: Pass) -> Option<(DeviceId, usize)> {
    let mut latest: Option<(f64, (DeviceId, usize))> = None;
    schedule.each_need(pass, |need| {
        let Some(place) = schedule.place(need.pass) else { return };
        let hop = match need.via {
            crate::schedule::Via::Activation(edge) => costs.hop(schedule.placement(), edge).activation,
            crate::schedule::Via::Gradient(edge) => costs.hop(schedule.placement(), edge).gradient,
            _ => 0.0,
        };
        let end = timed.spans[place.0.index()][place.1].end + hop;
        if latest.is_none_or(|(old, _)| end > old) {
            latest = Some((end, place));
        }
    });
    latest.map(|(_, place)| place)
}
