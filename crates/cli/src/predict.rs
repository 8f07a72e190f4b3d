//! A plan with everything known about it: the program, its simulated run, and the bound.

use anyhow::{Context, Result, bail};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::doc::{CostDoc, Figures, PlanDoc};
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Bound, Plan, PlanOptions, Problem, lower_bound, plan};
use crossmesh_core::sim::simulate;
use crossmesh_core::trace::Trace;
use crossmesh_core::units::Bytes;
use crossmesh_core::verify::{Verified, VerifyError};

use crate::{output, tensors};

/// A plan, what it lowers to, and how long that takes.
pub struct Prediction {
    pub plan: Plan,
    pub program: Verified,
    pub trace: Trace,
    pub bound: Bound,
    /// What was assumed of hosts that nobody described, where people should know it.
    pub assumed: Option<String>,
}

impl Prediction {
    /// Plans a problem, proves the plan and predicts it.
    pub fn of_problem(problem: &Problem, options: &PlanOptions) -> Result<Self> {
        let bound = lower_bound(problem)?;
        Self::with_bound(plan(problem, options)?, bound)
    }

    /// Predicts a plan of ours that is already there.
    pub fn of_plan(plan: Plan) -> Result<Self> {
        let bound = lower_bound(&plan.problem).context("no lower bound")?;
        Self::with_bound(plan, bound)
    }

    pub fn with_bound(plan: Plan, bound: Bound) -> Result<Self> {
        let program = proven(&plan)?;
        Self::of_program(plan, program, bound)
    }

    /// Predicts a plan that was proven.
    pub fn of_program(plan: Plan, program: Verified, bound: Bound) -> Result<Self> {
        fits(&program, &plan.problem)?;
        let trace = simulate(&program, &plan.problem.cluster).context("the plan cannot be simulated")?;
        Ok(Self { plan, program, trace, bound, assumed: None })
    }

    /// With what was assumed of its hosts.
    pub fn assuming(self, assumed: Option<String>) -> Self {
        Self { assumed, ..self }
    }

    /// The plan document, as text.
    pub fn document(&self) -> String {
        self.plan_doc().to_json()
    }

    pub fn plan_doc(&self) -> PlanDoc {
        let figures = Figures {
            lower_bound_s: self.bound.seconds,
            predicted_s: self.seconds(),
            peak_extra_bytes: self.peak_extra_bytes(),
        };
        let doc = PlanDoc { assumed: self.assumed.clone(), ..PlanDoc::new(&self.plan, figures) };
        if self.plan.problem.reshards.len() == 1 {
            return doc;
        }
        let (rows, busiest) = tensors::in_order(&self.plan, &self.program, &self.trace);
        let cost = |row: tensors::TensorRow| CostDoc {
            bytes_moved: row.bytes_moved,
            transfers: row.transfers as u64,
            start_s: row.start_s,
            end_s: row.end_s,
            share_of_busiest_link: row.share_of_busiest_link,
        };
        doc.with_costs(busiest, rows.into_iter().map(cost))
    }

    pub fn seconds(&self) -> f64 {
        self.trace.makespan_s
    }

    /// The predicted time over the bound.
    pub fn ratio(&self) -> f64 {
        output::ratio(self.seconds(), self.bound.seconds)
    }

    /// The most memory a rank needs beside its tensors.
    pub fn peak_extra_bytes(&self) -> u64 {
        self.program.ranks.iter().map(|r| r.extra_bytes()).max().unwrap_or(0)
    }
}

/// Refuses what some device has no room for: its shards before and after, and what it needs meanwhile.
fn fits(program: &Verified, problem: &Problem) -> Result<()> {
    for (at, rank) in program.ranks.iter().enumerate() {
        let rank_id = Rank(at as u32);
        let host = problem.topology.host(rank_id);
        let Some(room) = problem.memory_of(rank_id) else { continue };
        let extra = rank.extra_bytes();
        let shards = rank.buffers.iter().map(|buffer| buffer.bytes).sum::<u64>() - extra;
        if shards + extra <= room {
            continue;
        }
        let hint = match room.checked_sub(shards).filter(|left| *left > 0) {
            Some(left) => format!("its shards fit: --max-extra-bytes {left} leaves the rest"),
            None => "move fewer tensors at once, or spread them over more devices".into(),
        };
        bail!(
            "device {rank_id} of {host} has {}: its shards before and after take {}, and what arrives meanwhile {}\nhint: {hint}",
            Bytes(room),
            Bytes(shards),
            Bytes(extra)
        );
    }
    Ok(())
}

/// The program of a plan that the verifier agrees with. Nobody is handed another.
pub fn proven(plan: &Plan) -> Result<Verified> {
    Verified::plan(plan, Addressing::Apart).map_err(|error| {
        anyhow::anyhow!(
            "the plan of strategy {} breaks a law: {}\nhint: this is a bug of crossmesh; try another --strategy",
            plan.strategy,
            Violation::from(error)
        )
    })
}

/// The first law that a plan breaks, with rank, region and transfer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    pub law: &'static str,
    pub message: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.law, self.message)
    }
}

impl From<VerifyError> for Violation {
    fn from(error: VerifyError) -> Self {
        Self { law: error.law().name(), message: error.to_string() }
    }
}
