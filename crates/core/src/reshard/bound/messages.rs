//! How many messages cannot be spared, and what they cost.
//!
//! Give every link a price, 1 for those of *busy* nodes and `rho <= 1` for those of the others. A plan that moves a byte
//! pays the price of every link it takes. In `T` seconds all links together carry prices of at most
//! `T * (busy rate + rho * other rate)`; so if no way of moving a piece costs less than `c` a byte,
//!
//! ```text
//! T >= sum of bytes * c / (busy rate + rho * other rate)       whatever the plan
//! ```
//!
//! What no way costs less than follows from who knows what when. Say a sum has parts on `C` nodes, none on two of them,
//! and is wanted on `R`. Until some node knows all of it, every node with a part but that one has sent; afterwards every
//! receiver but that one is still to hear of it:
//!
//! ```text
//! C = R = {a b c}      a -> b -> c      then  c -> a, c -> b       C - 1 + R - 1 messages
//! with a helper x      a -> x <- b, x -> c    c -> a, c -> b       one more, but two of them go into x, not into a b c
//! ```
//!
//! Messages into links priced `rho`: without helpers `C - 2` of those above go into nodes besides the receivers' last
//! ones (`C - 1` if no receiver holds a part); with helpers all but the last of the first `C - 1` (or `C`) may go into
//! helpers. The same backwards for messages out of nodes, where a part that several nodes hold may leave any of them.
//! Parts on several nodes: `C` is the fewest nodes that have them all.
//!
//! Say all `R` receivers have parts. If there are no more than `C + R - 2` messages, then until some `k` knows all of the sum everybody
//! else has sent once, along a tree to `k`, which is a receiver; so nobody else knows the part of `k`. After that there is one message for
//! every other receiver, which brings it that part: its sender is `k` or has heard of it, which are receivers. So receivers send `2 R - 2`
//! messages; or there is one message more.
//!
//! ```text
//! parts on a b c d, wanted on a b c      a -> b -> d -> c      then  c -> a -> b        5 messages, 4 of them from a b c
//!                                        a -> b -> c -> d      then  d -> a, d -> b, d -> c     6, and 3
//! ```
//!
//! A mix of the two takes 9/7 of the tensor's time and not 5/4, which is what five messages over four NICs would take.
//!
//! Out and in together: let some nodes pay 1 for what they send, and the others `sigma` for what they take in. A value that the
//! first alone hold and want costs a message for each of them; or one message to a helper among the others, who sends the rest
//! for nothing but has to take it in:
//!
//! ```text
//! a holds p, b and c want it, d takes in q from a        a -> b -> c      2
//!                                                        a -> d -> b, c   1 + sigma
//! ```
//!
//! So hosts that have too much to send are not helped by hosts that have enough to take in.

use std::collections::BTreeSet;

/// Who holds the parts of a sum, as nodes of a level.
#[derive(Debug)]
pub(super) struct Parts {
    /// Nodes that are alone with some part; rising.
    alone: Vec<u32>,
    /// Holders of further parts, disjoint from each other and from `alone`.
    groups: Vec<Vec<u32>>,
    holders: Vec<u32>,
    /// Nodes with every part; rising.
    pub complete: Vec<u32>,
    /// At least so many nodes are needed to have every part.
    fewest: usize,
    /// Nobody on this level has some part: it is another level's business.
    pub is_lacking: bool,
}

/// What is needed as copies: who has it and who lacks it.
pub(super) struct Copies<'a> {
    pub bytes: u64,
    pub holders: &'a [u32],
    pub receivers: &'a [u32],
}

