//! The verifier: what a plan and its program must obey, checked from the layouts alone.
//!
//! ```text
//! plan -> shape (malformed) -> lower -> passing, else program (matched, deadlock, memory)
//!              \-> holding (causality, coverage) and sums (the same for partial sums) -> claims
//! ```
//!
//! It trusts nothing the planner says: not that a sender holds a box, not that boxes fit together, not a figure. It
//! knows boxes and what ranks hold, never an element, so its cost grows with the plan and not with the tensors.

mod error;
mod holding;
mod passing;
mod program;
mod shape;
mod sums;
mod tiling;

use std::fmt;

pub use error::{Law, VerifyError};

use crate::id::Rank;
use crate::program::Program;
use crate::reshard::Plan;
use crate::reshard::doc::PlanDoc;
use crate::reshard::lower::Lowering;
use crate::reshard::shards::AllSides;

/// What has been proven of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Proof {
    pub transfers: usize,
    pub bytes: u64,
    /// The most memory that a rank needs beside its tensors, and the first rank that needs it.
    pub peak_extra_bytes: u64,
    pub peak_rank: Rank,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "every element arrives exactly once: {} B in {} transfers", self.bytes, self.transfers)?;
        match self.peak_extra_bytes {
            0 => write!(f, ", no deadlock, no extra memory"),
            peak => write!(f, ", no deadlock, at most {peak} B of extra memory ({})", self.peak_rank),
        }
    }
}

/// Figures that came with a plan, to be held against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Claims {
    pub bytes: Option<u64>,
    /// No rank needs more beside its tensors.
    pub peak_extra_bytes: Option<u64>,
}

impl Claims {
    pub fn of(doc: &PlanDoc) -> Self {
        Self { bytes: Some(doc.bytes), peak_extra_bytes: Some(doc.peak_extra_bytes) }
    }
}

/// Proves a plan right, or names the first law it breaks.
pub fn verify(plan: &Plan) -> Result<Proof, VerifyError> {
    verify_claims(plan, &Claims::default())
}

/// Proves a plan and the figures that came with it.
pub fn verify_claims(plan: &Plan, claims: &Claims) -> Result<Proof, VerifyError> {
    shape::check(plan)?;
    let sides = AllSides::of(&plan.problem);
    holding::check_senders(plan, &sides)?;
    let (peak_rank, peak_extra_bytes) = match passing::is_right(plan, &sides) {
        true => {
            holding::check_receivers(plan, &sides)?;
            (Rank(0), 0)
        }
        false => {
            let program = Lowering::new(plan, &sides).into_program();
            let graph = program::Graph::new(&program)?;
            let order = graph.order()?;
            holding::check_receivers(plan, &sides)?;
            sums::check(plan, &sides, &order)?;
            graph.check_memory(&order)?
        }
    };
    let proof =
        Proof { transfers: plan.transfers().len(), bytes: plan.bytes_moved(), peak_extra_bytes, peak_rank };
    check_claims(&proof, claims)?;
    Ok(proof)
}

/// Proves what can be proven of a program alone: messages match, nothing waits in a circle, staging memory has one
/// user at a time. Answers the most memory a rank needs beside its tensors, and which rank that is.
pub fn verify_program(program: &Program) -> Result<(Rank, u64), VerifyError> {
    let graph = program::Graph::new(program)?;
    let order = graph.order()?;
    graph.check_memory(&order)
}

fn check_claims(proof: &Proof, claims: &Claims) -> Result<(), VerifyError> {
    match (claims.peak_extra_bytes, claims.bytes) {
        (Some(claimed), _) if proof.peak_extra_bytes > claimed => {
            let (rank, needed) = (proof.peak_rank, proof.peak_extra_bytes);
            Err(VerifyError::OverClaim { rank, needed, claimed })
        }
        (_, Some(claimed)) if proof.bytes != claimed => {
            Err(VerifyError::BytesClaimed { moved: proof.bytes, claimed })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
