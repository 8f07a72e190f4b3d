//! One order over all ranks for a step whose communication blocks.
//!
//! A device that made something stands still until it is delivered, and a device between two passes takes what is
//! offered to it:
//!
//! ```text
//! device 0   | F0 |>>| F1 |......|>>|<<|  BW0  |
//! device 1        |>>| F0 |  BW0 |>>|<<|   F1   | ...       >> an activation on its way, << a gradient
//! ```
//!
//! Played through with estimated times, that gives an order of passes and crossings in which nothing can get stuck.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::{Carries, Direction, Step, StepError};
use crate::id::{DeviceId, MicrobatchId};
use crate::schedule::{Pass, PassKind, Via};

/// What happens next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Item {
    Pass(Pass),
    Cross { crossing: usize, direction: Direction, microbatch: MicrobatchId },
}

/// A crossing that waits for both of its devices.
#[derive(Debug, Clone, Copy)]
struct Offer {
    crossing: usize,
    direction: Direction,
    microbatch: MicrobatchId,
    from: DeviceId,
    to: DeviceId,
}

struct Play<'a> {
    step: &'a Step,
    /// By crossing, forwards and backwards.
    crossing_ns: Vec<[u64; 2]>,
    now_ns: u64,
    busy_until: Vec<u64>,
    next: Vec<usize>,
    offers: Vec<Offer>,
    /// What has been delivered or computed; passes count once they have started, their end is in `ends`.
    crossed: BTreeSet<(usize, Direction, MicrobatchId)>,
    ends_ns: Vec<Option<u64>>,
    /// Crossings that a pass under way will offer at its end.
    making: Vec<Vec<Offer>>,
    events: BinaryHeap<Reverse<u64>>,
    order: Vec<Item>,
}

/// Passes and crossings in an order in which every rank may do one after the other.
pub(super) fn blocking_order(step: &Step) -> Result<Vec<Item>, StepError> {
    let devices = step.ranks.len();
    let nanos = |seconds: f64| (seconds * 1e9).ceil() as u64;
    let mut play = Play {
        step,
        crossing_ns: step
            .crossings
            .iter()
            .map(|c| [nanos(c.forward.predicted_s()), nanos(c.backward.predicted_s())])
            .collect(),
        now_ns: 0,
        busy_until: vec![0; devices],
        next: vec![0; devices],
        offers: vec![],
        crossed: BTreeSet::new(),
        ends_ns: vec![None; step.schedule.num_passes()],
        making: vec![vec![]; devices],
        events: BinaryHeap::new(),
        order: vec![],
    };
    loop {
        while play.advance() {}
        let Some(Reverse(now)) = play.events.pop() else { break };
        play.now_ns = now;
        play.offer_what_was_made();
    }
    match play.first_left() {
        None => Ok(play.order),
        Some(first) => Err(StepError::Cycle { first }),
    }
}

impl Play<'_> {
    fn first_left(&self) -> Option<Pass> {
        let orders = self.step.schedule.devices().iter().zip(&self.next);
        orders.filter_map(|(order, next)| order.get(*next).copied()).next()
    }

    fn is_idle(&self, device: DeviceId) -> bool {
        self.busy_until[device.index()] <= self.now_ns
    }

    fn offer_what_was_made(&mut self) {
        for device in 0..self.making.len() {
            if self.busy_until[device] <= self.now_ns {
                let made = std::mem::take(&mut self.making[device]);
                self.offers.extend(made);
            }
        }
    }

    /// Starts something that can start now, if there is any such thing.
    fn advance(&mut self) -> bool {
        let ready = |o: &Offer| self.is_idle(o.from) && self.is_idle(o.to);
        if let Some(at) = self.offers.iter().position(ready) {
            let offer = self.offers.remove(at);
            self.cross(offer);
            return true;
        }
        let devices: Vec<DeviceId> = self.step.schedule.placement().devices().collect();
        devices.into_iter().any(|device| self.try_pass(device))
    }

    fn cross(&mut self, offer: Offer) {
        let Offer { crossing, direction, microbatch, from, to } = offer;
        let end = self.now_ns + self.crossing_ns[crossing][direction as usize].max(1);
        for device in [from, to] {
            self.busy_until[device.index()] = end;
        }
        self.crossed.insert((crossing, direction, microbatch));
        self.events.push(Reverse(end));
        self.order.push(Item::Cross { crossing, direction, microbatch });
    }

    fn try_pass(&mut self, device: DeviceId) -> bool {
        let schedule = &self.step.schedule;
        let Some(&pass) = schedule.devices()[device.index()].get(self.next[device.index()]) else {
            return false;
        };
        let sending = self.offers.iter().any(|o| o.from == device);
        if !self.is_idle(device) || sending || !self.has_all(pass) {
            return false;
        }
        let end = self.now_ns + self.step.times[pass.stage.index()].of(pass).unwrap_or(0).max(1);
        self.next[device.index()] += 1;
        self.busy_until[device.index()] = end;
        self.ends_ns[schedule.node(pass).expect("it is of this schedule") as usize] = Some(end);
        self.making[device.index()] = self.offers_of(pass);
        self.events.push(Reverse(end));
        self.order.push(Item::Pass(pass));
        true
    }

    /// What a pass makes; or asks for, if it loads what is kept elsewhere.
    fn offers_of(&self, pass: Pass) -> Vec<Offer> {
        let (step, placement) = (self.step, self.step.schedule.placement());
        let carried = step.crossings_from(pass).filter(|(c, _)| step.crosses(*c, pass.microbatch));
        let offer = |(crossing, direction): (usize, Direction)| {
            let edge = step.crossings[crossing].edge;
            let (from, to) = (placement.device(edge.from), placement.device(edge.to));
            let (from, to) = if direction == Direction::Forward { (from, to) } else { (to, from) };
            Offer { crossing, direction, microbatch: pass.microbatch, from, to }
        };
        carried.map(offer).collect()
    }

    /// Whether everything that a pass needs has been computed and delivered.
    fn has_all(&self, pass: Pass) -> bool {
        let schedule = &self.step.schedule;
        let mut all = true;
        schedule.each_need(pass, |need| {
            let node = schedule.node(need.pass);
            all &= node.is_none_or(|n| self.ends_ns[n as usize].is_some_and(|end| end <= self.now_ns));
            let (carries, direction) = match need.via {
                Via::Activation(_) => (Carries::Tensors, Direction::Forward),
                Via::Gradient(_) => (Carries::Tensors, Direction::Backward),
                Via::Own if need.pass.kind == PassKind::Load => (Carries::Memory, Direction::Backward),
                Via::Own | Via::Vocabulary => return,
            };
            for (crossing, c) in self.step.crossings.iter().enumerate().filter(|(_, c)| c.carries == carries)
            {
                let brings = match need.via {
                    Via::Activation(edge) | Via::Gradient(edge) => c.edge == edge,
                    Via::Own | Via::Vocabulary => c.edge.from == pass.stage,
                };
                all &= !brings || self.crossed.contains(&(crossing, direction, pass.microbatch));
            }
        });
        all
    }
}
