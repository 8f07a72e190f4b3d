//! Pipeline schedules as data: for every device, the order of its passes.
//!
//! A schedule says nothing about time. It has a [`Placement`] of virtual stages on devices, the [`Routes`] of the
//! microbatches, and for every device a list of [`Pass`]es; what a pass waits for follows from these ([`Schedule::needs`]).
//! Whatever looks at schedules (checkers, timing, drawing, lowering) uses that one function.
//!
//! ```text
//! device 0   0F0 0F1 0BW0 0BW1            1F0 needs 0F0 (its activation, over the edge 0 -> 1)
//! device 1   1F0 1BW0 1F1 1BW1            0BW0 needs 0F0 (own) and 1BW0 (its gradient, over the same edge)
//! ```

pub mod bound;
pub mod bubble;
pub mod check;
mod costs;
mod critical_path;
mod error;
pub mod generate;
pub mod megatron;
pub mod memory;
mod needs;
mod order_graph;
mod pass;
mod placement;
mod routes;
mod time;
pub mod torch_csv;

pub use bubble::Bubble;
pub use check::{Check, CheckError, check};
pub use costs::{Channel, Costs, Hop, StageCost};
pub use critical_path::{Step, critical_path};
pub use error::ScheduleError;
pub use generate::{Backward, GenerateError, Name, Spec, generate};
pub use memory::Footprint;
pub use needs::{Need, Via};
pub use order_graph::{Wait, Why};
pub use pass::{Pass, PassError, PassKind};
pub use placement::{MAX_STAGES, Placement};
pub use routes::{Edge, Routes};
pub use time::{Message, Span, Timed, time};

use std::collections::BTreeSet;

use crate::id::{DeviceId, MicrobatchId, StageId};

/// More passes of one kind than this is taken for a typing mistake.
pub const MAX_PASSES: u64 = 1 << 24;

/// For every device the order of its passes. Every pass is on its stage's device, and there once; whether all are there,
/// and whether the order can be run, is for [`check()`] to say.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    name: String,
    placement: Placement,
    routes: Routes,
    num_microbatches: u32,
    devices: Vec<Vec<Pass>>,
    /// For every device, where its evicted activations are kept.
    keepers: Vec<Option<DeviceId>>,
    /// The numbers of passes that start together with the next one.
    pairs: BTreeSet<u32>,
    index: Index,
}

impl Schedule {
    pub fn new(
        name: impl Into<String>,
        placement: Placement,
        routes: Routes,
        num_microbatches: u32,
        devices: Vec<Vec<Pass>>,
    ) -> Result<Self, ScheduleError> {
        fits(&placement, &routes, num_microbatches, devices.len())?;
        let index = Index::new(&placement, &routes, num_microbatches, &devices)?;
        let keepers = vec![None; devices.len()];
        let (name, pairs) = (name.into(), BTreeSet::new());
        Ok(Self { name, placement, routes, num_microbatches, devices, keepers, pairs, index })
    }

    /// The same orders with other routes, such as with skips.
    pub fn with_routes(self, routes: Routes) -> Result<Self, ScheduleError> {
        let Self { name, placement, num_microbatches, devices, keepers, pairs, .. } = self;
        let schedule = Self::new(name, placement, routes, num_microbatches, devices)?;
        Ok(Self { keepers, pairs, ..schedule })
    }

    /// Lets a forward and the backward behind it start together: by the schedule's own clock, and in its checks and bounds, the
    /// first waits until both can. A training step has them one behind the other, as all passes, each as soon as it can.
    pub fn with_pairs(mut self, pairs: Vec<(Pass, Pass)>) -> Result<Self, ScheduleError> {
        for (first, second) in pairs {
            let places = self.place(first).zip(self.place(second));
            if !places.is_some_and(|((d, a), (e, b))| d == e && a + 1 == b) {
                return Err(ScheduleError::PairApart { first, second });
            }
            self.pairs.extend(self.node(first));
        }
        Ok(self)
    }

    /// Lets every device update its weights when its passes are done: in one pass, of its first stage.
    pub fn with_updates(self) -> Result<Self, ScheduleError> {
        let orders = self.devices.iter().flat_map(|order| order.windows(2));
        let pairs = orders.filter(|w| self.is_paired(w[0])).map(|w| (w[0], w[1])).collect();
        let Self { name, placement, routes, num_microbatches, mut devices, keepers, .. } = self;
        for (device, order) in placement.devices().zip(&mut devices) {
            let first = placement.stages_on(device).first().copied();
            order.extend(first.map(|stage| Pass::new(PassKind::Optimizer, stage, MicrobatchId(0))));
        }
        let schedule = Self::new(name, placement, routes, num_microbatches, devices)?;
        Self { keepers, ..schedule }.with_pairs(pairs)
    }

    /// Whether the pass starts together with the next one of its device.
    pub fn is_paired(&self, pass: Pass) -> bool {
        self.node(pass).is_some_and(|node| self.pairs.contains(&node))
    }

    /// Says where each device's evicted activations are kept.
    pub fn with_keepers(mut self, keepers: Vec<Option<DeviceId>>) -> Self {
        assert_eq!(keepers.len(), self.devices.len(), "an entry for every device");
        self.keepers = keepers;
        self
    }

