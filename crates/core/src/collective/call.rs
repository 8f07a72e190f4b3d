//! A call: one collective of one group, with its sizes.

use super::{Collective, CollectiveError, Group};
use crate::dtype::DType;
use crate::id::Rank;
use crate::layout::{Layout, ReduceOp};
use crate::mesh::RankList;

/// How many elements a collective moves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Counts {
    /// Of the whole tensor; of an all-to-all, what each rank has. Where it is dealt out, by torch.chunk's rule: parts of
    /// ceil(n/k), the last ones shorter or empty.
    Even(u64),
    /// What each rank brings to an all-gather, or takes from a reduce-scatter.
    PerRank(Vec<u64>),
    /// What each rank has for each, of an all-to-all: a row for every sender.
    PerPair(Vec<Vec<u64>>),
}

/// What a group is asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Call {
    pub collective: Collective,
    pub group: Group,
    pub dtype: DType,
    pub counts: Counts,
    /// How parts combine, where there is something to combine.
    pub op: ReduceOp,
    /// Who has what is broadcast, or gets what is reduced.
    pub root: Rank,
}

impl Call {
    /// Adds up where there is something to combine; the group's first rank is the root.
    pub fn new(collective: Collective, group: &Group, dtype: DType, elements: u64) -> Self {
        let (dtype, elements) = match collective {
            Collective::Barrier => (DType::U8, 1),
            _ => (dtype, elements),
        };
        let (root, group) = (group.ranks()[0], group.clone());
        Self { collective, group, dtype, counts: Counts::Even(elements), op: ReduceOp::Sum, root }
    }

    pub fn with_op(self, op: ReduceOp) -> Self {
        Self { op, ..self }
    }

    pub fn with_counts(self, counts: Counts) -> Self {
        Self { counts, ..self }
    }

    pub fn with_root(self, root: Rank) -> Self {
        Self { root, ..self }
    }

    /// Whether the order in which parts are combined shows in the result.
    pub fn order_matters(&self) -> bool {
        self.collective.reduces() && self.op == ReduceOp::Sum && self.dtype.rounds() && self.group.len() > 2
    }

    /// Whether every sender has a tensor of its own.
    pub fn has_rows(&self) -> bool {
        matches!(self.counts, Counts::PerPair(_))
    }

    /// The reshards that it is: one, but for an all-to-all with counts of its own, which has one for every sender.
    pub fn layouts(&self) -> Result<Vec<(Layout, Layout)>, CollectiveError> {
        self.layouts_named("")
    }

    /// The same, with the meshes' names told apart from those of other calls.
    pub(super) fn layouts_named(&self, name: &str) -> Result<Vec<(Layout, Layout)>, CollectiveError> {
        self.check()?;
        let names = Names { call: self, name };
        match &self.counts {
            Counts::PerPair(rows) => {
                rows.iter().zip(self.group.ranks()).map(|(row, from)| names.row(*from, row)).collect()
            }
            Counts::PerRank(counts) => Ok(vec![names.pair(total(counts), Some(counts))?]),
            Counts::Even(elements) => Ok(vec![names.pair(*elements, None)?]),
        }
    }

    fn check(&self) -> Result<(), CollectiveError> {
        let ranks = self.group.len();
        let wrong = |found: usize| {
            Err(CollectiveError::Counts { collective: self.collective, given: found, wanted: ranks })
        };
        if self.collective.has_root() && self.group.position(self.root).is_none() {
            return Err(CollectiveError::RootOutside { root: self.root, ranks: self.group.ranks().to_vec() });
        }
        match (&self.counts, self.collective) {
            (Counts::Even(_), _) => Ok(()),
            (Counts::PerRank(counts), Collective::AllGather | Collective::ReduceScatter) => {
                if counts.len() == ranks { Ok(()) } else { wrong(counts.len()) }
            }
            (Counts::PerPair(rows), Collective::AllToAll) => {
                let lens = [rows.len()].into_iter().chain(rows.iter().map(Vec::len));
                lens.into_iter().find(|len| *len != ranks).map_or(Ok(()), wrong)
            }
            _ => Err(CollectiveError::NoCounts(self.collective)),
        }
    }
}

/// Writes layouts down.
struct Names<'a> {
    call: &'a Call,
    name: &'a str,
}

impl Names<'_> {
    fn all(&self, shape: &str) -> String {
        let (group, dtype) = (&self.call.group, self.call.dtype);
        format!("{dtype}[{shape}]@G{}{{g:{}}}={}", self.name, group.len(), RankList(group.ranks()))
    }

    fn one(&self, mesh: &str, shape: &str, rank: Rank) -> String {
        format!("{}[{shape}]@{mesh}{}{{}}={}(_)", self.call.dtype, self.name, rank.0)
    }

    fn pair(&self, elements: u64, counts: Option<&Vec<u64>>) -> Result<(Layout, Layout), CollectiveError> {
        let shape = match self.call.collective {
            Collective::AllToAll => format!("{},{elements}", self.call.group.len()),
            _ => elements.to_string(),
        };
        let all = self.all(&shape);
        let root = self.one("R", &shape, self.call.root);
        let parts = format!("{all}(_ | {} g)", self.call.op);
        let dealt = match counts {
            Some(counts) => format!("{all}(g{})", cuts(counts)),
            None => format!("{all}(g)"),
        };
        let (src, dst) = match self.call.collective {
            Collective::AllReduce | Collective::Barrier => (parts, format!("{all}(_)")),
            Collective::ReduceScatter => (parts, dealt),
            Collective::AllGather => (dealt, format!("{all}(_)")),
            Collective::AllToAll => (format!("{all}(g,_)"), format!("{all}(_,g)")),
            Collective::Broadcast => (root, format!("{all}(_)")),
            Collective::Reduce => (parts, root),
        };
        Ok((src.parse()?, dst.parse()?))
    }

    /// What one rank has for everybody.
    fn row(&self, from: Rank, counts: &[u64]) -> Result<(Layout, Layout), CollectiveError> {
        let shape = total(counts).to_string();
        let src = self.one(&format!("R{}x", from.0), &shape, from);
        Ok((src.parse()?, format!("{}(g{})", self.all(&shape), cuts(counts)).parse()?))
    }
}

/// More than there can be is refused where the layouts are read.
fn total(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// `[0,3,8]` for parts of 3 and 5.
fn cuts(counts: &[u64]) -> String {
    let ends = counts.iter().scan(0u64, |end, count| {
        *end = end.saturating_add(*count);
        Some(format!(",{end}"))
    });
    format!("[0{}]", ends.collect::<String>())
}
