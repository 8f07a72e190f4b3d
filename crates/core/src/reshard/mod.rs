//! Resharding: from a [`Problem`] (which tensors move between which layouts, on which cluster) to a [`Plan`]
//! (transfers of boxes with their order).
//!
//! ```text
//! Problem -> pieces -> strategy -> Plan -> lower -> Program
//!                 \-> bound
//! ```

pub mod allgather;
mod assign;
mod atoms;
pub mod bound;
pub mod broadcast;
mod coverage;
mod demand;
pub mod doc;
mod draft;
mod flow;
pub mod jobs;
pub mod lower;
#[cfg(test)]
mod paper;
pub mod pieces;
pub mod plan;
pub mod problem;
pub mod sendrecv;
pub mod shards;
mod shares;
pub mod strategy;
#[cfg(test)]
mod testing;
mod unit;

pub(crate) use bound::bandwidth_bound;
pub use bound::{Bound, lower_bound};
pub(crate) use flow::fitting_chunk;
#[doc(hidden)]
pub use flow::{plan_in_blocks, plan_served};
pub use lower::lower;
pub use plan::{Plan, Transfer};
pub use problem::{Placed, PlanError, Problem, Reshard};
pub use strategy::{PlanOptions, Scheduler, Strategy, default_chunk, plan};
