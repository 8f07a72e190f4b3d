//! The simulator: interprets a program with a cost model, event by event, and writes a trace.
//!
//! Every channel (a lane from one rank to another) moves one message at a time; channels share links by weighted max-min fairness
//! ([`network`]). A message starts when it heads its channel, everything it waits for on both sides has ended, and the
//! first chunk of what it forwards has arrived; from there it stays a chunk behind what it follows:
//!
//! ```text
//! r0 -> r1   |=====================|
//! r1 -> r2      |=====================|      one chunk later, and so on down the chain
//! ```
//!
//! Where the cluster says that messages cost time, a rank sees to one at a time: before its first byte leaves, and after its last one has
//! arrived. Both wait for whatever the rank is busy with.
//!
//! Between events every rate is constant, so nothing is computed per chunk: the cost is in events, not in bytes.

mod network;
mod wiring;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::cluster::{Cluster, Topology};
use crate::id::Rank;
use crate::program::Program;
use crate::trace::{OpSpan, Trace};
use network::{Network, Ordered};
use wiring::{Ending, Local, Message, Wiring};

/// Why a program has no trace. A verified program always has one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    #[error("{rank} has a send or receive with tag {tag} that nothing matches\nhint: verify the plan first")]
    Unmatched { rank: Rank, tag: u32 },
    #[error("the program has {program} ranks, the cluster {cluster} devices")]
    ClusterTooSmall { program: usize, cluster: usize },
    #[error(
        "nothing moves after {now_s} s: {left} messages wait, the first from {src} to {dst}\nhint: verify the plan first"
    )]
    Stuck { now_s: f64, left: usize, src: Rank, dst: Rank },
    #[error(
        "nothing happens after {now_s} s, and {left} copies or computations wait for each other\nhint: verify the program first"
    )]
    Idle { now_s: f64, left: usize },
    #[error("the simulation does not come to an end: {events} events for {messages} messages, at {now_s} s")]
    Endless { events: u64, messages: usize, now_s: f64 },
}

/// Interprets a program on a cluster.
pub fn simulate(program: &Program, cluster: &Cluster) -> Result<Trace, SimError> {
    let topology = Topology::new(cluster);
    if program.ranks.len() > topology.num_ranks() {
        return Err(SimError::ClusterTooSmall {
            program: program.ranks.len(),
            cluster: topology.num_ranks(),
        });
    }
    let mut sim = Sim::new(program, cluster, &topology)?;
    sim.run()?;
    sim.into_trace()
}

/// More events than this per message would be a mistake of ours. A message has a handful, and a few more for every
/// chunk that its stream falls behind and catches up.
const MAX_EVENTS_PER_MESSAGE: u64 = 10_000;

/// Events closer together than this share of the time passed are one event.
const SAME_TIME: f64 = 1e-9;

/// A channel's message under way.
#[derive(Debug, Clone, Copy, Default)]
struct Channel {
    /// Index into its queue.
    head: u32,
    preparation: Preparation,
    moving: bool,
    sent: f64,
    updated_s: f64,
    /// Predictions of an older version are void.
    version: u32,
}

/// What the sender has done for the head of a channel before its first byte can leave.
#[derive(Debug, Clone, Copy, Default)]
enum Preparation {
    #[default]
    Ahead,
    UnderWay,
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The sender has seen to the head of this channel.
    Prepared(u32),
    /// The last byte is there, and the receiver has yet to see to it.
    Landed(u32),
    /// The receiver has seen to it.
    Arrived(u32),
    /// The first chunk has arrived: followers may start.
    Opened(u32),
    /// A computation has come to its end.
    Computed(u32),
    Channel {
        channel: u32,
        version: u32,
        due: Due,
    },
}

/// What a channel comes to next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// The end of its message.
    Finish,
    /// A full chunk of its message.
    Chunk,
    /// The bytes that have arrived so far of the message it follows: from here it stays with it.
    CatchUp,
    /// A chunk more behind that message than it has to be: from here it is on its own again. The distance between the
    /// two keeps a channel from changing its mind forever at one moment in time.
    FallBehind,
}

/// How far a message is.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    chunk_sent: bool,
    opened: bool,
    sent: bool,
    arrived: bool,
}

