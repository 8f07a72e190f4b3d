//! The laws, and how a plan or a program breaks them.

use std::fmt;

use crate::id::{MicrobatchId, Rank, TransferId};
use crate::program::messages::MatchError;
use crate::program::{Dep, OpKind, RankProgram, TileId};
use crate::region::Region;
use crate::schedule::Pass;

/// What every plan and every program obeys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Law {
    /// Transfers and ops are what they claim to be: ranks, boxes, buffers and sizes that exist.
    Malformed,
    /// Every destination element arrives exactly once; of a partial sum, every contribution.
    Coverage,
    /// Nobody sends what they do not have.
    Causality,
    /// Nothing is written while it may be read or written.
    Race,
    /// Every send has its receive, and both ends of a channel agree on the order.
    Matched,
    /// No ops wait for each other in a cycle.
    Deadlock,
    /// Memory beside the tensors is as small as claimed.
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
            Law::Race => "race",
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

/// An op of a rank, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpName {
    pub rank: Rank,
    pub op: u32,
    pub does: Does,
}

/// What an op does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Sends the message of this tag; in a program that was made of a plan, the transfer of this number.
    Send(TransferId, Rank),
    Receive(TransferId, Rank),
    Copy,
    /// Copies, or adds, what the message of this tag brought.
    CopyOf(TransferId),
    Compute(u32),
}

impl OpName {
    pub fn of(rank: Rank, op: u32, ranked: &RankProgram) -> Self {
        let what = &ranked.ops[op as usize];
        let does = match what.kind {
            OpKind::Send { to, tag, .. } => Does::Send(TransferId(tag), to),
            OpKind::Recv { from, tag, .. } => Does::Receive(TransferId(tag), from),
            OpKind::Copy { from, .. } => {
                let brings = |dep: &Dep| match ranked.ops.get(dep.op as usize)?.kind {
                    OpKind::Recv { tag, into, .. } if into == from => Some(Does::CopyOf(TransferId(tag))),
                    _ => None,
                };
                ranked.deps(what).iter().find_map(brings).unwrap_or(Does::Copy)
            }
            OpKind::Compute { pass, .. } => Does::Compute(pass),
        };
        Self { rank, op, does }
    }

    fn renumbered(&mut self, id: &impl Fn(TransferId) -> TransferId) {
        if let Does::Send(tag, _) | Does::Receive(tag, _) | Does::CopyOf(tag) = &mut self.does {
            *tag = id(*tag);
        }
    }
}

