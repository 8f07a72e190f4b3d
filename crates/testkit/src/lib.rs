//! Helps tests: random problems, brute-force oracles, mutated plans.

pub mod arb;
pub mod big;
pub mod fuzz;
