//! The lower bound: no plan is faster.

use super::problem::{PlanError, Problem};

/// The least seconds any plan needs, and what stands in the way of fewer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bound {
    pub seconds: f64,
    /// For a reader: which hosts' links, which direction, how many bytes.
    pub reason: String,
}

pub fn lower_bound(problem: &Problem) -> Result<Bound, PlanError> {
    let _ = problem;
    Ok(Bound::default())
}
