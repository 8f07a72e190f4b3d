//! Algorithms: which blocks a tensor is cut into, and the way of each.

use std::fmt;
use std::str::FromStr;

use super::shape::{Between, Shape, Slot, Team};
use super::way::{Way, write};
use super::{Call, Collective, CollectiveError};
use crate::id::{Rank, TransferId};
use crate::region::{Region, Span};
use crate::reshard::{Plan, Reshard};

/// How a collective is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algorithm {
    /// The one that is predicted to be the fastest.
    #[default]
    Auto,
    /// Everything straight from who has it to who wants it: one step. Of a sum, every part to everyone.
    Direct,
    /// A sum straight to its owners, a block each, and straight back: two steps, and every byte is sent once each way.
    /// Where there is no sum for all, the same as direct.
    Pairwise,
    /// From rank to rank, around the group.
    Ring,
    /// Down and up a tree; an all-gather doubles what it has at each step.
    Tree,
    /// Inside a host first, then between hosts, then inside again.
    TwoLevel,
    /// The reshard planner's own answer.
    Flow,
}

impl Algorithm {
    /// Every algorithm that makes a plan; `auto` picks among them, the first where they are equally fast.
    pub const CONCRETE: [Algorithm; 6] = [
        Algorithm::Direct,
        Algorithm::Pairwise,
        Algorithm::TwoLevel,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::Flow,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Direct => "direct",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::TwoLevel => "two-level",
            Algorithm::Flow => "flow",
        }
    }

    /// Whether there is such a way to do it; `in_order` where sums have to be added up in the group's order.
    pub fn can(self, collective: Collective, in_order: bool) -> bool {
        match self {
            Algorithm::Auto | Algorithm::Direct => true,
            Algorithm::Pairwise => !collective.has_root(),
            Algorithm::Ring | Algorithm::TwoLevel => collective != Collective::AllToAll,
            Algorithm::Tree => collective != Collective::AllToAll && !in_order,
            Algorithm::Flow => !in_order,
        }
    }

    /// The ways to go about it that `auto` compares.
    pub(super) fn variants(self) -> Vec<Variant> {
        let shape = |shape| vec![Variant { algorithm: self, shape }];
        match self {
            Algorithm::Direct | Algorithm::Pairwise => shape(Shape::Star),
            Algorithm::Ring => shape(Shape::Line),
            Algorithm::Tree => shape(Shape::Tree),
            Algorithm::TwoLevel => [Between::Line, Between::Star]
                .map(|between| Variant { algorithm: self, shape: Shape::TwoLevels { between } })
                .to_vec(),
            Algorithm::Auto | Algorithm::Flow => vec![],
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = CollectiveError;

    fn from_str(s: &str) -> Result<Self, CollectiveError> {
        let all = [Algorithm::Auto].into_iter().chain(Algorithm::CONCRETE);
        all.into_iter().find(|a| a.name() == s).ok_or_else(|| CollectiveError::UnknownAlgorithm(s.into()))
    }
}

/// An algorithm, and which of its forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    pub algorithm: Algorithm,
    pub shape: Shape,
}

/// A ring is cut into at most this many blocks. One more block than a rank has neighbours saves it `1/n` of the bytes;
/// with more ranks than this, that is little, and every block takes its own walk around the group.
const MAX_RING_BLOCKS: usize = 16;
/// Two levels use at most this many blocks: root hosts times ranks in a host.
const MAX_LEVEL_BLOCKS: usize = 64;
/// Where a sum waits for every part before it goes on, it is cut into pieces, so that parts follow each other; into no
/// smaller ones than this, as each has to be announced.
const MIN_PIECE_BYTES: u64 = 64 << 10;
const MAX_PIECES: u64 = 32;

/// Writes the transfers of one call of a reduction, a broadcast or an all-gather.
pub(super) struct Blocks<'a> {
    pub call: &'a Call,
    pub team: &'a Team,
    pub variant: Variant,
    pub in_order: bool,
}

