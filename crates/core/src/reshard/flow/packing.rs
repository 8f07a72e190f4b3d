//! Packing trees: how much of everything travels along which tree, so that the busiest link is done as early as can be.
//!
//! Hosts, ports, local links and uplinks are all links here, and a tree ([`super::trees`]) loads every one it passes. Each
//! link has a price that rises steeply with its load; whatever travels along a tree that has become dear moves to the
//! cheapest, just as much of it as makes the two cost the same. From round to round prices get steeper, until the
//! busiest link alone counts (a pairwise Frank-Wolfe method on the soft maximum of the loads).
//!
//! ```text
//! load  link a  ██████████           price of a 9, of b 1       a  ██████▌
//!       link b  ███             ->   move from a to b      ->   b  ██████▌
//! ```
//!
//! Prices also say when to stop: by linear programming's duality no packing is done before all that has to move, at the
//! cheapest trees' prices, over what all links together are worth.

use super::links::Links;
use super::trees::{Commodity, Prices, Tree};

/// A packing this close to what is possible is done.
const CLOSE_ENOUGH: f64 = 1.002;
/// Prices rise by `e` to the power of this, per bound's time of load: from the first round to the last.
const FIRST_STEEPNESS: f64 = 20.0;
const LAST_STEEPNESS: f64 = 3000.0;
const STEEPER: f64 = 1.2;
const MAX_ROUNDS: u32 = 120;
/// Moves in a round, all commodities together, and for one.
const STEPS_PER_ROUND: usize = 200;
const MAX_STEPS: usize = 30;
/// Rounds between two looks at the duality bound.
const ROUNDS_PER_LOOK: u32 = 8;
/// Halvings of the step when searching for where two trees cost the same.
const HALVINGS: u32 = 24;
/// What is less than this share of its commodity goes the way of the rest.
const SLIVER: f64 = 1.0 / 256.0;

/// For a commodity: trees, and the bytes that travel along each.
pub(super) type Shares = Vec<(Tree, u64)>;

/// Packs all commodities, on links that have `loads_s` to do besides, until the busiest link is close to what is
/// possible; no packing is faster than `floor_s`.
pub(super) fn pack<'a>(
    links: &'a Links,
    commodities: &'a [Commodity],
    loads_s: &[f64],
    floor_s: f64,
) -> Packing<'a> {
    let mut packing = Packing::new(links, commodities, loads_s, floor_s);
    let steps = (STEPS_PER_ROUND / commodities.len().max(1)).clamp(1, MAX_STEPS);
    let (mut best_s, mut best) = (f64::MAX, packing.active.clone());
    let mut least_s = floor_s;
    for round in 0..MAX_ROUNDS {
        packing.reprice();
        (0..commodities.len()).for_each(|c| packing.improve(c, steps));
        let seconds = packing.busiest_s();
        if seconds < best_s {
            (best_s, best) = (seconds, packing.active.clone());
        }
        if round % ROUNDS_PER_LOOK == ROUNDS_PER_LOOK - 1 {
            least_s = least_s.max(packing.dual_s());
        }
        if best_s <= CLOSE_ENOUGH * least_s {
            break;
        }
        packing.steepness = (packing.steepness * STEEPER).min(LAST_STEEPNESS);
    }
    packing.set(loads_s, best);
    packing
}

/// A tree with its links.
struct Known {
    tree: Tree,
    links: Vec<u32>,
}

pub(super) struct Packing<'a> {
    links: &'a Links<'a>,
    commodities: &'a [Commodity],
    trees: Vec<Known>,
    /// By commodity: which of `trees` are in use, with their bytes.
    active: Vec<Vec<(u32, f64)>>,
    loads_s: Vec<f64>,
    /// Times are in units of this.
    unit_s: f64,
    steepness: f64,
    /// The load at which a link's price is one a second.
    level_s: f64,
    per_byte: Vec<f64>,
}