    pub fn renamed(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    pub fn num_microbatches(&self) -> u32 {
        self.num_microbatches
    }

    pub fn microbatches(&self) -> impl DoubleEndedIterator<Item = MicrobatchId> + use<> {
        (0..self.num_microbatches).map(MicrobatchId)
    }

    /// The order of every device.
    pub fn devices(&self) -> &[Vec<Pass>] {
        &self.devices
    }

    /// Where the device's evicted activations are kept.
    pub fn keeper(&self, device: DeviceId) -> Option<DeviceId> {
        self.keepers[device.index()]
    }

    pub fn num_passes(&self) -> usize {
        self.devices.iter().map(Vec::len).sum()
    }

    /// A pass's number: passes are counted device by device in their order, from 0.
    pub fn node(&self, pass: Pass) -> Option<u32> {
        self.index.node(pass)
    }

    pub fn has(&self, pass: Pass) -> bool {
        self.node(pass).is_some()
    }

    /// A pass's device and its place in that device's order.
    pub fn place(&self, pass: Pass) -> Option<(DeviceId, usize)> {
        let device = self.placement.device(pass.stage);
        self.node(pass).map(|node| (device, (node - self.index.first[device.index()]) as usize))
    }

    /// The number of each device's first pass.
    pub fn first_node(&self, device: DeviceId) -> u32 {
        self.index.first[device.index()]
    }

    /// The backward pass of a stage for a microbatch: fused, or the one for the input, whichever there is.
    pub fn backward(&self, stage: StageId, microbatch: MicrobatchId) -> Pass {
        let fused = Pass::new(PassKind::BW, stage, microbatch);
        if self.has(fused) { fused } else { fused.with_kind(PassKind::B) }
    }
}

fn fits(
    placement: &Placement,
    routes: &Routes,
    num_microbatches: u32,
    orders: usize,
) -> Result<(), ScheduleError> {
    let (stages, devices) = (placement.num_stages(), placement.num_devices());
    if routes.num_stages() != stages {
        let routes = routes.num_stages();
        return Err(ScheduleError::RoutesDiffer { routes, wanted: stages, what: "stages" });
    }
    if let Some(routes) = routes.num_microbatches().filter(|n| *n != num_microbatches as usize) {
        let wanted = num_microbatches as usize;
        return Err(ScheduleError::RoutesDiffer { routes, wanted, what: "microbatches" });
    }
    if orders != devices {
        return Err(ScheduleError::DevicesDiffer { orders, devices });
    }
    bounded(stages, num_microbatches)
}

/// Refuses sizes that nobody means, before memory is set aside for them.
pub(crate) fn bounded(num_stages: usize, num_microbatches: u32) -> Result<(), ScheduleError> {
    let (stages, microbatches) = (num_stages as u64, u64::from(num_microbatches));
    if microbatches == 0 {
        return Err(ScheduleError::NoMicrobatches);
    }
    match stages * microbatches > MAX_PASSES {
        true => Err(ScheduleError::TooManyPasses { stages, microbatches, limit: MAX_PASSES }),
        false => Ok(()),
    }
}

/// Where every pass is, looked up without a search.
#[derive(Debug, Clone, PartialEq)]
struct Index {
    num_microbatches: u32,
    /// The number of each device's first pass.
    first: Vec<u32>,
    /// By kind, and within it by stage and microbatch; empty where a kind does not occur.
    nodes: [Vec<u32>; PassKind::ALL.len()],
}

const ABSENT: u32 = u32::MAX;

impl Index {
    fn new(
        placement: &Placement,
        routes: &Routes,
        num_microbatches: u32,
        devices: &[Vec<Pass>],
    ) -> Result<Self, ScheduleError> {
        let size = placement.num_stages() * num_microbatches as usize;
        let mut index = Self { num_microbatches, first: vec![], nodes: Default::default() };
        let mut node = 0;
        for (device, order) in devices.iter().enumerate() {
            index.first.push(node);
            for &pass in order {
                let device = DeviceId::at(device);
                belongs(placement, routes, num_microbatches, device, pass)?;
                let table = &mut index.nodes[pass.kind as usize];
                if table.is_empty() {
                    table.resize(size, ABSENT);
                }
                let entry = &mut table[slot(num_microbatches, pass)];
                if *entry != ABSENT {
                    return Err(ScheduleError::PassTwice { pass, device });
                }
                *entry = node;
                node += 1;
            }
        }
        Ok(index)
    }

    fn node(&self, pass: Pass) -> Option<u32> {
        if pass.microbatch.0 >= self.num_microbatches {
            return None;
        }
        let slot = slot(self.num_microbatches, pass);
        self.nodes[pass.kind as usize].get(slot).copied().filter(|node| *node != ABSENT)
    }
}

fn slot(num_microbatches: u32, pass: Pass) -> usize {
    pass.stage.index() * num_microbatches as usize + pass.microbatch.index()
}

fn belongs(
    placement: &Placement,
    routes: &Routes,
    num_microbatches: u32,
    device: DeviceId,
    pass: Pass,
) -> Result<(), ScheduleError> {
    let num_stages = placement.num_stages();
    if pass.stage.index() >= num_stages {
        return Err(ScheduleError::PassOfNoStage { pass, device, num_stages });
    }
    if pass.microbatch.0 >= num_microbatches {
        return Err(ScheduleError::NoSuchMicrobatch { pass, device, num_microbatches });
    }
    let home = placement.device(pass.stage);
    if home != device {
        return Err(ScheduleError::WrongDevice { pass, device, home });
    }
    // An update is of the step, and a share of the vocabulary is every stage's.
    let anywhere = matches!(pass.kind, PassKind::Optimizer | PassKind::S | PassKind::T);
    match anywhere || routes.visits(pass.microbatch, pass.stage) {
        true => Ok(()),
        false => Err(ScheduleError::OffRoute { pass, device }),
    }
}

#[cfg(test)]
mod tests;
