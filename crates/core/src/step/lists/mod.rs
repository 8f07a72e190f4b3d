//! What a rank does inside a pass, as a list: it computes, starts collectives with other ranks, and waits for them where it reads what they bring.
//!
//! ```text
//! F   norm, product | start 0 ======= wait 0 | norm, product | start 1 ======= wait 1
//! ```
//!
//! Nothing computes while a list waits. Lists that need nothing of each other (F of one microbatch, B of another, what a third one's weights still wait for) may
//! become one, in which whoever waits lets another go on ([`Order`]; DHelix, Wang et al., 2024):
//!
//! ```text
//! F   compute | start .......... wait | compute | start .......... wait |
//! B           | compute | start .......... wait | compute | start .......... wait
//! ```
//!
//! One law keeps that from blocking: all members of a group start the same calls in the same order, whatever they compute between ([`check_order`]). So an order
//! is chosen once, from numbers that all of them know, and applied to every member's lists.

mod of_step;
mod order;
mod run;
#[cfg(test)]
mod tests;

pub use of_step::{RankList, StepLists};
pub use order::Order;
pub use run::{Ran, RankTimes, run};

/// The group of ranks that a call is of, among those that are looked at together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupIndex(pub u32);

/// What ranks of a group do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallKind {
    AllReduce,
    AllGather,
    ReduceScatter,
    /// Each sends others what they want of it: gradients of weights that several stages use.
    Exchange,
}

/// A collective inside a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub group: GroupIndex,
    pub kind: CallKind,
    /// Of the whole tensor.
    pub bytes: u64,
    /// How long it keeps its members' links busy.
    pub ns: u64,
    /// What it sends where: one of the programs of [`StepLists`], where the list is part of a step.
    pub program: u32,
}

/// A step of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item {
    Compute {
        ns: u64,
    },
    /// Starts a call of the list, by its number, and goes on.
    Start(usize),
    /// Goes on when it has ended.
    Wait(usize),
}

/// What a rank does, in order. Every call is started once and waited for once behind that.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct List {
    items: Vec<Item>,
    calls: Vec<Call>,
    waited: Vec<bool>,
}

impl List {
    /// Computes for so long.
    pub fn compute(&mut self, ns: u64) {
        self.items.push(Item::Compute { ns });
    }

    /// Starts a call, and says its number.
    pub fn start(&mut self, call: Call) -> usize {
        let number = self.calls.len();
        self.items.push(Item::Start(number));
        self.calls.push(call);
        self.waited.push(false);
        number
    }

    /// Waits for a call that was started and not waited for.
    pub fn wait(&mut self, call: usize) {
        let before = std::mem::replace(&mut self.waited[call], true);
        assert!(!before, "call {call} is waited for twice");
        self.items.push(Item::Wait(call));
    }

    /// Waits for all that is still under way.
    pub fn settle(&mut self) {
        let left: Vec<usize> = (0..self.waited.len()).filter(|&call| !self.waited[call]).collect();
        left.into_iter().for_each(|call| self.wait(call));
    }

    /// Computes for other times: `time` turns the place of an item and its time into another.
    pub fn retimed(&mut self, mut time: impl FnMut(usize, u64) -> u64) {
        for (at, item) in self.items.iter_mut().enumerate() {
            if let Item::Compute { ns } = item {
                *ns = time(at, *ns);
            }
        }
    }

    /// With another list behind it.
    pub fn then(mut self, other: &List) -> Self {
        let before = self.calls.len();
        self.items.extend(other.items.iter().map(|item| match *item {
            Item::Start(call) => Item::Start(before + call),
            Item::Wait(call) => Item::Wait(before + call),
            compute => compute,
        }));
        self.calls.extend(&other.calls);
        self.waited.extend(&other.waited);
        self
    }

    pub fn items(&self) -> &[Item] {
        &self.items
    }

    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Whether nothing is under way behind it.
    pub fn is_settled(&self) -> bool {
        self.waited.iter().all(|&waited| waited)
    }

    pub fn compute_ns(&self) -> u64 {
        let of = |item: &Item| if let Item::Compute { ns } = item { *ns } else { 0 };
        self.items.iter().map(of).sum()
    }

    /// How long its calls keep a link busy, one behind the other.
    pub fn comm_ns(&self) -> u64 {
        self.calls.iter().map(|call| call.ns).sum()
    }
}

/// Lists that would never end, or take each other's bytes for something else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    #[error(
        "members {first} and {other} of group {} start different calls at place {place}: {of_first} and {of_other}\nhint: all members of a group start the same \
         calls in the same order",
        group.0
    )]
    Order {
        group: GroupIndex,
        /// Ranks, by their lists.
        first: usize,
        other: usize,
        /// Among the group's calls.
        place: usize,
        of_first: String,
        of_other: String,
    },
    #[error("rank {rank} starts a call of group {}, and is not one of its members", group.0)]
    Stranger { rank: usize, group: GroupIndex },
    #[error(
        "rank {rank} waits for a call of group {} that another member never starts: it waits itself\nhint: ranks of two groups wait for them in the same order",
        group.0
    )]
    Blocked { rank: usize, group: GroupIndex },
    #[error(
        "rank {rank} starts a call and never waits for it\nhint: the optimizer's pass is the last that can"
    )]
    Unsettled { rank: usize },
}

/// Checks the law of order: `groups` has the members of every group, as indices into `lists`.
pub fn check_order(lists: &[&List], groups: &[Vec<usize>]) -> Result<(), ListError> {
    for (rank, list) in lists.iter().enumerate() {
        let is_in = |call: &&Call| groups.get(call.group.0 as usize).is_some_and(|g| g.contains(&rank));
        if let Some(call) = list.calls.iter().find(|call| !is_in(call)) {
            return Err(ListError::Stranger { rank, group: call.group });
        }
    }
    for (g, members) in groups.iter().enumerate() {
        let group = GroupIndex(g as u32);
        let calls = |rank: usize| -> Vec<(CallKind, u64)> {
            let started = lists[rank].items.iter().filter_map(|item| match item {
                Item::Start(call) => Some(lists[rank].calls[*call]),
                _ => None,
            });
            started.filter(|call| call.group == group).map(|call| (call.kind, call.bytes)).collect()
        };
        let Some((&first, others)) = members.split_first() else { continue };
        let wanted = calls(first);
        for &other in others {
            let found = calls(other);
            if found == wanted {
                continue;
            }
            let place = wanted.iter().zip(&found).take_while(|(a, b)| a == b).count();
            let show = |calls: &[(CallKind, u64)]| match calls.get(place) {
                Some((kind, bytes)) => format!("{kind:?} of {bytes} B"),
                None => "none".to_string(),
            };
            let (of_first, of_other) = (show(&wanted), show(&found));
            return Err(ListError::Order { group, first, other, place, of_first, of_other });
        }
    }
    Ok(())
}
