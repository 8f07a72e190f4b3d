//! Whether a rank's destination may lie where its source does.
//!
//! In one place, what arrives must not fall on a part that is still to be sent. Lowered so, a plan is a program like any other,
//! and the verifier says whether it is right:
//!
//! ```text
//! ring      r0 sends its block 2, and much later receives the sum of block 2, made of it       in place
//! direct    r0 sends everything to everyone, and adds up everything meanwhile                  needs two places
//! ```

use crate::id::Rank;
use crate::reshard::Plan;
use crate::reshard::lower::Addressing;
use crate::verify::Verified;

/// The plan's program with one address for every element of this rank in both layouts; none if it would go wrong.
pub fn in_place(plan: &Plan, rank: Rank) -> Option<Verified> {
    Verified::plan(plan, Addressing::InPlace(rank)).ok()
}
