//! Helps tests: random problems, brute-force oracles, mutated plans.