impl Blocks<'_> {
    pub fn write(&self, plan: &mut Plan, tensor: u32) {
        for (span, way) in self.ways(&plan.problem.reshards[tensor as usize]) {
            if !span.is_empty() {
                let region = plan.add_region(Region::new(vec![span]));
                write(plan, tensor, region, &way);
            }
        }
    }

    fn ways(&self, reshard: &Reshard) -> Vec<(Span, Way)> {
        let whole = Span::new(0, reshard.src.layout.shape()[0]);
        match self.call.collective {
            Collective::AllReduce | Collective::Barrier => self.all_reduce(whole),
            Collective::ReduceScatter => {
                let owned = parts(&reshard.dst.layout).into_iter().zip(&self.team.group);
                owned
                    .flat_map(|(span, owner)| self.reduce_to(span, *owner, self.team.slot_of(*owner)))
                    .collect()
            }
            Collective::Reduce => {
                self.in_slots(whole, |span, slot| self.reduce_to(span, self.call.root, slot))
            }
            Collective::Broadcast => {
                self.in_slots(whole, |span, slot| vec![self.spread(span, self.call.root, slot)])
            }
            Collective::AllGather => {
                let held = parts(&reshard.src.layout).into_iter().zip(&self.team.group);
                held.map(|(span, owner)| self.spread(span, *owner, self.team.slot_of(*owner))).collect()
            }
            Collective::AllToAll => unreachable!("an all-to-all has no blocks that go to several"),
        }
    }

    fn spread(&self, span: Span, holder: Rank, slot: Slot) -> (Span, Way) {
        let mut way = Way::default();
        way.leaf(holder);
        way.spread = self.team.spread(self.variant.shape, holder, slot);
        (span, way)
    }

    /// With two levels, a cut for every rank of a host, so that all of them take part.
    fn in_slots(&self, whole: Span, ways: impl Fn(Span, Slot) -> Vec<(Span, Way)>) -> Vec<(Span, Way)> {
        let slots = match self.variant.shape {
            Shape::TwoLevels { between: Between::Line } => self.team.num_slots().min(MAX_LEVEL_BLOCKS),
            _ => 1,
        };
        cut(whole, slots as u64).enumerate().flat_map(|(slot, span)| ways(span, slot)).collect()
    }

    /// A sum that one rank wants.
    fn reduce_to(&self, span: Span, owner: Rank, slot: Slot) -> Vec<(Span, Way)> {
        match self.in_order {
            true => self.reduce_in_order(span, owner, slot),
            false => vec![(span, self.team.gather(self.variant.shape, owner, slot))],
        }
    }

    fn reduce_in_order(&self, span: Span, owner: Rank, slot: Slot) -> Vec<(Span, Way)> {
        let mut way = self.team.gather_in_order(self.variant.shape, owner, slot);
        let last = way.stations.last().map(|s| s.rank);
        way.spread.extend(last.filter(|last| *last != owner).map(|last| (last, owner)));
        self.pieces(span).map(|piece| (piece, way.clone())).collect()
    }

    /// Cuts of a sum that would otherwise wait for its parts one after the other.
    fn pieces(&self, span: Span) -> impl Iterator<Item = Span> + use<> {
        let bytes = span.len() * self.call.dtype.bytes();
        // A plan with more transfers than this takes longer to make than it saves.
        let ranks = self.team.group.len() as u64;
        let most = (4 * MAX_PIECES * MAX_PIECES / (ranks * ranks)).clamp(4, MAX_PIECES);
        cut(span, (bytes / MIN_PIECE_BYTES).clamp(1, most))
    }

    fn all_reduce(&self, whole: Span) -> Vec<(Span, Way)> {
        let (team, shape) = (self.team, self.variant.shape);
        match (self.variant.algorithm, shape) {
            // Everybody adds up for itself: in one order, or they would come to different sums.
            (Algorithm::Direct, _) => {
                let ways = team.group.iter().flat_map(|rank| self.reduce_in_order(whole, *rank, 0));
                ways.collect()
            }
            (_, Shape::Line) if self.in_order => {
                let mut way = team.gather_in_order(shape, team.last_of_group(), 0);
                way.spread = team.spread_back();
                self.pieces(whole).map(|piece| (piece, way.clone())).collect()
            }
            (_, Shape::Star) => self.blocks(whole, team.group.len(), |i| (team.group[i], 0)),
            (_, Shape::Line) => {
                let n = team.by_host.len();
                let blocks = n.min(MAX_RING_BLOCKS);
                self.blocks(whole, blocks, |i| (team.by_host[i * n / blocks], 0))
            }
            (_, Shape::Tree) => self.blocks(whole, 1, |_| (team.by_host[0], 0)),
            (_, Shape::TwoLevels { between: Between::Star }) => {
                let root = if self.in_order { team.last(0) } else { team.by_host[0] };
                self.blocks(whole, 1, |_| (root, 0))
            }
            (_, Shape::TwoLevels { between: Between::Line }) => self.all_reduce_in_levels(whole),
        }
    }

    /// Every host is the root of some blocks, and in it every rank.
    fn all_reduce_in_levels(&self, whole: Span) -> Vec<(Span, Way)> {
        let team = self.team;
        let roots = if self.in_order { 1 } else { team.num_hosts().min(MAX_RING_BLOCKS) };
        let slots = team.num_slots().min(MAX_LEVEL_BLOCKS / roots).max(1);
        self.blocks(whole, roots * slots, |i| {
            let (host, slot) = (i % roots * team.num_hosts() / roots, i / roots);
            (if self.in_order { team.last(slot) } else { team.leader(host, slot) }, slot)
        })
    }

    /// Blocks of a sum that all want, each with a root of its own.
    fn blocks(&self, whole: Span, count: usize, root: impl Fn(usize) -> (Rank, Slot)) -> Vec<(Span, Way)> {
        let mut ways = vec![];
        for (i, span) in cut(whole, count as u64).enumerate() {
            let (root, slot) = root(i);
            for (span, way) in self.reduce_to(span, root, slot) {
                let spread = self.team.spread(self.variant.shape, root, slot);
                ways.push((span, Way { spread, ..way }));
            }
        }
        ways
    }
}

