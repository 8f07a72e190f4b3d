//! From a plan to the program of every rank.
//!
//! A transfer becomes a send on one rank and a receive on the other; its `after` becomes dependencies between ops of
//! one rank. Where a transfer waits for one that touches neither of its ranks, a token of no bytes carries the news:
//!
//! ```text
//! t0: r0 -> r1                       r1   recv t0, send token to r2
//! t1: r2 -> r3, after t0             r2   recv token, send t1
//! ```
//!
//! What a rank holds and also wants is copied. Ops stand in list order (or where `after` points forwards, in an order
//! that can run), so both ends of a channel see the same order.

mod buffers;
mod order;

use crate::id::{Rank, RegionId, TransferId};
use crate::program::{Buffer, Dep, DepKind, Op, OpKind, Program, RankProgram};
use crate::region::Region;

use super::plan::{Plan, Transfer};
use buffers::{Buffers, Part, Sides};

/// Lowers a plan. Any plan lowers to some program; that it is a good one is for the verifier to say.
pub fn lower(plan: &Plan) -> Program {
    let sides = Sides::of(plan);
    let buffers = Buffers::assign(plan, &sides);
    let order = order::lowering_order(plan, &buffers);
    let mut lowering = Lowering::new(plan, &sides, buffers);
    lowering.copy_what_stays();
    lowering.number_ops(&order);
    for id in order {
        lowering.emit(id, &plan.transfers()[id.index()]);
    }
    lowering.program
}

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

struct Lowering<'a> {
    plan: &'a Plan,
    sides: &'a [Sides],
    buffers: Buffers,
    program: Program,
    /// By transfer: the place of its send among the sender's ops, and of its receive among the receiver's.
    send_ops: Vec<u32>,
    recv_ops: Vec<u32>,
    next_tag: u32,
}

impl<'a> Lowering<'a> {
    fn new(plan: &'a Plan, sides: &'a [Sides], mut buffers: Buffers) -> Self {
        let slots = std::mem::take(&mut buffers.slots);
        let ranks =
            slots.into_iter().map(|stages| RankProgram { stages, ..RankProgram::default() }).collect();
        let program = Program { chunk_bytes: plan.chunk_bytes, ranks, copied: vec![] };
        let next_tag = plan.transfers().len() as u32;
        Self { plan, sides, buffers, program, send_ops: vec![], recv_ops: vec![], next_tag }
    }

    /// Copies of what ranks hold and want, before anything else.
    fn copy_what_stays(&mut self) {
        for (tensor, (reshard, sides)) in self.plan.problem.reshards.iter().zip(self.sides).enumerate() {
            if sides.src.is_partial() {
                continue;
            }
            for &rank in &reshard.dst.ranks {
                for held in sides.src.boxes(rank) {
                    for region in sides.dst.common(rank, &held) {
                        self.push_copy(rank, tensor as u32, region, Buffer::Src, Buffer::Dst);
                    }
                }
            }
        }
    }

    /// Copies a box that the plan has no id for. Dependencies pushed before belong to it.
    fn push_copy(&mut self, rank: Rank, tensor: u32, region: Region, from: Buffer, into: Buffer) {
        let deps = self.program.ranks[rank.index()].deps.len() as u32;
        self.push_copy_after(rank, tensor, region, (from, into), deps);
    }

    fn push_copy_after(
        &mut self,
        rank: Rank,
        tensor: u32,
        region: Region,
        (from, into): (Buffer, Buffer),
        deps: u32,
    ) {
        let bytes = region.volume() * self.plan.problem.reshards[tensor as usize].src.layout.dtype().bytes();
        let id = RegionId::at(self.plan.regions().len() + self.program.copied.len());
        self.program.copied.push(region);
        self.push(rank, OpKind::Copy { from, into }, (tensor, id, bytes), deps);
    }

    /// Adds an op whose dependencies are all those pushed since there were `deps` of them.
    fn push(&mut self, rank: Rank, kind: OpKind, (tensor, region, bytes): (u32, RegionId, u64), deps: u32) {
        let program = &mut self.program.ranks[rank.index()];
        let deps = deps..program.deps.len() as u32;
        program.ops.push(Op { kind, tensor, region, bytes, deps });
    }

