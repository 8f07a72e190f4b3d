//! Helps tests: random problems, brute-force oracles, mutated plans, processes and namespaces.

pub mod arb;
pub mod big;
pub mod big_sums;
pub mod boxes;
pub mod classes;
pub mod cuts;
pub mod fuzz;
pub mod gaps;
pub mod interpret;
pub mod machine;
pub mod mutate;
pub mod mutate_program;
pub mod optimum;
pub mod replay;
pub mod seed;
pub mod simple;
pub mod simplex;
pub mod sockets;
pub mod steps;
pub mod sweep;
