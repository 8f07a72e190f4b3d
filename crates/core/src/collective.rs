//! Collectives: names for reshards within one group of ranks.
//!
//! Every collective is a pair of layouts on the group, so planning, proving, simulating and running one is planning,
//! proving, simulating and running a reshard. Nothing here knows rings or trees: `flow` finds the ring for large
//! tensors and the tree for small ones, and adds up inside a host before anything leaves it.
//!
//! ```text
//! all-reduce       G{g:n}(_ | sum g)  ->  G{g:n}(_)          every rank has a part of the sum, all want the sum
//! reduce-scatter   G{g:n}(_ | sum g)  ->  G{g:n}(g)
//! all-gather       G{g:n}(g)          ->  G{g:n}(_)
//! all-to-all       G{g:n}(g,_)        ->  G{g:n}(_,g)        from a row each to some columns each
//! broadcast        R{}=root(_)        ->  G{g:n}(_)
//! reduce           G{g:n}(_ | sum g)  ->  R{}=root(_)
//! barrier          all-reduce of one byte
//! ```
//!
//! ```
//! use crossmesh_core::collective::{Collective, Group};
//! use crossmesh_core::dtype::DType;
//! use crossmesh_core::id::Rank;
//! let group = Group::new((0..4).map(Rank).collect()).unwrap();
//! let (src, dst) = Collective::AllReduce.layouts(&group, DType::F32, 1 << 20).unwrap();
//! assert_eq!(src.to_string(), "f32[1048576]@G{g:4}=0-3(_ | sum g)");
//! assert_eq!(dst.to_string(), "f32[1048576]@G{g:4}=0-3(_)");
//! ```

use std::fmt;
use std::str::FromStr;

use crate::dtype::DType;
use crate::id::Rank;
use crate::layout::{Layout, NotationError, ReduceOp};
use crate::mesh::RankList;

/// What a group of ranks does together. Reductions add up unless [`Collective::layouts_with`] is told otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    Broadcast,
    Reduce,
    Barrier,
}

/// Why a collective cannot be written down.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    #[error("a group needs at least one rank")]
    EmptyGroup,
    #[error("{0} is in the group twice")]
    Repeated(Rank),
    #[error(
        "{elements} elements cannot be dealt out to {ranks} ranks evenly\nhint: give a multiple of {ranks}"
    )]
    Uneven { elements: u64, ranks: usize },
    #[error(
        "unknown collective `{0}`\nhint: collectives are all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, reduce and barrier"
    )]
    Unknown(String),
    #[error(transparent)]
    Layout(#[from] NotationError),
}

/// Ranks that act together. The first is the root of what has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    ranks: Vec<Rank>,
}

impl Group {
    pub fn new(ranks: Vec<Rank>) -> Result<Self, CollectiveError> {
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|w| w[0] == w[1]) {
            _ if ranks.is_empty() => Err(CollectiveError::EmptyGroup),
            Some(pair) => Err(CollectiveError::Repeated(pair[0])),
            None => Ok(Self { ranks }),
        }
    }

    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }
}

