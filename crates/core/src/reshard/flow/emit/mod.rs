//! From routes to transfers: boxes for bytes, devices for hosts.
//!
//! A class is a row of bytes. Routes cut it one way, stretches of items with the same holders and wanters another, the
//! choice of ports a third ([`crossings`]); between two cuts everything is settled, and each box there becomes a tree of
//! transfers ([`remote`], [`local`]):
//!
//! ```text
//! routes     |      h0 -> h2 -> h3      |   h1 -> h2 -> h3   |
//! stretches  |  r0 -> r8 r9 | r1 -> r10 |                    |
//! cells      |      0       |     1     |         2          |
//! ```
//!
//! Trees of devices that were packed need no such choices ([`packed`]). Either way transfers are put into [`lanes`] and
//! weighed.

mod crossings;
mod lanes;
mod local;
mod packed;
mod remote;
mod stretches;

use crate::id::{Rank, TransferId};

use super::super::demand::Demands;
use super::super::plan::Plan;
use super::super::problem::Problem;
use super::ports::PortTable;
use lanes::Lanes;
use stretches::{Stretch, stretches};

/// Where in the list of arrivals those of a host begin.
#[derive(Clone, Copy)]
struct Has {
    /// Void for any other box than the one under way.
    box_number: u32,
    first: usize,
}

pub(super) struct Emitter<'a> {
    pub(super) problem: &'a Problem,
    pub(super) demands: &'a Demands,
    pub(super) plan: Plan,
    stretches: Vec<Vec<Stretch>>,
    ports: PortTable,
    /// Whether any host has a choice of ports.
    pub(super) many_ports: bool,
    /// Whether what crosses between hosts is also brought to who wants it on the holders' own.
    serves_home: bool,
    /// Counts boxes, so that devices that can stand in for each other take turns.
    turn: usize,
    lanes: Lanes,
    /// Whether sums follow each other as streams.
    pub(super) is_streamed: bool,
    /// Whether every sum was put together in blocks.
    pub(super) are_blocks: bool,
    /// Transfers that go before others on their links.
    pub(super) urgent: Vec<TransferId>,
    /// Transfers that weigh what they themselves have, whatever else goes between the same devices: a host that begins one when
    /// another is over has few of them under way, and with the weight of all they would take its NIC from what they bring about.
    pub(super) alone: Vec<TransferId>,
    /// Who has received the box under way, host after host, and since which transfer.
    arrivals: Vec<(Rank, TransferId)>,
    /// By host.
    has: Vec<Has>,
    box_number: u32,
}

impl<'a> Emitter<'a> {
    pub(super) fn new(problem: &'a Problem, demands: &'a Demands, plan: Plan) -> Self {
        let many_ports = problem.topology.ports.len() > problem.topology.num_hosts();
        let stretches = demands.remote.iter().map(|class| stretches(class, demands)).collect();
        Self {
            problem,
            demands,
            plan,
            stretches,
            ports: PortTable::default(),
            many_ports,
            serves_home: false,
            turn: 0,
            lanes: Lanes::default(),
            is_streamed: false,
            are_blocks: false,
            urgent: vec![],
            alone: vec![],
            arrivals: vec![],
            has: vec![Has { box_number: 0, first: 0 }; problem.topology.num_hosts()],
            box_number: 0,
        }
    }

    /// What every host has been given to send so far.
    pub(super) fn bytes_out(&self) -> Vec<u64> {
        let topology = &self.problem.topology;
        let mut bytes = vec![0; topology.num_hosts()];
        for t in self.plan.transfers().iter().filter(|t| self.plan.crosses_hosts(t)) {
            bytes[topology.host(t.src).index()] += t.bytes;
        }
        bytes
    }
}
