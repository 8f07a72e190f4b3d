//! The laws, and how a plan breaks them.

use std::fmt;

use crate::id::{Rank, TransferId};
use crate::region::Region;

/// What every plan and every program obeys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Law {
    /// Transfers are what they claim to be: ranks, boxes and sizes that exist.
    Malformed,
    /// Every destination element arrives exactly once; of a partial sum, every contribution.
    Coverage,
    /// Nobody sends what they do not have.
    Causality,
    /// Every send has its receive, and both ends of a channel agree on the order.
    Matched,
    /// No ops wait for each other in a circle.
    Deadlock,
    /// Staging memory is never used by two boxes at once, and is as small as claimed.
    Memory,
    /// The figures beside the plan are true.
    Claims,
}

impl Law {
    pub fn name(self) -> &'static str {
        match self {
            Law::Malformed => "malformed",
            Law::Coverage => "coverage",
            Law::Causality => "causality",
            Law::Matched => "matched",
            Law::Deadlock => "deadlock",
            Law::Memory => "memory",
            Law::Claims => "claims",
        }
    }
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A law broken, where and by whom.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    #[error("{transfer} names {rank}, the cluster has {devices} devices")]
    NoSuchRank { transfer: TransferId, rank: Rank, devices: usize },
    #[error("{transfer} moves tensor {tensor}, there are {tensors}")]
    NoSuchTensor { transfer: TransferId, tensor: u32, tensors: usize },
    #[error("{transfer} goes from {rank} to itself, with {region}")]
    SelfTransfer { transfer: TransferId, rank: Rank, region: Region },
    #[error("{transfer} from {rank} moves the empty box {region}")]
    EmptyBox { transfer: TransferId, rank: Rank, region: Region },
    #[error("{transfer} from {rank} moves {region}, the tensor is {whole}")]
    OutsideTensor { transfer: TransferId, rank: Rank, region: Region, whole: Region },
    #[error("{transfer} from {rank} is stated as {stated} B, its box {region} has {bytes} B")]
    SizeDiffers { transfer: TransferId, rank: Rank, region: Region, stated: u64, bytes: u64 },
    #[error("{transfer} waits for {after}, which is not in the plan")]
    NoSuchTransfer { transfer: TransferId, after: TransferId },
    #[error("{transfer} names {after} twice in `after`")]
    AfterTwice { transfer: TransferId, after: TransferId },
    #[error("{transfer} combines {region} on {rank}, but the source holds whole values")]
    CombinesWhole { transfer: TransferId, rank: Rank, region: Region },
    #[error(
        "{rank} receives parts of a sum for {region} by {first} and {second}, whose boxes cross\nhint: cut the boxes that meet on a rank alike"
    )]
    CrossingSums { rank: Rank, region: Region, first: TransferId, second: TransferId },
    #[error(
        "{transfer} adds {region} on {rank}, only some of which {rank} has a part of\nhint: cut the box where the source layout does"
    )]
    CrossesOwnPart { transfer: TransferId, rank: Rank, region: Region },

    #[error("{rank} never gets {region} of tensor {tensor}")]
    Missing { tensor: u32, rank: Rank, region: Region },
    #[error("{rank} gets {region} of tensor {tensor} twice: {} and by {second}", first_time(first))]
    Twice { tensor: u32, rank: Rank, region: Region, first: Option<TransferId>, second: TransferId },
    #[error("{rank} never gets part {contribution} of the sum for {region} of tensor {tensor}")]
    MissingPart { tensor: u32, rank: Rank, region: Region, contribution: u32 },
    #[error("{transfer} brings {rank} part {contribution} of the sum for {region} a second time")]
    PartTwice { transfer: TransferId, rank: Rank, region: Region, contribution: u32 },

    #[error(
        "{transfer} sends {region} from {rank}, which does not hold {lacking}\nhint: what {rank} does not hold from the start must come by a transfer named in `after`"
    )]
    NotHeld { transfer: TransferId, rank: Rank, region: Region, lacking: Region },
    #[error(
        "{transfer} sends the sum of {region} from {rank}, but does not wait for {unnamed}, which adds to it"
    )]
    SumUnfinished { transfer: TransferId, rank: Rank, region: Region, unnamed: TransferId },
    #[error("{transfer} sends {region} from {rank}, parts of which are sums of different parts")]
    SumUneven { transfer: TransferId, rank: Rank, region: Region },
    #[error("{transfer} has {rank} add its own part of {region}, which it does not hold")]
    NoOwnPart { transfer: TransferId, rank: Rank, region: Region },
    #[error(
        "{writer} may change {region} on {rank} while {transfer} still uses it\nhint: name {transfer} in its `after`"
    )]
    Race { transfer: TransferId, rank: Rank, region: Region, writer: TransferId },

    #[error("{rank} {what} message {tag} {count} times")]
    NotOnce { rank: Rank, tag: u32, what: &'static str, count: usize },
    #[error("{rank} {what} message {tag}, but nobody {missing} it")]
    Unmatched { rank: Rank, tag: u32, what: &'static str, missing: &'static str },
    #[error("message {tag} from {src} to {dst} differs between its ends: {what}")]
    EndsDiffer { tag: u32, src: Rank, dst: Rank, what: &'static str },
    #[error(
        "{src} sends message {tag} to {dst} in place {sent} of their channel, {dst} expects it in place {received}"
    )]
    ChannelOrder { tag: u32, src: Rank, dst: Rank, sent: u32, received: u32 },
    #[error("op {op} of {rank} waits for op {dep}, which {why}")]
    BadDependency { rank: Rank, op: u32, dep: u32, why: &'static str },

    #[error("{} wait for each other{}", circle(transfers), if *buffered { "" } else { " unless sends are buffered" })]
    Circle {
        /// Each waits for the next, the last for the first.
        transfers: Vec<TransferId>,
        /// Whether they would even if sends completed on their own.
        buffered: bool,
    },

    #[error("{rank} has staging buffer {slot} of {slot_bytes} B, op {op} puts {bytes} B into it")]
    SlotTooSmall { rank: Rank, slot: u32, slot_bytes: u64, op: u32, bytes: u64 },
    #[error("op {writer} of {rank} writes staging buffer {slot} while op {reader} may still use it")]
    SlotTaken { rank: Rank, slot: u32, reader: u32, writer: u32 },
    #[error("{rank} needs {needed} B beside its tensors, {claimed} B are claimed")]
    OverClaim { rank: Rank, needed: u64, claimed: u64 },

    #[error("the transfers move {moved} B, {claimed} B are claimed")]
    BytesClaimed { moved: u64, claimed: u64 },
}

