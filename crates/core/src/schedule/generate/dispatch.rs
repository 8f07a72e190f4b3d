//! Runs passes as they become ready and writes down the order that results.
//!
//! Each device always takes, of the passes it could run now, the one of the lowest rank. Ranks come from a list per device
//! (an order to follow, and to overtake where it waits) or from kinds and chunks (backwards before forwards, say). A forward
//! runs only if memory allows: when following a list, only if what is left of the list still fits behind it. So a list that
//! fits is followed to its end, whatever the costs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::id::{DeviceId, MicrobatchId, StageId};
use crate::schedule::{Costs, Edge, Footprint, Pass, PassKind, Placement};

/// When weight gradients are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// In their turn.
    InTurn,
    /// When nothing else could run.
    Last,
    /// In their turn while the device has forwards to run, and last from then on.
    TailLast,
    /// When nothing else could run, and they are over before anything that is on its way arrives.
    Fitting,
}

impl Fill {
    pub const ALL: [Fill; 4] = [Fill::TailLast, Fill::Last, Fill::InTurn, Fill::Fitting];
}

/// What decides between passes that are ready.
#[derive(Debug, Clone, Copy)]
pub enum Ranks<'a> {
    /// Earlier in the device's list.
    Listed(&'a [Vec<Pass>]),
    /// By kind and chunk; of W the oldest. `reserve` activations are kept free of forwards of any chunk but the last.
    Classes { rank: fn(PassKind, u32) -> u32, reserve: f64 },
}

/// What the devices have to hold.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    pub footprint: &'a Footprint,
    pub caps: &'a [f64],
}

#[derive(Debug, Clone, Copy)]
pub struct Dispatch<'a> {
    pub placement: &'a Placement,
    pub microbatches: u32,
    pub costs: &'a Costs,
    pub memory: Option<Memory<'a>>,
    pub split: bool,
    pub fill: Fill,
}

/// Sums of halves and thirds are not exact.
const SLACK: f64 = 1e-9;

impl Dispatch<'_> {
    /// The order of every device; `None` where all devices end up waiting for memory.
    pub fn run(&self, ranks: Ranks<'_>) -> Option<Vec<Vec<Pass>>> {
        let mut state = State::new(self, ranks);
        state.wake_all();
        while let Some(Reverse((time, device))) = state.events.pop() {
            state.act(f64::from_bits(time), DeviceId(device));
        }
        (state.left == 0).then_some(state.orders)
    }
}

/// The three kinds that are dispatched; a fused backward stands in B's place.
const KINDS: usize = 3;
const F: usize = 0;
const B: usize = 1;
const W: usize = 2;

struct State<'a> {
    setup: &'a Dispatch<'a>,
    ranks: Ranks<'a>,
    /// Times as bits (they are not negative, so bits compare like times), and the device that may have something to do.
    events: BinaryHeap<Reverse<(u64, u32)>>,
    /// By kind and stage: the next microbatch.
    next: [Vec<u32>; KINDS],
    /// By stage and microbatch: when the activation, or the gradient, has arrived.
    activation: Vec<f64>,
    gradient: Vec<f64>,
    /// By stage: when the channels into it are free.
    channels: [Vec<f64>; 2],
    free: Vec<f64>,
    held: Vec<f64>,
    orders: Vec<Vec<Pass>>,
    list: Lists,
    left: usize,
}

/// What is left of the lists to follow.
#[derive(Default)]
struct Lists {
    /// By kind, stage and microbatch.
    place: Vec<u32>,
    done: Vec<Vec<bool>>,
    head: Vec<usize>,
}

impl<'a> State<'a> {
    fn new(setup: &'a Dispatch<'a>, ranks: Ranks<'a>) -> Self {
        let (stages, devices) = (setup.placement.num_stages(), setup.placement.num_devices());
        let passes = stages * setup.microbatches as usize;
        let mut activation = vec![f64::INFINITY; passes];
        activation[..setup.microbatches as usize].fill(0.0);
        let list = match ranks {
            Ranks::Listed(orders) => Lists::new(setup, orders),
            Ranks::Classes { .. } => Lists::default(),
        };
        Self {
            setup,
            ranks,
            events: BinaryHeap::new(),
            next: std::array::from_fn(|_| vec![0; stages]),
            activation,
            gradient: vec![f64::INFINITY; passes],
            channels: std::array::from_fn(|_| vec![0.0; stages]),
            free: vec![0.0; devices],
            held: vec![0.0; devices],
            orders: vec![vec![]; devices],
            list,
            left: passes * if setup.split { 3 } else { 2 },
        }
    }

