//! Why a collective did not come to its end.

use crossmesh_core::collective::{Collective, CollectiveError};
use crossmesh_core::id::Rank;
use crossmesh_core::mesh::RankList;

use super::GroupId;
use crate::error::CommError;

/// See the module.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(transparent)]
    Plan(#[from] CollectiveError),
    #[error("{me} is not in the group of ranks {}", RankList(ranks))]
    NotAMember { me: Rank, ranks: Vec<Rank> },
    #[error("{0:?} is not a group of this rank")]
    NoSuchGroup(GroupId),
    #[error(
        "the ranks of a group do not agree on it: {me} has {}\nhint: every member lists the same ranks in the same order",
        RankList(ranks)
    )]
    GroupsDiffer { me: Rank, ranks: Vec<Rank> },
    #[error("{me} is in {count} groups, more than there can be")]
    TooManyGroups { me: Rank, count: u32 },
    #[error("{collective}: {me} {what} {found} elements, expected {expected}")]
    Length { collective: Collective, me: Rank, what: &'static str, found: usize, expected: u64 },
    #[error("{me} cannot get memory for {bytes} B: {cause}")]
    Memory { me: Rank, bytes: u64, cause: String },
    #[error("a rank's thread panicked")]
    Panicked,
}
