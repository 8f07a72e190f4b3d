//! What a rank is handed by the process that started it: its own part of a program that is proven, and what it has to know of
//! the others.
//!
//! ```text
//! crossmesh run     plans, lowers and proves, once
//!   |  handed-0.json, handed-1.json, ...      a rank's ops, its tensors' boxes, who takes part, what its connections may send
//! crossmesh rank    takes its part by the parent's word: it costs what its own ops cost
//! ```
//!
//! The files lie in a folder that only this user can write to. Ranks of a job that others started prove for themselves.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use crossmesh_comm::transport::tcp::Shares;
use crossmesh_core::id::{Rank, RegionId};
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::program::{BoxTable, Program, RankProgram};
use crossmesh_core::verify::{Verified, VerifiedRank};
use serde::{Deserialize, Serialize};

/// Parent and child are one program: nobody else reads or writes this.
const SCHEMA: &str = "crossmesh.handed/1";

/// The document.
#[derive(Debug, Serialize, Deserialize)]
struct Doc {
    schema: String,
    rank: Rank,
    ranks: Vec<Rank>,
    /// What comes from others over NICs: from whom, and how much there is of the NIC for it, in bytes per second.
    shares: Vec<(Rank, f64)>,
    program: ProgramDoc,
}

/// A rank's part, read.
#[derive(Debug, Clone)]
pub struct Handed {
    pub program: VerifiedRank,
    /// All that take part, in order.
    pub ranks: Vec<Rank>,
    pub shares: Shares,
}

/// One rank's part as a document.
pub fn write(program: &Verified, rank: Rank, ranks: &[Rank], shares: &Shares) -> Result<String> {
    let shares = shares.into_rank(rank).collect();
    let program = ProgramDoc::new(&alone(program, rank), None);
    let doc = Doc { schema: SCHEMA.into(), rank, ranks: ranks.to_vec(), shares, program };
    serde_json::to_string(&doc).context("a rank's part cannot be written down")
}

pub fn read(path: &Path) -> Result<Handed> {
    let name = || format!("a rank's part, {}", path.display());
    let text = std::fs::read_to_string(path).with_context(name)?;
    let doc: Doc = serde_json::from_str(&text).with_context(name)?;
    if doc.schema != SCHEMA {
        bail!("{} has schema `{}`, not {SCHEMA}", name(), doc.schema);
    }
    let program = doc.program.to_program().with_context(name)?;
    let program = VerifiedRank::vouched_for(program, doc.rank).with_context(name)?;
    let shares = Shares::to(doc.rank, doc.shares);
    Ok(Handed { program, ranks: doc.ranks, shares })
}

/// A program of which one rank is left, and the boxes that it names.
fn alone(program: &Program, rank: Rank) -> Program {
    let mut ranked = program.ranks[rank.index()].clone();
    let mut boxes = BoxTable::default();
    let mut places: HashMap<RegionId, RegionId> = HashMap::new();
    let mut kept = |id: RegionId| {
        let place = places.entry(id);
        *place.or_insert_with(|| boxes.push(program.boxes[id].clone()))
    };
    ranked.tiles.iter_mut().for_each(|tile| tile.region = kept(tile.region));
    // Ops that move nothing need no box.
    ranked.ops.iter_mut().for_each(|op| op.region = if op.bytes > 0 { kept(op.region) } else { RegionId(0) });
    let mut ranks = vec![RankProgram::default(); program.ranks.len()];
    ranks[rank.index()] = ranked;
    Program { chunk_bytes: program.chunk_bytes, tensors: program.tensors.clone(), boxes, ranks }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::cluster::Topology;
    use crossmesh_core::reshard::lower::Addressing;
    use crossmesh_core::reshard::problem::{Assumed, Hosts};
    use crossmesh_core::reshard::{PlanOptions, Problem, plan};

    fn proven() -> (Verified, Shares) {
        let pair = ("w", "f32[12,6]@A{h:2,d:2}(h+d,_)", "f32[12,6]@B{h:3}(_,h)");
        let pairs = vec![(pair.0.to_string(), pair.1.parse().unwrap(), pair.2.parse().unwrap())];
        let hosts = Hosts::Assumed(Assumed { devices_per_host: Some(2), ..Assumed::default() });
        let problem = Problem::new(pairs, hosts).unwrap();
        let plan = plan(&problem, &PlanOptions::default()).unwrap();
        let program = Verified::plan(&plan, Addressing::Apart).unwrap();
        let shares = Shares::of(&problem.cluster, &Topology::new(&problem.cluster), &program);
        (program, shares)
    }

    #[test]
    fn a_rank_gets_its_own_part_and_no_more() {
        let ((program, shares), folder) = (proven(), tempfile::tempdir().unwrap());
        let ranks: Vec<Rank> = (0..7).map(Rank).collect();
        for &rank in &ranks {
            let path = folder.path().join("part.json");
            std::fs::write(&path, write(&program, rank, &ranks, &shares).unwrap()).unwrap();
            let handed = read(&path).unwrap();
            let (whole, own) = (program.rank(rank), &handed.program);
            assert_eq!((handed.ranks.as_slice(), own.id()), (ranks.as_slice(), rank));
            assert_eq!(
                (&own.buffers, &own.deps, own.ops.len()),
                (&whole.buffers, &whole.deps, whole.ops.len())
            );
            for (mine, theirs) in own.ops.iter().zip(&whole.ops) {
                assert_eq!((mine.kind, mine.tensor, mine.bytes), (theirs.kind, theirs.tensor, theirs.bytes));
                assert_eq!(own.whole().boxes[mine.region], program.boxes[theirs.region]);
            }
            for (mine, theirs) in own.tiles.iter().zip(&whole.tiles) {
                assert_eq!(
                    (mine.buffer, mine.offset, mine.holds),
                    (theirs.buffer, theirs.offset, theirs.holds)
                );
                assert_eq!(own.whole().boxes[mine.region], program.boxes[theirs.region]);
            }
            assert!(own.whole().boxes.len() <= own.ops.len() + own.tiles.len());
            assert!(own.whole().ranks.iter().enumerate().all(|(r, of)| r == rank.index() || of.is_idle()));
            for &from in &ranks {
                assert_eq!(handed.shares.bytes_per_s(from, rank), shares.bytes_per_s(from, rank));
            }
        }
    }

    #[test]
    fn nonsense_is_refused_before_it_runs() {
        let ((program, shares), folder) = (proven(), tempfile::tempdir().unwrap());
        let path = folder.path().join("part.json");
        let text = write(&program, Rank(0), &[Rank(0)], &shares).unwrap();
        let refused = |text: &str| {
            std::fs::write(&path, text).unwrap();
            format!("{:#}", read(&path).unwrap_err())
        };
        assert!(refused(&text[..text.len() / 2]).contains("part.json"));
        assert!(refused(&text.replace("handed/1", "handed/2")).contains("handed/2"));
        assert!(refused(&text.replace("\"buffer\":0", "\"buffer\":77")).contains("names buffer 77"));
        assert!(refused(&text.replacen("\"rank\":0", "\"rank\":99", 1)).contains("r99"));
    }
}
