//! `minimal-window`, ours: the fewest microbatches in flight at every stage with which the communication is hidden.
//!
//! In the steady state every stage runs one F, one B (and one W) each period T, which is the busiest stage's work or the
//! slowest hop, whichever is longer. Say the B of a microbatch starts `lag` after its F did:
//!
//! ```text
//! stage j     F---.                          .-->B        lag
//! stage j+1       '-c->F---- ... ---->B--c---'            lag of the next stage
//! ```
//! 1. What is on the way takes time: a stage's lag is at least the next stage's, and its F, the hop, the next B, the hop back.
//!    (The next W is left out: the gradient has gone before.)
//! 2. The passes of a period fit beside each other: between the end of F and the next B, or between the end of B and the
//!    next F, there is a gap for W, and neither gap is negative. At a stage that is never idle, this leaves the lag few
//!    values within a period; that is why a window of `lag / T` rounded up is too small for long pipelines.
//!
//! Taking the smallest lag from the last stage to the first gives the smallest windows: so many F as start within the lag.
//! A memory cap makes the period longer until the windows fit.

use crate::id::{MicrobatchId, StageId};
use crate::schedule::memory::KEPT_FOR_W;
use crate::schedule::{Costs, Edge, Footprint, PassKind, time};

use super::dispatch::{Dispatch, Fill, Memory, Ranks};
use super::{Backward, GenerateError, Name, Pass, Placement, Schedule, Spec, named, v_shape, windows};

/// How a stage runs in the steady state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Forwards before the first backward: the most microbatches in flight.
    pub forwards: u32,
    /// Whether W comes behind the next F rather than behind its own B.
    pub late_weights: bool,
}

impl Window {
    /// Activations held at once.
    fn peak(self) -> f64 {
        f64::from(self.forwards) + if self.late_weights { KEPT_FOR_W } else { 0.0 }
    }
}

/// Every stage's window at the shortest period whose windows keep to the caps. Each device holds one stage.
pub fn windows_that_hide(
    costs: &Costs,
    placement: &Placement,
    microbatches: u32,
    backward: Backward,
    caps: Option<&[f64]>,
) -> Vec<Window> {
    let line = Line::new(costs, placement, backward);
    let fit = |windows: &Option<Vec<Window>>| {
        windows.as_ref().is_some_and(|windows| {
            caps.is_none_or(|caps| windows.iter().zip(caps).all(|(w, cap)| fits(*w, microbatches, *cap)))
        })
    };
    let shortest = line.shortest_period();
    let mut windows = line.windows(shortest);
    if !fit(&windows) {
        // With the period of a microbatch that is alone in the pipeline, one in flight is enough.
        let (mut too_short, mut long) = (shortest, line.longest_period());
        for _ in 0..BISECTIONS {
            let middle = (too_short + long) / 2.0;
            if fit(&line.windows(middle)) { long = middle } else { too_short = middle }
        }
        windows = line.windows(long);
    }
    let windows = windows.expect("a period as long as a microbatch's way has a place for every pass");
    let settled = |(stage, window): (usize, Window)| {
        let forwards = window.forwards.clamp(1, microbatches);
        // One in flight always fits, if its W does not wait for the next one.
        let late = window.late_weights && caps.is_none_or(|caps| window.peak() <= caps[stage] + 1e-9);
        Window { forwards, late_weights: late }
    };
    windows.into_iter().enumerate().map(settled).collect()
}

/// Halvings of the range of periods; far beyond what tells two windows apart.
const BISECTIONS: u32 = 48;

fn fits(window: Window, microbatches: u32, cap: f64) -> bool {
    window.forwards.min(microbatches) <= 1 && cap >= 1.0 || window.peak() <= cap + 1e-9
}

/// The stages' costs, with W where it counts: in B if it is fused.
struct Line {
    stages: Vec<Times>,
    /// From each stage to the next and back.
    hops: Vec<(f64, f64)>,
}

#[derive(Clone, Copy)]
struct Times {
    f: f64,
    b: f64,
    w: f64,
}

