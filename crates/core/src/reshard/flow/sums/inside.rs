//! Inside a host that has every part.

use std::collections::BTreeSet;

use crate::id::{HostId, Rank};

use super::super::emit::Emitter;
use super::between::Following;
use super::cuts::Cut;
use super::room::Room;
use super::roots::{Job, roots};
use super::tree::{Shape, Tree};

impl Emitter<'_> {
    pub(super) fn inside_host(&mut self, host: HostId, cuts: &[Cut], room: Option<&mut Room>) {
        let first = self.problem.topology.ranks_of(host).next().map_or(0, |r| r.0);
        let of = &self.problem.cluster.hosts[host.index()];
        let jobs: Vec<Job> = cuts.iter().map(|cut| cut.among_devices(first)).collect();
        let (roots, all_add) = roots(&jobs, &vec![of.local_bytes_per_s; of.devices as usize]);
        let with = |_: &Self, shape| -> Vec<Tree> {
            jobs.iter().zip(&roots).map(|(job, &root)| job.tree_inside(first, root, shape)).collect()
        };
        self.emit_best(cuts, with, (all_add, Following::Never, &BTreeSet::new()), room);
    }
}

impl Job {
    /// Among devices of a host, around the ring that ends at the root.
    fn tree_inside(&self, first: u32, root: u32, shape: Shape) -> Tree {
        let root = Rank(first + root);
        let ring = |nodes: &[u32]| {
            let mut ranks: Vec<Rank> = nodes.iter().map(|n| Rank(first + n)).filter(|&r| r != root).collect();
            ranks.sort_by_key(|&r| (r < root, r));
            ranks
        };
        let mut tree = Tree::new(root);
        let (adders, receivers) = (ring(&self.adders), ring(&self.receivers));
        match shape {
            Shape::Path => tree.push_path(adders),
            Shape::Star => adders.iter().for_each(|&r| tree.push_path(vec![r])),
        }
        let mut from = root;
        for &to in &receivers {
            tree.down.push((from, to));
            from = if shape == Shape::Path { to } else { root };
        }
        tree
    }
}
