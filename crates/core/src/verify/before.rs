//! What is known to be over before something else begins.
//!
//! Every op has a start and an end. Nothing is taken from how an engine sends: that a send is over says that its bytes
//! were read, not that they arrived.
//!
//! ```text
//! end of d      ->  start of o        o waits for d's end
//! start of d    ->  start of o        o follows d as a stream,
//! end of d      ->  end of o          and does not end before it
//! start of o    ->  end of o
//! end of a send ->  end of its receive
//! ```
//!
//! Ops of one box move it element by element. A message writes an element after it was read, and what follows a stream moves an
//! element after it has come by; so along a chain of those, each element has left one place before it comes to the next:
//!
//! ```text
//! r1 sends its block 2 -> r2 adds to it, and sends that on -> r0 -> r1 receives the sum of block 2
//! ```
//!
//! There r1 may receive into the memory that it sends from.

use crate::program::messages::At;
use crate::program::{DepKind, OpKind};

use super::order::Order;

/// Knows what is over.
pub trait Over {
    /// Whether op `first` of a rank is done with an element before op `then` of the same rank reads or writes it.
    fn is_over(&mut self, rank: u32, first: u32, then: u32) -> bool;
}

/// Searches backwards from one op for another.
pub struct Before<'a> {
    order: &'a Order<'a>,
    /// By op and moment: the search that saw it last. Made with the first search.
    seen: Vec<[u32; 3]>,
    searches: u32,
    /// What was found and is yet to be looked at: of the rank at hand, where the way mostly lies, and of others.
    open: Vec<(At, Moment)>,
    abroad: Vec<(At, Moment)>,
    /// By rank: whether every compute op waits for the one before it.
    serial: Vec<bool>,
    /// By op: a compute op of its rank, if one is known, before whose start it is over. Then it is before all that come later on a
    /// device that does one thing at a time: a backward needs what its forward has waited for.
    over_by: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    Start,
    /// An element has been moved; whichever, but the same one all along.
    Element,
    End,
}

impl<'a> Before<'a> {
    pub fn new(order: &'a Order<'a>) -> Self {
        let serial = (0..order.program.ranks.len()).map(|rank| is_serial(order, rank as u32)).collect();
        Self { order, seen: vec![], searches: 0, open: vec![], abroad: vec![], serial, over_by: vec![] }
    }
}

impl Over for Before<'_> {
    fn is_over(&mut self, rank: u32, first: u32, then: u32) -> bool {
        let computes = matches!(self.order.op((rank, then)).kind, OpKind::Compute { .. });
        if !computes || !self.serial[rank as usize] {
            return self.is_found_over(rank, first, then);
        }
        if self.over_by.is_empty() {
            self.over_by = vec![u32::MAX; self.order.num_ops()];
        }
        let index = self.order.index((rank, first));
        if self.over_by[index] <= then {
            return true;
        }
        let over = self.is_found_over(rank, first, then);
        if over {
            self.over_by[index] = then;
        }
        over
    }
}

impl Before<'_> {
    fn is_found_over(&mut self, rank: u32, first: u32, then: u32) -> bool {
        let order = self.order;
        let ranked = &order.program.ranks[rank as usize];
        if ranked.deps(order.op((rank, then))).iter().any(|dep| dep.op == first) {
            return true; // at its end, or followed element by element
        }
        if self.seen.is_empty() {
            self.seen = vec![[0; 3]; order.num_ops()];
        }
        self.searches += 1;
        self.open.clear();
        self.abroad.clear();
        self.open.push(((rank, then), Moment::Element));
        self.search((rank, first))
    }

    fn search(&mut self, target: At) -> bool {
        let order = self.order;
        while let Some((at, moment)) = self.open.pop().or_else(|| self.abroad.pop()) {
            let (op, ranked) = (order.op(at), &order.program.ranks[at.0 as usize]);
            for dep in ranked.deps(op) {
                let reached = match (moment, dep.kind) {
                    (Moment::Start, DepKind::Done) => Moment::End,
                    (_, DepKind::Stream) => moment,
                    (_, DepKind::Done) => continue, // by way of the start
                };
                if self.reach((at.0, dep.op), reached, target) {
                    return true;
                }
            }
            if moment == Moment::Start {
                continue;
            }
            if self.reach(at, Moment::Start, target) {
                return true;
            }
            if let OpKind::Recv { tag, .. } = op.kind
                && self.reach(order.messages[tag].send, moment, target)
            {
                return true;
            }
        }
        false
    }

    /// Notes a moment that was found to lie before. True if the target is done with its element by then.
    fn reach(&mut self, at: At, moment: Moment, target: At) -> bool {
        let over = match moment {
            Moment::Start => false,
            Moment::Element => at == target,
            Moment::End => at == target || self.comes_later_on_device(at, target),
        };
        let order = self.order;
        let seen = &mut self.seen[order.index(at)][moment as usize];
        // What stands before the target cannot wait for it.
        if !over && *seen != self.searches && order.key(at) >= order.key(target) {
            *seen = self.searches;
            let stack = if at.0 == target.0 { &mut self.open } else { &mut self.abroad };
            stack.push((at, moment));
        }
        over
    }

    /// A device does one thing at a time, in the order of its list.
    fn comes_later_on_device(&self, at: At, target: At) -> bool {
        let computes = |at: At| matches!(self.order.op(at).kind, OpKind::Compute { .. });
        at.0 == target.0 && at.1 > target.1 && self.serial[at.0 as usize] && computes(at) && computes(target)
    }
}

fn is_serial(order: &Order, rank: u32) -> bool {
    let ranked = &order.program.ranks[rank as usize];
    let mut last = None;
    for (i, op) in (0..).zip(&ranked.ops).filter(|(_, op)| matches!(op.kind, OpKind::Compute { .. })) {
        let waits = |before| ranked.deps(op).iter().any(|d| d.op == before && d.kind == DepKind::Done);
        if last.is_some_and(|before| !waits(before)) {
            return false;
        }
        last = Some(i);
    }
    true
}
