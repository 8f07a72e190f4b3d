//! `flow`: plans at the bound.
//!
//! Four steps, each a module: what has to move ([`super::demand`]); how fast it can be done at all
//! ([`super::bound`]); who sends what, along which trees of hosts ([`mod@routes`]) and through which ports ([`ports`]);
//! and the transfers that do it ([`emit`], and [`sums`] for partial sums). Clusters with tiers have routes of their own
//! ([`tiers`]).
//!
//! Small tensors among large ones are not worth a message for every piece and receiver: they are [`gathered`] first.
//!
//! That decides about hosts, then ports, then devices, and each may be in the way of the others: local links that relay
//! have no time for what stays inside, a rack's uplink none for what its hosts could send. Where the plan is not close to
//! the bound, all links are looked at together: trees of devices ([`trees`]) are packed ([`packing`]) over all [`links`].
//!
//! Why this meets the bound: at the bound's time every node can send its share and take in its share, and every
//! channel weighs as much as it has bytes. So a link with load `L` gives each of its channels `bytes / L` of its rate,
//! no link is asked for more than it has until the bound's time, and by then every channel is through. What comes on
//! top is the fill of chains, a chunk per hop; holders send as many copies themselves as their time allows, because a
//! chain that is not there needs no filling.

mod boxes;
mod emit;
mod gathered;
mod links;
mod packing;
mod ports;
mod routes;
mod sums;
mod tiers;
mod trees;

use std::cell::OnceCell;

use rustc_hash::{FxHashMap, FxHashSet};

use super::assign::least_time;
use super::bound::{bound_of, out_jobs};
use super::demand::Demands;
use super::lower::lower;
use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::strategy::{MIN_CHUNK_BYTES, PlanOptions};
use crate::cluster::Host;
use crate::id::Rank;
use crate::units::{Bytes, Seconds};
use emit::Emitter;
use gathered::Gathered;
use links::Links;
use packing::{Packing, pack};
use routes::{Route, routes};
use sums::{Balanced, MANY_PAIRS, Shape, Style};
use tiers::tiered_routes;
use trees::{Commodity, commodities};

/// Alternatives are compared by simulating them while they are no larger than this; beyond, the first is taken.
const MAX_COMPARED_TRANSFERS: usize = 20_000;
/// The same for sums: paths through many hosts take long to simulate.
const MAX_COMPARED_SUMS: usize = 4_000;
/// Up to here the last few of them are, in the end: busiest links that are alike say nothing about what waits for what.
const MAX_COMPARED_AT_LAST: usize = 6_000;
/// Streams of sums are simulated while they are no larger than this, and taken where they are that close to the bound.
const MAX_STREAMED: usize = 60_000;
const MAX_STREAMED_BY_NIC: usize = 8_000;
const STREAMED_GAIN: f64 = 1.05;
/// Chains of no more hosts than this are quickly simulated.
const SHALLOW: u32 = 8;
/// Shapes of trees by load towards the root and away from it, and batches, in the order in which they are tried.
const BALANCED: [(Shape, Shape, u64); 6] = [
    (Shape::Path, Shape::Path, 1),
    // Where a host has every part, what it adds up spreads like any other value: from the root, or by way of others.
    (Shape::Path, Shape::Star, 1),
    (Shape::Star, Shape::Star, 1),
    (Shape::Path, Shape::Star, 4),
    (Shape::Path, Shape::Path, 4),
    (Shape::Star, Shape::Star, 4),
];
/// Chunks are small enough for a chain to fill in this share of the busiest link's time, within limits.
const FILL_SHARE: u64 = 512;
const MIN_CHUNK: u64 = 32 << 10;
const MAX_CHUNK: u64 = 4 << 20;
/// How much longer than the bound the ports beside the right devices may take before others relay.
const RELAY_GAIN: f64 = 1.01;
/// How much longer than the bound a plan may take before trees are packed.
const PACKING_GAIN: f64 = 1.01;
/// Trees are packed where that is not too much work, and compared by simulating plans of no more transfers than this.
const MAX_PACKING_WORK: usize = 100_000;
const MAX_PACKED_TRANSFERS: usize = 4096;
/// Below, there is nothing to share out.
const MIN_PACKED_BYTES: u64 = 1 << 20;
/// How much longer the busiest link may take in exchange for fewer trees: each is tried.
const PACKING_SLACKS: [f64; 3] = [1.003, 1.01, 1.03];
/// A plan this close to the bound is not worth comparing with others.
const CLOSE_ENOUGH: f64 = 1.02;
/// The most extra time holders are given in exchange for shallower trees.
const MAX_STRETCH: f64 = 64.0;

