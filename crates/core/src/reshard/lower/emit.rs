//! Makes the ops of a program, one transfer after the other.

use crate::id::{Rank, RegionId, TransferId};
use crate::program::{Buffer, Dep, DepKind, OpKind, Program, RankProgram};
use crate::region::Region;

use super::super::plan::{Plan, Transfer};
use super::super::shards::AllSides;
use super::buffers::{Buffers, Part};
use super::order::lowering_order;
use super::{Sink, What};

/// How a transfer waits for another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// Its send waits for this op of the sender.
    Send(Dep),
    /// Its receive waits for this op of the receiver.
    Recv(Dep),
    /// They share no rank.
    Token,
}

/// A plan whose transfers have their buffers, and are yet to become ops.
pub(crate) struct Lowering<'a> {
    plan: &'a Plan,
    sides: &'a AllSides,
    buffers: Buffers,
}

impl<'a> Lowering<'a> {
    pub(crate) fn new(plan: &'a Plan, sides: &'a AllSides) -> Self {
        Self { plan, sides, buffers: Buffers::assign(plan, sides) }
    }

    /// Whether a rank needs memory beside its tensors.
    pub(crate) fn has_stages(&self) -> bool {
        !self.buffers.staged.is_empty()
    }

    pub(crate) fn into_program(mut self) -> Program {
        let slots = std::mem::take(&mut self.buffers.slots).into_iter();
        let mut ranks = slots.map(|stages| RankProgram { stages, ..RankProgram::default() }).collect();
        let chunk_bytes = self.plan.chunk_bytes;
        let copied = self.emit_into(&mut ranks);
        Program { chunk_bytes, ranks, copied }
    }

    /// Hands every op to the sink, in an order in which each rank's ops stand. Answers the boxes of copies that the plan
    /// does not name.
    pub(crate) fn emit_into(self, sink: &mut impl Sink) -> Vec<Region> {
        let plan = self.plan;
        let order = lowering_order(plan, &self.buffers);
        let n = plan.transfers().len();
        let mut emitter = Emitter {
            plan,
            sides: self.sides,
            stays: vec![vec![]; plan.problem.topology.num_ranks()],
            buffers: self.buffers,
            sink,
            copied: vec![],
            send_ops: vec![0; n],
            recv_ops: vec![0; n],
            waits: vec![],
            deps: vec![],
            next_tag: n as u32,
        };
        emitter.copy_what_stays();
        emitter.reserve();
        match order {
            None => (0..).map(TransferId).zip(plan.transfers()).for_each(|(id, t)| emitter.emit(id, t)),
            Some(order) => {
                emitter.number_ops(&order);
                order.iter().for_each(|id| emitter.emit(*id, &plan.transfers()[id.index()]));
            }
        }
        emitter.copied
    }
}

struct Emitter<'a, S> {
    plan: &'a Plan,
    sides: &'a AllSides,
    buffers: Buffers,
    sink: &'a mut S,
    copied: Vec<Region>,
    /// By rank: its first ops, which copy what stays; by tensor, and which of `copied`.
    stays: Vec<Vec<(u32, u32)>>,
    /// By transfer: the place of its send among the sender's ops, and of its receive among the receiver's. Known once
    /// they are emitted, or from `number_ops`. Where the receiver's own part is added behind it, that is the place.
    send_ops: Vec<u32>,
    recv_ops: Vec<u32>,
    /// How the transfer at hand waits for each of its `after`.
    waits: Vec<Wait>,
    /// What the op at hand waits for.
    deps: Vec<Dep>,
    next_tag: u32,
}

