//! Links and the fair sharing of them.
//!
//! Weighted max-min fairness by progressive filling: raise every channel's rate in step with its weight until a link
//! is full; the channels on it stay there; go on with the rest. A channel that has caught up with the one it follows
//! stays with it.
//!
//! ```text
//! link A, rate 1   x y        B is full first: y and z stay at a quarter.
//! link B, rate ½   y z        x gets what is left of A: three quarters.
//! ```
//!
//! Only links where something changed, and whatever shares a channel with them, are filled again. A channel that stops
//! changes nothing for the others unless one of its links was what held them back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::cluster::{Cluster, Topology};
use crate::id::{PortId, Rank};
use crate::trace::{Busy, Link, LinkUse};

/// A link and what passes through it now.
#[derive(Debug)]
struct LinkState {
    link: Link,
    bytes_per_s: f64,
    users: Vec<u32>,
    /// How many users it is this link, and no other, that holds back.
    holds: u32,
    rate: f64,
    since_s: f64,
    busy: Vec<Busy>,
    bytes: u64,
    // Scratch of a filling.
    in_fill: bool,
    left: f64,
    weight: f64,
    open_users: u32,
}

impl LinkState {
    fn new(link: Link, bytes_per_s: f64) -> Self {
        Self {
            link,
            bytes_per_s,
            users: vec![],
            holds: 0,
            rate: 0.0,
            since_s: 0.0,
            busy: vec![],
            bytes: 0,
            in_fill: false,
            left: 0.0,
            weight: 0.0,
            open_users: 0,
        }
    }

    fn set_rate(&mut self, rate: f64, now_s: f64) {
        let rate = if rate < 1e-9 * self.bytes_per_s { 0.0 } else { rate };
        if (rate - self.rate).abs() <= 1e-9 * self.bytes_per_s {
            return;
        }
        if self.rate > 0.0 && now_s > self.since_s {
            self.busy.push(Busy { start_s: self.since_s, end_s: now_s, share: self.rate / self.bytes_per_s });
        }
        self.rate = rate;
        self.since_s = now_s;
    }
}

/// What the network knows of a channel.
#[derive(Debug, Clone, Default)]
pub(super) struct Flow {
    pub rate: f64,
    weight: f64,
    /// The channel it must not overtake, once it has caught up.
    pub leader: Option<u32>,
    followers: Vec<u32>,
    /// It has caught up with bytes that are still on the wire, and stands still.
    pub parked: bool,
    active: bool,
    held_by: Option<u32>,
    // Scratch of a filling.
    in_fill: bool,
    frozen: bool,
    fill_weight: f64,
    /// The filling that `fill_weight` is of.
    weighed_in: u32,
}

/// A float that can sit in a heap; times and levels are never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ordered(pub f64);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// What reaches its limit in a filling: a link, or a channel that follows another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Follower(u32),
    Link(u32),
}

/// All links, and the channels over them.
#[derive(Debug)]
pub(super) struct Network {
    links: Vec<LinkState>,
    pub flows: Vec<Flow>,
    /// The links of channel `c`, and its place among their users, at `path_start[c]..path_start[c + 1]`.
    path_start: Vec<u32>,
    path: Vec<u32>,
    place: Vec<u32>,
    /// Links that a channel joined, or where its limit changed.
    joined: Vec<u32>,
    /// Links that a channel left.
    left: Vec<u32>,
    fillings: u32,
}

impl Network {
    pub(super) fn new(cluster: &Cluster, topology: &Topology, ends: &[(Rank, Rank)]) -> Self {
        let table = LinkTable { cluster, topology };
        let (mut path_start, mut path) =
            (Vec::with_capacity(ends.len() + 1), Vec::with_capacity(2 * ends.len()));
        path_start.push(0);
        for &(src, dst) in ends {
            table.path(src, dst, &mut path);
            path_start.push(path.len() as u32);
        }
        Self {
            links: table.links(),
            flows: vec![Flow::default(); ends.len()],
            place: vec![0; path.len()],
            path_start,
            path,
            joined: vec![],
            left: vec![],
            fillings: 0,
        }
    }

