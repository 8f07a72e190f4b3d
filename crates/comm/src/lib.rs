//! The part of crossmesh that moves bytes: it runs, for one rank, the program that `crossmesh-core` made.
//!
//! ```text
//! rendezvous, auth      who is there, and are they who they say          connected streams
//!        |
//! transport             mem, tcp, shm: frames in, frames out, never blocking
//!        |
//! engine                one event loop a rank: ops, dependencies, credits, deadlines, trace
//!        |
//! buffer                shards and staging memory; boxes as runs of bytes
//! ```
//!
//! What only benches, tests and `crossmesh run` need is in [`lab`].

pub mod arrays;
pub mod auth;
pub mod buffer;
mod checksum;
pub mod clock;
pub mod collectives;
pub mod combine;
pub mod deadline;
pub mod device;
pub mod driver;
pub mod engine;
pub mod environment;
pub mod error;
pub mod flight;
pub mod job;
pub mod lab;
pub mod launch;
pub mod limits;
pub mod memory;
pub mod protect;
pub mod rendezvous;
mod room;
pub mod step;
pub mod transport;
pub mod view;
pub mod wake;
pub mod wire;
