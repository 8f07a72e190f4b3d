//! Why devices are idle: every device's bubble, split so that its parts add up.
//!
//! Whenever a device is idle, something else is on its way to it. Walking back from the pass that ends the pause, over what each
//! pass waited for, tells what:
//!
//! ```text
//! device 0  F0 F1 ..........BW0   BW1
//! device 1  ......F0 BW0   F1 ......        before the first pass and behind the last: ramp, and the hop: communication
//!            ^^^^ hop     ^ waits for F1's activation while others compute: dependency
//! ```
//!
//! - *communication*: a message, or an activation that comes back, was under way;
//! - *ramp*: others computed before the device's first pass or after its last one;
//! - *dependency*: others computed what it needed, in between;
//! - *imbalance*: so much of these last two as the busiest device has more to do than this one: no order of passes can
//!   fill that. It is taken from dependency first.

use rustc_hash::FxHashMap;

use crate::id::{DeviceId, MicrobatchId};

use super::{Pass, Schedule, Timed, Via};

/// A device's idle time. The parts are not negative, and together they are what the step takes less the time it computes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Bubble {
    pub ramp: f64,
    pub imbalance: f64,
    pub communication: f64,
    pub dependency: f64,
}

impl Bubble {
    pub fn total(&self) -> f64 {
        self.ramp + self.imbalance + self.communication + self.dependency
    }

    /// What the busiest device has more to do is no wait for anything else.
    fn less_imbalance(mut self, more: f64) -> Self {
        let inside = self.dependency.min(more);
        let outside = self.ramp.min(more - inside);
        self.dependency -= inside;
        self.ramp -= outside;
        self.imbalance += inside + outside;
        self
    }
}

/// Every device's bubble.
pub fn split(schedule: &Schedule, timed: &Timed) -> Vec<Bubble> {
    let walk = Walk::new(schedule, timed);
    let most = timed.busy.iter().copied().fold(0.0, f64::max);
    let device = |device: DeviceId| walk.bubble(device).less_imbalance(most - timed.busy[device.index()]);
    schedule.placement().devices().map(device).collect()
}

/// The mean over all devices, as shares of the makespan.
pub fn shares(bubbles: &[Bubble], makespan: f64) -> Bubble {
    let whole = makespan * bubbles.len().max(1) as f64;
    let share = |part: fn(&Bubble) -> f64| match whole > 0.0 {
        true => bubbles.iter().map(part).sum::<f64>() / whole,
        false => 0.0,
    };
    Bubble {
        ramp: share(|b| b.ramp),
        imbalance: share(|b| b.imbalance),
        communication: share(|b| b.communication),
        dependency: share(|b| b.dependency),
    }
}

/// What a pass waited for.
#[derive(Clone, Copy)]
pub(super) struct Cause {
    pub pass: Pass,
    /// When what it made was there.
    pub arrived: f64,
}

