//! For tests of the baselines: short ways to a problem, a slow, obvious clock, and a slow, obvious replay.
//!
//! [`in_t`] shares NICs max-min fairly, lets local links be infinitely fast and chunks infinitely small. It is
//! written apart from the simulator, so that the two check each other.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::Strategy as _;

use super::plan::{Plan, Transfer};
use super::problem::{Hosts, Placed, Problem};
use super::strategy::{PlanOptions, Strategy, plan};
use crate::id::Rank;
use crate::region::Region;

pub fn problem(tensors: &[(&str, &str)]) -> Problem {
    let parsed = tensors.iter().map(|(s, d)| (String::new(), s.parse().unwrap(), d.parse().unwrap()));
    Problem::new(parsed.collect(), Hosts::default()).unwrap()
}

/// `r0->r2` for every transfer, in order.
pub fn pairs(plan: &Plan) -> Vec<String> {
    plan.transfers().iter().map(|t| format!("{}->{}", t.src, t.dst)).collect()
}

/// How long the plan takes, in units of t: the time of all tensors' bytes through one NIC.
pub fn in_t(plan: &Plan) -> f64 {
    let total: u64 = plan.problem.reshards.iter().map(|r| r.src.layout.bytes()).sum();
    let done = Fluid::new(plan).run();
    (done / total as f64 * 1e4).round() / 1e4
}

struct Fluid<'a> {
    plan: &'a Plan,
    left: Vec<f64>,
    rate: Vec<f64>,
    upstream: Vec<Option<usize>>,
}

impl<'a> Fluid<'a> {
    fn new(plan: &'a Plan) -> Self {
        let n = plan.transfers().len();
        let left = plan.transfers().iter().map(|t| t.bytes as f64).collect();
        let upstream = (0..n).map(|i| {
            let t = &plan.transfers()[i];
            let feeds = |u: &usize| {
                let up = &plan.transfers()[*u];
                up.dst == t.src && up.tensor == t.tensor && plan.region(up) == plan.region(t)
            };
            plan.after(t).iter().map(|id| id.index()).find(feeds)
        });
        Self { plan, left, rate: vec![0.0; n], upstream: upstream.collect() }
    }

    /// Bytes of one NIC's time until everything has arrived.
    fn run(mut self) -> f64 {
        let mut now = 0.0;
        while self.left.iter().any(|&l| l > 0.0) {
            let open: Vec<usize> = (0..self.left.len()).filter(|&i| self.may_run(i)).collect();
            self.share(&open);
            let step = open.iter().filter_map(|&i| self.horizon(i)).fold(f64::INFINITY, f64::min);
            assert!(step.is_finite(), "the plan is stuck");
            now += step;
            for &i in &open {
                self.left[i] -= self.rate[i] * step;
                if self.left[i] < 1e-6 {
                    self.left[i] = 0.0;
                }
            }
        }
        now
    }

    /// Its order allows it, and so does its lane of the channel: first in, first out.
    fn may_run(&self, i: usize) -> bool {
        let ts = self.plan.transfers();
        let started = |u: usize| self.left[u] < ts[u].bytes as f64 || self.may_run(u);
        let ordered = self
            .plan
            .after(&ts[i])
            .iter()
            .map(|id| id.index())
            .all(|u| if self.upstream[i] == Some(u) { started(u) } else { self.left[u] == 0.0 });
        let channel = (0..i)
            .rev()
            .find(|&u| (ts[u].src, ts[u].dst, ts[u].lane) == (ts[i].src, ts[i].dst, ts[i].lane))
            .is_none_or(|u| self.left[u] == 0.0);
        self.left[i] > 0.0 && ordered && channel
    }

    /// Max-min fair rates by progressive filling; a forwarder that has caught up is no faster than what feeds it.
    fn share(&mut self, open: &[usize]) {
        let hosts = self.plan.problem.topology.num_hosts();
        let links = |i: usize| {
            let t = &self.plan.transfers()[i];
            let topology = &self.plan.problem.topology;
            [topology.host(t.src).index(), hosts + topology.host(t.dst).index()]
        };
        let (local, mut unfrozen): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&i| !self.plan.crosses_hosts(&self.plan.transfers()[i]));
        let mut room = vec![1.0; 2 * hosts];
        while !unfrozen.is_empty() {
            let mut users = vec![0.0; 2 * hosts];
            unfrozen.iter().for_each(|&i| links(i).iter().for_each(|&l| users[l] += 1.0));
            let fair = |l: usize| if users[l] > 0.0 { room[l] / users[l] } else { f64::INFINITY };
            let tight = (0..2 * hosts).min_by(|&a, &b| fair(a).total_cmp(&fair(b))).unwrap();
            let rate = fair(tight);
            let (frozen, rest): (Vec<usize>, Vec<usize>) =
                unfrozen.into_iter().partition(|&i| links(i).contains(&tight));
            for i in frozen {
                self.rate[i] = rate;
                links(i).iter().for_each(|&l| room[l] -= rate);
            }
            unfrozen = rest;
        }
        local.into_iter().for_each(|i| self.rate[i] = 1e6);
        for &i in open {
            let caught_up = |u: &usize| self.left[*u] > 0.0 && self.left[*u] >= self.left[i] - 1e-6;
            if let Some(u) = self.upstream[i].filter(caught_up) {
                self.rate[i] = self.rate[i].min(self.rate[u]);
            }
        }
    }

    /// How long this transfer keeps its rate: until it ends, or catches up with what feeds it.
    fn horizon(&self, i: usize) -> Option<f64> {
        let end = (self.rate[i] > 0.0).then(|| self.left[i] / self.rate[i]);
        let catch_up = self.upstream[i].filter(|&u| self.rate[i] > self.rate[u]).and_then(|u| {
            let behind = self.left[i] - self.left[u];
            (self.left[u] > 0.0 && behind > 1e-6).then(|| behind / (self.rate[i] - self.rate[u]))
        });
        [end, catch_up].into_iter().flatten().min_by(f64::total_cmp)
    }
}