pub(crate) fn plan(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    let gathered = Gathered::of(problem)?;
    if gathered.len() == 0 {
        return plan_all(problem, options, MANY_PAIRS);
    }
    let (others, numbers) = gathered.others(problem);
    let mut plan = plan_all(&others, options, MANY_PAIRS)?;
    plan.renumber(problem.clone(), &numbers);
    gathered.add_to(&mut plan);
    plan.reasons.push(format!(
        "{} small tensors are put together by one that wants them and passed on whole: {} messages instead of {}",
        gathered.len(),
        gathered.messages,
        gathered.apart
    ));
    plan.check_size()?;
    Ok(plan)
}

/// The same with all sums in blocks that can be, however few: for tests of large plans on small ones.
#[doc(hidden)]
pub fn plan_in_blocks(problem: &Problem) -> Result<Plan, PlanError> {
    plan_all(problem, &PlanOptions::default(), 0)
}

/// The same where hosts that want nothing add up for others, however fast that is: for tests of it on small problems.
#[doc(hidden)]
pub fn plan_served(problem: &Problem) -> Result<Plan, PlanError> {
    let demands = Demands::of(problem)?;
    let (options, bound_s) = (&PlanOptions::default(), bound_of(problem, &demands).seconds);
    let flow =
        Flow { problem, options, demands: &demands, bound_s, many_pairs: MANY_PAIRS, style: Style::Served };
    Ok(flow.build(1.0, false)?.explain(&flow))
}

/// Every tensor piece by piece. Sums that would take `many_pairs` transfers and more are put together in blocks.
fn plan_all(problem: &Problem, options: &PlanOptions, many_pairs: u64) -> Result<Plan, PlanError> {
    if let Some(chunk) = options.chunk_bytes.filter(|&c| c < MIN_CHUNK_BYTES) {
        return Err(PlanError::ChunkTooSmall(chunk));
    }
    let demands = Demands::of(problem)?;
    let bound = bound_of(problem, &demands);
    let mut flow = Flow {
        problem,
        options,
        demands: &demands,
        bound_s: bound.seconds,
        many_pairs,
        style: Style::IN_TURN,
    };
    let mut best = flow.build(1.0, false)?;
    if !demands.sums.is_empty() {
        best = flow.try_styles(best)?;
        best = flow.try_served(best)?;
    }
    if best.is_small() && best.depth > 0 {
        best = flow.try_shallower(best)?;
    }
    if best.port_seconds > RELAY_GAIN * best.seconds {
        best = flow.try_relays(best)?;
    }
    best = flow.try_packing(best)?;
    flow.check_memory(&best.plan)?;
    let plan = best.explain(&flow);
    plan.check_size()?;
    Ok(plan)
}

/// Everything alternatives have in common.
struct Flow<'a> {
    problem: &'a Problem,
    options: &'a PlanOptions,
    demands: &'a Demands,
    bound_s: f64,
    /// Sums of so many transfers are put together in blocks.
    many_pairs: u64,
    /// How sums are added up.
    style: Style,
}

