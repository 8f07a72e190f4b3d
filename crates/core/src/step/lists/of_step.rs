//! The lists of all ranks for a whole step. A call may be started in one pass and waited for in a later one: sums of gradients are.

use std::ops::Range;

use super::{Item, List, ListError, check_order};
use crate::id::Rank;
use crate::program::Program;
use crate::schedule::Pass;

/// A rank's list for a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankList {
    pub list: List,
    /// The items of every pass, in the order of the rank's device.
    pub passes: Vec<(Pass, Range<usize>)>,
}

/// What the ranks of a step do inside their passes. [`super::super::lower_lists`] puts it into the step's program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepLists {
    /// Ranks by group, as indices into `ranks`.
    pub groups: Vec<Vec<usize>>,
    /// What calls send where: each is one of these, on ranks of its group.
    pub programs: Vec<Program>,
    pub ranks: Vec<RankList>,
}

impl RankList {
    /// Notes that all items since the last pass are those of this one.
    pub fn end_pass(&mut self, pass: Pass) {
        let start = self.passes.last().map_or(0, |(_, items)| items.end);
        self.passes.push((pass, start..self.list.items().len()));
    }

    /// With passes that take as long as `time` says of each, in which everything takes its share.
    fn retimed(&mut self, time: impl Fn(Pass) -> u64) {
        let mut times = vec![None; self.list.items().len()];
        for (pass, items) in &self.passes {
            let computed = |at: &usize| match self.list.items()[*at] {
                Item::Compute { ns } => Some(ns),
                _ => None,
            };
            let all: u64 = items.clone().filter_map(|at| computed(&at)).sum();
            let (mut before, mut given) = (0u64, 0u64);
            for at in items.clone() {
                let Some(ns) = computed(&at) else { continue };
                before += ns;
                // Where nothing is thought to take any time, the first item takes it all.
                let until = match all {
                    0 => time(*pass),
                    _ => (u128::from(time(*pass)) * u128::from(before) / u128::from(all)) as u64,
                };
                times[at] = Some(until - given);
                given = until;
            }
        }
        self.list.retimed(|at, ns| times[at].unwrap_or(ns));
    }
}

impl StepLists {
    /// With passes that take as long as `time` says of each rank's.
    pub fn retimed(mut self, time: impl Fn(Rank, Pass) -> u64) -> Self {
        for (rank, list) in (0..).map(Rank).zip(&mut self.ranks) {
            list.retimed(|pass| time(rank, pass));
        }
        self
    }

    /// Ops that its calls add to a step's program.
    pub fn num_ops(&self) -> usize {
        let of = |(rank, list): (usize, &RankList)| -> usize {
            let ops =
                |program: u32| self.programs[program as usize].ranks.get(rank).map_or(0, |r| r.ops.len());
            list.list.calls().iter().map(|call| ops(call.program)).sum()
        };
        self.ranks.iter().enumerate().map(of).sum()
    }

    /// Members of a group start the same calls in the same order, and every call that is started is waited for.
    pub fn check(&self) -> Result<(), ListError> {
        let lists: Vec<&List> = self.ranks.iter().map(|rank| &rank.list).collect();
        check_order(&lists, &self.groups)?;
        match lists.iter().position(|list| !list.is_settled()) {
            Some(rank) => Err(ListError::Unsettled { rank }),
            None => Ok(()),
        }
    }
}