/// Every rank's part of the dim; an empty span for none.
fn parts(layout: &crate::layout::Layout) -> Vec<Span> {
    let one = |spans: Vec<Span>| spans.first().copied().unwrap_or(Span::new(0, 0));
    let split = layout.by_axes().expect("a call's layouts are split by axes");
    split.part_spans(0).into_iter().map(one).collect()
}

/// Cuts a span into so many parts, as even as they get; some may be empty.
fn cut(span: Span, parts: u64) -> impl Iterator<Item = Span> {
    let at = move |i: u64| span.start + (u128::from(span.len()) * u128::from(i) / u128::from(parts)) as u64;
    (0..parts).map(move |i| Span::new(at(i), at(i + 1)))
}

/// An all-gather in which every rank doubles what it has at each step: both halves of the group gather what is theirs,
/// then every rank tells one of the other half all of it.
pub(super) fn doubling(plan: &mut Plan, tensor: u32, group: &[Rank]) {
    let spans = parts(&plan.problem.reshards[tensor as usize].src.layout);
    let mut brought: Vec<Vec<TransferId>> = vec![vec![]; group.len()];
    gather_range(plan, tensor, group, &spans, &mut brought, 0, group.len());
}

fn gather_range(
    plan: &mut Plan,
    tensor: u32,
    group: &[Rank],
    spans: &[Span],
    brought: &mut Vec<Vec<TransferId>>,
    first: usize,
    end: usize,
) {
    if end - first < 2 {
        return;
    }
    let middle = first + (end - first).div_ceil(2);
    gather_range(plan, tensor, group, spans, brought, first, middle);
    gather_range(plan, tensor, group, spans, brought, middle, end);
    let known = brought.clone();
    // The rank of the other half that stands where this one does, or the last before.
    let opposite = |at: usize| match at < middle {
        true => (middle + (at - first)).min(end - 1),
        false => first + (at - middle),
    };
    for (from, to) in [(first..middle, middle..end), (middle..end, first..middle)] {
        let held = spans[from].iter().filter(|s| !s.is_empty());
        let Some(all) = held.copied().reduce(|a, b| Span::new(a.start, b.end)) else { continue };
        let region = plan.add_region(Region::new(vec![all]));
        for at in to {
            let teller = opposite(at);
            brought[at].push(plan.add(tensor, group[teller], group[at], region, &known[teller]));
        }
    }
}

/// An all-to-all: every box straight from its holder, everybody beginning with the next in the group.
pub(super) fn exchange(plan: &mut Plan, first_tensor: u32, call: &Call) {
    let group = call.group.ranks();
    for step in 1..group.len() {
        for from in 0..group.len() {
            let to = (from + step) % group.len();
            let tensor = first_tensor + if call.has_rows() { from as u32 } else { 0 };
            let reshard = &plan.problem.reshards[tensor as usize];
            let held = reshard.src.layout.shard_at(&reshard.src.layout.mesh().coord(if call.has_rows() {
                0
            } else {
                from
            }));
            let wanted = reshard.dst.layout.shard_at(&reshard.dst.layout.mesh().coord(to));
            if let (Some(held), Some(wanted)) = (held.first(), wanted.first())
                && let Some(region) = held.intersect(wanted)
            {
                let region = plan.add_region(region);
                plan.add(tensor, group[from], group[to], region, &[]);
            }
        }
    }
}