impl Parts {
    /// From the holders of every part, each list rising.
    pub(super) fn of(parts: Vec<Vec<u32>>) -> Self {
        let alone: BTreeSet<u32> = parts.iter().filter(|p| p.len() == 1).map(|p| p[0]).collect();
        let mut taken = alone.clone();
        let mut groups: Vec<Vec<u32>> = vec![];
        let mut shared: Vec<&Vec<u32>> = parts.iter().filter(|p| p.len() > 1).collect();
        shared.sort_by_key(|p| p.len());
        for part in &shared {
            if part.iter().all(|n| !taken.contains(n)) {
                taken.extend(part.iter());
                groups.push(part.to_vec());
            }
        }
        // Those who are alone with a part are needed anyway; so is, of disjoint groups, somebody of each.
        let rest: Vec<&&Vec<u32>> = shared.iter().filter(|p| !p.iter().any(|n| alone.contains(n))).collect();
        let mut held = std::collections::BTreeMap::<u32, usize>::new();
        rest.iter().flat_map(|p| p.iter()).for_each(|&n| *held.entry(n).or_default() += 1);
        let most = held.values().copied().max().unwrap_or(1);
        let fewest = alone.len() + groups.len().max(rest.len().div_ceil(most));
        let holders: BTreeSet<u32> = parts.iter().flatten().copied().collect();
        let complete = parts.iter().min_by_key(|p| p.len()).cloned().unwrap_or_default();
        let has_all = |n: &u32| parts.iter().all(|p| p.binary_search(n).is_ok());
        Self {
            is_lacking: parts.iter().any(Vec::is_empty),
            alone: alone.into_iter().collect(),
            groups,
            holders: holders.into_iter().collect(),
            complete: complete.into_iter().filter(has_all).collect(),
            fewest: fewest.max(1),
        }
    }

    fn each_is_alone(&self) -> bool {
        self.alone.len() == self.holders.len()
    }
}

/// Bytes that have to be brought together and to be brought to nodes that lack some of them.
#[derive(Debug)]
pub(super) struct Need<'a> {
    pub bytes: u64,
    /// Nodes that cannot do without a message; rising.
    pub receivers: Vec<u32>,
    held: Held<'a>,
    /// Whether some receiver holds a part.
    shared: bool,
}