struct Sim {
    wiring: Wiring,
    network: Network,
    channels: Vec<Channel>,
    progress: Vec<Progress>,
    latency_s: Vec<f64>,
    /// By channel: how long a message keeps its sender busy, and its receiver.
    message_s: Vec<f64>,
    /// By rank: until when it is busy with messages.
    busy_until_s: Vec<f64>,
    chunk: f64,
    now_s: f64,
    events: BinaryHeap<Reverse<(Ordered, Event)>>,
    /// Channels whose head may be able to start.
    to_try: Vec<u32>,
    endings: Vec<Ending>,
    makespan_s: f64,
    locals_left: usize,
    ops: Vec<Vec<OpSpan>>,
}

impl Sim {
    fn new(program: &Program, cluster: &Cluster, topology: &Topology) -> Result<Self, SimError> {
        let wiring = Wiring::of(program)?;
        let network = Network::new(cluster, topology, &wiring.channel_ends);
        let latency = |&(src, dst): &(Rank, Rank)| match topology.same_host(src, dst) {
            true => cluster.local_latency_s,
            false => cluster.latency_s,
        };
        let message = |&(src, dst): &(Rank, Rank)| match topology.same_host(src, dst) {
            true => cluster.local_message_s,
            false => cluster.message_s,
        };
        Ok(Self {
            message_s: wiring.channel_ends.iter().map(message).collect(),
            busy_until_s: vec![0.0; program.ranks.len()],
            channels: vec![Channel::default(); wiring.channel_ends.len()],
            progress: vec![Progress::default(); wiring.messages.len()],
            latency_s: wiring.channel_ends.iter().map(latency).collect(),
            chunk: program.chunk_bytes.max(1) as f64,
            now_s: 0.0,
            events: BinaryHeap::new(),
            to_try: (0..wiring.channel_ends.len() as u32).collect(),
            endings: vec![],
            makespan_s: 0.0,
            locals_left: wiring.locals.len(),
            ops: program.ranks.iter().map(|r| vec![OpSpan::default(); r.ops.len()]).collect(),
            wiring,
            network,
        })
    }

    fn run(&mut self) -> Result<(), SimError> {
        for local in 0..self.wiring.locals.len() as u32 {
            if self.wiring.locals[local as usize].pending == 0 {
                self.begin_local(local);
            }
        }
        let messages = self.wiring.messages.len();
        let most = MAX_EVENTS_PER_MESSAGE * (100 + messages as u64) + self.wiring.locals.len() as u64;
        let mut events = 0;
        self.settle();
        while let Some(Reverse((Ordered(time), event))) = self.events.pop() {
            // Events of one moment are handled together, before links are shared anew.
            self.now_s = self.now_s.max(time);
            self.handle(event);
            let next = self.events.peek().map(|Reverse((Ordered(next), _))| *next);
            if next.is_none_or(|next| next > self.now_s * (1.0 + SAME_TIME)) {
                self.settle();
            }
            events += 1;
            if events > most {
                return Err(SimError::Endless { events, messages, now_s: self.now_s });
            }
        }
        Ok(())
    }

    /// Starts what can start and shares the links anew, until nothing more follows from it.
    fn settle(&mut self) {
        let mut changed = vec![];
        loop {
            while let Some(ending) = self.endings.pop() {
                self.end(ending);
            }
            match self.to_try.pop() {
                Some(channel) => self.try_start(channel),
                None => {
                    self.network.refill(self.now_s, &mut changed);
                    if changed.is_empty() {
                        return;
                    }
                    self.apply_rates(&mut changed);
                }
            }
        }
    }

    fn head(&self, channel: u32) -> Option<u32> {
        let at = self.channels[channel as usize].head as usize;
        self.wiring.queues.of(channel).get(at).copied()
    }

    /// Whether a message may start now.
    fn is_ready(&self, message: u32) -> bool {
        let open = |leader: &u32| self.progress[*leader as usize].opened;
        self.wiring.messages[message as usize].pending == 0
            && self.wiring.leaders.of(message).iter().all(open)
    }

