//! A program under way on a rank: what each op waits for, and how far it is.

use std::collections::VecDeque;
use std::sync::Arc;

use crossmesh_core::id::Rank;
use crossmesh_core::program::{DepKind, Op, OpKind};
use crossmesh_core::trace::OpSpan;
use crossmesh_core::verify::VerifiedRank;
use rustc_hash::FxHashMap;

use super::tags::ByTag;
use crate::buffer::{OpPlaces, RankBuffers};
use crate::combine::Combine;
use crate::error::CommError;
use crate::memory::lease::{Borrower, Lease};
use crate::memory::place::Lent;
use crate::memory::{Memory, Place, Unavailable};

/// A rank's program with its memory, ready to start.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// The same on all ranks that take part, and in use once at a time.
    pub id: u32,
    /// Jobs of a higher priority send first.
    pub priority: u32,
    pub chunk_bytes: u64,
    pub(crate) program: VerifiedRank,
    pub(crate) places: Vec<OpPlaces>,
    pub(crate) tensors: Vec<Tensor>,
}

/// A tensor's name, and how its partial sums add up.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    pub combine: Option<Combine>,
}

impl JobSpec {
    /// A proven program on its buffers.
    pub fn new(id: u32, buffers: &RankBuffers) -> Result<Self, CommError> {
        let program = buffers.program().clone();
        let me = program.id();
        let cannot =
            |e: std::io::Error| CommError::System { me, what: "place its ops", cause: e.to_string() };
        let places = buffers.places().map_err(cannot)?;
        let whole = program.whole();
        let tensors = whole.tensors.iter().enumerate().map(|(i, t)| tensor(i, t)).collect();
        let chunk_bytes = whole.chunk_bytes;
        Ok(Self { id, priority: 0, chunk_bytes, program, places, tensors })
    }
}

fn tensor(index: usize, tensor: &crossmesh_core::program::Tensor) -> Tensor {
    let name = match &*tensor.name {
        "" => format!("{index} ({}{:?})", tensor.dtype, tensor.shape),
        name => name.to_string(),
    };
    Tensor { name, combine: tensor.partial.map(|p| Combine::new(tensor.dtype, p.op)) }
}

/// Whether two sends go to the same peer in the same lane.
fn in_one_channel(a: &Op, b: &Op) -> bool {
    match (a.kind, b.kind) {
        (OpKind::Send { to, lane, .. }, OpKind::Send { to: other, lane: other_lane, .. }) => {
            (to, lane) == (other, other_lane)
        }
        _ => false,
    }
}

/// All memory of some places, for one engine.
fn leases(places: &[OpPlaces], borrower: Borrower) -> Result<Vec<Lease>, Unavailable> {
    let mut known: Vec<&Arc<Memory>> = vec![];
    for place in places.iter().flat_map(|p| [&p.from, &p.into]).flatten() {
        // Most ops are where the op before them was.
        if !known.iter().rev().any(|memory| Arc::ptr_eq(memory, &place.memory)) {
            known.push(&place.memory);
        }
    }
    known.into_iter().map(|memory| Lease::new(memory, borrower)).collect()
}

/// A place of a job under way. What a pass or a peer has of it meanwhile, the program says: it was verified.
#[expect(unsafe_code, reason = "the engine has what its jobs lease")]
fn lent(place: &Place) -> &Lent {
    // SAFETY: the job has a lease of the memory, so that no other engine and no owner touches it; and an engine is driven by
    // one thread at a time. The lease is given up when all messages have arrived, or with the engine's links.
    unsafe { Lent::of(place) }
}

/// How far an op is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Ops that have to end first.
    pub waits: u32,
    /// The receive that a send follows.
    pub leader: Option<u32>,
    /// Sends: the peer has a place for it.
    pub peer_ready: bool,
    /// Sends: handed to the link.
    pub issued: u64,
    pub issued_all: bool,
    /// Out of our hands, or in place.
    pub moved: u64,
    pub done: bool,
    /// When it could start, when its first byte moved, when it ended.
    pub ready_ns: u64,
    pub started_ns: u64,
    pub ended_ns: u64,
}

/// Sends to one peer in one lane, first in, first out.
#[derive(Debug)]
pub(crate) struct Channel {
    pub link: usize,
    pub queue: VecDeque<u32>,
    /// Virtual time: bytes sent over weight.
    pub pass: f64,
    /// Whether it stands in the line of those that can send.
    pub in_line: bool,
}

