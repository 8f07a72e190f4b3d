//! `broadcast`: every unit task travels along one chain of all its receivers, chunk by chunk; a scheduler picks each
//! task's sender and the order of the tasks (the paper's method, and its ablations).
//!
//! ```text
//! host A            host C                 host D
//! a0 ==[NIC]==> c0 -> c1 -> c2 ==[NIC]==> d0 -> d1      every host takes the box in once
//! ```
//!
//! Two tasks that share a host get in each other's way, as sender or as receiver; the schedulers see hosts, not
//! devices, and [`HostTask`] is what they see. The chain then runs by the rules of [`super::draft`].

mod dfs;
mod greedy;

use crate::cluster::Topology;
use crate::id::{HostId, Rank, TransferId};

use super::draft::Draft;
use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::strategy::{PlanOptions, Scheduler, Strategy};
use super::unit::{UnitTask, UnitTasks};
use crate::units::Bytes;

pub fn plan(problem: &Problem, options: &PlanOptions, scheduler: Scheduler) -> Result<Plan, PlanError> {
    let mut draft = Draft::new(problem, options, Strategy::Broadcast(scheduler))?;
    let topology = &problem.topology;
    let mut state = HostState::new(topology.num_hosts());
    for units in UnitTasks::of_all(problem)? {
        let hosts = HostTasks::of(&units, topology);
        let seed = options.seed.wrapping_add(u64::from(units.tensor));
        let Schedule { order, reason } = schedule(&hosts.tasks, &mut state, scheduler, seed);
        draft.plan.reasons.extend(reason);
        for task in hosts.local {
            chain(&mut draft, &units, topology, &units.tasks[task], None);
        }
        for Assignment { task, sender } in order {
            let task = &units.tasks[hosts.tasks[task].unit];
            chain(&mut draft, &units, topology, task, Some(sender));
        }
    }
    let mut plan = draft.finish()?;
    let between = Bytes(plan.bytes_between_hosts());
    let who = match scheduler {
        Scheduler::Naive => "the first holder begins, boxes in the tensor's order",
        Scheduler::Balance => "the least loaded holder begins, boxes in the tensor's order",
        Scheduler::Dfs => "a search chose who begins, and the order of boxes",
        Scheduler::Greedy => "boxes that share no host go together",
    };
    plan.reasons.insert(
        0,
        format!("every box travels along one chain of its receivers, {between} between hosts: {who}"),
    );
    Ok(plan)
}

/// A unit task between hosts: who may send it, and which hosts have to take it in over the network.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostTask {
    /// Index into the tensor's unit tasks.
    unit: usize,
    /// In the order of the source tile's devices.
    senders: Vec<HostId>,
    receivers: Vec<HostId>,
    bytes: u64,
}

/// A tensor's tasks as the schedulers see them.
struct HostTasks {
    tasks: Vec<HostTask>,
    /// Unit tasks that every receiver finds on its own host: nothing to schedule.
    local: Vec<usize>,
}

impl HostTasks {
    fn of(units: &UnitTasks, topology: &Topology) -> Self {
        let mut out = Self { tasks: vec![], local: vec![] };
        for (unit, task) in units.tasks.iter().enumerate() {
            let senders = hosts_of(units.holders(task).iter().copied(), topology);
            let mut receivers = hosts_of(units.receivers(task), topology);
            receivers.retain(|h| !senders.contains(h));
            match receivers.is_empty() {
                true => out.local.push(unit),
                false => out.tasks.push(HostTask { unit, senders, receivers, bytes: task.bytes }),
            }
        }
        out
    }
}

/// The hosts of some devices, each once, in the order they come.
fn hosts_of(ranks: impl Iterator<Item = Rank>, topology: &Topology) -> Vec<HostId> {
    by_host(ranks, topology).into_iter().map(|(host, _)| host).collect()
}

/// Devices by host, hosts in the order they come.
fn by_host(ranks: impl Iterator<Item = Rank>, topology: &Topology) -> Vec<(HostId, Vec<Rank>)> {
    let mut groups: Vec<(HostId, Vec<Rank>)> = Vec::new();
    for rank in ranks {
        let host = topology.host(rank);
        // Mostly the last one: meshes tend to list a host's devices side by side.
        match groups.iter().rposition(|(h, _)| *h == host) {
            Some(i) => groups[i].1.push(rank),
            None => groups.push((host, vec![rank])),
        }
    }
    groups
}

/// What earlier tensors left behind, by host.
struct HostState {
    /// Bytes given to each host to send.
    sent: Vec<u64>,
    /// When each host is free again, in bytes of NIC time.
    clock: Vec<u64>,
}

impl HostState {
    fn new(num_hosts: usize) -> Self {
        Self { sent: vec![0; num_hosts], clock: vec![0; num_hosts] }
    }
}

/// A task's sender, at its place in the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Assignment {
    task: usize,
    sender: HostId,
}

/// Every task once, in the order they start.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Schedule {
    order: Vec<Assignment>,
    reason: Option<String>,
}

fn schedule(tasks: &[HostTask], state: &mut HostState, scheduler: Scheduler, seed: u64) -> Schedule {
    match scheduler {
        Scheduler::Naive => naive(tasks),
        Scheduler::Balance => balance(tasks, &mut state.sent),
        Scheduler::Greedy => greedy::schedule(tasks, &mut state.sent, seed),
        Scheduler::Dfs => dfs::schedule(tasks, &mut state.clock),
    }
}

/// The first replica sends, in the order the tasks come.
fn naive(tasks: &[HostTask]) -> Schedule {
    let order = tasks.iter().enumerate().map(|(task, t)| Assignment { task, sender: t.senders[0] });
    Schedule { order: order.collect(), reason: None }
}

/// The host with the fewest bytes to send so far sends, the first of several; in the order the tasks come.
fn balance(tasks: &[HostTask], sent: &mut [u64]) -> Schedule {
    let least = |t: &HostTask, sent: &[u64]| {
        t.senders.iter().copied().min_by_key(|h| sent[h.index()]).expect("a source tile has a host")
    };
    let order = tasks.iter().enumerate().map(|(task, t)| {
        let sender = least(t, sent);
        sent[sender.index()] += t.bytes;
        Assignment { task, sender }
    });
    Schedule { order: order.collect(), reason: None }
}

/// Sends a unit task along its chain: from the first holder on host `from` through the receivers beside it, then host
/// after host. Receivers on other hosts with a holder of their own hang off that one.
fn chain(draft: &mut Draft, units: &UnitTasks, topology: &Topology, task: &UnitTask, from: Option<HostId>) {
    let holder_on = |host: HostId| units.holders(task).iter().copied().find(|r| topology.host(*r) == host);
    let mut main: Vec<Rank> = Vec::new();
    let mut chains: Vec<(Rank, Vec<Rank>)> = Vec::new();
    for (host, there) in by_host(units.receivers(task), topology) {
        match holder_on(host) {
            Some(_) if from == Some(host) => main.splice(0..0, there).for_each(drop),
            Some(holder) => chains.push((holder, there)),
            None => main.extend(there),
        }
    }
    chains.extend(from.and_then(holder_on).map(|sender| (sender, main)));
    for region in draft.add_regions(units.boxes(task)) {
        for (sender, receivers) in &chains {
            let mut at: (Rank, Option<TransferId>) = (*sender, None);
            for receiver in receivers {
                let id = draft.send(units.tensor, at.0, *receiver, region, at.1);
                at = (*receiver, Some(id));
            }
        }
    }
    draft.end_op();
}

#[cfg(test)]
mod tests;
