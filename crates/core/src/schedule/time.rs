//! When every pass runs: each device in its order, each pass as soon as what it needs is there.
//!
//! Messages run beside compute. On a serial channel (an edge, one direction) they go one after another; that is the only
//! thing they share here. Edges that share NICs are for the simulator of programs.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::id::{DeviceId, MicrobatchId};

use super::check::{self, CheckError};
use super::{Channel, Costs, Pass, Schedule, Via};

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Span {
    pub start: f64,
    pub end: f64,
}

/// An activation or a gradient on its way between two devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Message {
    pub from: DeviceId,
    pub to: DeviceId,
    /// `Via::Activation` or `Via::Gradient`.
    pub via: Via,
    pub microbatch: MicrobatchId,
    pub span: Span,
}

/// A schedule with its times.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timed {
    /// For every device, pass by pass in its order.
    pub spans: Vec<Vec<Span>>,
    /// All passes as they start, none before what it needs.
    pub order: Vec<Pass>,
    /// Every message that takes time, in the order they were sent from each device.
    pub messages: Vec<Message>,
    /// When the last pass ends.
    pub makespan: f64,
    /// The time each device computes.
    pub busy: Vec<f64>,
}

impl Timed {
    /// The share of all devices' time that nothing was computed in.
    pub fn bubble(&self) -> f64 {
        self.bubble_of(self.busy.iter().sum::<f64>() / self.busy.len().max(1) as f64)
    }

    /// The share of one device's time.
    pub fn device_bubble(&self, device: DeviceId) -> f64 {
        self.bubble_of(self.busy[device.index()])
    }

    /// The time from a device's first pass to its last.
    pub fn span_of(&self, device: DeviceId) -> Span {
        let spans = &self.spans[device.index()];
        let start = spans.first().map_or(0.0, |s| s.start);
        Span { start, end: spans.iter().map(|s| s.end).fold(start, f64::max) }
    }

    /// The longest time from any device's first pass to its last. Steps that follow each other without a barrier, as in the
    /// zero-bubble papers, take so long each.
    pub fn period(&self) -> f64 {
        let length = |d| {
            let span = self.span_of(DeviceId::at(d));
            span.end - span.start
        };
        (0..self.spans.len()).map(length).fold(0.0, f64::max)
    }

    /// The share of that time in which nothing is computed: the bubble as the zero-bubble papers count it.
    pub fn inner_bubble(&self) -> f64 {
        let (busy, period) = (self.busy.iter().sum::<f64>(), self.period());
        let whole = period * self.busy.len() as f64;
        if whole > 0.0 { (1.0 - busy / whole).max(0.0) } else { 0.0 }
    }

    /// The time a device is idle between its first pass and its last.
    pub fn idle_inside(&self, device: DeviceId) -> f64 {
        let span = self.span_of(device);
        (span.end - span.start - self.busy[device.index()]).max(0.0)
    }

    fn bubble_of(&self, busy: f64) -> f64 {
        if self.makespan > 0.0 { (1.0 - busy / self.makespan).max(0.0) } else { 0.0 }
    }
}

/// Runs the schedule with these costs. Fails where a pass is missing or the order can never be run.
pub fn time(schedule: &Schedule, costs: &Costs) -> Result<Timed, CheckError> {
    check::costs_fit(schedule, costs)?;
    let mut clock = Clock::new(schedule, costs);
    let mut ready: VecDeque<DeviceId> = schedule.placement().devices().collect();
    while let Some(device) = ready.pop_front() {
        clock.advance(device, &mut ready)?;
    }
    match clock.performed.len() == schedule.num_passes() {
        true => Ok(clock.finish()),
        false => Err(check::deadlock(schedule).expect_err("devices that wait forever wait in a cycle")),
    }
}

/// How far every device got.
struct Clock<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// For every pass whether it has run; its messages are in `arrivals`.
    done: Vec<bool>,
    spans: Vec<Span>,
    /// Per device: the next pass, and when the device is free.
    next: Vec<usize>,
    free: Vec<f64>,
    busy: Vec<f64>,
    /// Devices that wait for a pass: a device waits for one at a time.
    waiting: Vec<Vec<DeviceId>>,
    waits_for: Vec<Option<u32>>,
    channels: Channels,
    messages: Vec<Message>,
    /// What has run, in an order in which it can.
    performed: Vec<(f64, Pass)>,
}

