//! Programs that were proven: what an engine takes.

use std::sync::Arc;

use crate::id::Rank;
use crate::program::{Program, RankProgram};
use crate::reshard::Plan;
use crate::reshard::lower::Addressing;

use super::error::VerifyError;
use super::{Claims, Proof, check_claims, check_time, prove, tables, verify_program};

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
        check_claims(plan, &proven.proof, claims)?;
        check_time(plan, &proven.program, claims)?;
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
    /// One rank's part of a program that somebody else has proven: whoever started this rank and handed it over a channel that
    /// nobody else writes to. Whether it fits to the others' parts is the word of that somebody; what can be seen in the part alone is
    /// looked at all the same. It costs what the rank's own ops cost.
    pub fn vouched_for(program: Program, rank: Rank) -> Result<Self, VerifyError> {
        let wholes = tables::wholes(&program)?;
        let (index, len) = (rank.0, program.ranks.len());
        let Some(ranked) = program.ranks.get(rank.index()) else {
            return Err(VerifyError::NoSuch { rank, what: "rank", index, len });
        };
        tables::check_rank(&program, rank, ranked, &wholes)?;
        Ok(Self { program: Arc::new(program), rank })
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
