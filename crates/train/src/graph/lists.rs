//! What a unit does in its passes, as a list: the walk of [`super::unit`] through its steps, without numbers. Where that starts a collective this does, and where that
//! waits this does; between the two stand the times of what is computed.

use std::collections::BTreeMap;

use crossmesh_core::step::lists::{Call, CallKind, List};

use crate::kernels::Kernels;

use super::Axis;
use super::build::Access;
use super::derive::{Slot, Step, What};
use super::op::{Cost, Said, Way};
use super::unit::Unit;

/// Who takes a collective of so many bytes along an axis for which call; nobody where there is one rank.
type ToCall<'a> = dyn Fn(Axis, CallKind, u64) -> Option<Call> + 'a;

/// How fast a rank is.
pub struct Pace<'a> {
    pub operations_per_s: f64,
    pub call: &'a ToCall<'a>,
}

impl Pace<'_> {
    fn ns(&self, operations: f64) -> u64 {
        (operations / self.operations_per_s * 1e9).round() as u64
    }
}

/// What flows between units by name, and the call that brings it where it is still coming.
#[derive(Debug, Default)]
pub struct Coming(BTreeMap<String, Option<usize>>);

impl Coming {
    /// Waits for all of it.
    pub fn settle(&mut self, list: &mut List) {
        self.0.values_mut().for_each(|call| wait(call, list));
    }
}

fn wait(call: &mut Option<usize>, list: &mut List) {
    if let Some(call) = call.take() {
        list.wait(call);
    }
}

/// A unit's walk through a microbatch.
pub struct Lister<'a, K: Kernels> {
    unit: &'a Unit<K>,
    pace: &'a Pace<'a>,
    /// By slot: the call that brings it.
    coming: Vec<Option<usize>>,
}

impl<'a, K: Kernels> Lister<'a, K> {
    pub(super) fn new(unit: &'a Unit<K>, pace: &'a Pace<'a>) -> Self {
        Self { unit, pace, coming: vec![None; unit.passes.slots.len()] }
    }

    /// F.
    pub fn forward(&mut self, flow: &mut Coming, list: &mut List) {
        let (inputs, passes) = (&self.unit.inputs, &self.unit.passes);
        for input in inputs {
            self.coming[passes.value_slot[input.val.index()]] = flow.0.remove(&input.name).flatten();
        }
        let unit = self.unit;
        for step in &passes.forward {
            self.run(step, list, |slot| unit.is_handed_back(slot));
        }
        let back = inputs.iter().filter(|i| i.access == Access::Reads);
        let back = back.map(|i| (i.name.as_str(), passes.value_slot[i.val.index()]));
        let outputs = unit.outputs.iter().map(|(name, slot)| (name.as_str(), *slot));
        let handed: Vec<(&str, Slot)> = back.chain(outputs).collect();
        self.hand_on(&handed, &passes.after_forward, list, |name, call, _| {
            flow.0.insert(name.into(), call);
        });
        self.end(list);
    }

    /// B.
    pub fn backward(&mut self, flow: &mut Coming, list: &mut List) {
        let (unit, passes) = (self.unit, &self.unit.passes);
        for ((name, _), slot) in unit.outputs.iter().zip(&passes.output_gradients) {
            if let Some(slot) = *slot {
                self.coming[slot] = flow.0.remove(name).flatten();
            }
        }
        for step in &passes.backward {
            self.run(step, list, |_| false);
        }
        let gradients = unit.inputs.iter().zip(&passes.input_gradients);
        let handed: Vec<(&str, Slot)> =
            gradients.filter_map(|(input, slot)| Some((input.name.as_str(), (*slot)?))).collect();
        // A gradient that was there before is waited for, and what is added to it need not be.
        self.hand_on(&handed, &passes.after_backward, list, |name, call, list| {
            if let Some(before) = flow.0.get_mut(name) {
                wait(before, list);
            }
            flow.0.insert(name.into(), call);
        });
        self.end(list);
    }

    /// W.
    pub fn weights(&mut self, list: &mut List) {
        for step in &self.unit.passes.weights {
            self.run(step, list, |_| false);
        }
        self.end(list);
    }

    /// What nobody read is over at the end at the latest.
    fn end(&mut self, list: &mut List) {
        self.coming.iter_mut().for_each(|call| wait(call, list));
    }

    fn hand_on(
        &mut self,
        handed: &[(&str, Slot)],
        kept: &[Slot],
        list: &mut List,
        mut give: impl FnMut(&str, Option<usize>, &mut List),
    ) {
        kept.iter().for_each(|&slot| wait(&mut self.coming[slot], list));
        for (i, &(name, slot)) in handed.iter().enumerate() {
            if kept.contains(&slot) || handed[i + 1..].iter().any(|&(_, s)| s == slot) {
                wait(&mut self.coming[slot], list);
            }
            let call = self.coming[slot].take();
            give(name, call, list);
        }
    }

    fn run(&mut self, step: &Step, list: &mut List, spared: impl Fn(Slot) -> bool) {
        let dies = |slot: Slot| step.dead.contains(&slot) && !spared(slot);
        if let What::Sum { a, b, to } = step.what {
            if self.coming[a].is_some() && self.coming[b].is_some() {
                wait(&mut self.coming[a], list);
            }
            if let Some(late) = [a, b].into_iter().find(|&late| self.coming[late].is_some() && dies(late)) {
                self.coming[to] = self.coming[late].take();
                return;
            }
        }
        step.reads.iter().for_each(|&slot| wait(&mut self.coming[slot], list));
        match &step.what {
            What::Forward { node } => {
                let node = &self.unit.nodes[*node];
                let Cost { matrix, attention } = node.op.cost();
                let out = self.unit.passes.value_slot[node.out.index()];
                self.op(matrix + attention, node.op.says(Way::Forward), out, list);
            }
            What::Backward { node, made, .. } => {
                let op = &self.unit.nodes[*node].op;
                let Cost { matrix, attention } = op.cost();
                let learns = made.iter().any(Option::is_some);
                let operations = if learns { matrix + 2.0 * attention } else { 0.0 };
                let to = made.iter().flatten().next().copied();
                let said = op.says(Way::Backward);
                assert!(to.is_some() || said.is_empty(), "what comes back is a gradient");
                self.op(operations, said, to.unwrap_or_default(), list);
            }
            What::Weights { node, .. } => {
                let operations = self.unit.nodes[*node].op.cost().matrix;
                self.op(operations, vec![], 0, list);
            }
            What::Sum { .. } => {}
        }
    }

    /// Computes, or starts what brings its result. Members of a group have the same items, also where one has no part in an op.
    fn op(&mut self, operations: f64, said: Vec<Said>, to: Slot, list: &mut List) {
        list.compute(self.pace.ns(operations));
        for Said { axis, kind, elements, waits } in said {
            let Some(call) = (self.pace.call)(axis, kind, elements.bytes::<K>()) else { continue };
            let call = list.start(call);
            match waits {
                true => list.wait(call),
                false => self.coming[to] = Some(call),
            }
        }
    }
}
