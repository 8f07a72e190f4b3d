//! What only benches, tests and `crossmesh run` need. Engine, transports, rendezvous and collectives use nothing of it; `step` runs
//! steps without compute on its pattern.
//!
//! ```text
//! execute   one rank's part of a plan: fill, run, check; pattern says what every element should be
//! sweep     collectives over many sizes, timed as nccl-tests do
//! emulate   hosts as network namespaces with shaped NICs
//! usage     what a rank needs of the system beside its tensors
//! fuzz      frames and words of any bytes, as plain functions
//! ```

pub mod emulate;
pub mod execute;
pub mod fuzz;
pub mod pattern;
pub mod sweep;
pub mod usage;