    fn wake_all(&mut self) {
        for device in self.setup.placement.devices() {
            self.wake(0.0, device);
        }
    }

    fn wake(&mut self, time: f64, device: DeviceId) {
        self.events.push(Reverse((time.to_bits(), device.0)));
    }

    /// Lets a device start a pass, if it is free and one is ready.
    fn act(&mut self, now: f64, device: DeviceId) {
        if self.free[device.index()] > now {
            return;
        }
        if let Some(pass) = self.choose(now, device) {
            self.start(now, device, pass);
        }
    }

    fn choose(&self, now: f64, device: DeviceId) -> Option<Pass> {
        let mut best: Option<(u64, Pass)> = None;
        let mut filler: Option<(u64, Pass)> = None;
        let lower = |old: &Option<(u64, Pass)>, rank| old.as_ref().is_none_or(|(r, _)| rank < *r);
        for &stage in self.setup.placement.stages_on(device) {
            for kind in [F, B, W] {
                let Some(pass) = self.ready(now, device, stage, kind) else { continue };
                let rank = self.rank(pass, kind);
                let slot = if kind == W { &mut filler } else { &mut best };
                if lower(slot, rank) {
                    *slot = Some((rank, pass));
                }
            }
        }
        let last = match self.setup.fill {
            Fill::InTurn => false,
            Fill::Last | Fill::Fitting => true,
            Fill::TailLast => self.forwards_are_over(device),
        };
        let filler =
            filler.filter(|(_, w)| self.setup.fill != Fill::Fitting || self.is_over_in_time(now, device, *w));
        let chosen = match (best, filler) {
            (Some(best), Some(filler)) if !last && filler.0 < best.0 => filler,
            (best, filler) => best.or(filler)?,
        };
        Some(chosen.1)
    }

    /// Whether nothing arrives while the pass runs, beyond what memory keeps waiting anyway.
    fn is_over_in_time(&self, now: f64, device: DeviceId, pass: Pass) -> bool {
        let end = now + self.setup.costs.pass(pass);
        let arrives = |arrival: f64| arrival > now && arrival < end * (1.0 - 1e-12);
        self.setup.placement.stages_on(device).iter().all(|stage| {
            let s = stage.index();
            let next = |kind: usize| Some(self.next[kind][s]).filter(|m| *m < self.setup.microbatches);
            let forward = next(F).is_some_and(|m| {
                let pass = Pass::new(PassKind::F, *stage, MicrobatchId(m));
                arrives(self.activation[self.slot(s, m)]) && self.fits(device, pass)
            });
            let backward = next(B).is_some_and(|m| arrives(self.gradient[self.slot(s, m)]));
            !forward && !backward
        })
    }

    fn forwards_are_over(&self, device: DeviceId) -> bool {
        let stages = self.setup.placement.stages_on(device);
        stages.iter().all(|s| self.next[F][s.index()] == self.setup.microbatches)
    }

    /// The next pass of this kind, if everything it needs is here and it fits.
    fn ready(&self, now: f64, device: DeviceId, stage: StageId, kind: usize) -> Option<Pass> {
        let s = stage.index();
        let m = self.next[kind][s];
        if m == self.setup.microbatches || (kind == W && !self.setup.split) {
            return None;
        }
        let at = self.slot(s, m);
        let pass = Pass::new(self.kind(kind), stage, MicrobatchId(m));
        let ready = match kind {
            F => self.activation[at] <= now && self.fits(device, pass),
            B => m < self.next[F][s] && self.gradient[at] <= now,
            _ => m < self.next[B][s],
        };
        // A device runs one pass at a time, so what it started earlier is over.
        ready.then_some(pass)
    }

    fn rank(&self, pass: Pass, kind: usize) -> u64 {
        match self.ranks {
            Ranks::Listed(_) => u64::from(self.list.place[self.list_slot(pass, kind)]),
            Ranks::Classes { rank, .. } => {
                let chunk = self.setup.placement.chunk(pass.stage);
                u64::from(rank(pass.kind, chunk)) << 32 | u64::from(pass.microbatch.0)
            }
        }
    }

    /// Whether a forward leaves enough memory: for the rest of the list, or for the last chunk.
    fn fits(&self, device: DeviceId, pass: Pass) -> bool {
        let Some(memory) = self.setup.memory else { return true };
        let d = device.index();
        let after = self.held[d] + memory.footprint.change(pass).0;
        let room = memory.caps[d] + SLACK - after;
        match self.ranks {
            Ranks::Classes { reserve, .. } => {
                let last = self.setup.placement.stages_on(device).last() == Some(&pass.stage);
                room >= if last { 0.0 } else { reserve }
            }
            Ranks::Listed(orders) => {
                let place = self.list.place[self.list_slot(pass, F)] as usize;
                room >= self.list.highest_before(d, place, &orders[d], memory.footprint)
            }
        }
    }