    fn try_start(&mut self, channel: u32) {
        while !self.channels[channel as usize].moving {
            let Some(message) = self.head(channel).filter(|&m| self.is_ready(m)) else { return };
            if !self.is_prepared(channel, message) {
                return;
            }
            if self.wiring.messages[message as usize].bytes == 0.0 {
                self.finish(channel);
                continue;
            }
            let state = &mut self.channels[channel as usize];
            (state.moving, state.sent, state.updated_s) = (true, 0.0, self.now_s);
            self.network.activate(channel, self.wiring.messages[message as usize].weight);
            self.check_lead(channel, message);
        }
    }

    /// Whether the sender has seen to a head that may start. If not, it does so as soon as it can.
    fn is_prepared(&mut self, channel: u32, message: u32) -> bool {
        let seconds = self.message_s[channel as usize];
        match self.channels[channel as usize].preparation {
            Preparation::Done => true,
            Preparation::UnderWay => false,
            Preparation::Ahead if seconds == 0.0 => {
                self.mark_start(message, self.now_s);
                true
            }
            Preparation::Ahead => {
                let begin_s = self.occupy(self.wiring.messages[message as usize].src, seconds);
                self.channels[channel as usize].preparation = Preparation::UnderWay;
                self.mark_start(message, begin_s);
                self.later(begin_s + seconds - self.now_s, Event::Prepared(channel));
                false
            }
        }
    }

    /// Keeps a rank busy with a message for so long, from now or from when it is free; says when that begins.
    fn occupy(&mut self, rank: Rank, seconds: f64) -> f64 {
        let until_s = &mut self.busy_until_s[rank.index()];
        let begin_s = until_s.max(self.now_s);
        *until_s = begin_s + seconds;
        begin_s
    }

    fn mark_start(&mut self, message: u32, start_s: f64) {
        let m = &self.wiring.messages[message as usize];
        self.ops[m.src.index()][m.send_op as usize].start_s = start_s;
        self.ops[m.dst.index()][m.recv_op as usize].start_s = start_s;
    }

    /// Brings a channel's progress up to now.
    fn update(&mut self, channel: u32, rate: f64) {
        let state = &mut self.channels[channel as usize];
        state.sent += rate * (self.now_s - state.updated_s);
        state.updated_s = self.now_s;
    }

    fn sent(&self, channel: u32) -> f64 {
        let state = &self.channels[channel as usize];
        state.sent + self.network.flows[channel as usize].rate * (self.now_s - state.updated_s)
    }

    /// How many bytes the head of `channel` may still send before it waits for what it follows; `None` if it follows
    /// nothing that is still under way. Also names the leading channel, if that one still sends.
    fn lead(&self, message: u32) -> Option<(f64, Option<u32>)> {
        let channel = self.wiring.messages[message as usize].channel;
        let mut lead: Option<(f64, Option<u32>)> = None;
        for &leader in self.wiring.leaders.of(message) {
            let progress = self.progress[leader as usize];
            if progress.arrived {
                continue;
            }
            let m = &self.wiring.messages[leader as usize];
            let (available, by) = match progress.sent {
                true => (m.bytes - self.chunk, None),
                false => (self.sent(m.channel) - self.chunk, Some(m.channel)),
            };
            let left = (available - self.sent(channel)).max(0.0);
            if lead.is_none_or(|(least, _)| left < least) {
                lead = Some((left, by));
            }
        }
        lead
    }

    /// Ties a channel to its leader, or parks it, if it has caught up.
    fn check_lead(&mut self, channel: u32, message: u32) {
        match self.lead(message) {
            Some((left, by)) if left <= SAME_TIME * self.wiring.messages[message as usize].bytes => {
                self.network.follow(channel, by);
                self.network.flows[channel as usize].parked = by.is_none();
                self.network.touch(channel);
            }
            _ => {}
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Prepared(channel) => {
                self.channels[channel as usize].preparation = Preparation::Done;
                self.to_try.push(channel);
            }
            Event::Landed(message) => self.land(message),
            Event::Arrived(message) => self.arrive(message),
            Event::Opened(message) => self.open(message),
            Event::Computed(local) => self.endings.push(Ending::Local(local)),
            Event::Channel { channel, version, due } => {
                if self.channels[channel as usize].version != version {
                    return;
                }
                self.update(channel, self.network.flows[channel as usize].rate);
                let message = self.head(channel).expect("a moving channel has a head");
                match due {
                    Due::Finish => self.finish(channel),
                    Due::Chunk => {
                        self.progress[message as usize].chunk_sent = true;
                        self.later(self.latency_s[channel as usize], Event::Opened(message));
                        self.predict(channel);
                    }
                    Due::CatchUp => {
                        let (_, by) = self.lead(message).expect("it caught up with something");
                        self.network.follow(channel, by);
                        self.network.flows[channel as usize].parked = by.is_none();
                        self.network.touch(channel);
                        self.predict(channel);
                    }
                    Due::FallBehind => {
                        self.network.follow(channel, None);
                        self.network.touch(channel);
                        self.predict(channel);
                    }
                }
            }
        }
    }