/// Back from a pass over what it waited for.
pub(super) struct Walk<'a> {
    schedule: &'a Schedule,
    timed: &'a Timed,
    arrivals: FxHashMap<(Via, MicrobatchId), f64>,
    /// For every device the places of its passes that compute, as moves take no turn.
    turns: Vec<Vec<usize>>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(schedule: &'a Schedule, timed: &'a Timed) -> Self {
        let arrivals = timed.messages.iter().map(|m| ((m.via, m.microbatch), m.span.end)).collect();
        let computes = |order: &Vec<Pass>| (0..order.len()).filter(|at| !order[*at].kind.is_move()).collect();
        Self { schedule, timed, arrivals, turns: schedule.devices().iter().map(computes).collect() }
    }

    fn bubble(&self, device: DeviceId) -> Bubble {
        let (order, spans) = (&self.schedule.devices()[device.index()], &self.timed.spans[device.index()]);
        let mut bubble = Bubble::default();
        let mut free = 0.0;
        let turns = &self.turns[device.index()];
        for (nth, &place) in turns.iter().enumerate() {
            let (communication, others) = self.pause(free, spans[place].start, self.need(order[place]));
            bubble.communication += communication;
            *(if nth == 0 { &mut bubble.ramp } else { &mut bubble.dependency }) += others;
            free = spans[place].end;
        }
        let (communication, others) = self.pause(free, self.timed.makespan, self.last());
        bubble.communication += communication;
        bubble.ramp += others;
        bubble
    }

    /// Of the time from `from` to `to`, how much went by with messages and how much with passes, back along what led there.
    fn pause(&self, from: f64, to: f64, mut cause: Option<Cause>) -> (f64, f64) {
        let (mut communication, mut others, mut at) = (0.0, 0.0, to);
        while at > from {
            // Before the first of all passes nothing is under way: a rounding error of the sums.
            let Some(Cause { pass, arrived }) = cause else { break };
            let span = self.span(pass);
            let [arrived, ended, started] = [arrived, span.end, span.start].map(|t| t.clamp(from, at));
            let computed = (ended - started).max(0.0);
            let moved = pass.kind.is_move();
            communication += (arrived - ended).max(0.0) + if moved { computed } else { 0.0 };
            others += (at - arrived) + if moved { 0.0 } else { computed };
            at = started.min(ended).min(arrived);
            cause = self.cause(pass);
        }
        (communication, others + (at - from).max(0.0))
    }

    pub(super) fn span(&self, pass: Pass) -> super::Span {
        let (device, place) = self.schedule.place(pass).expect("a pass that was timed");
        self.timed.spans[device.index()][place]
    }

    /// What kept a pass from starting earlier: what it needs, or the pass before it on its device.
    pub(super) fn cause(&self, pass: Pass) -> Option<Cause> {
        let (device, place) = self.schedule.place(pass)?;
        let turns = &self.turns[device.index()];
        let before = turns.partition_point(|at| *at < place).checked_sub(1).map(|nth| turns[nth]);
        let turn = before.map(|at| Cause {
            pass: self.schedule.devices()[device.index()][at],
            arrived: self.timed.spans[device.index()][at].end,
        });
        later(turn, self.need(pass))
    }

    fn need(&self, pass: Pass) -> Option<Cause> {
        let mut latest = None;
        self.schedule.each_need(pass, |need| {
            let end = self.span(need.pass).end;
            let arrived = self.arrivals.get(&(need.via, need.pass.microbatch)).copied().unwrap_or(end);
            latest = later(latest, Some(Cause { pass: need.pass, arrived }));
        });
        latest
    }

    /// The pass with which the step ends.
    pub(super) fn last(&self) -> Option<Cause> {
        let passes = self.schedule.devices().iter().zip(&self.timed.spans);
        let ends = passes.flat_map(|(order, spans)| order.iter().zip(spans));
        ends.fold(None, |latest, (pass, span)| later(latest, Some(Cause { pass: *pass, arrived: span.end })))
    }
}

/// The later of two; of equals the first.
fn later(a: Option<Cause>, b: Option<Cause>) -> Option<Cause> {
    match (a, b) {
        (Some(a), Some(b)) if b.arrived > a.arrived => Some(b),
        (None, b) => b,
        (a, _) => a,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Name, Spec, StageCost, generate, time};

    fn parts(name: Name, spec: &Spec) -> Bubble {
        let schedule = generate(name, spec).unwrap();
        let timed = time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap();
        shares(&split(&schedule, &timed), timed.makespan)
    }

    #[test]
    fn a_plain_pipeline_has_ramp_and_dependency_alone() {
        // 1F1B on 4 stages idles 3 (f + b + w) = 9 on every device, of 33. The last one waits at both ends only.
        let spec = Spec::even(4, 8);
        let schedule = generate(Name::OneF1B, &spec).unwrap();
        let timed = time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap();
        let bubbles = split(&schedule, &timed);
        assert!(bubbles.iter().all(|b| b.total() == 9.0 && b.imbalance == 0.0 && b.communication == 0.0));
        let ramps: Vec<f64> = bubbles.iter().map(|b| b.ramp).collect();
        assert_eq!(ramps, [0.0, 3.0, 6.0, 9.0]);
    }

    #[test]
    fn a_slow_device_shows_as_imbalance_and_a_hop_as_communication() {
        let slow = Spec { speeds: vec![1.0, 1.0, 0.5, 1.0], ..Spec::even(4, 64) };
        let bubble = parts(Name::OneF1B, &slow);
        assert!(bubble.imbalance > 0.3 && bubble.dependency < 0.05, "{bubble:?}");
        let heavy = Spec { work: vec![StageCost::new(1.0, 1.0, 1.0); 4], ..Spec::even(4, 64).with_hop(0.5) };
        let bubble = parts(Name::OneF1B, &heavy);
        assert!(bubble.communication > 0.1 && bubble.imbalance == 0.0, "{bubble:?}");
    }
}
