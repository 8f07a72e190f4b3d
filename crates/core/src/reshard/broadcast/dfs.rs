//! The paper's depth-first search over senders and order, with its flaws mended.
//!
//! Tasks are appended one by one; a task starts when its sender and all its receivers are free. The search differs
//! from the paper's code in these points:
//! - tasks that look alike (same senders, receivers and bytes) are one *kind*, tried once at a node, not once a task;
//! - only orders by rising start are tried: any schedule can be written so, and others are the same one again;
//! - the task that can start first is tried first, so that the first leaf is already a good list schedule;
//! - the estimate of what is still to come never exceeds the truth: bytes that must pass a host, and for senders that
//!   can stand in for each other, their joint bytes shared evenly;
//! - a branch that cannot *beat* the best is cut, and the search ends at the lower bound;
//! - clocks are kept up to date by doing and undoing;
//! - it is bounded by nodes, not by the wall clock.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::id::HostId;

use super::{Assignment, HostTask, Schedule};

const NODE_LIMIT: u64 = 200_000;
/// Choices and cuts looked at over all nodes; once spent, nodes look at [`SHORT_LIST`] kinds only, and the first leaf
/// is taken.
const WORK_LIMIT: u64 = 10_000_000;
const SHORT_LIST: usize = 64;

pub(super) fn schedule(tasks: &[HostTask], clock: &mut [u64]) -> Schedule {
    let found = Search::new(tasks, clock.to_vec()).run(NODE_LIMIT);
    for a in &found.order {
        let hosts = || tasks[a.task].receivers.iter().copied().chain([a.sender]);
        let end = hosts().map(|h| clock[h.index()]).max().unwrap_or(0) + tasks[a.task].bytes;
        hosts().for_each(|h| clock[h.index()] = end);
    }
    found
}

/// Tasks that only differ in their number.
struct Kind<'a> {
    task: &'a HostTask,
    members: Vec<usize>,
    /// How many are not yet placed; they are taken from the front of `members`.
    left: usize,
    /// The cuts it counts for.
    cuts: Vec<usize>,
}

/// Hosts that, together, have to spend `bytes` on tasks not yet placed, each task on one of them.
struct Cut {
    hosts: Vec<HostId>,
    bytes: u64,
}

#[derive(Clone, Copy)]
struct Choice {
    kind: usize,
    sender: HostId,
    start: u64,
}

/// A node on the current path: what to try here, and how to undo what was tried last.
struct Node {
    choices: Vec<Choice>,
    next: usize,
    undo: Vec<(HostId, u64)>,
}

struct Search<'a> {
    kinds: Vec<Kind<'a>>,
    /// The first ones are single hosts, by id: what each has to take part in, whoever else does.
    cuts: Vec<Cut>,
    clock: Vec<u64>,
    path: Vec<Choice>,
    num_tasks: usize,
    work: u64,
}

impl<'a> Search<'a> {
    fn new(tasks: &'a [HostTask], clock: Vec<u64>) -> Self {
        let mut by_kind: BTreeMap<_, usize> = BTreeMap::new();
        let mut kinds: Vec<Kind> = Vec::new();
        for (i, task) in tasks.iter().enumerate() {
            let kind = *by_kind.entry((&task.senders, &task.receivers, task.bytes)).or_insert(kinds.len());
            if kind == kinds.len() {
                kinds.push(Kind { task, members: vec![], left: 0, cuts: vec![] });
            }
            kinds[kind].members.push(i);
            kinds[kind].left += 1;
        }
        let num_tasks = tasks.len();
        let mut search = Self { kinds, cuts: vec![], clock, path: vec![], num_tasks, work: 0 };
        search.find_cuts();
        search
    }

    /// One cut for every host, and one for every set of senders that tasks choose from.
    fn find_cuts(&mut self) {
        self.cuts = (0..self.clock.len()).map(|h| Cut { hosts: vec![HostId::at(h)], bytes: 0 }).collect();
        let mut sets: Vec<Vec<HostId>> = self.kinds.iter().map(|k| sorted(&k.task.senders)).collect();
        sets.push(sorted(&sets.concat()));
        sets.retain(|s| s.len() > 1);
        sets.sort_unstable();
        sets.dedup();
        // More sets than this only make nodes slow; the widest ones bind most often.
        sets.sort_by_key(|s| Reverse(s.len()));
        sets.truncate(SHORT_LIST);
        self.cuts.extend(sets.into_iter().map(|hosts| Cut { hosts, bytes: 0 }));
        for kind in &mut self.kinds {
            let task = kind.task;
            kind.cuts = task.receivers.iter().map(|h| h.index()).collect();
            for (c, cut) in self.cuts.iter().enumerate() {
                if task.senders.iter().all(|s| cut.hosts.contains(s)) && !kind.cuts.contains(&c) {
                    kind.cuts.push(c);
                }
            }
            kind.cuts.iter().for_each(|&c| self.cuts[c].bytes += task.bytes * kind.left as u64);
        }
    }