/// Every element's global index, by rank: what the rank has from the start, or should have in the end.
fn elements(placed: &Placed, num_ranks: usize) -> Vec<BTreeSet<u64>> {
    let mut held = vec![BTreeSet::new(); num_ranks];
    for (position, rank) in placed.ranks.iter().enumerate() {
        for region in placed.layout.shard_at(&placed.layout.mesh().coord(position)) {
            held[rank.index()].extend(indices(&region, placed.layout.shape()));
        }
    }
    held
}

fn indices(region: &Region, shape: &[u64]) -> Vec<u64> {
    region.spans().iter().zip(shape).fold(vec![0], |outer, (span, len)| {
        outer.iter().flat_map(|i| (span.start..span.end).map(move |j| i * len + j)).collect()
    })
}

/// Moves every element by hand. Nothing is sent that its sender has not got, from the start or by a transfer it names;
/// nothing arrives where it is already; and in the end every rank has its destination shard.
fn replay(plan: &Plan) {
    for (tensor, reshard) in plan.problem.reshards.iter().enumerate() {
        let num_ranks = plan.problem.topology.num_ranks();
        let start = elements(&reshard.src, num_ranks);
        let mut have = start.clone();
        for (i, t) in plan.transfers().iter().enumerate().filter(|(_, t)| t.tensor as usize == tensor) {
            let feeds = |a: &Transfer| a.dst == t.src && a.region == t.region && a.tensor == t.tensor;
            assert!(plan.after(t).iter().all(|a| a.index() < i));
            let fed = plan.after(t).iter().any(|a| feeds(&plan.transfers()[a.index()]));
            for e in indices(plan.region(t), reshard.src.layout.shape()) {
                assert!(fed || start[t.src.index()].contains(&e), "{} sends what it lacks: {t:?}", t.src);
                assert!(have[t.dst.index()].insert(e), "{} gets element {e} again: {t:?}", t.dst);
            }
        }
        for (rank, wanted) in elements(&reshard.dst, num_ranks).iter().enumerate() {
            assert!(wanted.is_subset(&have[rank]), "{} lacks elements of tensor {tensor}", Rank::at(rank));
        }
    }
}

/// A mesh of one or two axes with its ranks listed from `first`, and a way to split three dims over it.
fn arb_layout(name: &'static str) -> impl proptest::strategy::Strategy<Value = String> {
    let specs =
        ["_,_,_", "x,_,_", "_,x,_", "y,_,_", "_,_,y", "x,y,_", "_,y,x", "x+y,_,_", "_,y+x,_", "x of 3+4,y,_"];
    (1u32..4, 1u32..4, 0u32..8, prop::sample::select(specs.to_vec())).prop_map(move |(x, y, first, spec)| {
        format!("f16[7,6,4]@{name}{{x:{x},y:{y}}}={}-{}({spec})", first, first + x * y - 1)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Disjoint, overlapping and identical meshes on hosts of three devices; two tensors, so that loads carry over.
    #[test]
    fn every_element_arrives_once(src in arb_layout("A"), dst in arb_layout("B"), seed in any::<u64>()) {
        let all = ("f16[7,6,4]@H{x:6,y:3}(_,_,_)", "f16[7,6,4]@H{x:6,y:3}(_,_,_)");
        let problem = problem(&[all, (&src, &dst), (&dst.replace('B', "C"), &src.replace('A', "D"))]);
        for strategy in Strategy::CONCRETE.into_iter().filter(|s| *s != Strategy::Flow) {
            let plan = plan(&problem, &PlanOptions { strategy, seed, ..PlanOptions::default() }).unwrap();
            replay(&plan);
            prop_assert_eq!(plan.strategy, strategy.name());
        }
    }
}