/// One alternative.
struct Built {
    plan: Plan,
    /// How much longer than the least time holders were given.
    stretch: f64,
    seconds: f64,
    port_seconds: f64,
    relayed_bytes: u64,
    /// Forwarding hops between hosts of the deepest route.
    depth: u32,
    /// Whether sums follow each other as streams.
    is_streamed: bool,
    /// Whether every sum was put together in blocks.
    are_blocks: bool,
    /// How many trees were packed, if they were.
    packed_trees: Option<usize>,
    predicted: OnceCell<f64>,
}

impl Flow<'_> {
    fn build(&self, stretch: f64, relay: bool) -> Result<Built, PlanError> {
        let (host_rates, local_rates) = out_rates(self.problem);
        let mut emitter = self.emitter()?;
        let loads = emitter.bytes_out();
        let jobs = out_jobs(&self.demands.remote);
        let (seconds, _) = least_time(&jobs, &host_rates, &loads, self.bound_s);
        let remote = match self.problem.cluster.tiers.is_empty() {
            true => routes(&self.demands.remote, &host_rates, &loads, seconds * stretch),
            false => Some(tiered_routes(&self.demands.remote, self.problem)),
        };
        let remote = remote.expect("the least time is enough");
        let (port_seconds, relayed_bytes) = emitter.choose_ports(&remote, relay);
        emitter.remote(&remote);

        let no_loads = vec![0; local_rates.len()];
        let inside = emitter.local_classes();
        let (local_s, _) = least_time(&out_jobs(&inside), &local_rates, &no_loads, self.bound_s);
        let local = routes(&inside, &local_rates, &no_loads, local_s).expect("the least time is enough");
        emitter.local(&inside, &local);
        let (is_streamed, are_blocks) = (emitter.is_streamed, emitter.are_blocks);
        let mut plan = emitter.into_plan();
        let depth = deepest(&remote);
        plan.chunk_bytes = self.options.chunk_bytes.unwrap_or_else(|| fitting_chunk(&plan));
        let (packed_trees, predicted) = (None, OnceCell::new());
        Ok(Built {
            plan,
            stretch,
            seconds,
            port_seconds,
            relayed_bytes,
            depth,
            is_streamed,
            are_blocks,
            packed_trees,
            predicted,
        })
    }

    /// Adds sums up in other ways, until one is close to the bound, and takes the fastest: by paths alone, since at a star
    /// one sender may wait for another; and along trees by load.
    fn try_styles(&mut self, mut best: Built) -> Result<Built, PlanError> {
        if self.bound_s == 0.0 || best.are_blocks {
            return Ok(best); // blocks are what they are in every style
        }
        best = self.try_following(best)?;
        let links = Links::of(self.problem);
        let mut styles = vec![Style::Turns { stars: false, follow: false, by_nic: false }];
        if self.options.max_extra_bytes.is_none() {
            let by_nic = Style::Turns { stars: true, follow: false, by_nic: true };
            styles.extend(self.shares_nics_unevenly().then_some(by_nic));
            let bound_s = self.bound_s;
            let balanced = |(up, down, batches)| Style::Balanced(Balanced { up, down, batches, bound_s });
            styles.extend(BALANCED.map(balanced));
        }
        let mut best_style = self.style;
        let mut beaten = vec![];
        for style in styles {
            if self.is_close_sum(&best, &links) {
                break;
            }
            self.style = style;
            let rival = self.build(1.0, false)?;
            if self.is_faster_sum(&rival, &best, &links) {
                beaten.push((std::mem::replace(&mut best, rival), best_style));
                best_style = style;
            }
        }
        let size = best.plan.transfers().len();
        if size > MAX_COMPARED_SUMS && size <= MAX_COMPARED_AT_LAST {
            for (rival, style) in beaten {
                let is_known = rival.plan.transfers().len() <= MAX_COMPARED_AT_LAST;
                if is_known && rival.predicted_s() < best.predicted_s() * 0.999 {
                    (best, best_style) = (rival, style);
                }
            }
        }
        self.style = best_style;
        Ok(best)
    }

    /// Lets boxes follow each other through many hosts, as a stream for every port. Side by side they take long to fill their paths, and one
    /// behind the other they may be in each other's way where paths part: which is faster is seen by simulating both, where that
    /// does not take long. Streams do not; others do where paths are long.
    fn try_following(&mut self, best: Built) -> Result<Built, PlanError> {
        let size = best.plan.transfers().len();
        let is_known = size <= MAX_COMPARED_SUMS || (best.is_shallow() && size <= MAX_STREAMED);
        if size > MAX_STREAMED || (is_known && best.predicted_s() <= CLOSE_ENOUGH * self.bound_s) {
            return Ok(best);
        }
        let mut best_style = self.style;
        let (mut best, mut is_known) = (best, is_known);
        for by_nic in [false, true] {
            self.style = Style::Turns { stars: false, follow: true, by_nic };
            let rival = self.build(1.0, false)?;
            let most = if by_nic { MAX_STREAMED_BY_NIC } else { MAX_STREAMED };
            if rival.is_streamed && rival.plan.transfers().len() <= most {
                let rival_s = rival.predicted_s();
                let is_faster = match is_known || best.plan.transfers().len() <= MAX_COMPARED_TRANSFERS {
                    _ if !is_known && rival_s <= CLOSE_ENOUGH * self.bound_s => true,
                    true => rival_s < best.predicted_s() * 0.999,
                    false => rival_s <= STREAMED_GAIN * self.bound_s,
                };
                if is_faster {
                    (best, best_style, is_known) = (rival, self.style, true);
                }
            }
            let limited = self.options.max_extra_bytes.is_some();
            if limited
                || !self.has_many_ports()
                || (is_known && best.predicted_s() <= CLOSE_ENOUGH * self.bound_s)
            {
                break;
            }
        }
        self.style = best_style;
        Ok(best)
    }

    /// Lets hosts that want nothing add up for the few that want what many have.
    fn try_served(&mut self, best: Built) -> Result<Built, PlanError> {
        let links = Links::of(self.problem);
        let is_limited = self.options.max_extra_bytes.is_some();
        if self.bound_s == 0.0 || best.are_blocks || is_limited || self.is_close_sum(&best, &links) {
            return Ok(best);
        }
        let plan = Plan::new(self.problem.clone(), "flow", 0);
        if !Emitter::new(self.problem, self.demands, plan).could_serve() {
            return Ok(best);
        }
        let style = std::mem::replace(&mut self.style, Style::Served);
        let rival = self.build(1.0, false)?;
        // No chain of these goes through many hosts: they are quickly simulated. Another plan takes as long as its busiest link at least.
        let best_s = match best.plan.transfers().len() <= MAX_COMPARED_SUMS {
            true => best.predicted_s(),
            false => links.busiest_s(&best.plan),
        };
        if rival.predicted_s() < best_s * 0.999 {
            return Ok(rival);
        }
        self.style = style;
        Ok(best)
    }

    fn has_many_ports(&self) -> bool {
        self.problem.topology.ports.len() > self.problem.topology.num_hosts()
    }

    /// Whether devices of some host have more or less of a NIC than others: then arriving at a NIC instead of at a device may be worth another
    /// hop.
    fn shares_nics_unevenly(&self) -> bool {
        let uneven =
            |h: &Host| h.nics > 1 && !h.devices.is_multiple_of(h.nics) && !h.nics.is_multiple_of(h.devices);
        self.problem.cluster.hosts.iter().any(uneven)
    }

    /// Whether other ways to add up need not be tried.
    fn is_close_sum(&self, built: &Built, links: &Links) -> bool {
        let limit_s = CLOSE_ENOUGH * self.bound_s;
        let is_large = built.plan.transfers().len() > MAX_COMPARED_SUMS;
        links.busiest_s(&built.plan) <= limit_s && (is_large || built.predicted_s() <= limit_s)
    }

    /// By simulating both where they are small, else by their busiest links.
    fn is_faster_sum(&self, rival: &Built, best: &Built, links: &Links) -> bool {
        match rival.plan.transfers().len().max(best.plan.transfers().len()) <= MAX_COMPARED_SUMS {
            true => rival.predicted_s() < best.predicted_s() * 0.999,
            false => RELAY_GAIN * links.busiest_s(&rival.plan) < links.busiest_s(&best.plan),
        }
    }

    /// Gives holders more time than the least, twice as much each try, so that they send more copies themselves and
    /// trees get shallower: where messages are small, fewer hops are worth more than fewer bytes.
    fn try_shallower(&self, mut best: Built) -> Result<Built, PlanError> {
        let mut best_s = best.predicted_s();
        if best_s <= CLOSE_ENOUGH * self.bound_s {
            return Ok(best);
        }
        let (mut stretch, mut depth) = (2.0, best.depth);
        while depth > 0 && stretch <= MAX_STRETCH {
            let rival = self.build(stretch, false)?;
            depth = rival.depth;
            let rival_s = rival.predicted_s();
            if rival_s < best_s * 0.999 {
                (best, best_s) = (rival, rival_s);
            }
            stretch *= 2.0;
        }
        Ok(best)
    }

    /// Lets idle neighbours' NICs help, if that is predicted to be faster and memory allows it.
    fn try_relays(&self, best: Built) -> Result<Built, PlanError> {
        let rival = self.build(best.stretch, true)?;
        let faster = match rival.is_small() {
            true => rival.predicted_s() < best.predicted_s(),
            false => rival.port_seconds < best.port_seconds,
        };
        let fits = self.options.max_extra_bytes.is_none() || self.check_memory(&rival.plan).is_ok();
        Ok(if faster && fits { rival } else { best })
    }

    /// Packs trees of devices where a plan is not close to the bound, with fewer and fewer trees, and takes the best of
    /// them all.
    fn try_packing(&self, best: Built) -> Result<Built, PlanError> {
        let links = Links::of(self.problem);
        if self.is_close(&best, &links) {
            return Ok(best);
        }
        let commodities = commodities(self.demands, self.problem);
        let work = commodities.iter().map(|c| c.work(&links)).sum::<usize>();
        if work > MAX_PACKING_WORK || commodities.iter().map(|c| c.bytes).sum::<u64>() < MIN_PACKED_BYTES {
            return Ok(best);
        }
        let loads_s = links.loads_s(&self.emitter()?.plan);
        let mut packing = pack(&links, &commodities, &loads_s, self.bound_s);
        let least_s = packing.busiest_s();
        let mut best = best;
        for slack in PACKING_SLACKS {
            packing.simplify(slack * least_s);
            let rival = self.build_packed(&commodities, &packing)?;
            let fits = self.options.max_extra_bytes.is_none() || self.check_memory(&rival.plan).is_ok();
            if fits && self.is_faster(&rival, &best, &links) {
                best = rival;
            }
            if self.is_close(&best, &links) {
                break;
            }
        }
        Ok(best)
    }

    /// Whether a plan is so close to the bound that others need not be tried: by its busiest link, and where links of
    /// several kinds may be in each other's way and it is not too large, by simulating it.
    fn is_close(&self, built: &Built, links: &Links) -> bool {
        let limit_s = PACKING_GAIN * self.bound_s;
        let is_enough = !links.has_choice() || built.plan.transfers().len() > MAX_PACKED_TRANSFERS;
        links.busiest_s(&built.plan) <= limit_s && (is_enough || built.predicted_s() <= limit_s)
    }

    fn is_faster(&self, rival: &Built, best: &Built, links: &Links) -> bool {
        match rival.plan.transfers().len().max(best.plan.transfers().len()) <= MAX_PACKED_TRANSFERS {
            true => rival.predicted_s() < best.predicted_s(),
            false => RELAY_GAIN * links.busiest_s(&rival.plan) < links.busiest_s(&best.plan),
        }
    }

    /// With partial sums emitted.
    fn emitter(&self) -> Result<Emitter<'_>, PlanError> {
        let mut emitter =
            Emitter::new(self.problem, self.demands, Plan::new(self.problem.clone(), "flow", 0));
        emitter.sums(self.options.max_extra_bytes, self.style, self.many_pairs)?;
        Ok(emitter)
    }

    fn build_packed(&self, commodities: &[Commodity], packing: &Packing) -> Result<Built, PlanError> {
        let shares = packing.shares();
        let mut emitter = self.emitter()?;
        emitter.packed(commodities, &shares);
        let are_blocks = emitter.are_blocks;
        let mut plan = emitter.into_plan();
        plan.chunk_bytes = self.options.chunk_bytes.unwrap_or_else(|| fitting_chunk(&plan));
        Ok(Built {
            depth: network_depths(&plan).into_iter().max().unwrap_or(0),
            plan,
            stretch: 1.0,
            seconds: packing.busiest_s(),
            port_seconds: 0.0,
            relayed_bytes: 0,
            is_streamed: false,
            are_blocks,
            packed_trees: Some(shares.iter().map(Vec::len).sum()),
            predicted: OnceCell::new(),
        })
    }

    fn check_memory(&self, plan: &Plan) -> Result<(), PlanError> {
        let Some(limit) = self.options.max_extra_bytes else { return Ok(()) };
        let program = lower(plan);
        let extra = program.ranks.iter().map(|r| r.extra_bytes()).enumerate();
        let (rank, needed) =
            extra.max_by_key(|&(rank, bytes)| (bytes, std::cmp::Reverse(rank))).unwrap_or((0, 0));
        match needed <= limit {
            true => Ok(()),
            false => Err(PlanError::OverBudget { rank: Rank::at(rank), needed, limit, smallest: needed }),
        }
    }
}