impl<'a> Packing<'a> {
    /// Everything along the tree that is cheapest when its turn comes.
    fn new(links: &'a Links, commodities: &'a [Commodity], loads_s: &[f64], unit_s: f64) -> Self {
        let mut packing = Self {
            links,
            commodities,
            trees: vec![],
            active: vec![vec![]; commodities.len()],
            loads_s: loads_s.to_vec(),
            unit_s,
            steepness: FIRST_STEEPNESS,
            level_s: 0.0,
            per_byte: vec![0.0; loads_s.len()],
        };
        packing.reprice();
        for (c, commodity) in commodities.iter().enumerate() {
            let (_, tree) = packing.prices().cheapest_tree(commodity);
            let id = packing.know(c, tree);
            packing.active[c].push((id, 0.0));
            packing.add(c, 0, commodity.bytes as f64);
            packing.level_s = packing.level_s.max(packing.busiest_s());
        }
        packing
    }

    fn prices(&self) -> Prices<'_> {
        Prices { links: self.links, per_byte: &self.per_byte }
    }

    /// When the busiest link is done.
    pub(super) fn busiest_s(&self) -> f64 {
        self.loads_s.iter().copied().fold(0.0, f64::max)
    }

    fn price_at(&self, link: u32, load_s: f64) -> f64 {
        let over = (load_s - self.level_s) / self.unit_s;
        (self.steepness * over).min(60.0).exp() * self.links.seconds_per_byte[link as usize]
    }

    fn reprice(&mut self) {
        self.level_s = self.busiest_s();
        for link in 0..self.per_byte.len() as u32 {
            self.per_byte[link as usize] = self.price_at(link, self.loads_s[link as usize]);
        }
    }

    /// The number of a tree of a commodity.
    fn know(&mut self, c: usize, tree: Tree) -> u32 {
        let same = |(id, _): &&(u32, f64)| self.trees[*id as usize].tree == tree;
        if let Some((id, _)) = self.active[c].iter().find(same) {
            return *id;
        }
        let mut links = vec![];
        tree.edges.iter().for_each(|&(src, dst)| self.links.between(src, dst, &mut links));
        self.trees.push(Known { tree, links });
        self.trees.len() as u32 - 1
    }

    fn cost(&self, tree: u32) -> f64 {
        self.trees[tree as usize].links.iter().map(|&l| self.per_byte[l as usize]).sum()
    }

    /// Adds bytes to a commodity's tree.
    fn add(&mut self, c: usize, place: usize, bytes: f64) {
        self.active[c][place].1 += bytes;
        let tree = self.active[c][place].0 as usize;
        for i in 0..self.trees[tree].links.len() {
            let link = self.trees[tree].links[i];
            self.loads_s[link as usize] += bytes * self.links.seconds_per_byte[link as usize];
            self.per_byte[link as usize] = self.price_at(link, self.loads_s[link as usize]);
        }
    }

    /// Moves parts of a commodity from its dearest tree to the cheapest, a few times.
    fn improve(&mut self, c: usize, steps: usize) {
        for _ in 0..steps {
            if !self.improve_once(c) {
                return;
            }
        }
    }

    fn improve_once(&mut self, c: usize) -> bool {
        let (cost, tree) = self.prices().cheapest_tree(&self.commodities[c]);
        let costs: Vec<f64> = self.active[c].iter().map(|&(tree, _)| self.cost(tree)).collect();
        let places = 0..costs.len();
        let dearest = places.clone().max_by(|&a, &b| costs[a].total_cmp(&costs[b])).expect("trees in use");
        let known = places.min_by(|&a, &b| costs[a].total_cmp(&costs[b])).expect("trees in use");
        if cost.min(costs[known]) >= costs[dearest] * (1.0 - 1e-4) {
            return false;
        }
        let cheapest = match cost < costs[known] * (1.0 - 1e-9) {
            true => {
                let id = self.know(c, tree);
                self.active[c].push((id, 0.0));
                self.active[c].len() - 1
            }
            false => known,
        };
        let bytes = self.step(c, dearest, cheapest);
        self.add(c, cheapest, bytes);
        self.add(c, dearest, -bytes);
        let nothing = 1e-6 * self.commodities[c].bytes as f64;
        self.active[c].retain(|&(_, share)| share > nothing);
        true
    }

    /// By how many copies the links' loads change.
    fn change(&self, from: &[u32], to: &[u32]) -> Vec<(u32, f64)> {
        let mut change: Vec<(u32, f64)> = to.iter().map(|&l| (l, 1.0)).collect();
        change.extend(from.iter().map(|&l| (l, -1.0)));
        change.sort_by_key(|&(link, _)| link);
        change.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 += if same { next.1 } else { 0.0 };
            same
        });
        change.retain(|&(_, copies)| copies != 0.0);
        change
    }

    /// How much to move from one tree to another until they cost the same.
    fn step(&self, c: usize, from: usize, to: usize) -> f64 {
        let ((from, most), (to, _)) = (self.active[c][from], self.active[c][to]);
        let change = self.change(&self.trees[from as usize].links, &self.trees[to as usize].links);
        let pays = |bytes: f64| {
            let price = |&(link, copies): &(u32, f64)| {
                let more_s = copies * bytes * self.links.seconds_per_byte[link as usize];
                copies * self.price_at(link, self.loads_s[link as usize] + more_s)
            };
            change.iter().map(price).sum::<f64>() < 0.0
        };
        if pays(most) {
            return most;
        }
        let (mut low, mut high) = (0.0, most);
        for _ in 0..HALVINGS {
            let middle = 0.5 * (low + high);
            if pays(middle) { low = middle } else { high = middle }
        }
        low
    }

    /// A time that no packing beats, by the present prices.
    fn dual_s(&mut self) -> f64 {
        self.reprice();
        let prices = self.prices();
        let cheapest = |c: &Commodity| prices.cheapest_tree(c).0 * c.bytes as f64;
        let bytes: f64 = self.commodities.iter().map(cheapest).sum();
        let worth = self.per_byte.iter().zip(&self.links.seconds_per_byte).map(|(price, s)| price / s);
        bytes / worth.sum::<f64>()
    }
}

