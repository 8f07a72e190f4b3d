//! Helps tests: random problems, brute-force oracles, mutated plans, processes and namespaces.

pub mod arb;
pub mod big;
pub mod cuts;
pub mod fuzz;
pub mod machine;
pub mod mutate;
pub mod replay;
pub mod seed;
pub mod simple;
pub mod sockets;
pub mod sweep;