    fn hops(&self, channel: u32) -> std::ops::Range<usize> {
        self.path_start[channel as usize] as usize..self.path_start[channel as usize + 1] as usize
    }

    /// A channel begins to move bytes.
    pub(super) fn activate(&mut self, channel: u32, weight: f64) {
        let flow = &mut self.flows[channel as usize];
        debug_assert!(!flow.active);
        (flow.active, flow.weight, flow.rate) = (true, weight, 0.0);
        for hop in self.hops(channel) {
            let users = &mut self.links[self.path[hop] as usize].users;
            self.place[hop] = users.len() as u32;
            users.push(channel);
        }
        self.touch(channel);
    }

    /// A channel stops moving bytes.
    pub(super) fn deactivate(&mut self, channel: u32, now_s: f64) {
        self.follow(channel, None);
        self.release(channel);
        let flow = &mut self.flows[channel as usize];
        (flow.active, flow.parked) = (false, false);
        let rate = std::mem::replace(&mut flow.rate, 0.0);
        for hop in self.hops(channel) {
            let (link, place) = (self.path[hop], self.place[hop] as usize);
            let users = &mut self.links[link as usize].users;
            users.swap_remove(place);
            if let Some(&moved) = users.get(place) {
                let moved_hop = self.hops(moved).find(|&h| self.path[h] == link);
                self.place[moved_hop.expect("a user of a link has it on its path")] = place as u32;
            }
            let state = &mut self.links[link as usize];
            let rest = if state.users.is_empty() { 0.0 } else { state.rate - rate };
            state.set_rate(rest, now_s);
            self.left.push(link);
        }
    }

    /// Something changed that may change an active channel's rate.
    pub(super) fn touch(&mut self, channel: u32) {
        if self.flows[channel as usize].active {
            let hops = self.hops(channel);
            self.joined.extend_from_slice(&self.path[hops]);
        }
    }

    /// Ties a channel to the one it follows, or frees it.
    pub(super) fn follow(&mut self, channel: u32, leader: Option<u32>) {
        let old = std::mem::replace(&mut self.flows[channel as usize].leader, leader);
        if let Some(old) = old {
            self.flows[old as usize].followers.retain(|&f| f != channel);
        }
        if let Some(leader) = leader {
            self.flows[leader as usize].followers.push(channel);
        }
    }

    pub(super) fn followers(&self, channel: u32) -> Vec<u32> {
        self.flows[channel as usize].followers.clone()
    }

    /// Counts a message that has passed.
    pub(super) fn count(&mut self, channel: u32, bytes: u64) {
        for hop in self.hops(channel) {
            self.links[self.path[hop] as usize].bytes += bytes;
        }
    }

    fn release(&mut self, channel: u32) {
        if let Some(link) = self.flows[channel as usize].held_by.take() {
            self.links[link as usize].holds -= 1;
        }
    }

    /// Shares links anew where something changed. Every channel whose rate changed is pushed with its old rate.
    pub(super) fn refill(&mut self, now_s: f64, changed: &mut Vec<(u32, f64)>) {
        let mut links = std::mem::take(&mut self.joined);
        let held = std::mem::take(&mut self.left).into_iter().filter(|&l| self.links[l as usize].holds > 0);
        links.extend(held);
        links.retain(|&l| !std::mem::replace(&mut self.links[l as usize].in_fill, true));
        if links.is_empty() {
            return;
        }
        let channels = self.gather(&mut links);
        let old: Vec<f64> = channels.iter().map(|&c| self.flows[c as usize].rate).collect();
        self.fill(&links, &channels);
        for &link in &links {
            let state = &mut self.links[link as usize];
            let rate = state.users.iter().map(|&c| self.flows[c as usize].rate).sum();
            state.in_fill = false;
            state.set_rate(rate, now_s);
        }
        for (&channel, old) in channels.iter().zip(old) {
            let flow = &mut self.flows[channel as usize];
            flow.in_fill = false;
            if (flow.rate - old).abs() > 1e-12 * old {
                changed.push((channel, old));
            }
        }
    }