#[derive(Debug)]
enum Held<'a> {
    Whole(&'a [u32]),
    Sum(&'a Parts),
}

impl<'a> Need<'a> {
    pub(super) fn of_whole(bytes: u64, holders: &'a [u32], receivers: &[u32]) -> Self {
        Self { bytes, receivers: receivers.to_vec(), held: Held::Whole(holders), shared: false }
    }

    /// Where every node with a part has all of them, each can make the sum by itself: that is as good as having it.
    pub(super) fn of_sum(bytes: u64, parts: &'a Parts, receivers: Vec<u32>) -> Self {
        if parts.complete == parts.holders {
            return Self { bytes, receivers, held: Held::Whole(&parts.complete), shared: false };
        }
        let shared = receivers.iter().any(|r| parts.holders.binary_search(r).is_ok());
        Self { bytes, receivers, held: Held::Sum(parts), shared }
    }

    /// What has to be copied, unless it has to be added up first.
    pub(super) fn copies(&self) -> Option<Copies<'_>> {
        match self.held {
            Held::Whole(holders) => Some(Copies { bytes: self.bytes, holders, receivers: &self.receivers }),
            Held::Sum(_) => None,
        }
    }

    fn holders(&self) -> &'a [u32] {
        match self.held {
            Held::Whole(holders) => holders,
            Held::Sum(parts) => &parts.holders,
        }
    }

    fn sources(&self) -> (&'a [u32], &'a [Vec<u32>]) {
        match self.held {
            Held::Whole(holders @ [_]) => (holders, &[]),
            Held::Whole(_) => (&[], &[]),
            Held::Sum(parts) => (&parts.alone, &parts.groups),
        }
    }

    /// Nodes that have to send because nobody else holds something that others want.
    pub(super) fn leaving_alone(&self) -> impl Iterator<Item = u32> {
        let receivers = &self.receivers;
        self.sources().0.iter().copied().filter(move |n| receivers.iter().any(|r| r != n))
    }

    /// Sets of several nodes, one of which has to send; disjoint, and without the nodes above.
    pub(super) fn leaving_groups(&self) -> impl Iterator<Item = &'a [u32]> {
        let whole = match self.held {
            Held::Whole(holders) if holders.len() > 1 => Some(holders),
            _ => None,
        };
        let receivers = &self.receivers;
        let is_wanted = move |group: &&[u32]| receivers.iter().any(|r| group.binary_search(r).is_err());
        self.sources().1.iter().map(Vec::as_slice).filter(is_wanted).chain(whole)
    }

    fn fewest(&self) -> usize {
        match self.held {
            Held::Whole(_) => 1,
            Held::Sum(parts) => parts.fewest,
        }
    }

    /// Messages besides one into each receiver, without helpers and if helpers take what they can.
    fn extra_in(&self) -> (usize, usize) {
        match (self.fewest(), self.shared) {
            (0 | 1, _) => (0, 0),
            (n, true) => (n - 2, n - 1),
            (n, false) => (n - 1, n),
        }
    }

    /// The same for messages besides those that have to leave, where every part has one node.
    fn extra_out(&self) -> Option<(usize, usize)> {
        let receivers = self.receivers.len();
        match self.held {
            Held::Whole(_) => Some((receivers - 1, receivers)),
            Held::Sum(parts) if !parts.each_is_alone() || parts.fewest < 2 => None,
            Held::Sum(_) if self.shared => Some((receivers.saturating_sub(2), receivers - 1)),
            Held::Sum(_) => Some((receivers - 1, receivers)),
        }
    }

    /// What a byte costs at least if `busy` nodes pay 1 for what they send and the others `sigma` for what they take in.
    fn cost_across(&self, busy: &[bool], sigma: f64) -> f64 {
        let is_busy = |n: &&u32| busy[**n as usize];
        let inside = self.receivers.iter().filter(is_busy).count();
        let into_others = sigma * (self.receivers.len() - inside) as f64;
        let leaving = match self.held {
            // Others that have it send it for nothing, once one of them has taken it in.
            Held::Whole(holders) if !holders.iter().all(|n| busy[*n as usize]) => 0.0,
            Held::Whole(_) if inside < self.receivers.len() => 1.0,
            Held::Whole(_) => (inside as f64).min(1.0 + sigma),
            Held::Sum(_) => {
                let alone = self.leaving_alone().filter(|&n| busy[n as usize]).count();
                let groups = self.leaving_groups().filter(|g| g.iter().all(|&n| busy[n as usize])).count();
                (alone + groups) as f64
            }
        };
        leaving + into_others
    }

    fn is_within(&self, busy: &[bool]) -> bool {
        self.holders().iter().chain(&self.receivers).all(|&n| busy[n as usize])
    }

    fn cost_in(&self, busy: &[bool], rho: f64) -> f64 {
        let price = |n: &u32| if busy[*n as usize] { 1.0 } else { rho };
        let (without, helped) = self.extra_in();
        let extra = match self.is_within(busy) {
            true => (without as f64).min(rho * helped as f64),
            false => rho * without as f64,
        };
        self.receivers.iter().map(price).sum::<f64>() + extra
    }

    fn cost_out(&self, busy: &[bool], rho: f64) -> f64 {
        let leaving = self.leaving_alone().filter(|&n| busy[n as usize]).count()
            + self.leaving_groups().filter(|g| g.iter().all(|&n| busy[n as usize])).count();
        let all = (self.receivers.len() + self.extra_in().0).max(leaving);
        let (leaving, all) = (leaving as f64, all as f64);
        match self.extra_out() {
            Some((without, helped)) if self.is_within(busy) => {
                leaving + (without as f64).min(rho * helped as f64)
            }
            Some((without, helped)) if self.is_wanted_by_some_holders(busy) => {
                let others = rho * (self.holders().len() as f64 - leaving);
                leaving + others + (without as f64).min(rho * helped as f64)
            }
            _ => leaving + rho * (all - leaving),
        }
    }

    /// Whether those who want the sum all have a part of it, and are busy, at least three of them: with the fewest messages they send all
    /// that is to be passed on.
    fn is_wanted_by_some_holders(&self, busy: &[bool]) -> bool {
        let Held::Sum(parts) = self.held else { return false };
        let has = |n: &u32| parts.holders.binary_search(n).is_ok();
        self.receivers.len() > 2 && self.receivers.iter().all(|n| busy[*n as usize] && has(n))
    }
}

