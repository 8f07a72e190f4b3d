//! Two jobs as the two sides: each counts its own ranks from 0 and names its own meshes.
//!
//! A trainer's ranks 0 to 7 and an engine's ranks 0 to 3 are twelve processes. Told how many ranks come before the
//! other job's first, its layouts are read as they are written there:
//!
//! ```text
//! trainer   bf16[8192,1024]@M{tp:8}=0-7(tp,_)      ranks 0 to 7
//! engine    bf16[8192,1024]@M{tp:4}=0-3(_,tp)      ranks 8 to 11, by an offset of 8; its M is called M_dst
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crate::id::Rank;
use crate::layout::Layout;
use crate::mesh::{Mesh, RankList};

use super::problem::PlanError;

/// Tensors with a source and a destination each.
type Pairs = Vec<(String, Layout, Layout)>;

/// The same pairs with destinations of another job, whose rank 0 is rank `offset` here: their meshes list the ranks they
/// have among all, and have other names where a mesh of the sources has the same.
pub fn offset_destinations(pairs: Pairs, offset: u32) -> Result<Pairs, PlanError> {
    let sources: BTreeSet<String> = pairs.iter().map(|(_, src, _)| src.mesh().name().into()).collect();
    let destinations = pairs.iter().map(|(_, _, dst)| dst.mesh().name().to_string());
    let taken: BTreeSet<String> = sources.iter().cloned().chain(destinations).collect();
    let mut job = Job { offset, next_free: 0, placed: BTreeMap::new(), sources, taken };
    let shifted = pairs.into_iter().map(|(name, src, dst)| {
        let mesh = job.place(dst.mesh())?;
        Ok((name, src, dst.on_mesh(mesh)))
    });
    shifted.collect()
}

struct Job {
    offset: u32,
    /// As the job counts.
    next_free: u32,
    /// By the job's own names: axes and ranks as it says them, and what the mesh is here.
    placed: BTreeMap<String, (Mesh, Mesh)>,
    sources: BTreeSet<String>,
    taken: BTreeSet<String>,
}

impl Job {
    /// The mesh with its ranks among those of all jobs.
    fn place(&mut self, mesh: &Mesh) -> Result<Mesh, PlanError> {
        if let Some((first, here)) = self.placed.get(mesh.name()) {
            let same_ranks = mesh.listed_ranks().is_none_or(|ranks| first.listed_ranks() == Some(ranks));
            if first.axes() == mesh.axes() && same_ranks {
                return Ok(here.clone());
            }
            let ranks = first.listed_ranks().unwrap_or_default();
            return Err(PlanError::MeshRedefined {
                name: mesh.name().into(),
                first: format!("{first} on ranks {}", RankList(ranks)),
                second: mesh.to_string(),
            });
        }
        let own: Vec<Rank> = match mesh.listed_ranks() {
            Some(ranks) => ranks.to_vec(),
            None => (self.next_free..).take(mesh.len()).map(Rank).collect(),
        };
        let shift = |rank: &Rank| {
            let shifted = rank.0.checked_add(self.offset).filter(|r| *r < u32::MAX);
            let too_large =
                || PlanError::OffsetTooLarge { mesh: mesh.to_string(), rank: rank.0, offset: self.offset };
            shifted.map(Rank).ok_or_else(too_large)
        };
        let ranks: Vec<Rank> = own.iter().map(shift).collect::<Result<_, _>>()?;
        let last = own.iter().map(|r| r.0).max().unwrap_or(0);
        self.next_free = self.next_free.max(last + 1);
        let here = Mesh { name: self.name_here(mesh.name()), axes: mesh.axes().to_vec(), ranks: Some(ranks) };
        let first = Mesh { ranks: Some(own), ..mesh.clone() };
        self.placed.insert(mesh.name().into(), (first, here.clone()));
        Ok(here)
    }

    fn name_here(&mut self, name: &str) -> String {
        let mut here = name.to_string();
        while self.sources.contains(name) && self.taken.contains(&here) {
            here.push_str("_dst");
        }
        self.taken.insert(here.clone());
        here
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Problem;
    use crate::reshard::problem::Hosts;

    fn shifted(pairs: &[(&str, &str)], offset: u32) -> Result<Vec<String>, PlanError> {
        let pair = |(src, dst): &(&str, &str)| (String::new(), src.parse().unwrap(), dst.parse().unwrap());
        let pairs = offset_destinations(pairs.iter().map(pair).collect(), offset)?;
        let texts = pairs.iter().map(|(_, _, dst)| dst.to_string()).collect();
        Problem::new(pairs, Hosts::default())?;
        Ok(texts)
    }

    #[test]
    fn a_job_keeps_its_own_ranks_and_names() {
        let trainer = "f32[8]@M{tp:4}=0-3(tp)";
        assert_eq!(shifted(&[(trainer, "f32[8]@E{tp:2}=0-1(tp)")], 4).unwrap(), ["f32[8]@E{tp:2}=4-5(tp)"]);
        assert_eq!(shifted(&[(trainer, "f32[8]@M{tp:4}=0-3(_)")], 4).unwrap(), ["f32[8]@M_dst{tp:4}=4-7(_)"]);
        // Meshes that list no ranks take the next free ones of their job.
        let two =
            [(trainer, "f32[8]@E{x:2}(x)"), (trainer, "f32[8]@F{x:2}(x)"), (trainer, "f32[8]@E{x:2}(_)")];
        let expected = ["f32[8]@E{x:2}=4-5(x)", "f32[8]@F{x:2}=6-7(x)", "f32[8]@E{x:2}=4-5(_)"];
        assert_eq!(shifted(&two, 4).unwrap(), expected);
        let boxes = "f32[8]@E{x:2}{1: [0:8]}";
        assert_eq!(shifted(&[(trainer, boxes)], 4).unwrap(), ["f32[8]@E{x:2}=4-5{1: [0:8]}"]);
    }

    #[test]
    fn the_jobs_may_share_ranks_and_must_leave_none_out() {
        assert_eq!(
            shifted(&[("f32[8]@A{x:4}(x)", "f32[8]@B{x:2}(x)")], 2).unwrap(),
            ["f32[8]@B{x:2}=2-3(x)"]
        );
        let gap = shifted(&[("f32[8]@A{x:4}(x)", "f32[8]@B{x:2}(x)")], 6).unwrap_err();
        assert!(matches!(gap, PlanError::RankGap { .. }), "{gap}");
        let large = shifted(&[("f32[8]@A{x:4}(x)", "f32[8]@B{x:2}=7,3(x)")], u32::MAX - 7).unwrap_err();
        assert!(matches!(large, PlanError::OffsetTooLarge { rank: 7, .. }), "{large}");
        let redefined =
            shifted(&[("f32[8]@A{x:4}(x)", "f32[8]@B{x:2}(x)"), ("f32[8]@A{x:4}(x)", "f32[8]@B{x:4}(x)")], 4);
        assert!(matches!(redefined, Err(PlanError::MeshRedefined { .. })));
    }
}