impl Packing<'_> {
    /// Goes back to other shares.
    fn set(&mut self, loads_s: &[f64], active: Vec<Vec<(u32, f64)>>) {
        self.loads_s = loads_s.to_vec();
        for (tree, share) in active.iter().flatten() {
            for &link in &self.trees[*tree as usize].links {
                self.loads_s[link as usize] += share * self.links.seconds_per_byte[link as usize];
            }
        }
        self.active = active;
    }

    /// Does with fewer trees, as long as no link is busy for longer than `limit_s`: what has the least moves to
    /// another tree of its commodity, the one that keeps links least busy.
    pub(super) fn simplify(&mut self, limit_s: f64) {
        for c in 0..self.commodities.len() {
            let mut order: Vec<u32> = self.active[c].iter().map(|a| a.0).collect();
            let share = |packing: &Self, tree: u32| {
                packing.active[c].iter().find(|a| a.0 == tree).map_or(0.0, |a| a.1)
            };
            order.sort_by(|&a, &b| share(self, a).total_cmp(&share(self, b)).then(a.cmp(&b)));
            for tree in order {
                if self.active[c].len() > 1 {
                    self.try_without(c, tree, limit_s);
                }
            }
        }
    }

    fn try_without(&mut self, c: usize, tree: u32, limit_s: f64) {
        let from = self.active[c].iter().position(|a| a.0 == tree).expect("a tree in use");
        let bytes = self.active[c][from].1;
        self.add(c, from, -bytes);
        let others = (0..self.active[c].len()).filter(|&to| to != from);
        let busiest = |to: usize| {
            let change = self.change(&[], &self.trees[self.active[c][to].0 as usize].links);
            let load = |&(link, copies): &(u32, f64)| {
                self.loads_s[link as usize] + copies * bytes * self.links.seconds_per_byte[link as usize]
            };
            change.iter().map(load).fold(0.0, f64::max)
        };
        let best = others.map(|to| (busiest(to), to)).reduce(|a, b| if b.0 < a.0 { b } else { a });
        let (load_s, to) = best.expect("another tree in use");
        match load_s <= limit_s {
            true => {
                self.add(c, to, bytes);
                self.active[c].remove(from);
            }
            false => self.add(c, from, bytes),
        }
    }

    /// Every commodity's trees with whole bytes, without slivers.
    pub(super) fn shares(&self) -> Vec<Shares> {
        let both = self.commodities.iter().zip(&self.active);
        both.map(|(commodity, active)| whole_bytes(commodity.bytes, active, &self.trees)).collect()
    }
}

