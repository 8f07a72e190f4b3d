//! Resharding: from a [`Problem`] (which tensors move between which layouts, on which cluster) to a [`Plan`]
//! (transfers of boxes with their order).
//!
//! ```text
//! Problem -> pieces -> strategy -> Plan -> lower -> Program
//!                 \-> bound
//! ```

mod assign;
pub mod bound;
mod demand;
pub mod doc;
mod flow;
pub mod lower;
pub mod pieces;
pub mod plan;
pub mod problem;
pub mod shards;
pub mod strategy;

pub use bound::{Bound, lower_bound};
pub use lower::lower;
pub use plan::{Plan, Transfer};
pub use problem::{Placed, PlanError, Problem, Reshard};
pub use strategy::{PlanOptions, Scheduler, Strategy, plan};
