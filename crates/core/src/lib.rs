//! The part of crossmesh that decides: what lives where, what has to move, in which order, and how long it takes.
//!
//! Data walks one way: words are parsed into a [`reshard::Problem`], planned into a [`reshard::Plan`], lowered into a
//! [`program::Program`], which is verified, simulated, and elsewhere run. Nothing in this crate opens a socket or a
//! file, reads a clock, starts a thread or keeps global state.

pub mod box_index;
pub mod cluster;
pub mod collective;
pub mod critical_path;
pub mod dtype;
pub mod id;
pub mod layout;
pub mod mesh;
pub mod models;
pub mod printable;
pub mod program;
pub mod region;
pub mod reshard;
pub mod schedule;
pub mod sim;
pub mod stall;
pub mod step;
mod topological;
pub mod trace;
pub mod units;
pub mod verify;