pub(crate) struct Job {
    pub spec: JobSpec,
    /// Of all memory that it moves.
    pub leases: Vec<Lease>,
    pub ops: Vec<Progress>,
    /// The ops that wait for op `i` to end: `dependents[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    dependents: Vec<u32>,
    /// By receive: the sends that follow it.
    pub followers: FxHashMap<u32, Vec<u32>>,
    pub channels: Vec<Channel>,
    /// By op; none of those that send nothing.
    channel_of: Vec<Option<u32>>,
    pub send_by_tag: ByTag,
    pub recv_by_tag: ByTag,
    pub left: usize,
    /// By peer: ops with it that have not ended.
    left_with: FxHashMap<Rank, u32>,
    pub started_ns: u64,
    pub moved_ns: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

impl Job {
    pub fn new(
        spec: JobSpec,
        now_ns: u64,
        link_of: impl Fn(Rank) -> Option<usize>,
        me: Rank,
        borrower: Borrower,
    ) -> Result<Self, CommError> {
        let len = spec.program.ops.len();
        let leases = leases(&spec.places, borrower);
        let in_use = |e: Unavailable| CommError::System { me, what: "start a program", cause: e.to_string() };
        let mut job = Self {
            leases: leases.map_err(in_use)?,
            ops: vec![Progress::default(); len],
            starts: vec![],
            dependents: vec![],
            followers: FxHashMap::default(),
            channels: vec![],
            channel_of: vec![None; len],
            send_by_tag: ByTag::new(&[]),
            recv_by_tag: ByTag::new(&[]),
            left: len,
            left_with: FxHashMap::default(),
            started_ns: now_ns,
            moved_ns: now_ns,
            bytes_sent: 0,
            bytes_received: 0,
            spec,
        };
        job.wire_dependencies();
        job.wire_channels(link_of, me)?;
        Ok(job)
    }

    pub fn op(&self, op: u32) -> &Op {
        &self.spec.program.ops[op as usize]
    }

    /// Where an op reads.
    pub fn source(&self, op: u32) -> Option<&Lent> {
        self.spec.places[op as usize].from.as_ref().map(lent)
    }

    /// Where it writes.
    pub fn target(&self, op: u32) -> Option<&Lent> {
        self.spec.places[op as usize].into.as_ref().map(lent)
    }

    /// Where a send stands in line.
    pub fn channel_of(&self, op: u32) -> Option<u32> {
        self.channel_of[op as usize]
    }

    pub fn dependents(&self, op: u32) -> std::ops::Range<usize> {
        self.starts[op as usize] as usize..self.starts[op as usize + 1] as usize
    }

    pub fn dependent(&self, place: usize) -> u32 {
        self.dependents[place]
    }

    fn wire_dependencies(&mut self) {
        let program = &self.spec.program;
        let mut waits: Vec<(u32, u32)> = vec![];
        for (i, op) in (0..).zip(&program.ops) {
            for dep in program.deps(op) {
                let leader = &program.ops[dep.op as usize];
                let streams = dep.kind == DepKind::Stream
                    && self.ops[i as usize].leader.is_none()
                    && matches!((op.kind, leader.kind), (OpKind::Send { .. }, OpKind::Recv { .. }))
                    && (leader.tensor, leader.bytes) == (op.tensor, op.bytes);
                if in_one_channel(leader, op) && dep.op < i {
                    continue; // first in, first out: the channel sees to it
                }
                if streams {
                    self.ops[i as usize].leader = Some(dep.op);
                    self.followers.entry(dep.op).or_default().push(i);
                } else {
                    self.ops[i as usize].waits += 1;
                    waits.push((dep.op, i));
                }
            }
        }
        waits.sort_unstable();
        let mut at = 0;
        for op in 0..=program.ops.len() as u32 {
            while at < waits.len() && waits[at].0 < op {
                at += 1;
            }
            self.starts.push(at as u32);
        }
        self.dependents = waits.into_iter().map(|(_, op)| op).collect();
    }

    fn wire_channels(&mut self, link_of: impl Fn(Rank) -> Option<usize>, me: Rank) -> Result<(), CommError> {
        let mut channels: FxHashMap<(Rank, u32), u32> = FxHashMap::default();
        let (mut sends, mut recvs) = (vec![], vec![]);
        for (i, op) in (0..).zip(&self.spec.program.ops) {
            match op.kind {
                OpKind::Send { to, lane, tag, .. } => {
                    let link = link_of(to).ok_or(CommError::NoLink { me, peer: to })?;
                    let channel = *channels.entry((to, lane)).or_insert_with(|| {
                        let queue = VecDeque::new();
                        self.channels.push(Channel { link, queue, pass: 0.0, in_line: false });
                        self.channels.len() as u32 - 1
                    });
                    self.channels[channel as usize].queue.push_back(i);
                    self.channel_of[i as usize] = Some(channel);
                    sends.push((tag, i));
                }
                OpKind::Recv { from, tag, .. } => {
                    link_of(from).ok_or(CommError::NoLink { me, peer: from })?;
                    recvs.push((tag, i));
                }
                OpKind::Copy { .. } | OpKind::Compute { .. } => {}
            }
        }
        for op in 0..self.ops.len() as u32 {
            if let Some(peer) = self.peer_of(op) {
                *self.left_with.entry(peer).or_default() += 1;
            }
        }
        (self.send_by_tag, self.recv_by_tag) = (ByTag::new(&sends), ByTag::new(&recvs));
        Ok(())
    }

