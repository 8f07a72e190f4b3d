//! Commodities along the trees they were packed into.

use crate::id::{Rank, RegionId, TransferId};

use super::super::packing::Shares;
use super::super::trees::{Commodity, Tree};
use super::Emitter;
use super::lanes::RouteId;
use super::stretches::Row;

impl Emitter<'_> {
    /// Emits commodities along their trees.
    pub(in super::super) fn packed(&mut self, commodities: &[Commodity], shares: &[Shares]) {
        let demands = self.demands;
        for (c, (commodity, shares)) in commodities.iter().zip(shares).enumerate() {
            let mut row = Row::new(&commodity.items, 0);
            let mut at = 0;
            for (t, (tree, bytes)) in shares.iter().enumerate() {
                row.for_each(demands, at, at + bytes, |index, region| {
                    let tensor = demands.items[index as usize].tensor;
                    let region = self.plan.add_region(region);
                    self.along(tree, (6, c as u32, t as u32), tensor, region);
                });
                at += bytes;
            }
        }
    }

    fn along(&mut self, tree: &Tree, route: RouteId, tensor: u32, region: RegionId) {
        let mut has: Vec<(Rank, TransferId)> = Vec::with_capacity(tree.edges.len());
        for &(src, dst) in &tree.edges {
            let since = has.iter().find(|h| h.0 == src).map(|h| h.1);
            let forwards = || tree.edges.iter().any(|e| e.0 == dst);
            let id = match since {
                Some(_) => self.plan.add(tensor, src, dst, region, since.as_slice()),
                None if forwards() => self.add_first(tensor, (src, dst), region, &[], route),
                None => self.plan.add(tensor, src, dst, region, &[]),
            };
            has.push((dst, id));
        }
    }
}