fn first_time(first: &Option<TransferId>) -> String {
    first.map_or("it holds that from the start,".into(), |t| format!("by {t}"))
}

fn circle(transfers: &[TransferId]) -> String {
    const SHOWN: usize = 8;
    let mut text = transfers.iter().take(SHOWN).map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
    if transfers.len() > SHOWN {
        text += &format!(" and {} more", transfers.len() - SHOWN);
    }
    text
}

impl VerifyError {
    pub fn law(&self) -> Law {
        use VerifyError::*;
        match self {
            NoSuchRank { .. } | NoSuchTensor { .. } | SelfTransfer { .. } | EmptyBox { .. } => Law::Malformed,
            OutsideTensor { .. } | SizeDiffers { .. } | NoSuchTransfer { .. } => Law::Malformed,
            AfterTwice { .. } | CombinesWhole { .. } => Law::Malformed,
            CrossingSums { .. } | CrossesOwnPart { .. } => Law::Malformed,
            Missing { .. } | Twice { .. } | MissingPart { .. } | PartTwice { .. } => Law::Coverage,
            NoOwnPart { .. } => Law::Causality,
            NotHeld { .. } | SumUnfinished { .. } | SumUneven { .. } | Race { .. } => Law::Causality,
            NotOnce { .. } | Unmatched { .. } | EndsDiffer { .. } | ChannelOrder { .. } => Law::Matched,
            BadDependency { .. } => Law::Matched,
            Circle { .. } => Law::Deadlock,
            SlotTooSmall { .. } | SlotTaken { .. } | OverClaim { .. } => Law::Memory,
            BytesClaimed { .. } => Law::Claims,
        }
    }

    /// The same with other names for the transfers: those of a document whose ids leave gaps, say.
    pub fn renumbered(mut self, id: impl Fn(TransferId) -> TransferId) -> Self {
        use VerifyError::*;
        match &mut self {
            NoSuchRank { transfer, .. } | NoSuchTensor { transfer, .. } | SelfTransfer { transfer, .. } => {
                *transfer = id(*transfer);
            }
            EmptyBox { transfer, .. } | OutsideTensor { transfer, .. } | SizeDiffers { transfer, .. } => {
                *transfer = id(*transfer);
            }
            CombinesWhole { transfer, .. } | CrossesOwnPart { transfer, .. } | PartTwice { transfer, .. } => {
                *transfer = id(*transfer);
            }
            NotHeld { transfer, .. } | SumUneven { transfer, .. } | NoOwnPart { transfer, .. } => {
                *transfer = id(*transfer)
            }
            NoSuchTransfer { transfer, after } | AfterTwice { transfer, after } => {
                (*transfer, *after) = (id(*transfer), id(*after));
            }
            SumUnfinished { transfer, unnamed: other, .. } | Race { transfer, writer: other, .. } => {
                (*transfer, *other) = (id(*transfer), id(*other));
            }
            CrossingSums { first, second, .. } => (*first, *second) = (id(*first), id(*second)),
            Twice { first, second, .. } => (*first, *second) = (first.map(&id), id(*second)),
            Circle { transfers, .. } => transfers.iter_mut().for_each(|t| *t = id(*t)),
            Missing { .. } | MissingPart { .. } | NotOnce { .. } | Unmatched { .. } | EndsDiffer { .. } => {}
            ChannelOrder { .. } | BadDependency { .. } | SlotTooSmall { .. } | SlotTaken { .. } => {}
            OverClaim { .. } | BytesClaimed { .. } => {}
        }
        self
    }
}