impl Built {
    fn predicted_s(&self) -> f64 {
        *self.predicted.get_or_init(|| self.plan.predicted_s())
    }

    /// No chain goes through many hosts.
    fn is_shallow(&self) -> bool {
        network_depths(&self.plan).into_iter().all(|depth| depth <= SHALLOW)
    }

    /// Small enough to be compared with others by simulating both.
    fn is_small(&self) -> bool {
        self.plan.transfers().len() <= MAX_COMPARED_TRANSFERS
    }

    /// Says why the plan is as it is.
    fn explain(mut self, flow: &Flow) -> Plan {
        let mut reasons = vec![];
        let depths = network_depths(&self.plan);
        let (mut sent, mut forwarded, mut hops, mut added, mut passed_on) = (0, 0, 0, 0, 0);
        for (t, &depth) in
            self.plan.transfers().iter().zip(&depths).filter(|(t, _)| self.plan.crosses_hosts(t))
        {
            let is_sum = flow.problem.reshards[t.tensor as usize].src.layout.num_contributions() > 1;
            match (is_sum, t.reduce, depth) {
                (true, true, _) => added += t.bytes,
                (true, false, _) => passed_on += t.bytes,
                (false, _, 0) => sent += t.bytes,
                (false, _, _) => (forwarded, hops) = (forwarded + t.bytes, hops.max(depth)),
            }
        }
        if !flow.demands.sums.is_empty() {
            reasons.push(format!(
                "partial sums are added up on the way: what a host has of them leaves it as one, {} in all; {} of whole sums \
                 go from host to host",
                Bytes(added),
                Bytes(passed_on)
            ));
        }
        if let Style::Balanced(Balanced { up, down, batches, .. }) = flow.style {
            reasons.push(format!(
                "devices and hosts for sums are chosen by load: {} towards the root of a box, {} away from it, {batches} after each other",
                up.name(),
                down.name()
            ));
        }
        if flow.style == Style::Served {
            reasons.push("hosts that want nothing add up for the few that want what many have, and send the sum to each".into());
        }
        if let Some(trees) = self.packed_trees {
            let busiest = Seconds(self.seconds);
            reasons.push(format!(
                "NICs, local links and uplinks are in each other's way: {trees} trees of devices share them, so that the \
                 busiest is done after {busiest}"
            ));
        }
        reasons.extend(match (sent, forwarded) {
            (0, 0) if added + passed_on > 0 => None,
            (0, 0) if self.plan.transfers().is_empty() => Some("every device holds what it wants".into()),
            (0, 0) => Some("every host holds what it wants: nothing crosses between hosts".into()),
            (_, 0) => Some(format!(
                "holders have the time to send every copy themselves, {} in all: nothing is forwarded between hosts",
                Bytes(sent)
            )),
            _ => Some(format!(
                "holders send {}, all they can until {}; receivers forward {}, over up to {hops} further hosts",
                Bytes(sent),
                Seconds(self.seconds * self.stretch),
                Bytes(forwarded),
            )),
        });
        if self.stretch > 1.0 {
            let least = Seconds(flow.bound_s);
            reasons.push(format!(
                "fewer hops are predicted to be faster than fewer bytes, which could take {least}"
            ));
        }
        if self.relayed_bytes > 0 {
            let bytes = Bytes(self.relayed_bytes);
            reasons.push(format!("{bytes} take a detour over a neighbouring device, whose NIC is free"));
        }
        self.plan.reasons = reasons;
        self.plan
    }
}

