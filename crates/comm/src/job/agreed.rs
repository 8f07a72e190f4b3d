//! Which plans the ranks have agreed on, and the ids of their runs.
//!
//! A run's id has to be the same on all ranks, and in use once at a time. Ranks agree on plans in one order, so a plan's number is its
//! place in that order; the runs of one plan are counted. Later runs of plans that were agreed on need no order between each other:
//!
//! ```text
//!  31 ... 20   19 ....... 10   9 ....... 0
//!     0        the plan        its run           below what collectives use
//! ```
//!
//! When numbers run out, the plan that was agreed on first is forgotten, by all ranks, and is agreed on anew when it comes again.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

const USE_BITS: u32 = 10;
/// Runs of one plan that may be under way at once.
pub const MOST_USES: u32 = 1 << USE_BITS;
const MOST_PLANS: u32 = crate::collectives::FIRST_JOB >> USE_BITS;

#[derive(Debug, Clone, Copy)]
struct Plan {
    number: u32,
    uses: u32,
    agreed: bool,
}

#[derive(Debug, Default)]
pub struct Agreed {
    plans: FxHashMap<u64, Plan>,
    /// By age.
    order: VecDeque<u64>,
    begun: u32,
}

/// What is known of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    No,
    UnderWay,
    Agreed,
}

impl Agreed {
    pub fn look(&self, fingerprint: u64) -> Known {
        match self.plans.get(&fingerprint) {
            None => Known::No,
            Some(plan) if plan.agreed => Known::Agreed,
            Some(_) => Known::UnderWay,
        }
    }

    /// The ranks are about to compare their plans, this being ours.
    pub fn begin(&mut self, fingerprint: u64) {
        if self.order.len() >= MOST_PLANS as usize
            && let Some(oldest) = self.order.pop_front()
        {
            self.plans.remove(&oldest);
        }
        let plan = Plan { number: self.begun % MOST_PLANS, uses: 0, agreed: false };
        self.begun = self.begun.wrapping_add(1);
        self.plans.insert(fingerprint, plan);
        self.order.push_back(fingerprint);
    }

    /// They have.
    pub fn end(&mut self, fingerprint: u64, agreed: bool) {
        match self.plans.get_mut(&fingerprint) {
            Some(plan) if agreed => plan.agreed = true,
            _ => {
                self.plans.remove(&fingerprint);
                // Its number is spent on all ranks, whatever plan each of them had: its place stays.
                self.order.iter_mut().filter(|other| **other == fingerprint).for_each(|place| *place = 0);
            }
        }
    }

    /// The id of a plan's next run.
    pub fn next_id(&mut self, fingerprint: u64) -> u32 {
        let plan = self.plans.get_mut(&fingerprint).expect("only plans that were agreed on are run");
        let id = (plan.number << USE_BITS) | (plan.uses % MOST_USES);
        plan.uses = plan.uses.wrapping_add(1);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_other_ranks_whatever_was_disagreed_on() {
        let (mut one, mut other) = (Agreed::default(), Agreed::default());
        for plan in 1..3000u64 {
            let differs = plan % 7 == 0;
            let theirs = if differs { plan + 100_000 } else { plan };
            assert_eq!(one.look(plan), Known::No);
            one.begin(plan);
            other.begin(theirs);
            assert_eq!(one.look(plan), Known::UnderWay);
            one.end(plan, !differs);
            other.end(theirs, !differs);
            if !differs {
                let ids: Vec<u32> = (0..3).map(|_| one.next_id(plan)).collect();
                assert_eq!(ids, (0..3).map(|_| other.next_id(theirs)).collect::<Vec<_>>());
                assert!(ids.iter().all(|id| *id < crate::collectives::FIRST_JOB));
                assert!(ids[0] != ids[1] && ids[1] != ids[2]);
            }
        }
        assert_eq!((one.look(7), one.look(1), one.look(2998)), (Known::No, Known::No, Known::Agreed));
        assert_eq!(other.plans.len(), one.plans.len());
    }
}
