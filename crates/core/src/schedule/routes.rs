//! The route of every microbatch through the stages, and the tensors that jump over some.
//!
//! Most pipelines send every microbatch through all stages in model order. SkipPipe gives each microbatch its own route:
//! some stages, in any order. Skip tensors (of a U-Net) are edges between stages that are not neighbours.
//!
//! ```text
//! stage  0 --> 1 --> 2 --> 3       the chain, per microbatch
//!        '-----------------^       a skip, for every microbatch that visits both ends
//! ```

use crate::id::{MicrobatchId, StageId};

use super::ScheduleError;

/// A tensor from one stage to another; its gradient goes the other way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    pub from: StageId,
    pub to: StageId,
}

/// The route of every microbatch, and the skips.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    num_stages: usize,
    routes: RouteTable,
    skips: Vec<Edge>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum RouteTable {
    ModelOrder,
    Each(Vec<Route>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Route {
    stages: Vec<StageId>,
    /// The place of every stage in `stages`.
    place: Vec<Option<u32>>,
}

impl Routes {
    /// Every microbatch visits every stage in model order.
    pub fn model_order(num_stages: usize) -> Self {
        Self { num_stages, routes: RouteTable::ModelOrder, skips: vec![] }
    }

    /// A route of its own for every microbatch: stages in the order they are visited.
    pub fn each(num_stages: usize, routes: Vec<Vec<StageId>>) -> Result<Self, ScheduleError> {
        let read = |(microbatch, stages)| Route::new(num_stages, MicrobatchId::at(microbatch), stages);
        let routes = routes.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
        Ok(Self { num_stages, routes: RouteTable::Each(routes), skips: vec![] })
    }

    /// Adds tensors that jump over stages. An edge between neighbours in model order is the chain's already.
    pub fn with_skips(mut self, mut skips: Vec<Edge>) -> Result<Self, ScheduleError> {
        skips.sort_unstable();
        skips.dedup();
        let fits = |e: &Edge| e.from.index() + 1 < e.to.index() && e.to.index() < self.num_stages;
        if let Some(&edge) = skips.iter().find(|e| !fits(e)) {
            return Err(ScheduleError::BadSkip { edge, num_stages: self.num_stages });
        }
        self.skips = skips;
        Ok(self)
    }

    pub fn num_stages(&self) -> usize {
        self.num_stages
    }

    /// How many microbatches have a route; `None` where all take the same.
    pub fn num_microbatches(&self) -> Option<usize> {
        match &self.routes {
            RouteTable::ModelOrder => None,
            RouteTable::Each(routes) => Some(routes.len()),
        }
    }

    pub fn skips(&self) -> &[Edge] {
        &self.skips
    }

    pub fn visits(&self, microbatch: MicrobatchId, stage: StageId) -> bool {
        match &self.routes {
            RouteTable::ModelOrder => stage.index() < self.num_stages,
            RouteTable::Each(routes) => routes[microbatch.index()].place_of(stage).is_some(),
        }
    }

    /// The stages that a microbatch visits, in that order.
    pub fn stages(&self, microbatch: MicrobatchId) -> Vec<StageId> {
        match &self.routes {
            RouteTable::ModelOrder => (0..self.num_stages).map(StageId::at).collect(),
            RouteTable::Each(routes) => routes[microbatch.index()].stages.clone(),
        }
    }

    /// Where the microbatch was before.
    pub fn before(&self, microbatch: MicrobatchId, stage: StageId) -> Option<StageId> {
        match &self.routes {
            RouteTable::ModelOrder => stage.0.checked_sub(1).map(StageId),
            RouteTable::Each(routes) => {
                let route = &routes[microbatch.index()];
                Some(route.stages[route.place_of(stage)?.checked_sub(1)?])
            }
        }
    }

    /// Where the microbatch goes next.
    pub fn after(&self, microbatch: MicrobatchId, stage: StageId) -> Option<StageId> {
        match &self.routes {
            RouteTable::ModelOrder => {
                Some(stage.index() + 1).filter(|s| *s < self.num_stages).map(StageId::at)
            }
            RouteTable::Each(routes) => {
                let route = &routes[microbatch.index()];
                route.stages.get(route.place_of(stage)? + 1).copied()
            }
        }
    }

    /// Skips that end here, for a microbatch that visits both ends in this order.
    pub fn skips_into(&self, microbatch: MicrobatchId, stage: StageId) -> impl Iterator<Item = Edge> {
        self.skips.iter().copied().filter(move |e| e.to == stage && self.carries(microbatch, *e))
    }

    /// Skips that start here.
    pub fn skips_out(&self, microbatch: MicrobatchId, stage: StageId) -> impl Iterator<Item = Edge> {
        self.skips.iter().copied().filter(move |e| e.from == stage && self.carries(microbatch, *e))
    }

    fn carries(&self, microbatch: MicrobatchId, edge: Edge) -> bool {
        match &self.routes {
            RouteTable::ModelOrder => true,
            RouteTable::Each(routes) => {
                let route = &routes[microbatch.index()];
                let ends = route.place_of(edge.from).zip(route.place_of(edge.to));
                // Neighbours on this route have the chain's edge; the skip rides on it.
                ends.is_some_and(|(from, to)| from + 1 < to)
            }
        }
    }
}

impl Route {
    fn new(num_stages: usize, microbatch: MicrobatchId, stages: Vec<StageId>) -> Result<Self, ScheduleError> {
        if stages.is_empty() {
            return Err(ScheduleError::EmptyRoute { microbatch });
        }
        let mut place = vec![None; num_stages];
        for (at, &stage) in stages.iter().enumerate() {
            match place.get_mut(stage.index()) {
                None => return Err(ScheduleError::NoSuchStage { stage, num_stages }),
                Some(Some(_)) => return Err(ScheduleError::RouteTwice { microbatch, stage }),
                Some(free) => *free = Some(at as u32),
            }
        }
        Ok(Self { stages, place })
    }

    fn place_of(&self, stage: StageId) -> Option<usize> {
        self.place.get(stage.index()).copied().flatten().map(|place| place as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(stages: &[u32]) -> Vec<StageId> {
        stages.iter().map(|s| StageId(*s)).collect()
    }

    #[test]
    fn a_microbatch_may_take_its_own_way() {
        let routes = Routes::each(4, vec![ids(&[0, 2, 1]), ids(&[3])]).unwrap();
        let first = MicrobatchId(0);
        assert_eq!(routes.before(first, StageId(1)), Some(StageId(2)));
        assert_eq!(routes.after(first, StageId(1)), None);
        assert_eq!(routes.before(first, StageId(0)), None);
        assert!(!routes.visits(first, StageId(3)) && routes.visits(MicrobatchId(1), StageId(3)));
    }

    #[test]
    fn a_skip_counts_where_both_ends_are_visited() {
        let skip = Edge { from: StageId(0), to: StageId(2) };
        let routes = Routes::model_order(3).with_skips(vec![skip]).unwrap();
        assert_eq!(routes.skips_into(MicrobatchId(7), StageId(2)).collect::<Vec<_>>(), [skip]);
        let routes = vec![ids(&[0, 1, 2]), ids(&[0, 2]), ids(&[2, 1, 0]), ids(&[0, 1])];
        let routes = Routes::each(3, routes).unwrap().with_skips(vec![skip]).unwrap();
        let carried: Vec<usize> =
            (0..4).map(|m| routes.skips_out(MicrobatchId(m), StageId(0)).count()).collect();
        assert_eq!(carried, [1, 0, 0, 0]);
    }

    #[test]
    fn bad_routes_are_refused() {
        assert!(Routes::each(2, vec![ids(&[0, 0])]).is_err());
        assert!(Routes::each(2, vec![ids(&[2])]).is_err());
        assert!(Routes::each(2, vec![vec![]]).is_err());
        for (from, to) in [(0, 1), (2, 0), (0, 3), (1, 1)] {
            let edge = Edge { from: StageId(from), to: StageId(to) };
            assert!(Routes::model_order(3).with_skips(vec![edge]).is_err());
        }
    }
}