impl<S: Sink> Emitter<'_, S> {
    /// Copies of what ranks hold and want, before anything else.
    fn copy_what_stays(&mut self) {
        for (tensor, (reshard, sides)) in (0..).zip(self.plan.problem.reshards.iter().zip(self.sides.iter()))
        {
            if sides.src.is_partial() {
                continue;
            }
            for &rank in &reshard.dst.ranks {
                for held in sides.src.boxes(rank) {
                    for region in sides.dst.common(rank, &held) {
                        self.stays[rank.index()].push((tensor, self.copied.len() as u32));
                        self.push_copy(rank, tensor, region, Buffer::Src, Buffer::Dst);
                    }
                }
            }
        }
    }

    fn reserve(&mut self) {
        for (rank, ends) in (0..).map(Rank).zip(&self.buffers.num_ends) {
            self.sink.reserve(rank, *ends as usize);
        }
    }

    /// Copies a box that the plan has no id for.
    fn push_copy(&mut self, rank: Rank, tensor: u32, region: Region, from: Buffer, into: Buffer) {
        let bytes = region.volume() * self.plan.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        let id = RegionId::at(self.plan.regions().len() + self.copied.len());
        self.copied.push(region);
        self.push(rank, OpKind::Copy { from, into, reduce: false }, What { tensor, region: id, bytes });
    }

    /// Adds an op that waits for everything in `deps`.
    fn push(&mut self, rank: Rank, kind: OpKind, what: What) {
        self.sink.push(rank, kind, what, &self.deps);
        self.deps.clear();
    }

    fn wait_for(&mut self, ops: impl IntoIterator<Item = u32>) {
        self.deps.extend(ops.into_iter().map(|op| Dep { op, kind: DepKind::Done }));
    }

    /// Fixes the place of every op beforehand: where a dependency points forwards in the list.
    fn number_ops(&mut self, order: &[TransferId]) {
        let plan = self.plan;
        let mut next: Vec<u32> = self.stays.iter().map(|copies| copies.len() as u32).collect();
        let mut place = |rank: Rank, ops: u32| {
            next[rank.index()] += ops;
            next[rank.index()] - 1
        };
        for &id in order {
            let t = &plan.transfers()[id.index()];
            for a in plan.after(t).iter().map(|a| &plan.transfers()[a.index()]) {
                if !touches(a, t.src) && !touches(a, t.dst) {
                    place(a.dst, 1);
                    place(t.src, 1);
                }
            }
            let parts = self.buffers.assembled.get(&id).map_or(0, Vec::len) as u32;
            self.send_ops[id.index()] = place(t.src, parts + 1);
            let combining = self.buffers.combining(id);
            let copies = [combining.copy_own, combining.lands_in.is_some(), combining.then_own];
            let copies = copies.map(u32::from).iter().sum::<u32>();
            self.recv_ops[id.index()] = place(t.dst, copies + 1);
        }
    }

    fn emit(&mut self, id: TransferId, t: &Transfer) {
        let plan = self.plan;
        let mut waits = std::mem::take(&mut self.waits);
        waits.clear();
        if !plan.after(t).is_empty() {
            let streamed = self.streamed(t);
            waits.extend(plan.after(t).iter().map(|a| self.wait_of(t, *a, streamed)));
        }
        self.emit_send(id, t, &waits);
        self.emit_recv(id, t, &waits);
        self.waits = waits;
    }

    /// The transfer in `after` that brings the very box, and the last one where several add up to it; none if that is
    /// not all yet.
    fn streamed(&self, t: &Transfer) -> Option<TransferId> {
        let brings = |a: &&TransferId| {
            let a = &self.plan.transfers()[a.index()];
            let same = || a.region == t.region || self.plan.region(a) == self.plan.region(t);
            a.dst == t.src && a.tensor == t.tensor && same()
        };
        let last = self.plan.after(t).iter().filter(brings).max().copied();
        let passes_through = |id: &TransferId| {
            let combining = self.buffers.combining(*id);
            !combining.then_own && combining.lands_in.is_none()
        };
        last.filter(passes_through)
    }

    fn wait_of(&self, t: &Transfer, id: TransferId, streamed: Option<TransferId>) -> Wait {
        let a = &self.plan.transfers()[id.index()];
        let kind = if streamed == Some(id) { DepKind::Stream } else { DepKind::Done };
        let (send, recv) = (self.send_ops[id.index()], self.recv_ops[id.index()]);
        if a.dst == t.src {
            Wait::Send(Dep { op: recv, kind })
        } else if a.src == t.src {
            Wait::Send(Dep { op: send, kind })
        } else if a.dst == t.dst {
            Wait::Recv(Dep { op: recv, kind })
        } else if a.src == t.dst {
            Wait::Recv(Dep { op: send, kind })
        } else {
            Wait::Token
        }
    }

    fn emit_send(&mut self, id: TransferId, t: &Transfer, waits: &[Wait]) {
        let first_token = self.sink.num_ops(t.src);
        let tokens = self.emit_tokens(t, waits);
        let from = self.buffers.in_program(self.buffers.from[id.index()]);
        let first_part = self.sink.num_ops(t.src);
        let parts = self.buffers.assembled.remove(&id).unwrap_or_default();
        self.emit_parts(t, &parts, from);

        let sends = waits.iter().filter_map(|w| if let Wait::Send(dep) = w { Some(*dep) } else { None });
        self.deps.extend(sends);
        self.wait_for_copies(t, from);
        self.wait_for(first_token..first_token + tokens);
        self.wait_for(first_part..first_part + parts.len() as u32);
        self.send_ops[id.index()] = self.sink.num_ops(t.src);
        let kind = OpKind::Send { to: t.dst, lane: t.lane, tag: id.0, weight: t.weight, from };
        self.push(t.src, kind, What::of(t));
    }

    /// A box sent out of the destination shard may in part have been copied there.
    fn wait_for_copies(&mut self, t: &Transfer, from: Buffer) {
        let (plan, sides) = (self.plan, self.sides.tensor(t.tensor));
        let region = plan.region(t);
        if from != Buffer::Dst || sides.src.is_partial() || !sides.src.overlaps(t.src, region) {
            return;
        }
        let stays = &self.stays[t.src.index()];
        let first = stays.partition_point(|(tensor, _)| *tensor < t.tensor);
        for (op, (_, copy)) in (0..).zip(stays).skip(first).take_while(|(_, (tensor, _))| *tensor == t.tensor)
        {
            if self.copied[*copy as usize].overlaps(region) {
                self.deps.push(Dep { op, kind: DepKind::Done });
            }
        }
    }

    /// Tells the sender about everything it waits for and cannot see. Answers how much that is.
    fn emit_tokens(&mut self, t: &Transfer, waits: &[Wait]) -> u32 {
        let plan = self.plan;
        let mut tokens = 0;
        for (a, _) in plan.after(t).iter().zip(waits).filter(|(_, wait)| **wait == Wait::Token) {
            self.emit_token(t, *a);
            tokens += 1;
        }
        tokens
    }

    /// Tells the sender of `t` that `a` has arrived.
    fn emit_token(&mut self, t: &Transfer, a: TransferId) {
        let told_by = self.plan.transfers()[a.index()].dst;
        let tag = self.next_tag;
        self.next_tag += 1;
        let what = What { bytes: 0, ..What::of(t) };
        self.wait_for([self.recv_ops[a.index()]]);
        let (lane, from) = (told_by.0, Buffer::Src);
        self.push(told_by, OpKind::Send { to: t.src, lane, tag, weight: 1, from }, what);
        let recv = OpKind::Recv { from: told_by, lane, tag, into: Buffer::Src, reduce: false };
        self.push(t.src, recv, what);
    }

    fn emit_parts(&mut self, t: &Transfer, parts: &[Part], into: Buffer) {
        for part in parts {
            self.wait_for(part.brought_by.map(|a| self.recv_ops[a.index()]));
            let from = self.buffers.in_program(part.from);
            self.push_copy(t.src, t.tensor, part.region.clone(), from, into);
        }
    }

    fn emit_recv(&mut self, id: TransferId, t: &Transfer, waits: &[Wait]) {
        let combining = self.buffers.combining(id);
        let into = self.buffers.in_program(self.buffers.into[id.index()]);
        if combining.copy_own {
            self.emit_own_part(id, t, into);
        }
        let place = self.sink.num_ops(t.dst);
        self.recv_ops[id.index()] = place;
        let receives = waits.iter().filter_map(|w| if let Wait::Recv(dep) = w { Some(*dep) } else { None });
        self.deps.extend(receives);
        self.wait_for(combining.copy_own.then(|| place - 1));
        let previous = combining.previous.map(|p| self.recv_ops[p.index()]);
        let recv = |into, reduce| OpKind::Recv { from: t.src, lane: t.lane, tag: id.0, into, reduce };
        match combining.lands_in.map(|staged| self.buffers.in_program(Buffer::Stage(staged))) {
            None => {
                self.wait_for(previous);
                self.push(t.dst, recv(into, combining.reduce), What::of(t));
            }
            Some(landing) => {
                self.push(t.dst, recv(landing, false), What::of(t));
                self.wait_for(previous);
                self.add_behind(id, t, landing, into);
            }
        }
        if combining.then_own {
            self.add_behind(id, t, Buffer::Src, into);
        }
    }

    /// Adds what is in a buffer of the receiver once the transfer has got so far; then it has got that far.
    fn add_behind(&mut self, id: TransferId, t: &Transfer, from: Buffer, into: Buffer) {
        self.wait_for([self.recv_ops[id.index()]]);
        self.recv_ops[id.index()] = self.sink.num_ops(t.dst);
        self.push(t.dst, OpKind::Copy { from, into, reduce: true }, What::of(t));
    }

    /// Puts the receiver's own part of a sum where the others will be added, once the memory is free.
    fn emit_own_part(&mut self, id: TransferId, t: &Transfer, into: Buffer) {
        let plan = self.plan;
        let took_over = match self.buffers.into[id.index()] {
            Buffer::Stage(staged) => self.buffers.staged[staged as usize].took_over,
            _ => None,
        };
        if let Some(old) = took_over {
            let readers = plan.after(t).iter().filter(|a| {
                plan.transfers()[a.index()].src == t.dst && self.buffers.from[a.index()] == Buffer::Stage(old)
            });
            let sends = readers.map(|a| Dep { op: self.send_ops[a.index()], kind: DepKind::Done });
            self.deps.extend(sends);
        }
        self.push(t.dst, OpKind::Copy { from: Buffer::Src, into, reduce: false }, What::of(t));
    }
}

impl What {
    fn of(t: &Transfer) -> Self {
        Self { tensor: t.tensor, region: t.region, bytes: t.bytes }
    }
}

fn touches(transfer: &Transfer, rank: Rank) -> bool {
    transfer.src == rank || transfer.dst == rank
}