impl fmt::Display for OpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, op, does } = self;
        match does {
            Does::Send(tag, to) => write!(f, "the send of {tag} from {rank} to {to}"),
            Does::Receive(tag, from) => write!(f, "the receive of {tag} on {rank} from {from}"),
            Does::CopyOf(tag) => write!(f, "the copy of {tag}, op {op} of {rank},"),
            Does::Copy => write!(f, "the copy that is op {op} of {rank}"),
            Does::Compute(pass) => write!(f, "pass {pass}, op {op} of {rank},"),
        }
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
    #[error("{transfer} has {rank} add its own part of {region}, which it does not hold")]
    NoOwnPart { transfer: TransferId, rank: Rank, region: Region },
    #[error(
        "{transfer} sends {region} from {rank}, which does not hold {lacking}\nhint: what {rank} does not hold from the start must come by a transfer named in `after`"
    )]
    NotHeld { transfer: TransferId, rank: Rank, region: Region, lacking: Region },

    #[error("{rank} names {what} {index}, there are {len}")]
    NoSuch { rank: Rank, what: &'static str, index: u32, len: usize },
    #[error("tensor {tensor} has more bytes than can be counted")]
    TensorTooLarge { tensor: u32 },
    #[error("tensor {tensor} is made of {count} parts\nhint: partial sums have at least two")]
    TooFewParts { tensor: u32, count: u32 },
    #[error("tile {tile} of {rank} is {region}, tensor {tensor} is {whole}")]
    TileOutside { rank: Rank, tile: u32, tensor: u32, region: Region, whole: Region },
    #[error("tile {tile} of {rank} reaches to byte {end} of buffer {buffer}, which has {bytes} B")]
    TileBeyondBuffer { rank: Rank, tile: u32, buffer: u32, end: u64, bytes: u64 },
    #[error(
        "tile {tile} of {rank} has strides that put two elements in one place, or as many as it has not dims"
    )]
    TileOnItself { rank: Rank, tile: u32 },
    #[error("tile {tile} of {rank} holds part {part}, there are {parts}")]
    NoSuchPart { rank: Rank, tile: u32, part: u32, parts: u32 },
    #[error("tiles {first} and {second} of {rank} hold something from the start in the same bytes")]
    SourcesOverlap { rank: Rank, first: u32, second: u32 },
    #[error("{op} moves {bytes} B but names no place for them, or names one and moves none")]
    NoPlace { op: OpName, bytes: u64 },
    #[error("{op} moves {region}, its tile {tile} is {tile_region} of tensor {tensor}")]
    OutsideTile { op: OpName, region: Region, tile: u32, tile_region: Region, tensor: u32 },
    #[error("{op} is stated as {stated} B, its box {region} has {bytes} B")]
    BytesDiffer { op: OpName, region: Region, stated: u64, bytes: u64 },
    #[error("{op} combines values of tensor {tensor}, which is no partial sum")]
    CannotCombine { op: OpName, tensor: u32 },
    #[error(
        "the boxes that are written on {rank} cross each other too often to be told apart ({boxes} of them)"
    )]
    TooTangled { rank: Rank, boxes: usize },
    #[error("the program has {rank} hold tensor {tensor} otherwise than its {side} layout says")]
    OtherLayout { rank: Rank, tensor: u32, side: &'static str },

    #[error("crossing {crossing}, {} of microbatch {}, {what}", if *forward { "forward" } else { "backward" }, microbatch.0)]
    OtherCrossing { crossing: u32, forward: bool, microbatch: MicrobatchId, what: &'static str },
    #[error("{rank} does not run part {part} of {pass} where the schedule has it")]
    OtherPass { rank: Rank, pass: Pass, part: u32 },
    #[error("{op} is no part of the passes that the schedule has there")]
    NoSuchPass { op: OpName },
    #[error("{second} does not wait for {first} before it\nhint: a device does one thing at a time")]
    NotOneByOne { first: OpName, second: OpName },
    #[error("{op} {does} tile {}, and {pass} {should} by the schedule and its layouts", tile.0)]
    OtherNeeds { op: OpName, pass: Pass, tile: TileId, does: &'static str, should: &'static str },

    #[error("{rank} never gets {region} of tensor {tensor}")]
    Missing { tensor: u32, rank: Rank, region: Region },
    #[error("{rank} gets {region} of tensor {tensor} twice: {}, and by {second}", first_time(first))]
    Twice { tensor: u32, rank: Rank, region: Region, first: Option<OpName>, second: OpName },
    #[error("{rank} never gets part {contribution} of the sum for {region} of tensor {tensor}")]
    MissingPart { tensor: u32, rank: Rank, region: Region, contribution: u32 },
    #[error("{op} brings part {contribution} of the sum for {region} a second time")]
    PartTwice { op: OpName, region: Region, contribution: u32 },

    #[error("{op} reads {region}, but nothing has put {lacking} there")]
    ReadsNothing { op: OpName, region: Region, lacking: Region },
    #[error("{op} reads {region}, parts of which are sums of different parts")]
    SumUneven { op: OpName, region: Region },
    #[error(
        "{second} writes {region} while {first} may still {does} it\nhint: nothing that {second} waits for says that {first} is over"
    )]
    WriteRace { region: Region, first: OpName, second: OpName, does: &'static str },
    #[error(
        "{second} reads {region} while {first} may still write it\nhint: nothing that {second} waits for says that {first} is over"
    )]
    ReadRace { region: Region, first: OpName, second: OpName },

    #[error(transparent)]
    Messages(#[from] MatchError),
    #[error("op {op} of {rank} waits for op {dep}, which {why}")]
    BadDependency { rank: Rank, op: u32, dep: u32, why: &'static str },

    #[error("{} wait for each other{}", cycle(transfers), if *buffered { "" } else { " unless sends are buffered" })]
    Cycle {
        /// Each waits for the next, the last for the first. Those that are not messages are left out.
        transfers: Vec<TransferId>,
        /// Whether they would even if sends completed on their own.
        buffered: bool,
    },

    #[error("{rank} needs {needed} B beside its tensors, {claimed} B are claimed")]
    OverClaim { rank: Rank, needed: u64, claimed: u64 },
    #[error("the transfers move {moved} B, {claimed} B are claimed")]
    BytesClaimed { moved: u64, claimed: u64 },
    #[error("the lower bound is {seconds} s, {claimed} s are claimed")]
    BoundClaimed { seconds: f64, claimed: f64 },
    #[error("the plan is predicted to take {seconds} s, {claimed} s are claimed")]
    TimeClaimed { seconds: f64, claimed: f64 },
}

fn first_time(first: &Option<OpName>) -> String {
    first.map_or("it holds that from the start".into(), |op| format!("by {op}"))
}

fn cycle(transfers: &[TransferId]) -> String {
    const SHOWN: usize = 8;
    let mut text = transfers.iter().take(SHOWN).map(|t| t.to_string()).collect::<Vec<_>>().join(", ");
    if transfers.len() > SHOWN {
        text += &format!(" and {} more", transfers.len() - SHOWN);
    }
    match transfers.is_empty() {
        true => "ops of one rank".into(),
        false => text,
    }
}

impl VerifyError {
    pub fn law(&self) -> Law {
        use VerifyError::*;
        match self {
            NoSuchRank { .. } | NoSuchTensor { .. } | SelfTransfer { .. } | EmptyBox { .. } => Law::Malformed,
            OutsideTensor { .. } | SizeDiffers { .. } | NoSuchTransfer { .. } => Law::Malformed,
            AfterTwice { .. } | CombinesWhole { .. } => Law::Malformed,
            NoSuch { .. } | TensorTooLarge { .. } | TooFewParts { .. } | TileOutside { .. } => Law::Malformed,
            TileBeyondBuffer { .. } | TileOnItself { .. } | NoSuchPart { .. } => Law::Malformed,
            SourcesOverlap { .. } | NoPlace { .. } | OutsideTile { .. } | BytesDiffer { .. } => {
                Law::Malformed
            }
            CannotCombine { .. } | TooTangled { .. } | OtherLayout { .. } => Law::Malformed,
            OtherCrossing { .. } | OtherPass { .. } | NoSuchPass { .. } => Law::Malformed,
            NotOneByOne { .. } => Law::Race,
            OtherNeeds { .. } => Law::Causality,
            Missing { .. } | Twice { .. } | MissingPart { .. } | PartTwice { .. } => Law::Coverage,
            NoOwnPart { .. } | NotHeld { .. } | ReadsNothing { .. } | SumUneven { .. } => Law::Causality,
            WriteRace { .. } | ReadRace { .. } => Law::Race,
            Messages(_) | BadDependency { .. } => Law::Matched,
            Cycle { .. } => Law::Deadlock,
            OverClaim { .. } => Law::Memory,
            BytesClaimed { .. } | BoundClaimed { .. } | TimeClaimed { .. } => Law::Claims,
        }
    }

    /// The same with other names for the transfers: those of a document whose ids leave gaps, say.
    pub fn renumbered(mut self, id: impl Fn(TransferId) -> TransferId) -> Self {
        use VerifyError::*;
        match &mut self {
            NoSuchRank { transfer, .. }
            | NoSuchTensor { transfer, .. }
            | SelfTransfer { transfer, .. }
            | EmptyBox { transfer, .. }
            | OutsideTensor { transfer, .. }
            | SizeDiffers { transfer, .. }
            | CombinesWhole { transfer, .. }
            | NotHeld { transfer, .. }
            | NoOwnPart { transfer, .. } => *transfer = id(*transfer),
            NoSuchTransfer { transfer, after } | AfterTwice { transfer, after } => {
                (*transfer, *after) = (id(*transfer), id(*after));
            }
            NoPlace { op, .. }
            | OutsideTile { op, .. }
            | BytesDiffer { op, .. }
            | CannotCombine { op, .. }
            | NoSuchPass { op, .. }
            | OtherNeeds { op, .. }
            | PartTwice { op, .. }
            | ReadsNothing { op, .. }
            | SumUneven { op, .. } => op.renumbered(&id),
            WriteRace { first, second, .. }
            | ReadRace { first, second, .. }
            | NotOneByOne { first, second } => {
                first.renumbered(&id);
                second.renumbered(&id);
            }
            Twice { first, second, .. } => {
                first.iter_mut().for_each(|op| op.renumbered(&id));
                second.renumbered(&id);
            }
            Cycle { transfers, .. } => transfers.iter_mut().for_each(|t| *t = id(*t)),
            _ => {}
        }
        self
    }
}