    /// No way to place the remaining tasks ends sooner.
    fn bound(&self) -> u64 {
        let busy = self.clock.iter().copied().max().unwrap_or(0);
        let of_cut = |cut: &Cut| {
            let clocks: u64 = cut.hosts.iter().map(|h| self.clock[h.index()]).sum();
            if cut.bytes == 0 { 0 } else { (clocks + cut.bytes).div_ceil(cut.hosts.len() as u64) }
        };
        self.cuts.iter().map(of_cut).max().unwrap_or(0).max(busy)
    }

    fn run(mut self, node_limit: u64) -> Schedule {
        let target = self.bound();
        let mut best: Option<(u64, Vec<Choice>)> = None;
        let mut nodes = 0;
        let mut stack = vec![self.open_node()];
        while let Some(node) = stack.last_mut() {
            self.undo(&mut node.undo);
            let Some(choice) = node.choices.get(node.next).copied() else {
                stack.pop();
                continue;
            };
            node.next += 1;
            node.undo = self.place(choice);
            nodes += 1;
            let limit = best.as_ref().map_or(u64::MAX, |b| b.0);
            if self.bound() < limit {
                if self.path.len() == self.num_tasks {
                    best = Some((self.bound(), self.path.clone()));
                } else {
                    stack.push(self.open_node());
                }
            }
            let spent = nodes >= node_limit || self.work >= WORK_LIMIT;
            if best.as_ref().is_some_and(|b| b.0 <= target || spent) {
                break;
            }
        }
        self.report(best, target, nodes, stack.is_empty())
    }

    /// What can be placed next, the most promising first.
    fn open_node(&mut self) -> Node {
        let not_before = self.path.last().map_or(0, |c| c.start);
        let short = self.work >= WORK_LIMIT;
        let open: Vec<usize> = (0..self.kinds.len()).filter(|k| self.kinds[*k].left > 0).collect();
        // A short list is a comb over all kinds, one tooth further at every node.
        let stride = if short { open.len().div_ceil(SHORT_LIST) } else { 1 };
        let mut choices: Vec<Choice> = Vec::new();
        self.work += self.cuts.len() as u64;
        for &kind in open.iter().skip(self.path.len() % stride).step_by(stride) {
            let k = &self.kinds[kind];
            let ready = k.task.receivers.iter().map(|h| self.clock[h.index()]).max().unwrap_or(0);
            for &sender in &k.task.senders {
                self.work += 1;
                let start = ready.max(self.clock[sender.index()]);
                choices.push(Choice { kind, sender, start });
            }
        }
        // A task that could start before the last one is placed before it elsewhere in the tree. (A short list may
        // come upon such a task late, and has to take it.)
        choices.retain(|c| short || c.start >= not_before);
        choices.sort_by_cached_key(|c| self.promise(c));
        if self.num_tasks > SHORT_LIST {
            choices.truncate(SHORT_LIST);
        }
        Node { choices, next: 0, undo: vec![] }
    }

    /// Earliest start first; then the receivers with most still to come; then the sender with least else to do.
    fn promise(&self, c: &Choice) -> (u64, Reverse<u64>, u64, usize, HostId) {
        let to_come = |h: HostId| self.cuts[h.index()].bytes;
        let task = self.kinds[c.kind].task;
        let receivers = task.receivers.iter().map(|h| to_come(*h)).max().unwrap_or(0);
        let sender = self.clock[c.sender.index()] + to_come(c.sender);
        (c.start, Reverse(receivers), sender, c.kind, c.sender)
    }

    fn place(&mut self, choice: Choice) -> Vec<(HostId, u64)> {
        let kind = &mut self.kinds[choice.kind];
        kind.left -= 1;
        kind.cuts.iter().for_each(|&c| self.cuts[c].bytes -= kind.task.bytes);
        self.path.push(choice);
        let end = choice.start + kind.task.bytes;
        let hosts = kind.task.receivers.iter().copied().chain([choice.sender]);
        hosts.map(|h| (h, std::mem::replace(&mut self.clock[h.index()], end))).collect()
    }