    fn start(&mut self, now: f64, device: DeviceId, pass: Pass) {
        let d = device.index();
        let end = now + self.setup.costs.pass(pass);
        let kind = match pass.kind {
            PassKind::F => F,
            PassKind::W => W,
            _ => B,
        };
        self.next[kind][pass.stage.index()] += 1;
        self.free[d] = end;
        self.orders[d].push(pass);
        self.left -= 1;
        if let Some(memory) = self.setup.memory {
            let (come, go) = memory.footprint.change(pass);
            self.held[d] += come - go;
        }
        if let Ranks::Listed(_) = self.ranks {
            let place = self.list.place[self.list_slot(pass, kind)] as usize;
            self.list.take(d, place);
        }
        self.wake(end, device);
        self.hand_on(pass, kind, end);
    }

    /// Sends what a pass made to the next stage, or to the one before.
    fn hand_on(&mut self, pass: Pass, kind: usize, end: f64) {
        let (s, m) = (pass.stage.index(), pass.microbatch.0);
        let last = self.setup.placement.num_stages() - 1;
        match kind {
            F if s == last => self.gradient_arrives(s, m, end),
            F => {
                let edge = Edge { from: pass.stage, to: StageId::at(s + 1) };
                let cost = self.setup.costs.hop(self.setup.placement, edge).activation;
                let arrival = self.send(0, s + 1, end, cost);
                let at = self.slot(s + 1, m);
                self.activation[at] = arrival;
                self.wake(arrival, self.setup.placement.device(edge.to));
            }
            B if s > 0 => {
                let edge = Edge { from: StageId::at(s - 1), to: pass.stage };
                let cost = self.setup.costs.hop(self.setup.placement, edge).gradient;
                let arrival = self.send(1, s - 1, end, cost);
                self.gradient_arrives(s - 1, m, arrival);
            }
            _ => {}
        }
    }

    fn gradient_arrives(&mut self, stage: usize, microbatch: u32, arrival: f64) {
        let at = self.slot(stage, microbatch);
        self.gradient[at] = arrival;
        self.wake(arrival, self.setup.placement.device(StageId::at(stage)));
    }

    fn send(&mut self, channel: usize, into: usize, ready: f64, cost: f64) -> f64 {
        let free = &mut self.channels[channel][into];
        *free = self.setup.costs.channel().start(ready, *free) + cost;
        *free
    }

    fn slot(&self, stage: usize, microbatch: u32) -> usize {
        stage * self.setup.microbatches as usize + microbatch as usize
    }

    fn list_slot(&self, pass: Pass, kind: usize) -> usize {
        (kind * self.setup.placement.num_stages() + pass.stage.index()) * self.setup.microbatches as usize
            + pass.microbatch.index()
    }

    fn kind(&self, kind: usize) -> PassKind {
        match kind {
            F => PassKind::F,
            B if self.setup.split => PassKind::B,
            B => PassKind::BW,
            _ => PassKind::W,
        }
    }
}

impl Lists {
    fn new(setup: &Dispatch<'_>, orders: &[Vec<Pass>]) -> Self {
        let (stages, microbatches) = (setup.placement.num_stages(), setup.microbatches as usize);
        let mut place = vec![u32::MAX; KINDS * stages * microbatches];
        for order in orders {
            for (at, pass) in order.iter().enumerate() {
                let kind = match pass.kind {
                    PassKind::F => F,
                    PassKind::W => W,
                    _ => B,
                };
                place[(kind * stages + pass.stage.index()) * microbatches + pass.microbatch.index()] =
                    at as u32;
            }
        }
        let done = orders.iter().map(|order| vec![false; order.len()]).collect();
        Self { place, done, head: vec![0; orders.len()] }
    }

    fn take(&mut self, device: usize, place: usize) {
        let done = &mut self.done[device];
        done[place] = true;
        let head = &mut self.head[device];
        while done.get(*head) == Some(&true) {
            *head += 1;
        }
    }

    /// How far what is left of the list before `place` raises memory at its highest.
    fn highest_before(&self, device: usize, place: usize, order: &[Pass], footprint: &Footprint) -> f64 {
        let (mut level, mut highest) = (0.0f64, 0.0f64);
        let left = order[..place.min(order.len())].iter().zip(&self.done[device]).skip(self.head[device]);
        for (pass, done) in left {
            if !done {
                let (come, go) = footprint.change(*pass);
                level += come;
                highest = highest.max(level);
                level -= go;
            }
        }
        highest
    }
}
