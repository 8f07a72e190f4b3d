//! A sweep of collectives as a document, for the processes that run it.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use crossmesh_comm::collectives::Reduction;
use crossmesh_comm::lab::sweep::{Case, Sweep};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::doc::ClusterDoc;
use serde::{Deserialize, Serialize};

use crate::input::read_text;

/// See the module.
#[derive(Debug, Serialize, Deserialize)]
pub struct SweepDoc {
    cluster: ClusterDoc,
    groups: Vec<Vec<Rank>>,
    cases: Vec<CaseDoc>,
}

#[derive(Debug, Serialize, Deserialize)]
struct CaseDoc {
    collective: String,
    dtype: String,
    reduction: String,
    elements: u64,
    uneven: bool,
    algorithm: String,
    fixed_order: bool,
    chunk_bytes: Option<u64>,
}

impl SweepDoc {
    pub fn write(sweep: &Sweep) -> String {
        let case = |case: &Case| CaseDoc {
            collective: case.collective.to_string(),
            dtype: case.dtype.to_string(),
            reduction: case.reduction.name().to_string(),
            elements: case.elements,
            uneven: case.uneven,
            algorithm: case.algorithm.to_string(),
            fixed_order: case.fixed_order,
            chunk_bytes: case.chunk_bytes,
        };
        let doc = SweepDoc {
            cluster: ClusterDoc::new(&sweep.cluster),
            groups: sweep.groups.clone(),
            cases: sweep.cases.iter().map(case).collect(),
        };
        serde_json::to_string(&doc).expect("a sweep is made of numbers and text")
    }

    pub fn read(path: &Path) -> Result<Sweep> {
        let text = read_text(path)?;
        let doc: SweepDoc =
            serde_json::from_str(&text).with_context(|| format!("{} is not a sweep", path.display()))?;
        let cases = doc.cases.iter().map(CaseDoc::to_case).collect::<Result<_>>()?;
        Ok(Sweep { cluster: doc.cluster.to_cluster()?, groups: doc.groups, cases })
    }
}

impl CaseDoc {
    fn to_case(&self) -> Result<Case> {
        Ok(Case {
            collective: self.collective.parse()?,
            dtype: self.dtype.parse().map_err(|()| anyhow!("unknown dtype `{}`", self.dtype))?,
            reduction: parse_reduction(&self.reduction)?,
            elements: self.elements,
            uneven: self.uneven,
            algorithm: self.algorithm.parse()?,
            fixed_order: self.fixed_order,
            chunk_bytes: self.chunk_bytes,
        })
    }
}

pub fn parse_reduction(name: &str) -> Result<Reduction> {
    let known = Reduction::ALL.into_iter().find(|r| r.name() == name);
    known.with_context(|| format!("unknown reduction `{name}`\nhint: reductions are sum, max, min and mean"))
}
