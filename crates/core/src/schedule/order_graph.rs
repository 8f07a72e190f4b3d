//! What must come before what: the devices' orders and what passes need, as one graph. A cycle in it is a deadlock.
//!
//! ```text
//! buffered   a pass comes after the one before it on its device, and after what it needs
//! blocking   a message between devices is a node of its own, on both devices' orders:
//!            device 0   0F0 -- m --- 0F1
//!            device 1          m -- 1F0
//! ```

use std::fmt;

use crate::id::DeviceId;
use crate::topological::topological;

use super::check::CheckError;
use super::{Pass, Schedule, Via};

/// One step of a cycle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wait {
    pub pass: Pass,
    pub device: DeviceId,
    pub why: Why,
}

/// Why a pass waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// Its device runs that one first.
    After(Pass),
    Needs(Pass),
    /// Its device first hands over what that one made, to a device that is not there yet.
    Handing(Pass),
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} ", self.pass, self.device)?;
        match self.why {
            Why::After(pass) => write!(f, "comes after {pass}"),
            Why::Needs(pass) => write!(f, "needs {pass}"),
            Why::Handing(pass) => write!(f, "waits until {pass} is about to run"),
        }
    }
}

/// Nodes are passes by number, and behind them messages.
pub struct OrderGraph<'a> {
    schedule: &'a Schedule,
    /// For every node those before it, and why.
    before: Vec<Vec<(u32, Why)>>,
    passes: Vec<(DeviceId, Pass)>,
}

impl<'a> OrderGraph<'a> {
    pub fn of(schedule: &'a Schedule) -> Result<Self, CheckError> {
        let mut graph = Self::orders(schedule);
        for node in 0..graph.passes.len() {
            let (_, pass) = graph.passes[node];
            for (needed, other, _) in graph.needs(pass)? {
                graph.before[node].push((other, Why::Needs(needed)));
            }
        }
        Ok(graph)
    }

    /// With messages as nodes of both devices.
    pub fn blocking(schedule: &'a Schedule) -> Result<Self, CheckError> {
        let mut graph = Self::orders(schedule);
        let mut messages = Vec::new();
        for node in 0..graph.passes.len() as u32 {
            let (device, pass) = graph.passes[node as usize];
            for (needed, sender, via) in graph.needs(pass)? {
                let crosses = matches!(via, Via::Activation(_) | Via::Gradient(_))
                    && schedule.placement().device(needed.stage) != device;
                match crosses {
                    true => messages.push((sender, node)),
                    false => graph.before[node as usize].push((sender, Why::Needs(needed))),
                }
            }
        }
        graph.add_messages(&messages);
        Ok(graph)
    }

    /// From the sender's pass to the receiver's. A message waits for the pass that makes it, and for all that the receiver
    /// did and sent before; the receiver's pass and the sender's next one wait for it. Several messages of one pass may
    /// go in any order.
    fn add_messages(&mut self, messages: &[(u32, u32)]) {
        let first = self.before.len() as u32;
        let mut sent: Vec<Vec<u32>> = vec![vec![]; self.passes.len()];
        for (message, (sender, _)) in (first..).zip(messages) {
            sent[*sender as usize].push(message);
        }
        for (message, &(sender, receiver)) in (first..).zip(messages) {
            let (made, used) = (self.passes[sender as usize].1, self.passes[receiver as usize].1);
            let mut before = vec![(sender, Why::Needs(made))];
            if let Some(previous) = self.previous(receiver) {
                let all = sent[previous as usize].iter().copied().chain([previous]);
                before.extend(all.map(|node| (node, Why::Handing(used))));
            }
            self.before.push(before);
            self.before[receiver as usize].push((message, Why::Needs(made)));
            if let Some(next) = self.next(sender) {
                self.before[next as usize].push((message, Why::Handing(used)));
            }
        }
    }

    fn orders(schedule: &'a Schedule) -> Self {
        let rows = schedule.placement().devices().zip(schedule.devices());
        let passes: Vec<_> = rows.flat_map(|(d, order)| order.iter().map(move |p| (d, *p))).collect();
        let mut graph = Self { schedule, before: vec![vec![]; passes.len()], passes };
        for node in 0..graph.passes.len() as u32 {
            if let Some(previous) = graph.previous(node) {
                let (_, pass) = graph.passes[previous as usize];
                graph.before[node as usize].push((previous, Why::After(pass)));
            }
        }
        graph
    }

    fn needs(&self, pass: Pass) -> Result<Vec<(Pass, u32, Via)>, CheckError> {
        let find = |need: super::Need| match self.schedule.node(need.pass) {
            Some(node) => Ok((need.pass, node, need.via)),
            None => {
                let device = self.schedule.placement().device(need.pass.stage);
                Err(CheckError::Missing { pass: need.pass, device })
            }
        };
        self.schedule.needs(pass).into_iter().map(find).collect()
    }

    fn previous(&self, node: u32) -> Option<u32> {
        let device = self.passes[node as usize].0;
        (node > self.schedule.first_node(device)).then(|| node - 1)
    }

    fn next(&self, node: u32) -> Option<u32> {
        let device = self.passes[node as usize].0;
        self.passes.get(node as usize + 1).filter(|(d, _)| *d == device).map(|_| node + 1)
    }

    /// Whether every node can have its turn; otherwise a cycle of those that cannot.
    pub fn acyclic(&self) -> Result<(), Vec<Wait>> {
        let waits_for = |node: u32, i: usize| self.before[node as usize].get(i).map(|(other, _)| *other);
        topological(self.before.len(), waits_for).map(|_| ()).map_err(|cycle| self.waits(&cycle))
    }

    /// A cycle of nodes, each with why it waits for the next; messages are left out.
    fn waits(&self, cycle: &[u32]) -> Vec<Wait> {
        let next = cycle.iter().cycle().skip(1);
        shortened(cycle.iter().zip(next).filter_map(|(&node, next)| {
            let &(device, pass) = self.passes.get(node as usize)?;
            let waits = self.before[node as usize].iter().find(|(other, _)| other == next);
            let &(_, why) = waits.expect("each waits for the next");
            Some(Wait { pass, device, why })
        }))
    }
}

/// Several steps back along one device's order are one.
fn shortened(cycle: impl Iterator<Item = Wait>) -> Vec<Wait> {
    let mut steps: Vec<Wait> = Vec::new();
    for wait in cycle {
        match (steps.last_mut(), wait.why) {
            (Some(Wait { why: Why::After(after), .. }), Why::After(pass)) => *after = pass,
            _ => steps.push(wait),
        }
    }
    // The walk may have started in the middle of such a stretch.
    if steps.len() > 1
        && let (Why::After(_), Why::After(pass)) = (steps[steps.len() - 1].why, steps[0].why)
    {
        let last = steps.len() - 1;
        steps[last].why = Why::After(pass);
        steps.remove(0);
    }
    steps
}
