//! Collectives: what a group of ranks does together, as reshards within the group.
//!
//! Every collective is a pair of layouts on the group, so planning, proving, simulating and running one is planning,
//! proving, simulating and running a reshard:
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
//! [`plan`] turns calls into a plan by one of the known [`Algorithm`]s, or by the one that is predicted to be fastest.
//! A sum is always added up in an order that the plan fixes. With `fixed_order` it is that of the group, whatever the
//! algorithm, the sizes, the hosts and the chunks: bit for bit what a loop over the group's ranks would add up.
//!
//! ```
//! use crossmesh_core::cluster::{Cluster, Host};
//! use crossmesh_core::collective::{Algorithm, Call, Collective, CollectiveOptions, Group, plan};
//! use crossmesh_core::dtype::DType;
//! use crossmesh_core::id::Rank;
//! let group = Group::new((0..4).map(Rank).collect()).unwrap();
//! let call = Call::new(Collective::AllReduce, &group, DType::F32, 1 << 20);
//! let (src, dst) = call.layouts().unwrap().remove(0);
//! assert_eq!(src.to_string(), "f32[1048576]@G{g:4}=0-3(_ | sum g)");
//! assert_eq!(dst.to_string(), "f32[1048576]@G{g:4}=0-3(_)");
//!
//! let cluster = Cluster::of_hosts(vec![Host::with_devices(1); 4]);
//! let options = CollectiveOptions { algorithm: Algorithm::Ring, ..CollectiveOptions::default() };
//! let plan = plan(&[call], &cluster, &options).unwrap();
//! assert_eq!(plan.transfers().len(), 4 * 6); // four blocks, three hops to add up and three to tell
//! ```

mod algorithm;
mod block_route;
mod call;
mod choose;
mod group;
mod in_place;
mod shape;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use crate::id::Rank;
use crate::layout::NotationError;
use crate::mesh::RankList;
use crate::reshard::PlanError;

pub use algorithm::Algorithm;
pub use call::{Call, Counts};
pub use choose::{CollectiveOptions, plan};
pub use group::Group;
pub use in_place::in_place;

/// What a group of ranks does together.
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

/// Why a collective cannot be planned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    #[error("a group needs at least one rank")]
    EmptyGroup,
    #[error("{0} is in the group twice")]
    Repeated(Rank),
    #[error("the root {root} is not in the group of ranks {}", RankList(ranks))]
    RootOutside { root: Rank, ranks: Vec<Rank> },
    #[error(
        "{given} counts for {collective} within {wanted} ranks\nhint: give one for every rank, in the group's order"
    )]
    Counts { collective: Collective, given: usize, wanted: usize },
    #[error(
        "{0} has no counts of this kind\nhint: all-gather and reduce-scatter have one a rank, all-to-all one a pair"
    )]
    NoCounts(Collective),
    #[error(
        "there is no {algorithm} for {collective}{}\nhint: use one of {choices}, or auto",
        if *in_order { " in a fixed order" } else { "" }
    )]
    NoSuchWay { algorithm: Algorithm, collective: Collective, in_order: bool, choices: String },
    #[error("no calls were given")]
    NoCalls,
    #[error(
        "unknown collective `{0}`\nhint: collectives are all-reduce, reduce-scatter, all-gather, all-to-all, broadcast, reduce and barrier"
    )]
    Unknown(String),
    #[error(
        "unknown algorithm `{0}`\nhint: algorithms are auto, direct, pairwise, ring, tree, two-level and flow"
    )]
    UnknownAlgorithm(String),
    #[error(transparent)]
    Layout(#[from] NotationError),
    #[error(transparent)]
    Plan(#[from] PlanError),
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

    /// Whether parts are combined.
    pub fn reduces(self) -> bool {
        use Collective::*;
        matches!(self, AllReduce | ReduceScatter | Reduce | Barrier)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Collective::Broadcast | Collective::Reduce)
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
