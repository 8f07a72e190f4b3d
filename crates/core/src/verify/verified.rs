//! Programs that were proven: what an engine takes.

use std::sync::Arc;

use crate::id::Rank;
use crate::program::{Program, RankProgram};
use crate::reshard::Plan;
use crate::reshard::lower::{Addressing, project};

use super::error::VerifyError;
use super::{Claims, Proof, check_claims, prove, verify_program};

/// A program that obeys every law. There is no other way to make one than to prove it, or to have somebody's word.
#[derive(Debug, Clone, PartialEq)]
pub struct Verified {
    program: Arc<Program>,
    proof: Proof,
}

impl Verified {
    /// Proves a program.
    pub fn program(program: Program) -> Result<Self, VerifyError> {
        let proof = verify_program(&program)?;
        Ok(Self { program: Arc::new(program), proof })
    }

    /// Lowers a plan and proves that its program does what the plan is for.
    pub fn plan(plan: &Plan, addressing: Addressing) -> Result<Self, VerifyError> {
        let (program, proof) = prove(plan, addressing)?;
        Ok(Self { program: Arc::new(program), proof })
    }

    /// The same, with the figures that came with the plan.
    pub fn claimed_plan(plan: &Plan, claims: &Claims) -> Result<Self, VerifyError> {
        let proven = Self::plan(plan, Addressing::Apart)?;
        check_claims(plan, &proven.program, &proven.proof, claims)?;
        Ok(proven)
    }

    pub fn proof(&self) -> &Proof {
        &self.proof
    }

    /// One rank's part.
    pub fn rank(&self, rank: Rank) -> VerifiedRank {
        VerifiedRank { program: self.program.clone(), rank }
    }
}

impl std::ops::Deref for Verified {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.program
    }
}

/// One rank's part of a proven program.
#[derive(Debug, Clone)]
pub struct VerifiedRank {
    program: Arc<Program>,
    rank: Rank,
}

impl VerifiedRank {
    /// One rank's part of a plan that somebody else has proven: whoever started this rank and handed it the plan over a
    /// channel that nobody else writes to. It costs what the rank's own ops cost, not what the plan costs.
    pub fn vouched_for(plan: &Plan, rank: Rank) -> Self {
        Self { program: Arc::new(project(plan, rank, Addressing::Apart)), rank }
    }

    pub fn id(&self) -> Rank {
        self.rank
    }

    /// The program that this is a part of. Of a part that somebody vouched for, the others are empty.
    pub fn whole(&self) -> &Program {
        &self.program
    }
}

impl std::ops::Deref for VerifiedRank {
    type Target = RankProgram;

    fn deref(&self) -> &RankProgram {
        &self.program.ranks[self.rank.index()]
    }
}
