//! Which transfers touch which rank.

use rustc_hash::FxHashMap;

use crate::id::{Rank, TransferId};
use crate::reshard::plan::{Plan, Transfer};

/// News of `told` for the sender of `waits`, which shares no rank with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Word {
    /// The rank that tells: where `told` arrives.
    pub from: Rank,
    pub told: TransferId,
    pub waits: TransferId,
    /// Where `waits` names `told`, in the table of all `after` lists: a number of its own for every word.
    pub place: u32,
}

/// A rank's transfers in list order, and the words it sends, by what they tell of.
#[derive(Debug, Clone, Copy)]
pub struct Mine<'a> {
    pub transfers: &'a [TransferId],
    pub words: &'a [Word],
    /// One above the largest lane of the plan.
    pub first_free_lane: u32,
}

#[derive(Debug)]
pub struct Touching {
    /// By rank: its transfers are `transfers[starts[r]..starts[r + 1]]`. For one rank alone, all are its own.
    starts: Vec<usize>,
    transfers: Vec<TransferId>,
    /// Sorted.
    words: Vec<Word>,
    first_free_lane: u32,
    only: Option<Rank>,
}

impl Touching {
    pub fn all(plan: &Plan) -> Self {
        let named = plan.transfers().iter().map(|t| t.src.index().max(t.dst.index()) + 1);
        let num_ranks = named.max().unwrap_or(0);
        let mut starts = vec![0; num_ranks + 1];
        for t in plan.transfers() {
            starts[t.src.index() + 1] += 1;
            starts[t.dst.index() + 1] += usize::from(t.dst != t.src);
        }
        for rank in 0..num_ranks {
            starts[rank + 1] += starts[rank];
        }
        let mut next = starts.clone();
        let mut transfers = vec![TransferId(0); starts[num_ranks]];
        let (mut words, mut first_free_lane) = (vec![], 0);
        for (id, t) in (0..).map(TransferId).zip(plan.transfers()) {
            first_free_lane = first_free_lane.max(t.lane.saturating_add(1));
            for rank in [Some(t.src), Some(t.dst).filter(|dst| *dst != t.src)].into_iter().flatten() {
                transfers[next[rank.index()]] = id;
                next[rank.index()] += 1;
            }
            words.extend(words_for(plan, id, t));
        }
        words.sort_unstable();
        Self { starts, transfers, words, first_free_lane, only: None }
    }

    /// Of one rank: everything else is only looked at.
    pub fn one(plan: &Plan, rank: Rank) -> Self {
        let mut arrives = BitSet::new(plan.transfers().len());
        let (mut transfers, mut first_free_lane) = (vec![], 0);
        for (id, t) in (0..).map(TransferId).zip(plan.transfers()) {
            first_free_lane = first_free_lane.max(t.lane.saturating_add(1));
            if t.src == rank || t.dst == rank {
                transfers.push(id);
            }
            if t.dst == rank {
                arrives.insert(id.index());
            }
        }
        let mut words = vec![];
        let ordered = if plan.is_unordered() { &[][..] } else { plan.transfers() };
        for (id, t) in (0..).map(TransferId).zip(ordered) {
            if plan.after(t).iter().any(|a| arrives.contains(a.index())) {
                words.extend(words_for(plan, id, t).filter(|word| word.from == rank));
            }
        }
        words.sort_unstable();
        Self { starts: vec![], transfers, words, first_free_lane, only: Some(rank) }
    }

    pub fn of(&self, rank: Rank) -> Mine<'_> {
        let transfers = match self.only {
            Some(_) => &self.transfers[..],
            None => match self.starts.get(rank.index()..rank.index() + 2) {
                Some(ends) => &self.transfers[ends[0]..ends[1]],
                None => &[], // beyond the last one that moves anything
            },
        };
        let first = self.words.partition_point(|w| w.from < rank);
        let len = self.words[first..].partition_point(|w| w.from == rank);
        let words = &self.words[first..first + len];
        Mine { transfers, words, first_free_lane: self.first_free_lane }
    }
}

/// The words that a transfer needs.
fn words_for<'a>(plan: &'a Plan, waits: TransferId, t: &'a Transfer) -> impl Iterator<Item = Word> + 'a {
    plan.after_range(t).zip(plan.after(t)).filter_map(move |(place, &told)| {
        let a = &plan.transfers()[told.index()];
        needs_word(a, t).then_some(Word { from: a.dst, told, waits, place })
    })
}

/// Whether what waits for a transfer cannot see it.
pub fn needs_word(told: &Transfer, waits: &Transfer) -> bool {
    let touches = |rank: Rank| told.src == rank || told.dst == rank;
    !touches(waits.src) && !touches(waits.dst)
}

struct BitSet(Vec<u64>);

impl BitSet {
    fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }

    fn contains(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }
}

/// Where a transfer stands among those of the rank at hand. Asked only for those that touch it.
pub enum Lookup {
    Table(Vec<u32>),
    Map(FxHashMap<TransferId, u32>),
}

impl Lookup {
    /// For many ranks, one after the other.
    pub fn table(transfers: usize) -> Self {
        Self::Table(vec![0; transfers])
    }

    pub fn map(mine: &[TransferId]) -> Self {
        Self::Map(mine.iter().copied().zip(0..).collect())
    }

    pub fn fill(&mut self, mine: &[TransferId]) {
        if let Self::Table(table) = self {
            for (at, id) in (0..).zip(mine) {
                table[id.index()] = at;
            }
        }
    }

    pub fn place(&self, id: TransferId) -> usize {
        match self {
            Self::Table(table) => table[id.index()] as usize,
            Self::Map(map) => map[&id] as usize,
        }
    }
}
