//! Helps tests: random problems, brute-force oracles, mutated plans.

pub mod arb;
pub mod big;
pub mod cuts;
pub mod fuzz;
pub mod mutate;
pub mod replay;
pub mod seed;
pub mod simple;