impl Collective {
    pub const ALL: [Collective; 7] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::AllToAll,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Barrier,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllGather => "all-gather",
            Collective::AllToAll => "all-to-all",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::Barrier => "barrier",
        }
    }

    /// The reshard that it is, adding up where there is something to combine. As nccl-tests count, `elements` are those
    /// of the whole tensor, and for an all-to-all those that each rank has.
    pub fn layouts(
        self,
        group: &Group,
        dtype: DType,
        elements: u64,
    ) -> Result<(Layout, Layout), CollectiveError> {
        self.layouts_with(group, dtype, elements, ReduceOp::Sum)
    }

    pub fn layouts_with(
        self,
        group: &Group,
        dtype: DType,
        elements: u64,
        op: ReduceOp,
    ) -> Result<(Layout, Layout), CollectiveError> {
        let n = group.ranks.len();
        let (dtype, elements) = match self {
            Collective::Barrier => (DType::U8, 1),
            _ => (dtype, elements),
        };
        let shape = match self {
            Collective::AllToAll => format!("{n},{elements}"),
            _ => elements.to_string(),
        };
        let all = format!("{dtype}[{shape}]@G{{g:{n}}}={}", RankList(&group.ranks));
        let root = format!("{dtype}[{shape}]@R{{}}={}", group.ranks[0].0);
        let parts = format!("{all}(_ | {op} g)");
        let (src, dst) = match self {
            Collective::AllReduce | Collective::Barrier => (parts, format!("{all}(_)")),
            Collective::ReduceScatter => (parts, format!("{all}(g)")),
            Collective::AllGather => (format!("{all}(g)"), format!("{all}(_)")),
            Collective::AllToAll => (format!("{all}(g,_)"), format!("{all}(_,g)")),
            Collective::Broadcast => (format!("{root}(_)"), format!("{all}(_)")),
            Collective::Reduce => (parts, format!("{root}(_)")),
        };
        Ok((src.parse()?, dst.parse()?))
    }

    /// By nccl-tests' formulas: what the bus carries for every byte of the tensor, so that different collectives and
    /// group sizes can be compared with the links' rate.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::ReduceScatter | Collective::AllGather | Collective::AllToAll => (n - 1.0) / n,
            Collective::Broadcast | Collective::Reduce => 1.0,
            Collective::Barrier => 0.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Collective {
    type Err = CollectiveError;

    fn from_str(s: &str) -> Result<Self, CollectiveError> {
        let plain = |name: &str| name.replace(['-', '_'], "");
        Collective::ALL
            .into_iter()
            .find(|c| plain(c.name()) == plain(&s.to_lowercase()))
            .ok_or_else(|| CollectiveError::Unknown(s.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, Host};
    use crate::reshard::problem::Hosts;
    use crate::reshard::{PlanOptions, Problem, lower, plan};
    use crate::sim::simulate;
    use crate::verify::verify;

    /// Predicted seconds of a verified plan on hosts of one device with 1 GB/s each way.
    fn seconds(collective: Collective, hosts: u32, elements: u64) -> f64 {
        let host = Host { nic_out_bytes_per_s: 1e9, nic_in_bytes_per_s: 1e9, ..Host::with_devices(1) };
        let cluster = Cluster::of_hosts(vec![host; hosts as usize]);
        let group = Group::new((0..hosts).map(Rank).collect()).unwrap();
        let (src, dst) = collective.layouts(&group, DType::F32, elements).unwrap();
        let problem = Problem::new(vec![(String::new(), src, dst)], Hosts::Described(cluster)).unwrap();
        let plan = plan(&problem, &PlanOptions::default()).unwrap();
        verify(&plan).unwrap();
        simulate(&lower(&plan), &problem.cluster).unwrap().makespan_s
    }

    #[test]
    fn large_collectives_run_at_the_rate_of_the_links() {
        let bytes = 4.0 * f64::from(60 << 20);
        for collective in Collective::ALL.into_iter().filter(|c| *c != Collective::Barrier) {
            for hosts in [2, 3, 5] {
                let busbw =
                    bytes / seconds(collective, hosts, 60 << 20) * collective.bus_factor(hosts as usize);
                assert!(busbw > 0.97e9, "{collective} over {hosts}: {busbw} B/s of 1e9");
                assert!(busbw < 1.001e9, "{collective} over {hosts}: {busbw} B/s of 1e9");
            }
        }
    }

    #[test]
    fn any_subset_of_ranks_is_a_group() {
        let group = Group::new(vec![Rank(6), Rank(1), Rank(3)]).unwrap();
        let (src, dst) = Collective::Broadcast.layouts(&group, DType::Bf16, 9).unwrap();
        assert_eq!(
            (src.to_string(), dst.to_string()),
            ("bf16[9]@R{}=6(_)".into(), "bf16[9]@G{g:3}=6,1,3(_)".into())
        );
        assert_eq!(Group::new(vec![Rank(1), Rank(1)]), Err(CollectiveError::Repeated(Rank(1))));
        assert_eq!(Group::new(vec![]), Err(CollectiveError::EmptyGroup));
    }

    #[test]
    fn names_are_read_as_people_write_them() {
        for collective in Collective::ALL {
            assert_eq!(collective.name().parse(), Ok(collective));
        }
        assert_eq!("allreduce".parse(), Ok(Collective::AllReduce));
        assert_eq!("ALL_GATHER".parse(), Ok(Collective::AllGather));
        assert!(matches!("allredcue".parse::<Collective>(), Err(CollectiveError::Unknown(_))));
    }
}