impl Line {
    fn new(costs: &Costs, placement: &Placement, backward: Backward) -> Self {
        let times = |stage: StageId| {
            let cost = costs.stage(stage);
            match backward {
                Backward::Split => Times { f: cost.f, b: cost.b, w: cost.w },
                Backward::Fused => Times { f: cost.f, b: cost.b + cost.w, w: 0.0 },
            }
        };
        let hop = |stage: usize| {
            let edge = Edge { from: StageId::at(stage - 1), to: StageId::at(stage) };
            let hop = costs.hop(placement, edge);
            (hop.activation, hop.gradient)
        };
        Self {
            stages: placement.stages().map(times).collect(),
            hops: (1..placement.num_stages()).map(hop).collect(),
        }
    }

    fn shortest_period(&self) -> f64 {
        let work = self.stages.iter().map(|t| t.f + t.b + t.w);
        let hops = self.hops.iter().map(|(there, back)| there.max(*back));
        work.chain(hops).fold(0.0, f64::max)
    }

    fn longest_period(&self) -> f64 {
        let work: f64 = self.stages.iter().map(|t| t.f + t.b + t.w).sum();
        work + self.hops.iter().map(|(there, back)| there + back).sum::<f64>()
    }

    /// The smallest windows at a period; `None` where a stage's passes find no place in it.
    fn windows(&self, period: f64) -> Option<Vec<Window>> {
        let mut windows = Vec::with_capacity(self.stages.len());
        let mut lag = self.stages.last()?.f;
        for (at, times) in self.stages.iter().enumerate().rev() {
            if let (Some((there, back)), Some(next)) = (self.hops.get(at), self.stages.get(at + 1)) {
                lag += times.f + there + next.b + back;
            }
            let late_weights;
            (lag, late_weights) = next_lag(lag, *times, period)?;
            let forwards = (lag / period - 1e-9).ceil().clamp(1.0, f64::from(u32::MAX)) as u32;
            windows.push(Window { forwards: if period > 0.0 { forwards } else { 1 }, late_weights });
        }
        windows.reverse();
        Some(windows)
    }
}

/// The smallest lag of at least `lag` with which F, B and W fit into a period, and whether W is behind the next F then.
fn next_lag(lag: f64, times: Times, period: f64) -> Option<(f64, bool)> {
    let Times { f, b, w } = times;
    if period <= 0.0 {
        return Some((lag, false));
    }
    let slack = 1e-9 * period;
    let behind_b = (f, period - b - w);
    let behind_f = (f + w, period - b);
    let whole = (lag / period + 1e-12).floor();
    let candidates = [(whole, false), (whole, true), (whole + 1.0, false), (whole + 1.0, true)];
    let place = |(periods, late): (f64, bool)| {
        let (from, to) = if late { behind_f } else { behind_b };
        let start = periods * period;
        let at = lag.max(start + from);
        (from <= to + slack && at <= start + to + slack).then_some((at, late && w > 0.0))
    };
    candidates.into_iter().filter_map(place).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
}

pub fn minimal_window(
    spec: &Spec,
    placement: Placement,
    costs: &Costs,
    backward: Backward,
) -> Result<Schedule, GenerateError> {
    let microbatches = spec.microbatches;
    let caps = spec.caps.as_deref();
    let hiding = windows_that_hide(costs, &placement, microbatches, backward, caps);
    let mut best = Candidate::of(spec, &placement, costs, backward, hiding)?;
    // A short step may end before the steady state that the windows are made for.
    let eager: Vec<Window> = windows::eager_windows(spec.devices)
        .into_iter()
        .map(|forwards| Window { forwards: forwards.min(microbatches), late_weights: false })
        .collect();
    if caps.is_none_or(|caps| eager.iter().zip(caps).all(|(w, cap)| fits(*w, microbatches, *cap))) {
        let eager = Candidate::of(spec, &placement, costs, backward, eager)?;
        if eager.makespan < best.makespan * (1.0 - 1e-9) {
            best = eager;
        }
    }
    shrink(spec, &placement, costs, backward, best).map(|best| best.schedule)
}

/// In a short step the steady state may never come; then the windows are only limits.
const BACKWARD_FIRST: Ranks<'static> =
    Ranks::Classes { rank: |kind, _| u32::from(kind == PassKind::F), reserve: 0.0 };
const FORWARD_FIRST: Ranks<'static> =
    Ranks::Classes { rank: |kind, _| u32::from(kind != PassKind::F), reserve: 0.0 };