impl<'a> Clock<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs) -> Self {
        let (passes, devices) = (schedule.num_passes(), schedule.devices().len());
        Self {
            schedule,
            costs,
            done: vec![false; passes],
            spans: vec![Span::default(); passes],
            next: vec![0; devices],
            free: vec![0.0; devices],
            busy: vec![0.0; devices],
            waiting: vec![vec![]; devices],
            waits_for: vec![None; devices],
            channels: Channels::default(),
            messages: vec![],
            performed: Vec::with_capacity(passes),
        }
    }

    /// Runs a device until it has to wait for another, and wakes those that waited for what it did.
    fn advance(&mut self, device: DeviceId, ready: &mut VecDeque<DeviceId>) -> Result<(), CheckError> {
        let d = device.index();
        while let Some(&pass) = self.schedule.devices()[d].get(self.next[d]) {
            let Some(inputs) = self.inputs(device, pass)? else { return Ok(()) };
            self.perform(device, pass, inputs);
            let node = self.schedule.first_node(device) + self.next[d] as u32 - 1;
            let waiting = &mut self.waiting[d];
            waiting.retain(|other| {
                let woken = self.waits_for[other.index()] == Some(node);
                if woken {
                    ready.push_back(*other);
                }
                !woken
            });
        }
        Ok(())
    }

    /// When everything the pass needs is there; `None` if something has not run yet, and then the device waits for it.
    fn inputs(&mut self, device: DeviceId, pass: Pass) -> Result<Option<f64>, CheckError> {
        let (mut latest, mut missing, mut blocker) = (0.0f64, None, None);
        self.schedule.each_need(pass, |need| match self.schedule.node(need.pass) {
            None => missing = Some(need.pass),
            Some(node) if !self.done[node as usize] => blocker = blocker.or(Some((node, need.pass))),
            Some(node) => {
                let end = self.spans[node as usize].end;
                latest = latest.max(self.channels.arrival(need.via, need.pass.microbatch).unwrap_or(end));
            }
        });
        if let Some(needed) = missing {
            return Err(CheckError::Missing {
                pass: needed,
                device: self.schedule.placement().device(needed.stage),
            });
        }
        let Some((node, needed)) = blocker else { return Ok(Some(latest)) };
        let other = self.schedule.placement().device(needed.stage);
        self.waits_for[device.index()] = Some(node);
        self.waiting[other.index()].push(device);
        Ok(None)
    }

    fn perform(&mut self, device: DeviceId, pass: Pass, inputs: f64) {
        let (d, cost) = (device.index(), self.costs.pass(pass));
        let start = inputs.max(self.free[d]);
        let span = Span { start, end: start + cost };
        if !pass.kind.is_move() {
            self.free[d] = span.end;
            self.busy[d] += cost;
        }
        let node = self.schedule.first_node(device) as usize + self.next[d];
        (self.spans[node], self.done[node]) = (span, true);
        self.next[d] += 1;
        self.performed.push((start, pass));
        self.send(device, pass, span.end);
    }

    /// What the pass made leaves for the devices that need it.
    fn send(&mut self, from: DeviceId, pass: Pass, ready: f64) {
        let (schedule, costs) = (self.schedule, self.costs);
        let placement = schedule.placement();
        schedule.each_message(pass, |via, to| {
            let cost = match via {
                Via::Activation(edge) => costs.hop(placement, edge).activation,
                Via::Gradient(edge) => costs.hop(placement, edge).gradient,
                Via::Own | Via::Vocabulary => 0.0,
            };
            if cost > 0.0 {
                let microbatch = pass.microbatch;
                let span = self.channels.send(via, microbatch, ready, cost, costs.channel());
                self.messages.push(Message { from, to: placement.device(to), via, microbatch, span });
            }
        });
    }

    fn finish(mut self) -> Timed {
        let makespan = self.spans.iter().map(|s| s.end).fold(0.0, f64::max);
        let mut spans = Vec::new();
        for order in self.schedule.devices().iter().rev() {
            spans.push(self.spans.split_off(self.spans.len() - order.len()));
        }
        spans.reverse();
        // Stable: what starts together stays in an order in which it can run.
        self.performed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let order = self.performed.into_iter().map(|(_, pass)| pass).collect();
        Timed { spans, order, messages: self.messages, makespan, busy: self.busy }
    }
}

/// When the messages of every channel arrive.
#[derive(Default)]
struct Channels {
    /// An edge and a direction. Nothing walks over this map, so its order reaches no output.
    states: FxHashMap<Via, ChannelState>,
}

#[derive(Default)]
struct ChannelState {
    free: f64,
    /// By microbatch; NaN until sent.
    arrivals: Vec<f64>,
}

impl Channels {
    fn send(&mut self, via: Via, microbatch: MicrobatchId, ready: f64, cost: f64, channel: Channel) -> Span {
        let state = self.states.entry(via).or_default();
        let start = channel.start(ready, state.free);
        let span = Span { start, end: start + cost };
        state.free = span.end;
        if state.arrivals.len() <= microbatch.index() {
            state.arrivals.resize(microbatch.index() + 1, f64::NAN);
        }
        state.arrivals[microbatch.index()] = span.end;
        span
    }

    fn arrival(&self, via: Via, microbatch: MicrobatchId) -> Option<f64> {
        self.states.get(&via)?.arrivals.get(microbatch.index()).copied().filter(|t| !t.is_nan())
    }
}