fn whole_bytes(bytes: u64, active: &[(u32, f64)], trees: &[Known]) -> Shares {
    let mut active = active.to_vec();
    active.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let large = active.partition_point(|&(_, share)| share > SLIVER * bytes as f64).max(1);
    let total: f64 = active[..large].iter().map(|a| a.1).sum();
    let (mut at, mut sum) = (0, 0.0);
    let mut shares = vec![];
    for &(tree, share) in &active[..large] {
        sum += share;
        let end = ((bytes as f64 * sum / total).round() as u64).min(bytes);
        shares.push((trees[tree as usize].tree.clone(), end - at));
        at = end;
    }
    shares.last_mut().expect("trees in use").1 += bytes - at;
    shares
}

#[cfg(test)]
mod tests {
    use super::super::super::demand::Demands;
    use super::super::super::problem::{Hosts, Problem};
    use super::super::trees::commodities;
    use super::*;
    use crate::cluster::Cluster;
    use crate::id::Rank;

    fn problem(src: &str, dst: &str, cluster: &str) -> Problem {
        let hosts = Hosts::Described(Cluster::from_toml(cluster).unwrap());
        Problem::new(vec![(String::new(), src.parse().unwrap(), dst.parse().unwrap())], hosts).unwrap()
    }

    /// The least price of reaching everybody who wants it, over all ways there are: dynamic programming over sets of
    /// devices (Dreyfus and Wagner).
    fn least_price(prices: &Prices, commodity: &Commodity) -> f64 {
        let n = prices.links.topology.num_ranks();
        let holders = commodity.places.iter().flat_map(|p| &p.holders);
        let wanters: Vec<Rank> = commodity.places.iter().flat_map(|p| p.wanters.clone()).collect();
        let price = |src: usize, dst: usize| {
            let mut path = vec![];
            prices.links.between(Rank::at(src), Rank::at(dst), &mut path);
            path.iter().map(|&l| prices.per_byte[l as usize]).sum::<f64>()
        };
        let mut least = vec![vec![f64::MAX; n]; 1 << wanters.len()];
        for set in 1..1usize << wanters.len() {
            if set.is_power_of_two() {
                least[set][wanters[set.trailing_zeros() as usize].index()] = 0.0;
            }
            for v in (0..n).map(Rank::at).map(Rank::index) {
                let mut part = (set - 1) & set;
                while part > 0 {
                    least[set][v] = least[set][v].min(least[part][v] + least[set ^ part][v]);
                    part = (part - 1) & set;
                }
            }
            for _ in 0..n {
                for (u, v) in (0..n).flat_map(|u| (0..n).map(move |v| (u, v))).filter(|(u, v)| u != v) {
                    least[set][u] = least[set][u].min(price(u, v) + least[set][v]);
                }
            }
        }
        // Several holders may serve a part each.
        let mut best: Vec<f64> = (0..1usize << wanters.len())
            .map(|set| holders.clone().map(|h| least[set][h.index()]).fold(f64::MAX, f64::min))
            .collect();
        best[0] = 0.0;
        for set in 1..best.len() {
            let mut part = (set - 1) & set;
            while part > 0 {
                best[set] = best[set].min(best[part] + best[set ^ part]);
                part = (part - 1) & set;
            }
        }
        best[best.len() - 1]
    }

