//! What stays inside hosts.

use std::borrow::Cow;

use crate::id::{Rank, TransferId};

use super::super::super::demand::Class;
use super::super::routes::Route;
use super::Emitter;
use super::stretches::Row;

impl<'a> Emitter<'a> {
    /// What is left to move inside hosts.
    pub(in super::super) fn local_classes(&self) -> Cow<'a, [Class]> {
        if !self.serves_home {
            return Cow::Borrowed(&self.demands.local);
        }
        let mut crosses = vec![false; self.demands.items.len()];
        for &item in self.demands.remote.iter().flat_map(|class| &class.items) {
            crosses[item as usize] = true;
        }
        let left = |class: &Class| {
            let items: Vec<u32> = class.items.iter().copied().filter(|i| !crosses[*i as usize]).collect();
            let bytes = items.iter().map(|i| self.demands.items[*i as usize].bytes).sum();
            Class { bytes, items, ..class.clone() }
        };
        self.demands.local.iter().map(left).filter(|class| !class.items.is_empty()).collect()
    }

    /// Emits what moves inside hosts only.
    pub(in super::super) fn local(&mut self, classes: &[Class], routes: &[Vec<Route>]) {
        let demands = self.demands;
        for (c, (class, routes)) in classes.iter().zip(routes).enumerate() {
            let mut row = Row::new(&class.items, 0);
            for (r, route) in routes.iter().enumerate() {
                let forwards = route.edges.iter().any(|e| e.depth > 0);
                let lane = forwards.then_some((1, c as u32, r as u32));
                row.for_each(demands, route.start, route.end, |index, region| {
                    let tensor = demands.items[index as usize].tensor;
                    let region = self.plan.add_region(region);
                    let mut has: Vec<(u32, TransferId)> = Vec::with_capacity(route.edges.len());
                    for edge in &route.edges {
                        let since = has.iter().find(|h| h.0 == edge.from).map(|h| h.1);
                        let (src, dst) = (Rank(edge.from), Rank(edge.to));
                        let id = match since {
                            Some(_) => self.plan.add(tensor, src, dst, region, since.as_slice()),
                            None => self.add_root(tensor, (src, dst), region, lane.map(|l| (l, edge.to))),
                        };
                        has.push((edge.to, id));
                    }
                });
            }
        }
    }
}