    /// A peer has a place for a message of ours: which op that is, or why there is no such message.
    pub fn note_ready(&mut self, peer: Rank, tag: u32) -> Result<u32, &'static str> {
        let op = self.send_by_tag.get(tag).filter(|op| self.peer_of(*op) == Some(peer));
        let op = op.ok_or("no such message is for the rank that announces it")?;
        let progress = &mut self.ops[op as usize];
        match std::mem::replace(&mut progress.peer_ready, true) {
            false => Ok(op),
            true => Err("it was announced before"),
        }
    }

    /// How far the send at the head of a channel may go now; none if it may not go on.
    pub fn sendable(&self, channel: u32) -> Option<(u32, u64)> {
        let op = *self.channels[channel as usize].queue.front()?;
        let progress = &self.ops[op as usize];
        if progress.waits > 0 || !progress.peer_ready {
            return None;
        }
        let bytes = self.op(op).bytes;
        let upto = match progress.leader {
            Some(leader) if !self.ops[leader as usize].done => self.ops[leader as usize].moved,
            _ => bytes,
        };
        let leader_done = progress.leader.is_none_or(|l| self.ops[l as usize].done);
        let goes_on = upto > progress.issued || (bytes == 0 && leader_done);
        goes_on.then_some((op, upto))
    }

    /// When every op ran, in seconds since the job's start.
    pub fn spans(&self) -> Vec<OpSpan> {
        let seconds = |ns: u64| ns.saturating_sub(self.started_ns) as f64 * 1e-9;
        self.ops
            .iter()
            .map(|p| OpSpan { start_s: seconds(p.started_ns), end_s: seconds(p.ended_ns) })
            .collect()
    }

    pub fn peer_of(&self, op: u32) -> Option<Rank> {
        match self.op(op).kind {
            OpKind::Send { to, .. } => Some(to),
            OpKind::Recv { from, .. } => Some(from),
            OpKind::Copy { .. } | OpKind::Compute { .. } => None,
        }
    }

    /// The op that has waited the longest for a peer: for one in particular, or for any.
    pub fn oldest_wait(&self, peer: Option<Rank>) -> Option<u32> {
        let heads: Vec<u32> = self.channels.iter().filter_map(|c| c.queue.front().copied()).collect();
        let waiting = |op: &u32| {
            let p = &self.ops[*op as usize];
            // What was handed over and has not gone waits for the peer, also where more has yet to come.
            let follows = p.issued <= p.moved
                && p.leader
                    .is_some_and(|l| self.ops[l as usize].moved <= p.issued && !self.ops[l as usize].done);
            let with = self.peer_of(*op);
            !p.done && p.waits == 0 && !follows && with.is_some() && (peer.is_none() || with == peer)
        };
        let recvs = self.recv_by_tag.ops().into_iter();
        let sent = (0..self.ops.len() as u32).filter(|op| self.ops[*op as usize].issued_all);
        recvs.chain(heads).chain(sent).filter(waiting).min_by_key(|op| (self.ops[*op as usize].ready_ns, *op))
    }

    /// Takes note that an op has ended.
    pub fn count_down(&mut self, op: u32) {
        self.left -= 1;
        if let Some(left) = self.peer_of(op).and_then(|peer| self.left_with.get_mut(&peer)) {
            *left -= 1;
        }
    }

    /// Whoever it has something to do with.
    pub fn peers(&self) -> impl Iterator<Item = Rank> {
        self.left_with.keys().copied()
    }

    /// Whether there is anything left to do with a peer.
    pub fn goes_on_with(&self, peer: Rank) -> bool {
        self.left_with.get(&peer).is_some_and(|left| *left > 0)
    }

    /// The first op with a peer that has not ended, whatever it waits for.
    pub fn next_with(&self, peer: Rank) -> Option<u32> {
        (0..self.ops.len() as u32).find(|op| !self.ops[*op as usize].done && self.peer_of(*op) == Some(peer))
    }

    /// The op in words.
    pub fn describe(&self, op: u32) -> String {
        match self.op(op).kind {
            OpKind::Send { to, tag, .. } => format!("send t{tag} to {to}"),
            OpKind::Recv { from, tag, .. } => format!("receive t{tag} from {from}"),
            OpKind::Copy { .. } => format!("copy {op}"),
            OpKind::Compute { pass, .. } => format!("compute pass {pass}"),
        }
    }
}
