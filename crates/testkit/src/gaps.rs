//! How far plans are from the bound, over many random problems of a class.

use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Bound, Plan, PlanOptions, Problem, lower, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::verify::verify;

use crate::classes::{Class, command};
use crate::seed::Seed;
use crate::sweep;

/// One planned problem.
#[derive(Debug, Clone)]
pub struct Gap {
    pub seed: u64,
    /// Predicted time over the bound.
    pub over: f64,
    /// When the busiest link would be done, over the bound.
    pub busiest: f64,
    pub transfers: usize,
    /// The problem, to be planned again.
    pub command: String,
    /// Why the bound is what it is.
    pub reason: String,
    /// Why the plan is what it is.
    pub choices: Vec<String>,
}

/// What a sweep saw.
#[derive(Debug, Default)]
pub struct Sweep {
    pub gaps: Vec<Gap>,
    /// Problems in which nothing has to move.
    pub idle: usize,
}

/// A problem of a class.
pub fn problem((src, dst): &(String, String), seed: u64, class: Class) -> Problem {
    let pair = || (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    let mut cluster = Problem::new(vec![pair()], Hosts::default()).unwrap().cluster;
    (class.change)(&mut Seed(seed ^ 0x5eed), &mut cluster);
    Problem::new(vec![pair()], Hosts::Described(cluster)).unwrap()
}

/// Plans a problem, verifies the plan where it is one of those to be verified, and simulates it.
pub fn gap(pair: &(String, String), seed: u64, class: Class, verified: bool) -> Option<Gap> {
    let problem = problem(pair, seed, class);
    let command = command(&pair.0, &pair.1, &problem.cluster);
    let bound = lower_bound(&problem).unwrap();
    let plan = plan(&problem, &PlanOptions::default()).unwrap();
    if verified {
        verify(&plan).unwrap_or_else(|error| panic!("seed {seed}: {command}: {error}"));
    }
    if bound.seconds == 0.0 {
        assert!(plan.transfers().is_empty(), "seed {seed} moves although it need not: {command}");
        return None;
    }
    let gap = measured(&plan, &problem, bound, seed, command);
    assert!(gap.over >= 1.0 - 1e-6, "seed {seed} beats the bound: {gap:?}");
    Some(gap)
}

fn measured(plan: &Plan, problem: &Problem, bound: Bound, seed: u64, command: String) -> Gap {
    let trace = simulate(&lower(plan), &problem.cluster).unwrap();
    let busiest = trace.links.iter().map(|l| l.bytes as f64 / l.bytes_per_s).fold(0.0, f64::max);
    Gap {
        seed,
        over: trace.makespan_s / bound.seconds,
        busiest: busiest / bound.seconds,
        transfers: plan.transfers().len(),
        command,
        reason: bound.reason,
        choices: plan.reasons.clone(),
    }
}

/// Plans `CROSSMESH_SWEEP` problems of a class, or as many as usual from `CROSSMESH_FIRST` on; prints those that are
/// further off than `far`. Every `verify_each`-th plan is verified.
pub fn sweep(
    class: Class,
    pair: impl Fn(u64) -> (String, String),
    usual: usize,
    far: f64,
    verify_each: u64,
) -> Sweep {
    let mut seen = Sweep::default();
    let first = sweep::first();
    for seed in first..first + sweep::count(usual) as u64 {
        let Some(gap) = gap(&pair(seed), seed, class, seed % verify_each == 0) else {
            seen.idle += 1;
            continue;
        };
        if gap.over > far {
            let Gap { over, busiest, transfers, command, reason, choices, .. } = &gap;
            eprintln!(
                "{} seed {seed}: {over:.4}, the busiest link {busiest:.4}, {transfers} transfers ({reason}; {}):\n  {}",
                class.name,
                choices.join("; "),
                command.replace('\n', "\\n")
            );
        }
        seen.gaps.push(gap);
    }
    seen
}

impl Sweep {
    pub fn mean(&self) -> f64 {
        self.gaps.iter().map(|g| g.over).sum::<f64>() / self.gaps.len().max(1) as f64
    }

    /// # Panics
    /// Without problems.
    pub fn worst(&self) -> &Gap {
        self.gaps.iter().max_by(|a, b| a.over.total_cmp(&b.over)).expect("a sweep has problems")
    }

    /// A row of a table, and the worst problem as a command line.
    pub fn row(&self, class: Class) -> String {
        let worst = self.worst();
        let above = |limit: f64| self.gaps.iter().filter(|g| g.over > limit).count();
        format!(
            "| {} | {} problems | mean {:.4} | worst {:.4} (seed {}) | {} above 1.02, {} above 1.10 |\n  {}",
            class.name,
            self.gaps.len(),
            self.mean(),
            worst.over,
            worst.seed,
            above(1.02),
            above(1.10),
            worst.command
        )
    }
}
