//! From a plan to the program of every rank.

use crate::program::Program;

use super::plan::Plan;

pub fn lower(plan: &Plan) -> Program {
    Program { chunk_bytes: plan.chunk_bytes, ranks: vec![] }
}