    /// The head of a channel has been sent to its last byte.
    fn finish(&mut self, channel: u32) {
        let message = self.head(channel).expect("only a head can finish");
        let m = &self.wiring.messages[message as usize];
        let weight = m.weight;
        self.ops[m.src.index()][m.send_op as usize].end_s = self.now_s;
        self.network.count(channel, m.bytes as u64);
        self.progress[message as usize].sent = true;
        self.release_followers(channel);
        let state = &mut self.channels[channel as usize];
        state.head += 1;
        state.version += 1;
        state.sent = 0.0;
        state.preparation = Preparation::Ahead;
        self.endings.push(Ending::Sent(message));
        let is_free = self.message_s[channel as usize] == 0.0;
        let arrival = if is_free { Event::Arrived(message) } else { Event::Landed(message) };
        self.later(self.latency_s[channel as usize], arrival);
        if !self.channels[channel as usize].moving {
            return;
        }
        // The next message of the same kind takes over without a change to the network.
        let next = self.head(channel).filter(|&n| {
            let next = &self.wiring.messages[n as usize];
            is_free
                && next.weight == weight
                && next.bytes > 0.0
                && self.wiring.leaders.of(n).is_empty()
                && self.is_ready(n)
                && self.network.flows[channel as usize].leader.is_none()
        });
        match next {
            Some(next) => {
                self.mark_start(next, self.now_s);
                self.predict(channel);
            }
            None => {
                self.channels[channel as usize].moving = false;
                self.network.deactivate(channel, self.now_s);
                self.to_try.push(channel);
            }
        }
    }

    /// The channels that were tied to this one have caught up with bytes on the wire: they wait for them.
    fn release_followers(&mut self, channel: u32) {
        for follower in self.network.followers(channel) {
            self.network.follow(follower, None);
            self.network.flows[follower as usize].parked = true;
            self.network.touch(follower);
        }
    }

    fn land(&mut self, message: u32) {
        let Message { dst, channel, .. } = self.wiring.messages[message as usize];
        let seconds = self.message_s[channel as usize];
        let begin_s = self.occupy(dst, seconds);
        self.later(begin_s + seconds - self.now_s, Event::Arrived(message));
    }

    fn arrive(&mut self, message: u32) {
        let m = &self.wiring.messages[message as usize];
        self.ops[m.dst.index()][m.recv_op as usize].end_s = self.now_s;
        self.makespan_s = self.makespan_s.max(self.now_s);
        self.progress[message as usize].arrived = true;
        self.endings.push(Ending::Received(message));
        self.open(message);
    }

    /// Followers of a message have more to send than before, or may start.
    fn open(&mut self, message: u32) {
        self.progress[message as usize].opened = true;
        for i in 0..self.wiring.followers.of(message).len() {
            let follower = self.wiring.followers.of(message)[i];
            let channel = self.wiring.messages[follower as usize].channel;
            if self.head(channel) != Some(follower) {
                continue;
            }
            if !self.channels[channel as usize].moving {
                self.to_try.push(channel);
            } else if self.progress[message as usize].arrived {
                if self.network.flows[channel as usize].parked {
                    self.network.flows[channel as usize].parked = false;
                    self.network.touch(channel);
                    self.check_lead(channel, follower);
                }
                self.predict(channel);
            }
        }
    }