/// Orders that a candidate is chosen from, at most.
const CANDIDATES: usize = 10;

struct Candidate {
    windows: Vec<Window>,
    schedule: Schedule,
    makespan: f64,
}

impl Candidate {
    /// The shortest of the plain order and what dispatching makes of it, none of which holds more.
    fn of(
        spec: &Spec,
        placement: &Placement,
        costs: &Costs,
        backward: Backward,
        windows: Vec<Window>,
    ) -> Result<Self, GenerateError> {
        let orders = orders(&windows, spec.microbatches, backward);
        let name = |orders| named(Name::MinimalWindow, spec, placement.clone(), orders);
        let mut candidates = vec![name(orders.clone())?];
        let footprint = Footprint::units(placement);
        let caps: Vec<f64> = windows.iter().map(|w| w.peak()).collect();
        let memory = Some(Memory { footprint: &footprint, caps: &caps });
        let (microbatches, split) = (spec.microbatches, backward == Backward::Split);
        let fills: &[Fill] = if split { &[Fill::TailLast, Fill::Last, Fill::Fitting] } else { &[Fill::Last] };
        for &fill in fills {
            let dispatch = Dispatch { placement, microbatches, costs, memory, split, fill };
            for ranks in [Ranks::Listed(&orders), BACKWARD_FIRST, FORWARD_FIRST] {
                if let Some(orders) = dispatch.run(ranks) {
                    candidates.push(name(orders)?);
                }
            }
        }
        let schedule = v_shape::shortest(candidates, costs)?;
        let makespan = time(&schedule, costs)?.makespan;
        Ok(Self { windows, schedule, makespan })
    }
}

/// Passes that shrinking may dispatch or time.
const SHRINKING_PASSES: usize = 16 << 20;

/// Makes windows smaller, the first stage's first because it holds most, as long as the step does not get longer; and then once
/// more the other way round. A stage with a smaller window than the next one would never get its first gradient.
fn shrink(
    spec: &Spec,
    placement: &Placement,
    costs: &Costs,
    backward: Backward,
    mut best: Candidate,
) -> Result<Candidate, GenerateError> {
    let mut left = SHRINKING_PASSES;
    let stages = 0..best.windows.len();
    for stage in stages.clone().chain(stages.rev()) {
        let next = best.windows.get(stage + 1).map_or(1, |next| next.forwards);
        let (mut too_small, mut enough) = (next - 1, best.windows[stage].forwards);
        while too_small + 1 < enough && left > 0 {
            left = left.saturating_sub(CANDIDATES * best.schedule.num_passes());
            let middle = (too_small + enough) / 2;
            let mut windows = best.windows.clone();
            windows[stage].forwards = middle;
            let smaller = Candidate::of(spec, placement, costs, backward, windows)?;
            match smaller.makespan <= best.makespan * (1.0 + 1e-9) {
                true => (enough, best) = (middle, smaller),
                false => too_small = middle,
            }
        }
    }
    Ok(best)
}

/// As many forwards as the window says, and then a backward before every further forward.
fn orders(windows: &[Window], microbatches: u32, backward: Backward) -> Vec<Vec<Pass>> {
    let order = |(stage, window): (usize, &Window)| {
        let pass = |kind, m| Pass::new(kind, StageId::at(stage), MicrobatchId(m));
        let forwards = window.forwards.clamp(1, microbatches);
        let mut order: Vec<Pass> = (0..forwards).map(|m| pass(PassKind::F, m)).collect();
        for m in 0..microbatches {
            let next = (m + forwards < microbatches).then(|| pass(PassKind::F, m + forwards));
            match (backward, window.late_weights) {
                (Backward::Fused, _) => order.extend([pass(PassKind::BW, m)].into_iter().chain(next)),
                (Backward::Split, false) => {
                    order.extend([pass(PassKind::B, m), pass(PassKind::W, m)].into_iter().chain(next));
                }
                (Backward::Split, true) => {
                    order.push(pass(PassKind::B, m));
                    order.extend(next.into_iter().chain([pass(PassKind::W, m)]));
                }
            }
        }
        order
    };
    windows.iter().enumerate().map(order).collect()
}