    /// Adds to `links` whatever they share a channel with, however far, and returns the channels.
    fn gather(&mut self, links: &mut Vec<u32>) -> Vec<u32> {
        let mut channels: Vec<u32> = vec![];
        let (mut next_link, mut next_channel) = (0, 0);
        loop {
            if let Some(&channel) = channels.get(next_channel) {
                next_channel += 1;
                for hop in self.hops(channel) {
                    let link = self.path[hop];
                    if !std::mem::replace(&mut self.links[link as usize].in_fill, true) {
                        links.push(link);
                    }
                }
                let tied = self.flows[channel as usize].leader;
                let tied: Vec<u32> = tied.into_iter().chain(self.followers(channel)).collect();
                self.admit(&tied, &mut channels);
            } else if let Some(&link) = links.get(next_link) {
                next_link += 1;
                let users = std::mem::take(&mut self.links[link as usize].users);
                self.admit(&users, &mut channels);
                self.links[link as usize].users = users;
            } else {
                return channels;
            }
        }
    }

    fn admit(&mut self, candidates: &[u32], channels: &mut Vec<u32>) {
        for &channel in candidates {
            let flow = &mut self.flows[channel as usize];
            if flow.active && !flow.in_fill {
                flow.in_fill = true;
                channels.push(channel);
            }
        }
    }

    fn fill(&mut self, links: &[u32], channels: &[u32]) {
        self.fillings += 1;
        for &link in links {
            let state = &mut self.links[link as usize];
            (state.left, state.weight, state.open_users) = (state.bytes_per_s, 0.0, 0);
        }
        for &channel in channels {
            self.open(channel);
        }
        let mut limits: BinaryHeap<Reverse<(Ordered, Limit)>> = links
            .iter()
            .filter(|&&l| self.links[l as usize].open_users > 0)
            .map(|&l| Reverse((Ordered(self.level(l)), Limit::Link(l))))
            .collect();
        while let Some(Reverse((Ordered(level), limit))) = limits.pop() {
            match limit {
                Limit::Follower(channel) if !self.flows[channel as usize].frozen => {
                    let leader = self.flows[channel as usize].leader.expect("a follower has a leader");
                    let rate = self.flows[leader as usize].rate;
                    self.freeze(channel, rate, None, &mut limits);
                }
                Limit::Link(link) if self.links[link as usize].open_users > 0 => {
                    let current = self.level(link);
                    if current > level * (1.0 + 1e-12) {
                        limits.push(Reverse((Ordered(current), limit)));
                        continue;
                    }
                    let users = std::mem::take(&mut self.links[link as usize].users);
                    for &channel in &users {
                        if !self.flows[channel as usize].frozen {
                            let rate = self.flows[channel as usize].fill_weight * current;
                            self.freeze(channel, rate, Some(link), &mut limits);
                        }
                    }
                    self.links[link as usize].users = users;
                }
                _ => {}
            }
        }
    }

    /// The rate per weight that the link's open users would get, were they its only limit.
    fn level(&self, link: u32) -> f64 {
        let state = &self.links[link as usize];
        state.left.max(0.0) / state.weight
    }

    /// A channel's weight in this filling. A follower weighs no more than the channels it follows: then it is never
    /// given more than them, whichever is settled first. Chains are long, so each is walked once.
    fn weigh(&mut self, channel: u32) -> f64 {
        let flow = &mut self.flows[channel as usize];
        if flow.leader.is_none() {
            (flow.fill_weight, flow.weighed_in) = (flow.weight, self.fillings);
            return flow.weight;
        }
        let mut unweighed = vec![];
        let (mut weight, mut next) = (f64::INFINITY, Some(channel));
        while let Some(c) = next {
            let flow = &self.flows[c as usize];
            if flow.weighed_in == self.fillings {
                weight = flow.fill_weight;
                break;
            }
            unweighed.push(c);
            next = flow.leader;
        }
        for c in unweighed.into_iter().rev() {
            let flow = &mut self.flows[c as usize];
            weight = weight.min(flow.weight);
            (flow.fill_weight, flow.weighed_in) = (weight, self.fillings);
        }
        weight
    }

