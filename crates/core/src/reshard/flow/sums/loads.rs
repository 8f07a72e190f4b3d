//! What links have to do so far, and what more would cost.
//!
//! Every link has a price that rises steeply with its load, so that the sum of prices is about that of the busiest.

use crate::id::{HostId, Rank};

use super::super::super::plan::Plan;
use super::super::super::problem::Problem;
use super::super::links::Links;
use super::tree::Tree;

/// By how much, as a power of `e`, a price rises from nothing to do to everything.
const STEEPNESS: f64 = 24.0;

pub(super) struct Loads<'a> {
    pub links: Links<'a>,
    seconds: Vec<f64>,
    /// When all should be done.
    bound_s: f64,
    /// Copies over links by the tree that is looked at.
    copies: Vec<u32>,
}

impl<'a> Loads<'a> {
    pub(super) fn new(problem: &'a Problem, plan: &Plan, bound_s: f64) -> Self {
        let links = Links::of(problem);
        let seconds = links.loads_s(plan);
        let copies = vec![0; seconds.len()];
        Self { links, seconds, bound_s, copies }
    }

    /// A link's load, with so many bytes more, as a share of the time there is.
    fn with(&self, link: usize, bytes: u64) -> f64 {
        (self.seconds[link] + bytes as f64 * self.links.seconds_per_byte[link]) / self.bound_s
    }

    pub(super) fn nic_in(&self, rank: Rank, bytes: u64) -> f64 {
        self.with(self.links.nic_in(rank), bytes)
    }

    pub(super) fn nic_out(&self, rank: Rank, bytes: u64) -> f64 {
        self.with(self.links.nic_out(rank), bytes)
    }

    pub(super) fn local_in(&self, rank: Rank, bytes: u64) -> f64 {
        self.with(self.links.local_in(rank), bytes)
    }

    pub(super) fn local_out(&self, rank: Rank, bytes: u64) -> f64 {
        self.with(self.links.local_out(rank), bytes)
    }

    /// The ranks of a host.
    pub(super) fn ranks(&self, host: HostId) -> impl Iterator<Item = Rank> + use<> {
        self.links.topology.ranks_of(host)
    }

    /// What a host's NICs have to take in and send, together.
    pub(super) fn host(&self, host: HostId) -> (f64, f64) {
        let (mut into, mut out, mut count) = (0.0, 0.0, 0.0);
        let topology = self.links.topology;
        for port in topology.ports_of(host) {
            let (o, i) = (port.index(), topology.ports.len() + port.index());
            let width = 1.0 / self.links.seconds_per_byte[o];
            out += self.seconds[o] * width;
            into += self.seconds[i] * width;
            count += width;
        }
        (into / count / self.bound_s, out / count / self.bound_s)
    }

    /// What stands in the way of entering and of leaving a host: its NICs, or an uplink above it.
    pub(super) fn around(&self, host: HostId) -> (f64, f64) {
        let (mut into, mut out) = self.host(host);
        for (group_out, group_in) in self.links.groups_of(host) {
            (into, out) = (into.max(self.with(group_in, 0)), out.max(self.with(group_out, 0)));
        }
        (into, out)
    }

    /// By how much prices rise if a tree is taken.
    pub(super) fn price(&mut self, tree: &Tree, bytes: u64) -> f64 {
        let mut path = vec![];
        tree.edges().for_each(|(from, to)| self.links.between(from, to, &mut path));
        path.iter().for_each(|&link| self.copies[link as usize] += 1);
        let mut price = 0.0;
        for &link in &path {
            let copies = std::mem::take(&mut self.copies[link as usize]);
            if copies > 0 {
                let more = self.with(link as usize, bytes * u64::from(copies));
                price += (STEEPNESS * more).exp() - (STEEPNESS * self.with(link as usize, 0)).exp();
            }
        }
        price
    }

    pub(super) fn add(&mut self, tree: &Tree, bytes: f64) {
        let mut path = vec![];
        tree.edges().for_each(|(from, to)| self.links.between(from, to, &mut path));
        for link in path {
            self.seconds[link as usize] += bytes * self.links.seconds_per_byte[link as usize];
        }
    }

    pub(super) fn busiest(&self) -> f64 {
        self.seconds.iter().copied().fold(0.0, f64::max) / self.bound_s
    }
}