    fn end(&mut self, ending: Ending) {
        if let Ending::Local(local) = ending {
            let Local { rank, op, .. } = self.wiring.locals[local as usize];
            self.ops[rank.index()][op as usize].end_s = self.now_s;
            self.locals_left -= 1;
            self.makespan_s = self.makespan_s.max(self.now_s);
        }
        for i in 0..self.wiring.waiting(ending).len() {
            let waiter = self.wiring.waiting(ending)[i];
            match self.wiring.messages.get_mut(waiter as usize) {
                Some(message) => {
                    message.pending -= 1;
                    if message.pending == 0 {
                        self.to_try.push(message.channel);
                    }
                }
                None => {
                    let local = waiter - self.wiring.messages.len() as u32;
                    self.wiring.locals[local as usize].pending -= 1;
                    if self.wiring.locals[local as usize].pending == 0 {
                        self.begin_local(local);
                    }
                }
            }
        }
    }

    /// Nothing keeps a copy or a computation from starting.
    fn begin_local(&mut self, local: u32) {
        let Local { rank, op, seconds, .. } = self.wiring.locals[local as usize];
        self.ops[rank.index()][op as usize].start_s = self.now_s;
        match seconds > 0.0 {
            true => self.later(seconds, Event::Computed(local)),
            false => self.endings.push(Ending::Local(local)),
        }
    }

    /// New rates: progress so far counts at the old ones, and every prediction they touch is made anew.
    fn apply_rates(&mut self, changed: &mut Vec<(u32, f64)>) {
        for &(channel, old) in changed.iter() {
            let state = &mut self.channels[channel as usize];
            state.sent += old * (self.now_s - state.updated_s);
            state.updated_s = self.now_s;
        }
        for (channel, _) in changed.drain(..) {
            self.predict(channel);
            let Some(message) = self.head(channel) else { continue };
            for i in 0..self.wiring.followers.of(message).len() {
                let follower = self.wiring.followers.of(message)[i];
                let other = self.wiring.messages[follower as usize].channel;
                if self.channels[other as usize].moving && self.head(other) == Some(follower) {
                    self.predict(other);
                }
            }
        }
    }

    /// Works out what a moving channel comes to next, at the present rates.
    fn predict(&mut self, channel: u32) {
        let Some(message) = self.head(channel).filter(|_| self.channels[channel as usize].moving) else {
            return;
        };
        let rate = self.network.flows[channel as usize].rate;
        self.channels[channel as usize].version += 1;
        // What is parked waits for an arrival; its rate may not have been taken away yet.
        if rate <= 0.0 || self.network.flows[channel as usize].parked {
            return;
        }
        let sent = self.sent(channel);
        let mut next =
            (Ordered((self.wiring.messages[message as usize].bytes - sent).max(0.0) / rate), Due::Finish);
        let has_followers = !self.wiring.followers.of(message).is_empty();
        if has_followers && !self.progress[message as usize].chunk_sent {
            next = next.min((Ordered((self.chunk - sent).max(0.0) / rate), Due::Chunk));
        }
        if let Some((left, by)) = self.lead(message) {
            let gain = rate - by.map_or(0.0, |l| self.network.flows[l as usize].rate);
            let tied = self.network.flows[channel as usize].leader.is_some();
            if !tied && gain > 1e-9 * rate {
                next = next.min((Ordered(left / gain), Due::CatchUp));
            } else if tied && -gain > 1e-9 * rate {
                next = next.min((Ordered((self.chunk - left).max(0.0) / -gain), Due::FallBehind));
            }
        }
        let version = self.channels[channel as usize].version;
        let (Ordered(delay_s), due) = next;
        self.later(delay_s, Event::Channel { channel, version, due });
    }

    fn later(&mut self, delay_s: f64, event: Event) {
        self.events.push(Reverse((Ordered(self.now_s + delay_s), event)));
    }

    fn into_trace(self) -> Result<Trace, SimError> {
        let left = self.progress.iter().filter(|p| !p.arrived).count();
        if left > 0 {
            let first = self.progress.iter().position(|p| !p.arrived).expect("some message is left");
            let m = &self.wiring.messages[first];
            return Err(SimError::Stuck { now_s: self.now_s, left, src: m.src, dst: m.dst });
        }
        if self.locals_left > 0 {
            return Err(SimError::Idle { now_s: self.now_s, left: self.locals_left });
        }
        Ok(Trace { makespan_s: self.makespan_s, ops: self.ops, links: self.network.into_uses(self.now_s) })
    }
}

#[cfg(test)]
mod tests;
