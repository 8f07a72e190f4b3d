//! One GPU of a rank: its memory, copies of boxes that run beside the rank's engine, and kernels.
//!
//! ```text
//! Gpu                     memory, pinned staging, copies with tickets       what crates that move bytes see
//!   |
//! Driver (a trait)        a dozen calls: allocate, import, copy, has it passed?
//!   |              |
//! Cuda             StandIn
//! NVIDIA's, by     host memory, one thread a stream, a record of
//! its library      every call and of every rule that was broken
//! ```
//!
//! The crate builds anywhere. NVIDIA's driver is behind the feature `driver`, which needs no toolkit either: libraries are looked for when the
//! program runs, and what is missing is named ([`CudaError`]). Tests without a GPU run the same code over the [`standin::StandIn`].

pub mod arena;
pub mod boxes;
#[cfg(feature = "driver")]
pub mod cuda;
pub mod driver;
mod error;
pub mod gpu;
pub mod kernels;
pub mod standin;

pub use arena::{Arena, Block};
pub use boxes::{BoxCopy, Combine, Side};
pub use driver::{Card, Driver};
pub use error::CudaError;
pub use gpu::{DeviceMemory, Gpu, Staging, Ticket};
