//! A file per command: its arguments, and `run`, which answers.

pub mod bench;
pub mod checkpoint;
pub mod completions;
pub mod data;
pub mod diff;
pub mod explain;
pub mod generate;
pub mod launch;
pub mod plan;
pub mod rank;
pub mod run;
pub mod schedule;
pub mod simulate;
pub mod train;
pub mod verify;