    /// Fixes the place of every op beforehand: a dependency may point forwards in the list.
    fn number_ops(&mut self, order: &[TransferId]) {
        let plan = self.plan;
        let mut next: Vec<u32> = self.program.ranks.iter().map(|r| r.ops.len() as u32).collect();
        self.send_ops = vec![0; order.len()];
        self.recv_ops = vec![0; order.len()];
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
            let copy = u32::from(self.buffers.combining(id).copy_own);
            self.recv_ops[id.index()] = place(t.dst, copy + 1);
        }
        for (rank, ops) in self.program.ranks.iter_mut().zip(next) {
            rank.ops.reserve_exact(ops as usize - rank.ops.len());
        }
    }

    fn emit(&mut self, id: TransferId, t: &Transfer) {
        let plan = self.plan;
        let after = plan.after(t);
        let streamed = self.streamed(t);
        let is_token = |a: &&TransferId| self.wait_of(t, **a, streamed) == Wait::Token;
        let tokens: Vec<TransferId> = after.iter().filter(is_token).copied().collect();
        self.emit_send(id, t, &tokens, streamed);
        self.emit_recv(id, t, streamed);
    }

    /// The transfer in `after` that brings the very box, and the last one where several add up to it.
    fn streamed(&self, t: &Transfer) -> Option<TransferId> {
        let brings = |a: &&TransferId| {
            let a = &self.plan.transfers()[a.index()];
            let same = a.region == t.region || self.plan.region(a) == self.plan.region(t);
            a.dst == t.src && a.tensor == t.tensor && same
        };
        self.plan.after(t).iter().filter(brings).max().copied()
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

    fn emit_send(
        &mut self,
        id: TransferId,
        t: &Transfer,
        tokens: &[TransferId],
        streamed: Option<TransferId>,
    ) {
        let first_token = self.program.ranks[t.src.index()].ops.len() as u32;
        for a in tokens {
            self.emit_token(t, *a);
        }
        let from = self.buffers.in_program(self.buffers.from[id.index()]);
        let parts = self.buffers.assembled.remove(&id).unwrap_or_default();
        self.emit_parts(t, &parts, from);

        let plan = self.plan;
        let deps = self.program.ranks[t.src.index()].deps.len() as u32;
        let first_part = self.send_ops[id.index()] - parts.len() as u32;
        let done = |op: u32| Dep { op, kind: DepKind::Done };
        for a in plan.after(t) {
            if let Wait::Send(dep) = self.wait_of(t, *a, streamed) {
                self.program.ranks[t.src.index()].deps.push(dep);
            }
        }
        self.wait_for_copies(t, from);
        let sender = &mut self.program.ranks[t.src.index()];
        sender.deps.extend((0..tokens.len() as u32).map(|i| done(first_token + i)));
        sender.deps.extend((0..parts.len() as u32).map(|i| done(first_part + i)));
        let kind = OpKind::Send { to: t.dst, lane: t.lane, tag: id.0, weight: t.weight, from };
        self.push(t.src, kind, (t.tensor, t.region, t.bytes), deps);
    }

    /// A box sent out of the destination shard may in part have been copied there.
    fn wait_for_copies(&mut self, t: &Transfer, from: Buffer) {
        let (plan, sides) = (self.plan, &self.sides[t.tensor as usize]);
        let region = plan.region(t);
        if from != Buffer::Dst || sides.src.is_partial() || !sides.src.overlaps(t.src, region) {
            return;
        }
        let (first_copied, copied) = (plan.regions().len(), &self.program.copied);
        let rank = &mut self.program.ranks[t.src.index()];
        for (op, copy) in rank.ops.iter().enumerate() {
            if copy.region.index() < first_copied {
                break; // the copies come first
            }
            let overlaps = || copied[copy.region.index() - first_copied].overlaps(region);
            if copy.tensor == t.tensor && overlaps() {
                rank.deps.push(Dep { op: op as u32, kind: DepKind::Done });
            }
        }
    }

    /// Tells the sender of `t` that `a` has arrived.
    fn emit_token(&mut self, t: &Transfer, a: TransferId) {
        let told_by = self.plan.transfers()[a.index()].dst;
        let tag = self.next_tag;
        self.next_tag += 1;
        let what = (t.tensor, t.region, 0);
        let rank = &mut self.program.ranks[told_by.index()];
        let deps = rank.deps.len() as u32;
        rank.deps.push(Dep { op: self.recv_ops[a.index()], kind: DepKind::Done });
        self.push(
            told_by,
            OpKind::Send { to: t.src, lane: told_by.0, tag, weight: 1, from: Buffer::Src },
            what,
            deps,
        );
        let deps = self.program.ranks[t.src.index()].deps.len() as u32;
        let recv = OpKind::Recv { from: told_by, lane: told_by.0, tag, into: Buffer::Src, reduce: false };
        self.push(t.src, recv, what, deps);
    }

    fn emit_parts(&mut self, t: &Transfer, parts: &[Part], into: Buffer) {
        for part in parts {
            let rank = &mut self.program.ranks[t.src.index()];
            let deps = rank.deps.len() as u32;
            let brought = part.brought_by.map(|a| self.recv_ops[a.index()]);
            rank.deps.extend(brought.map(|op| Dep { op, kind: DepKind::Done }));
            let from = self.buffers.in_program(part.from);
            self.push_copy_after(t.src, t.tensor, part.region.clone(), (from, into), deps);
        }
    }

    fn emit_recv(&mut self, id: TransferId, t: &Transfer, streamed: Option<TransferId>) {
        let plan = self.plan;
        let combining = self.buffers.combining(id);
        let into = self.buffers.in_program(self.buffers.into[id.index()]);
        if combining.copy_own {
            self.emit_own_part(id, t, into);
        }
        let deps = self.program.ranks[t.dst.index()].deps.len() as u32;
        for a in plan.after(t) {
            if let Wait::Recv(dep) = self.wait_of(t, *a, streamed) {
                self.program.ranks[t.dst.index()].deps.push(dep);
            }
        }
        let own = combining.copy_own.then(|| self.recv_ops[id.index()] - 1);
        let previous = combining.previous.map(|p| self.recv_ops[p.index()]);
        let receiver = &mut self.program.ranks[t.dst.index()];
        receiver.deps.extend(own.into_iter().chain(previous).map(|op| Dep { op, kind: DepKind::Done }));
        let kind = OpKind::Recv { from: t.src, lane: t.lane, tag: id.0, into, reduce: combining.reduce };
        self.push(t.dst, kind, (t.tensor, t.region, t.bytes), deps);
    }

    /// Puts the receiver's own part of a sum where the others will be added, once the memory is free.
    fn emit_own_part(&mut self, id: TransferId, t: &Transfer, into: Buffer) {
        let plan = self.plan;
        let deps = self.program.ranks[t.dst.index()].deps.len() as u32;
        let took_over = match self.buffers.into[id.index()] {
            Buffer::Stage(staged) => self.buffers.staged[staged as usize].took_over,
            _ => None,
        };
        if let Some(old) = took_over {
            let readers = plan.after(t).iter().filter(|a| {
                plan.transfers()[a.index()].src == t.dst && self.buffers.from[a.index()] == Buffer::Stage(old)
            });
            let receiver = &mut self.program.ranks[t.dst.index()];
            let sends = readers.map(|a| Dep { op: self.send_ops[a.index()], kind: DepKind::Done });
            receiver.deps.extend(sends);
        }
        self.push(t.dst, OpKind::Copy { from: Buffer::Src, into }, (t.tensor, t.region, t.bytes), deps);
    }
}