    /// Prepares a channel for a filling.
    fn open(&mut self, channel: u32) {
        self.release(channel);
        let weight = self.weigh(channel);
        let flow = &mut self.flows[channel as usize];
        flow.frozen = flow.parked;
        if flow.parked {
            flow.rate = 0.0;
            return;
        }
        for hop in self.hops(channel) {
            let state = &mut self.links[self.path[hop] as usize];
            state.weight += weight;
            state.open_users += 1;
        }
    }

    fn freeze(
        &mut self,
        channel: u32,
        rate: f64,
        held_by: Option<u32>,
        limits: &mut BinaryHeap<Reverse<(Ordered, Limit)>>,
    ) {
        let flow = &mut self.flows[channel as usize];
        (flow.rate, flow.frozen, flow.held_by) = (rate, true, held_by);
        let weight = flow.fill_weight;
        for hop in self.hops(channel) {
            let state = &mut self.links[self.path[hop] as usize];
            state.left -= rate;
            state.weight -= weight;
            state.open_users -= 1;
        }
        if let Some(link) = held_by {
            self.links[link as usize].holds += 1;
        }
        for i in 0..self.flows[channel as usize].followers.len() {
            let follower = self.flows[channel as usize].followers[i];
            let fill_weight = self.flows[follower as usize].fill_weight;
            limits.push(Reverse((Ordered(rate / fill_weight), Limit::Follower(follower))));
        }
    }

    /// What every link carried, busiest links first in the table's order.
    pub(super) fn into_uses(self, now_s: f64) -> Vec<LinkUse> {
        let uses = self.links.into_iter().filter(|l| l.bytes > 0).map(|mut l| {
            l.set_rate(0.0, now_s);
            LinkUse { link: l.link, bytes: l.bytes, bytes_per_s: l.bytes_per_s, busy: l.busy }
        });
        uses.collect()
    }
}

/// Where a link stands in the network's table: NICs out, NICs in, local out, local in, then each tier's groups.
struct LinkTable<'a> {
    cluster: &'a Cluster,
    topology: &'a Topology,
}

impl LinkTable<'_> {
    fn links(&self) -> Vec<LinkState> {
        let ports = self.topology.ports.iter().enumerate().map(|(p, port)| (PortId::at(p), port));
        let local = (0..self.topology.num_ranks()).map(|r| {
            let rank = Rank::at(r);
            (rank, self.cluster.hosts[self.topology.host(rank).index()].local_bytes_per_s)
        });
        let mut links = Vec::new();
        links.extend(ports.clone().map(|(id, p)| LinkState::new(Link::NicOut(id), p.out_bytes_per_s)));
        links.extend(ports.map(|(id, p)| LinkState::new(Link::NicIn(id), p.in_bytes_per_s)));
        links.extend(local.clone().map(|(rank, rate)| LinkState::new(Link::LocalOut(rank), rate)));
        links.extend(local.map(|(rank, rate)| LinkState::new(Link::LocalIn(rank), rate)));
        for (t, tier) in self.cluster.tiers.iter().enumerate() {
            for (g, group) in tier.groups.iter().enumerate() {
                let (t, g) = (t as u32, g as u32);
                links.push(LinkState::new(Link::GroupOut(t, g), group.out_bytes_per_s));
                links.push(LinkState::new(Link::GroupIn(t, g), group.in_bytes_per_s));
            }
        }
        links
    }

    /// The links between two ranks.
    fn path(&self, src: Rank, dst: Rank, path: &mut Vec<u32>) {
        let (ports, ranks) = (self.topology.ports.len() as u32, self.topology.num_ranks() as u32);
        let (src_host, dst_host) = (self.topology.host(src), self.topology.host(dst));
        if src_host == dst_host {
            path.extend([2 * ports + src.0, 2 * ports + ranks + dst.0]);
            return;
        }
        path.extend([self.topology.port(src).0, ports + self.topology.port(dst).0]);
        let mut tier_base = 2 * ports + 2 * ranks;
        for (t, tier) in self.cluster.tiers.iter().enumerate() {
            let (out_of, into) = (self.topology.group(t, src_host), self.topology.group(t, dst_host));
            if out_of != into {
                path.extend(out_of.map(|g| tier_base + 2 * g));
                path.extend(into.map(|g| tier_base + 2 * g + 1));
            }
            tier_base += 2 * tier.groups.len() as u32;
        }
    }
}