/// What hosts can send to each other, and devices inside their host.
fn out_rates(problem: &Problem) -> (Vec<f64>, Vec<f64>) {
    let hosts = &problem.cluster.hosts;
    let local = hosts.iter().flat_map(|h| (0..h.devices).map(|_| h.local_bytes_per_s)).collect();
    (hosts.iter().map(|h| h.out_bytes_per_s()).collect(), local)
}

fn deepest(routes: &[Vec<Route>]) -> u32 {
    routes.iter().flatten().flat_map(|r| &r.edges).map(|e| e.depth).max().unwrap_or(0)
}

/// A chunk that lets the deepest chain fill in a small share of the time: with `n` lanes side by side on a port, a hop's
/// first chunk takes `n` chunks' time.
pub(crate) fn fitting_chunk(plan: &Plan) -> u64 {
    if plan.transfers().iter().any(|t| t.reduce) {
        return sums::chunk::fitting(plan);
    }
    let topology = &plan.problem.topology;
    let mut port_bytes = vec![0u64; topology.ports.len()];
    let mut side_by_side: FxHashMap<u32, FxHashSet<u32>> = FxHashMap::default();
    let depth = network_depths(plan).into_iter().max().unwrap_or(0);
    for transfer in plan.transfers().iter().filter(|t| plan.crosses_hosts(t)) {
        port_bytes[topology.port(transfer.src).index()] += transfer.bytes;
        if depth > 0 {
            side_by_side.entry(topology.port(transfer.src).0).or_default().insert(transfer.lane);
        }
    }
    let channels = side_by_side.values().map(|c| c.len() as u64).max().unwrap_or(1);
    let busiest = port_bytes.into_iter().max().unwrap_or(0);
    let chunk = busiest / (FILL_SHARE * u64::from(depth + 1) * channels);
    let power_of_two = 1 << chunk.max(1).ilog2();
    chunk.min(power_of_two).clamp(MIN_CHUNK, MAX_CHUNK)
}

/// For every transfer, how often its box has crossed between hosts before. A transfer follows one that brought the same
/// box to its source; it is the first in its `after`.
fn network_depths(plan: &Plan) -> Vec<u32> {
    let mut depths: Vec<u32> = Vec::with_capacity(plan.transfers().len());
    for t in plan.transfers() {
        let leader = plan.after(t).first().map(|a| (*a, &plan.transfers()[a.index()]));
        let leader = leader.filter(|(_, l)| l.dst == t.src && l.region == t.region);
        depths.push(leader.map_or(0, |(id, l)| depths[id.index()] + u32::from(plan.crosses_hosts(l))));
    }
    depths
}
