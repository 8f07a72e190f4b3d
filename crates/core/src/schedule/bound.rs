//! Times that no schedule beats.
//!
//! [`Bound::any`] holds for every way to put the layers on the devices, in whatever chunks: it is the one line that schedules with
//! different chunks compare with. [`placed`] knows which device has which stages, and so is higher. Both allow backwards to be
//! split, and messages to run beside passes.
//!
//! ```text
//! any      a set of k devices holds k shares of the layers, at least the k lightest:
//!          T * (their speeds) >= microbatches * (those shares) + what they miss until the first hops are made
//!          and one microbatch goes there and back through all the layers
//! placed   a device starts when the first microbatch gets there; its last B goes back to the first stage;
//!          its first B comes after a way to the last stage and back
//! ```

use super::{Costs, Edge, Hop, Placement, StageCost};
use crate::id::{DeviceId, StageId};

/// A model's work on devices of given speeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound<'a> {
    /// The model's work in shares of equally many layers: as many as devices, or a multiple.
    pub shares: &'a [StageCost],
    /// For every device.
    pub speeds: &'a [f64],
    pub hop: Hop,
    pub microbatches: u32,
    /// Whether every device holds as many layers as any other.
    pub even: bool,
}

impl Bound<'_> {
    /// Nothing that puts these layers on these devices ends earlier.
    pub fn any(&self) -> f64 {
        let mut speeds = self.speeds.to_vec();
        speeds.sort_by(f64::total_cmp);
        self.work(&speeds).max(self.chain(&speeds))
    }

    /// Every set of devices has its layers' work to do; the slowest ones and the lightest layers say most.
    fn work(&self, slowest_first: &[f64]) -> f64 {
        let blocks = self.blocks(StageCost::all);
        let devices = slowest_first.len();
        let (mut speed, mut work, mut late, mut bound) = (0.0, 0.0, 0.0, 0.0f64);
        for k in 0..devices {
            // The devices before it come later by one more hop: the fastest of them may come first.
            late += self.hop.activation * speed;
            speed += slowest_first[k];
            work += blocks[k];
            if self.even || k + 1 == devices {
                bound = bound.max((f64::from(self.microbatches) * work + late) / speed);
            }
        }
        bound
    }

    /// There and back through all layers, each device's at its speed, and at least a hop for every further device.
    fn chain(&self, slowest_first: &[f64]) -> f64 {
        let blocks = self.blocks(|cost| cost.f + cost.b);
        let fastest = slowest_first.last().copied().unwrap_or(1.0);
        let time = |(block, speed): (&f64, &f64)| block / if self.even { *speed } else { fastest };
        let hops = (slowest_first.len() as f64 - 1.0) * (self.hop.activation + self.hop.gradient);
        blocks.iter().zip(slowest_first).map(time).sum::<f64>() + hops
    }

    /// What a device's number of layers costs at least, then the next lightest, and so on.
    fn blocks(&self, of: impl Fn(&StageCost) -> f64) -> Vec<f64> {
        let mut costs: Vec<f64> = self.shares.iter().map(of).collect();
        if !self.even {
            // Nothing is known of a single device's layers.
            let mut blocks = vec![0.0; self.speeds.len().saturating_sub(1)];
            blocks.push(costs.iter().sum());
            return blocks;
        }
        costs.sort_by(f64::total_cmp);
        let size = (costs.len() / self.speeds.len()).max(1);
        costs.chunks(size).map(|block| block.iter().sum()).collect()
    }
}

/// Nothing ends earlier with these stages on these devices.
pub fn placed(placement: &Placement, costs: &Costs, microbatches: u32) -> f64 {
    let stages: Vec<StageId> = placement.stages().collect();
    let hop = |at: usize| costs.hop(placement, Edge { from: stages[at], to: stages[at + 1] });
    // When the first microbatch gets to a stage, and how long a gradient takes from behind it to the first stage's end.
    let (mut there, mut back) = (vec![0.0; stages.len()], vec![0.0; stages.len()]);
    for at in 1..stages.len() {
        there[at] = there[at - 1] + costs.stage(stages[at - 1]).f + hop(at - 1).activation;
        let last = if at == 1 { costs.stage(stages[0]).w } else { 0.0 };
        back[at] = back[at - 1] + hop(at - 1).gradient + costs.stage(stages[at - 1]).b + last;
    }
    let end = stages.len() - 1;
    let turned = |at: usize| {
        let behind = stages[at + 1..].iter().map(|s| costs.stage(*s).b).sum::<f64>();
        there[end] + costs.stage(stages[end]).f + behind + (at..end).map(|e| hop(e).gradient).sum::<f64>()
    };
    let of = |device: DeviceId| {
        let own = placement.stages_on(device);
        let (first, last) = (own[0].index(), own[own.len() - 1].index());
        let sum = |part: fn(&StageCost) -> f64| {
            f64::from(microbatches) * own.iter().map(|s| part(&costs.stage(*s))).sum::<f64>()
        };
        let all = there[first] + sum(StageCost::all);
        let home = there[first] + sum(|c| c.f + c.b) + back[first];
        all.max(home).max(turned(last) + sum(|c| c.b + c.w))
    };
    placement.devices().map(of).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Spec;

    #[test]
    fn an_even_pipeline_is_bound_by_its_work_and_its_hops() {
        assert_eq!(Spec::even(4, 8).bound(), 24.0);
        // One microbatch: there and back.
        assert_eq!(Spec::even(4, 1).with_hop(0.5).bound(), 8.0 + 6.0 * 0.5);
        // Devices start after 0, 1, 2 and 3 hops.
        assert_eq!(Spec::even(4, 8).with_hop(0.5).bound(), 24.0 + 6.0 * 0.5 / 4.0);
    }

    #[test]
    fn a_slow_device_has_its_share_of_the_layers() {
        let spec = Spec { speeds: vec![1.0, 0.5, 1.0, 1.0], ..Spec::even(4, 8) };
        assert_eq!(spec.bound(), 48.0);
        // An uneven model: the slow device may have the light slice.
        let work = [2.0, 2.0, 1.0, 1.0].map(|f| StageCost::new(f, f, f)).to_vec();
        assert_eq!(Spec { work, ..spec }.bound(), 48.0);
    }

    #[test]
    fn stages_that_have_their_places_say_more() {
        let spec = Spec::even(4, 8);
        let placement = Placement::linear(4).unwrap();
        // The last device starts after three forwards.
        assert_eq!(placed(&placement, &spec.costs(&placement).unwrap(), 8), 27.0);
    }
}