    /// Packs, checks every tree, and returns the busiest link over the time that no packing beats, by the last prices
    /// and every tree there is.
    fn over_the_least(problem: &Problem) -> f64 {
        let demands = Demands::of(problem).unwrap();
        let (links, commodities) = (Links::of(problem), commodities(&demands, problem));
        let floor_s = crate::reshard::lower_bound(problem).unwrap().seconds;
        let mut packing = pack(&links, &commodities, &vec![0.0; links.seconds_per_byte.len()], floor_s);
        let seconds = packing.busiest_s();
        let mut loads = vec![0.0; links.seconds_per_byte.len()];
        for (commodity, shares) in commodities.iter().zip(packing.shares()) {
            assert_eq!(shares.iter().map(|s| s.1).sum::<u64>(), commodity.bytes);
            for (tree, bytes) in shares {
                let mut has: Vec<Rank> = commodity.places.iter().flat_map(|p| p.holders.clone()).collect();
                let mut path = vec![];
                for &(src, dst) in &tree.edges {
                    assert!(has.contains(&src) && !has.contains(&dst), "{tree:?}");
                    has.push(dst);
                    links.between(src, dst, &mut path);
                }
                assert!(
                    commodity.places.iter().flat_map(|p| &p.wanters).all(|w| has.contains(w)),
                    "{tree:?}"
                );
                path.iter()
                    .for_each(|&l| loads[l as usize] += bytes as f64 * links.seconds_per_byte[l as usize]);
            }
        }
        let busiest = loads.into_iter().fold(0.0, f64::max);
        assert!(busiest <= seconds * 1.03, "slivers: {busiest} s for {seconds} s");
        let mut least_s = floor_s;
        for steepness in [100.0, 300.0, 1000.0] {
            (packing.steepness, packing.unit_s) = (steepness, seconds);
            // Prices of a link that is as busy as another differ by what balances them.
            for _ in 0..30 {
                packing.reprice();
                (0..commodities.len()).for_each(|c| packing.improve(c, MAX_STEPS));
            }
            packing.reprice();
            let prices = packing.prices();
            let worth: f64 =
                packing.per_byte.iter().zip(&links.seconds_per_byte).map(|(price, s)| price / s).sum();
            let bytes: f64 = commodities.iter().map(|c| least_price(&prices, c) * c.bytes as f64).sum();
            least_s = least_s.max(bytes / worth);
        }
        assert!(seconds >= least_s * (1.0 - 1e-6), "{seconds} s, and nothing is faster than {least_s} s");
        seconds / least_s
    }

    #[test]
    fn no_packing_is_much_faster() {
        let nics = |nics, local| {
            format!(
                "[[host]]\ncount = 3\ndevices = 3\nnics = {nics}\nnic = \"10Gbit\"\nlocal = \"{local}\"\n"
            )
        };
        let racks = "[[host]]\ncount = 6\ndevices = 1\nnic = \"10Gbit\"\n\
                     [[tier]]\nhosts_per_group = 3\noversubscription = 4\n";
        let cases = [
            ("u8[9000001]@A{h:3,d:3}(d)", "u8[9000001]@A{h:3,d:3}(h)", nics(3, "60Gbit")),
            ("u8[9000001]@A{x:1}=0(_)", "u8[9000001]@B{h:3,d:3}=0-8(_)", nics(3, "60Gbit")),
            ("u8[9000001]@A{x:3}=0-2(x)", "u8[9000001]@B{x:5}=3-7(_)", nics(2, "20Gbit")),
            ("u8[3000,3001]@A{x:3}=0,3,6(x,_)", "u8[3000,3001]@B{x:3}=1,4,8(_,x)", nics(3, "30Gbit")),
            ("u8[9000001]@A{h:4}(_)", "u8[9000001]@B{h:2}(h)", racks.to_string()),
            ("u8[9000001]@A{h:2}=0,3(h)", "u8[9000001]@B{h:4}=1,2,4,5(_)", racks.to_string()),
        ];
        for (src, dst, cluster) in cases {
            let ratio = over_the_least(&problem(src, dst, &cluster));
            assert!(ratio <= 1.02, "{src} -> {dst}: {ratio}");
        }
    }
}