fn touches(transfer: &Transfer, rank: Rank) -> bool {
    transfer.src == rank || transfer.dst == rank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Problem;

    fn problem(src: &str, dst: &str) -> Plan {
        let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        let mut plan = Plan::new(problem, "by hand", 1);
        let shape = plan.problem.reshards[0].src.layout.shape().to_vec();
        plan.add_region(Region::whole(&shape));
        plan
    }

    /// Adds a transfer of the whole tensor.
    fn whole(plan: &mut Plan, src: u32, dst: u32, after: &[u32]) {
        let after: Vec<TransferId> = after.iter().copied().map(TransferId).collect();
        plan.add(0, Rank(src), Rank(dst), RegionId(0), &after);
    }

    /// A rank's ops, one a line: what it does, then what it waits for (`~` to stream).
    fn show(program: &Program, rank: usize) -> Vec<String> {
        let rank = &program.ranks[rank];
        let buffer = |b: Buffer| match b {
            Buffer::Src => "src".into(),
            Buffer::Dst => "dst".into(),
            Buffer::Stage(slot) => format!("#{slot}"),
        };
        let line = |op: &Op| {
            let mut line = match op.kind {
                OpKind::Send { to, tag, from, .. } => format!("{} -> t{tag} {to}", buffer(from)),
                OpKind::Recv { from, tag, into, reduce, .. } => {
                    format!("{from} t{tag} {} {}", if reduce { "+>" } else { "->" }, buffer(into))
                }
                OpKind::Copy { from, into } => format!("{} => {}", buffer(from), buffer(into)),
            };
            for dep in rank.deps(op) {
                line += &format!(" {}{}", if dep.kind == DepKind::Stream { "~" } else { "" }, dep.op);
            }
            line
        };
        rank.ops.iter().map(line).collect()
    }

    #[test]
    fn forwarding_streams() {
        let mut plan = problem("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(_)");
        whole(&mut plan, 0, 1, &[]);
        whole(&mut plan, 1, 2, &[0]);
        let program = lower(&plan);
        assert_eq!(show(&program, 0), ["src -> t0 r1"]);
        assert_eq!(show(&program, 1), ["r0 t0 -> dst", "dst -> t1 r2 ~0"]);
        assert_eq!(show(&program, 2), ["r1 t1 -> dst"]);
    }

    #[test]
    fn a_token_carries_order_between_strangers() {
        let mut plan = problem("f32[4]@A{x:2}(_)", "f32[4]@B{x:2}(_)");
        whole(&mut plan, 0, 2, &[]);
        whole(&mut plan, 1, 3, &[0]);
        let program = lower(&plan);
        assert_eq!(show(&program, 2), ["r0 t0 -> dst", "src -> t2 r1 0"]);
        assert_eq!(show(&program, 1), ["r2 t2 -> src", "src -> t1 r3 0"]);
    }

    #[test]
    fn what_stays_is_copied_and_what_passes_through_is_staged() {
        let mut plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:2}=2,0(x)");
        let first = plan.add_region(Region::new(vec![crate::region::Span::new(0, 2)]));
        let t0 = plan.add(0, Rank(0), Rank(1), first, &[]);
        plan.add(0, Rank(1), Rank(2), first, &[t0]);
        let program = lower(&plan);
        assert_eq!(show(&program, 1), ["r0 t0 -> #0", "#0 -> t1 r2 ~0"]);
        assert_eq!(program.ranks[1].extra_bytes(), 8);

        let plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}=0(_)");
        let program = lower(&plan);
        assert_eq!(show(&program, 0), ["src => dst"]);
        assert_eq!(program.copied[0].to_string(), "[0:2]");
    }

    #[test]
    fn memory_is_handed_on_only_where_the_plan_says_so() {
        let build = |ordered: bool| {
            let mut plan = problem("f32[4]@A{x:2}(_)", "f32[4]@B{x:1}(x)");
            let halves = [(0, 2), (2, 4)]
                .map(|(a, b)| plan.add_region(Region::new(vec![crate::region::Span::new(a, b)])));
            // A rank of neither mesh passes both halves on.
            plan.problem.cluster.hosts.push(crate::cluster::Host::with_devices(1));
            plan.problem.topology = crate::cluster::Topology::new(&plan.problem.cluster);
            let t0 = plan.add(0, Rank(0), Rank(3), halves[0], &[]);
            let t1 = plan.add(0, Rank(3), Rank(2), halves[0], &[t0]);
            let order: &[TransferId] = &[t1];
            let t2 = plan.add(0, Rank(1), Rank(3), halves[1], if ordered { order } else { &[] });
            plan.add(0, Rank(3), Rank(2), halves[1], &[t2]);
            lower(&plan)
        };
        assert_eq!(build(false).ranks[3].stages, [8, 8]);
        let program = build(true);
        assert_eq!(program.ranks[3].stages, [8]);
        assert_eq!(show(&program, 3), ["r0 t0 -> #0", "#0 -> t1 r2 ~0", "r1 t2 -> #0 1", "#0 -> t3 r2 ~2"]);
    }

    #[test]
    fn partial_sums_add_up_where_they_meet() {
        let mut plan = problem("f32[4]@A{x:3}(_ | sum x)", "f32[4]@B{x:1}(_)");
        whole(&mut plan, 0, 2, &[]);
        whole(&mut plan, 1, 2, &[]);
        whole(&mut plan, 2, 3, &[0, 1]);
        for i in 0..3 {
            plan.transfer_mut(TransferId(i)).reduce = true;
        }
        let program = lower(&plan);
        assert_eq!(show(&program, 1), ["src -> t1 r2"]);
        assert_eq!(show(&program, 2), ["src => #0", "r0 t0 +> #0 0", "r1 t1 +> #0 1", "#0 -> t2 r3 1 ~2"]);
        assert_eq!(show(&program, 3), ["r2 t2 -> dst"]);
    }

    #[test]
    fn a_box_in_several_buffers_is_put_together_first() {
        let mut plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}(_)");
        let first = plan.add_region(Region::new(vec![crate::region::Span::new(0, 2)]));
        let t0 = plan.add(0, Rank(0), Rank(1), first, &[]);
        whole(&mut plan, 1, 2, &[t0.0]);
        let program = lower(&plan);
        assert_eq!(show(&program, 1), ["r0 t0 -> #0", "src => #1", "#0 => #1 0", "#1 -> t1 r2 0 1 2"]);
    }
}
