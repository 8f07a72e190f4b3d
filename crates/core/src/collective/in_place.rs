//! Whether a rank's destination may lie where its source does.
//!
//! A plan's proof keeps the two apart: nothing is ever written to a source. In one place, what arrives must not fall on
//! a part that is still to be sent. It cannot where it was made of that part: it has then been sent, byte for byte.
//!
//! ```text
//! ring      r0 sends its block 2, and much later receives the sum of block 2, made of it       in place
//! direct    r0 sends everything to everyone, and adds up everything meanwhile                  needs two places
//! ```

use crate::id::{Rank, TransferId};
use crate::reshard::shards::AllSides;
use crate::reshard::{Plan, Transfer};

/// Whether on this rank every write to a destination comes after, and because of, every send of what was there as
/// source. Source and destination then may have one address for every element.
pub fn in_place(plan: &Plan, rank: Rank) -> bool {
    let sides = AllSides::of(&plan.problem);
    let transfers = || (0..).map(TransferId).zip(plan.transfers());
    let from_source: Vec<TransferId> = transfers()
        .filter(|(_, t)| t.src == rank && sides.tensor(t.tensor).src.contains(rank, plan.region(t)))
        .filter(|(_, t)| !plan.after(t).iter().any(|a| brings(plan, *a, t)))
        .map(|(id, _)| id)
        .collect();
    let mut ancestors = Ancestors { plan, seen: vec![0; plan.transfers().len()], searches: 0 };
    for (id, t) in transfers().filter(|(_, t)| t.dst == rank) {
        if t.then_own {
            return false; // the own part is still to be read
        }
        if !sides.tensor(t.tensor).dst.contains(rank, plan.region(t)) {
            continue;
        }
        let overlaps = |read: &&TransferId| {
            let read = &plan.transfers()[read.index()];
            read.tensor == t.tensor && plan.region(read).overlaps(plan.region(t))
        };
        let reads: Vec<TransferId> = from_source.iter().filter(overlaps).copied().collect();
        if !ancestors.include(id, reads) {
            return false;
        }
    }
    true
}

/// Whether `a` brought the sender some of what `t` sends.
fn brings(plan: &Plan, a: TransferId, t: &Transfer) -> bool {
    let a = &plan.transfers()[a.index()];
    a.dst == t.src && a.tensor == t.tensor && plan.region(a).overlaps(plan.region(t))
}

struct Ancestors<'a> {
    plan: &'a Plan,
    seen: Vec<u32>,
    searches: u32,
}

impl Ancestors<'_> {
    /// Whether a transfer waits, directly or not, for all of some others.
    fn include(&mut self, from: TransferId, mut wanted: Vec<TransferId>) -> bool {
        self.searches += 1;
        let mut open = vec![from];
        while !wanted.is_empty()
            && let Some(id) = open.pop()
        {
            for &next in self.plan.after(&self.plan.transfers()[id.index()]) {
                if std::mem::replace(&mut self.seen[next.index()], self.searches) != self.searches {
                    wanted.retain(|w| *w != next);
                    open.push(next);
                }
            }
        }
        wanted.is_empty()
    }
}