/// Sets of nodes that are worth a look: those with something to add up, those who want it, those with anything to do, and these.
pub(super) fn busy_sets(needs: &[Need], binding: &[u32], num_nodes: usize) -> Vec<Vec<bool>> {
    let among = |chosen: &dyn Fn(&Need) -> bool| {
        let mut busy = vec![false; num_nodes];
        for need in needs.iter().filter(|n| chosen(n)) {
            need.holders().iter().chain(&need.receivers).for_each(|&n| busy[n as usize] = true);
        }
        busy
    };
    let mut bound_by = vec![false; num_nodes];
    binding.iter().for_each(|&n| bound_by[n as usize] = true);
    let mut wanting = vec![false; num_nodes];
    let sums = needs.iter().filter(|need| need.fewest() > 1);
    sums.flat_map(|need| &need.receivers).for_each(|&n| wanting[n as usize] = true);
    let mut sets = vec![among(&|_| true), among(&|need| need.fewest() > 1), wanting, bound_by];
    sets.dedup();
    sets.retain(|set| set.contains(&true));
    sets
}

/// The least seconds by messages into nodes, and what the busy ones have to carry of them.
pub(super) fn into(needs: &[Need], busy: &[bool], rates: &[f64]) -> (f64, u64) {
    worst_price(needs, busy, rates, |need| Some(need.extra_in()), Need::cost_in)
}

/// The same by messages out of nodes.
pub(super) fn out_of(needs: &[Need], busy: &[bool], rates: &[f64]) -> (f64, u64) {
    worst_price(needs, busy, rates, Need::extra_out, Need::cost_out)
}

/// The least seconds by messages out of busy nodes and into the others, and what the two have to carry together.
pub(super) fn across(needs: &[Need], busy: &[bool], out_rates: &[f64], in_rates: &[f64]) -> (f64, u64, f64) {
    let sum = |rates: &[f64], chosen: bool| -> f64 {
        rates.iter().zip(busy).filter(|(_, b)| **b == chosen).map(|(rate, _)| rate).sum()
    };
    let (out_rate, in_rate) = (sum(out_rates, true), sum(in_rates, false));
    let copies = |need: &Need| matches!(need.held, Held::Whole(_)) && need.is_within(busy);
    let turning: BTreeSet<usize> =
        needs.iter().filter(|n| copies(n)).map(|n| n.receivers.len() - 1).filter(|n| *n > 0).collect();
    let mut worst = (0.0, 0, out_rate);
    for sigma in turning.into_iter().map(|n| n as f64) {
        let rate = out_rate + sigma * in_rate;
        let carried: f64 = needs.iter().map(|need| need.bytes as f64 * need.cost_across(busy, sigma)).sum();
        if carried / rate > worst.0 {
            worst = (carried / rate, carried as u64, rate);
        }
    }
    worst
}

/// Tries the prices at which helping begins to pay for some piece; in between nothing is worse.
fn worst_price<'a>(
    needs: &[Need<'a>],
    busy: &[bool],
    rates: &[f64],
    extra: impl Fn(&Need<'a>) -> Option<(usize, usize)>,
    cost: impl Fn(&Need<'a>, &[bool], f64) -> f64,
) -> (f64, u64) {
    let sum = |chosen: bool| -> f64 {
        rates.iter().zip(busy).filter(|(_, b)| **b == chosen).map(|(rate, _)| rate).sum()
    };
    let (busy_rate, other_rate) = (sum(true), sum(false));
    let turning: BTreeSet<(usize, usize)> = needs.iter().filter_map(&extra).filter(|e| e.1 > 0).collect();
    let prices = turning.iter().map(|&(without, helped)| without as f64 / helped as f64);
    let mut worst = (0.0, 0);
    for rho in prices.chain([0.0, 1.0]) {
        let others = if rho > 0.0 { rho * other_rate } else { 0.0 };
        let carried: f64 = needs.iter().map(|need| need.bytes as f64 * cost(need, busy, rho)).sum();
        let seconds = carried / (busy_rate + others);
        if seconds > worst.0 {
            worst = (seconds, carried as u64);
        }
    }
    worst
}