    fn undo(&mut self, undo: &mut Vec<(HostId, u64)>) {
        if undo.is_empty() {
            return;
        }
        let choice = self.path.pop().expect("a placed choice is on the path");
        let kind = &mut self.kinds[choice.kind];
        kind.left += 1;
        kind.cuts.iter().for_each(|&c| self.cuts[c].bytes += kind.task.bytes);
        for (host, before) in undo.drain(..) {
            self.clock[host.index()] = before;
        }
    }

    fn report(&self, best: Option<(u64, Vec<Choice>)>, target: u64, nodes: u64, complete: bool) -> Schedule {
        let (end, path) = best.unwrap_or_default();
        let mut taken = vec![0; self.kinds.len()];
        let order: Vec<Assignment> = path
            .iter()
            .map(|c| {
                taken[c.kind] += 1;
                Assignment { task: self.kinds[c.kind].members[taken[c.kind] - 1], sender: c.sender }
            })
            .collect();
        let reason = if end <= target {
            format!("search met its lower bound after {nodes} nodes")
        } else if complete && self.num_tasks <= SHORT_LIST {
            format!(
                "search proved its best after {nodes} nodes, {end} B of NIC time; the bound is {target} B"
            )
        } else {
            format!("search stopped after {nodes} nodes at {end} B of NIC time; the bound is {target} B")
        };
        Schedule { order, reason: (self.num_tasks > 0).then_some(reason) }
    }
}

fn sorted(hosts: &[HostId]) -> Vec<HostId> {
    let mut hosts = hosts.to_vec();
    hosts.sort_unstable();
    hosts.dedup();
    hosts
}

#[cfg(test)]
mod tests {
    use super::super::tests::{best_makespan, host_task, makespan};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_large_case_stops_at_the_bound() {
        // The paper's case 4: 64 tasks, where the paper's search runs out of time at the naive order.
        let tasks: Vec<HostTask> = (0..64).map(|i| host_task(&[i % 8 / 4], &[2 + i / 32], 1)).collect();
        let found = schedule(&tasks, &mut [0; 4]);
        assert_eq!(makespan(&tasks, &found, 4), 32);
        assert_eq!(found.reason.unwrap(), "search met its lower bound after 64 nodes");
    }

    #[test]
    fn a_best_above_the_bound_is_proved() {
        // Any two tasks meet at a host, but no host has more than two thirds of them.
        let kinds = [host_task(&[0], &[3, 4], 1), host_task(&[1], &[4, 5], 1), host_task(&[2], &[3, 5], 1)];
        let found = schedule(&[kinds.clone(), kinds].concat(), &mut [0; 6]);
        let reason = found.reason.unwrap();
        assert!(reason.starts_with("search proved its best"), "{reason}");
        assert!(reason.ends_with("6 B of NIC time; the bound is 4 B"), "{reason}");
    }

    #[test]
    fn clocks_of_earlier_tensors_count() {
        // Host 0 is busy with an earlier tensor, so host 1 sends.
        let tasks = [host_task(&[0, 1], &[2], 4)];
        let mut clock = [10, 0, 0];
        assert_eq!(schedule(&tasks, &mut clock).order[0].sender, HostId(1));
        assert_eq!(clock, [10, 4, 4]);
    }

    #[test]
    fn thousands_of_tasks_are_bounded() {
        let tasks: Vec<HostTask> =
            (0..3000).map(|i| host_task(&[i % 8, (i + 1) % 8], &[8 + i * 7 % 8], 1 + i as u64 % 5)).collect();
        let found = schedule(&tasks, &mut [0; 16]);
        assert_eq!(found.order.len(), 3000);
        let bytes: u64 = tasks.iter().map(|t| t.bytes).sum();
        assert!(makespan(&tasks, &found, 16) as f64 <= 1.05 * bytes as f64 / 8.0);
    }

    proptest! {
        /// Against every order and every sender.
        #[test]
        fn small_cases_are_solved_exactly(
            raw in prop::collection::vec((1u32..8, 1u32..8, 1u64..5), 1..5)
        ) {
            let pick = |mask: u32, base: usize| -> Vec<usize> {
                (0..3).filter(|b| mask >> b & 1 == 1).map(|b| base + b).collect()
            };
            let tasks: Vec<HostTask> =
                raw.iter().map(|(s, r, bytes)| host_task(&pick(*s, 0), &pick(*r, 3), *bytes)).collect();
            let found = schedule(&tasks, &mut [0; 6]);
            prop_assert_eq!(makespan(&tasks, &found, 6), best_makespan(&tasks, 6));
        }
    }
}
