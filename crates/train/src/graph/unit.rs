//! A unit of a model: a graph with its passes, and how they are run.
//!
//! A reshard leaves what is coming in its slot, and the pass goes on. The first step that reads it waits; a sum does not, as long as one of the two is there:
//! it is coming too. What a unit hands on may still be coming, what it holds from pass to pass is there.
//!
//! ```text
//! list   .. linear | reshard | norm | linear | .. | add ..
//! ranks             start ======================== wait
//! ```

use crate::chain::Flow;
use crate::flat::FlatMut;
use crate::kernels::{Buffer, Kernels};
use crate::stage::{Recompute, StageError, Value};

use super::budget::{again, frontier};
use super::build::{Access, Builder, Input, Node};
use super::derive::{Passes, Slot, Step, What};
use super::lists::{Lister, Pace};
use super::op::{Arg, Born, Cost, Ctx, Mode, Reads, Saved};
use super::policy::Rule;

/// What a unit holds of a microbatch, slot by slot.
#[derive(Debug)]
pub struct Frame<B>(Vec<Option<Value<B>>>);

/// Something held.
#[derive(Debug)]
pub enum Item<'a, B> {
    Real(&'a mut B),
    Ids(&'a mut Vec<i32>),
}

impl<B: Buffer> Frame<B> {
    /// Calls `f` with everything in it, always in the same order.
    pub fn each_mut(&mut self, f: &mut dyn FnMut(Item<'_, B>)) {
        self.0.iter_mut().flatten().for_each(|value| each_of(value, f));
    }

    /// Waits for a value that is coming.
    fn settle<K: Kernels<Buf = B>>(&mut self, kernels: &K, slot: Slot) -> Result<(), StageError> {
        if self.is_coming(slot) {
            self.0[slot] = self.0[slot].take().map(|value| value.there(kernels)).transpose()?;
        }
        Ok(())
    }

    fn is_coming(&self, slot: Slot) -> bool {
        matches!(self.0[slot], Some(Value::Coming(_)))
    }

    pub fn elements(&self) -> Elements {
        self.0.iter().flatten().map(Elements::of).sum()
    }
}

fn each_of<B>(value: &mut Value<B>, f: &mut dyn FnMut(Item<'_, B>)) {
    match value {
        Value::Real(buf) => f(Item::Real(buf)),
        Value::Ids(ids) => f(Item::Ids(ids)),
        Value::Loss(_) | Value::Coming(_) => {}
    }
}

/// How much is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Elements {
    pub elems: usize,
    pub reals: usize,
    pub ids: usize,
}

impl Elements {
    pub fn elems(elems: usize) -> Self {
        Self { elems, ..Self::default() }
    }

    pub fn of<B: Buffer>(value: &Value<B>) -> Self {
        match value {
            Value::Real(buf) if buf.is_wide() => Self { reals: buf.len(), ..Self::default() },
            Value::Real(buf) => Self::elems(buf.len()),
            Value::Ids(ids) => Self { ids: ids.len(), ..Self::default() },
            // What is coming has no bytes here: nothing is, between passes.
            Value::Loss(_) | Value::Coming(_) => Self::default(),
        }
    }

    /// On a device with these kernels.
    pub fn bytes<K: Kernels>(self) -> u64 {
        (self.elems * size_of::<K::Elem>() + self.reals * size_of::<K::Real>() + self.ids * 4) as u64
    }
}

impl std::ops::Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { elems: self.elems + other.elems, reals: self.reals + other.reals, ids: self.ids + other.ids }
    }
}

impl std::iter::Sum for Elements {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| a + b)
    }
}

/// What is held between passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remembered {
    pub after_forward: Elements,
    /// Of these, those that wait in a file.
    pub filed: Elements,
    pub after_backward_input: Elements,
}

impl std::ops::Add for Remembered {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            after_forward: self.after_forward + other.after_forward,
            filed: self.filed + other.filed,
            after_backward_input: self.after_backward_input + other.after_backward_input,
        }
    }
}

impl std::iter::Sum for Remembered {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| a + b)
    }
}

/// A piece of a model that is never cut.
pub struct Unit<K: Kernels> {
    pub(super) nodes: Vec<Node<K>>,
    pub(super) inputs: Vec<Input>,
    /// Names of what it gives, and their slots.
    pub(super) outputs: Vec<(String, Slot)>,
    pub(super) passes: Passes,
    /// Operations that B and W spend on values that F had made.
    again: f64,
    /// Where memory is to be kept within a limit: passes that keep less and less.
    frugal: Vec<(Passes, f64)>,
}

impl<K: Kernels> Unit<K> {
    pub fn new(graph: Builder<'_, '_, K>, recompute: Recompute) -> Self {
        Self::ruled(graph, recompute, &[], false)
    }

    /// With rules that go before the one for all; and whether what they say nothing about waits in a file from F to B.
    pub fn ruled(graph: Builder<'_, '_, K>, recompute: Recompute, rules: &[Rule], offloaded: bool) -> Self {
        let filed = |passes: Passes| if offloaded { passes.filing(&graph, rules) } else { passes };
        let passes = filed(Passes::of(&graph, recompute, rules));
        let frugal = match recompute {
            Recompute::Within(_) => {
                let choices = frontier(&graph);
                let passes = |dropped: &[bool]| filed(Passes::dropping(&graph, dropped.to_vec()));
                choices.iter().map(|c| (passes(&c.dropped), c.again)).collect()
            }
            _ => vec![],
        };
        let again = again(&graph, &passes);
        let Builder { nodes, inputs, outputs, .. } = graph;
        let outputs = outputs.into_iter().map(|(name, val)| (name, passes.value_slot[val.index()])).collect();
        Self { nodes, inputs, outputs, passes, again, frugal }
    }

    /// Where memory is to be kept within a limit: what it may hold, and the operations that each choice costs, from the most held to the least.
    pub fn choices(&self) -> Vec<(Remembered, f64)> {
        self.frugal.iter().map(|(passes, again)| (passes.remembered(), *again)).collect()
    }

    /// What it does in passes, as lists.
    pub(crate) fn lister<'a>(&'a self, pace: &'a Pace<'a>) -> Lister<'a, K> {
        Lister::new(self, pace)
    }

    /// Takes one of them.
    pub fn choose(&mut self, choice: usize) {
        (self.passes, self.again) = self.frugal.swap_remove(choice);
        self.frugal.clear();
    }

    /// Operations that B and W spend on values that F had made.
    pub fn again(&self) -> f64 {
        self.again
    }

    /// What it will hold.
    pub fn remembered(&self) -> Remembered {
        self.passes.remembered()
    }

    /// Calls `f` with everything that waits in a file from F to B, always in the same order.
    pub fn each_filed(&self, frame: &mut Frame<K::Buf>, f: &mut dyn FnMut(Item<'_, K::Buf>)) {
        for &slot in &self.passes.filed {
            frame.0[slot].iter_mut().for_each(|value| each_of(value, f));
        }
    }

    /// The operations of its forward pass on this rank.
    pub fn cost(&self) -> Cost {
        self.nodes.iter().map(|node| node.op.cost()).sum()
    }

    /// F: takes and reads tensors, gives others, and holds what later passes need.
    pub fn forward(&self, ctx: &Ctx<'_, K>, flow: &mut Flow<K::Buf>) -> Result<Frame<K::Buf>, StageError> {
        let mut frame = self.frame();
        for input in &self.inputs {
            let value = flow.take(&input.name);
            assert!(value.is_some(), "`{}` should flow here", input.name);
            frame.0[self.passes.value_slot[input.val.index()]] = value;
        }
        let (list, kept): (&[Step], &[Slot]) = match ctx.mode {
            Mode::Train => (&self.passes.forward, &self.passes.after_forward),
            Mode::Evaluate => (&self.passes.evaluate, &[]),
        };
        for step in list {
            // What units behind look at too stays until it is handed back.
            self.run(ctx, step, &mut frame, |slot| self.is_handed_back(slot))?;
        }
        let mut handed: Vec<(&str, Slot)> = vec![];
        let back = self.inputs.iter().filter(|i| i.access == Access::Reads);
        handed.extend(back.map(|i| (i.name.as_str(), self.passes.value_slot[i.val.index()])));
        handed.extend(self.outputs.iter().map(|(name, slot)| (name.as_str(), *slot)));
        self.hand_on(ctx.kernels, &mut frame, &handed, kept, |name, value| {
            flow.put(name, value);
            Ok(())
        })?;
        Ok(frame)
    }

    /// Gives values to others, and leaves what is kept behind.
    fn hand_on(
        &self,
        kernels: &K,
        frame: &mut Frame<K::Buf>,
        handed: &[(&str, Slot)],
        kept: &[Slot],
        mut give: impl FnMut(&str, Value<K::Buf>) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        kept.iter().try_for_each(|&slot| frame.settle(kernels, slot))?;
        for (i, &(name, slot)) in handed.iter().enumerate() {
            let again = kept.contains(&slot) || handed[i + 1..].iter().any(|&(_, s)| s == slot);
            let value = if again {
                frame.settle(kernels, slot)?;
                self.copy(kernels, frame.0[slot].as_ref().expect("an op made it"))
            } else {
                frame.0[slot].take().expect("an op made it")
            };
            give(name, value)?;
        }
        Ok(())
    }

    pub(super) fn is_handed_back(&self, slot: Slot) -> bool {
        self.inputs.iter().any(|i| i.access == Access::Reads && self.passes.value_slot[i.val.index()] == slot)
    }

    /// B: takes the gradients of what it gave, gives those of what it took, adds to those of what it read.
    pub fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        frame: &mut Frame<K::Buf>,
    ) -> Result<(), StageError> {
        for ((name, _), slot) in self.outputs.iter().zip(&self.passes.output_gradients) {
            if let Some(slot) = *slot {
                let gradient = flow.take(name);
                assert!(gradient.is_some(), "the gradient of `{name}` should flow here");
                frame.0[slot] = gradient;
            }
        }
        for step in &self.passes.backward {
            self.run(ctx, step, frame, |_| false)?;
        }
        let gradients = self.inputs.iter().zip(&self.passes.input_gradients);
        let handed: Vec<(&str, Slot)> =
            gradients.filter_map(|(input, slot)| Some((input.name.as_str(), (*slot)?))).collect();
        self.hand_on(ctx.kernels, frame, &handed, &self.passes.after_backward, |name, gradient| {
            Ok(flow.add(ctx.kernels, name, gradient)?)
        })
    }

    /// W: adds to the gradients of its weights.
    pub fn backward_weight(
        &self,
        ctx: &Ctx<'_, K>,
        frame: &mut Frame<K::Buf>,
        grads: &mut FlatMut<'_, K::Buf>,
    ) -> Result<(), StageError> {
        for step in &self.passes.weights {
            match &step.what {
                What::Weights { node, gradient } => {
                    step.reads.iter().try_for_each(|&slot| frame.settle(ctx.kernels, slot))?;
                    let node_reads = self.nodes[*node].op.needs().weights;
                    let saved = self.saved(frame, *node, &node_reads, *gradient);
                    self.nodes[*node].op.weights(ctx.kernels, saved, grads);
                    bury(frame, &step.dead);
                }
                _ => self.run(ctx, step, frame, |_| false)?,
            }
        }
        Ok(())
    }

    fn frame(&self) -> Frame<K::Buf> {
        Frame((0..self.passes.slots.len()).map(|_| None).collect())
    }

    /// One step of F or B.
    fn run(
        &self,
        ctx: &Ctx<'_, K>,
        step: &Step,
        frame: &mut Frame<K::Buf>,
        spared: impl Fn(Slot) -> bool,
    ) -> Result<(), StageError> {
        let dies = |slot: Slot| step.dead.contains(&slot) && !spared(slot);
        if let What::Sum { a, b, to } = step.what {
            // The first of the two was started before the other.
            if frame.is_coming(a) && frame.is_coming(b) {
                frame.settle(ctx.kernels, a)?;
            }
            let late = [(a, b), (b, a)].into_iter().find(|&(late, _)| frame.is_coming(late) && dies(late));
            if let Some((late, other)) = late {
                let Some(Value::Real(plus)) = self.own(ctx.kernels, frame, other, dies(other)) else {
                    panic!("gradients are numbers, and are there when they are added");
                };
                let Some(Value::Coming(coming)) = frame.0[late].take() else { unreachable!("it is coming") };
                frame.0[to] = Some(Value::Coming(coming.plus(ctx.kernels, plus)));
                return Ok(());
            }
        }
        step.reads.iter().try_for_each(|&slot| frame.settle(ctx.kernels, slot))?;
        match &step.what {
            What::Forward { node } => {
                let n = *node;
                let node = &self.nodes[n];
                let slots: Vec<Slot> = node.ins.iter().map(|v| self.passes.value_slot[v.index()]).collect();
                let mut owned = node.op.needs().forward_takes.map(|i| {
                    let slot = slots[i];
                    let alone = slots.iter().filter(|&&s| s == slot).count() == 1;
                    let value = self.own(ctx.kernels, frame, slot, dies(slot) && alone);
                    (i, value)
                });
                let arg = |(i, &slot): (usize, &Slot)| match &mut owned {
                    Some((taken, value)) if *taken == i => Arg::Owned(value.take()),
                    _ => Arg::Seen(frame.0[slot].as_ref().expect("an input is there")),
                };
                let ins = slots.iter().enumerate().map(arg).collect();
                let made = node.op.forward(ctx, ins)?;
                let born = node.op.extras();
                let extras = self.passes.extra_slots[n].iter().zip(born);
                let extras = extras.filter(|(_, e)| e.born == Born::Forward).map(|(slot, _)| *slot);
                let out = self.passes.value_slot[node.out.index()];
                for (slot, value) in [out].into_iter().chain(extras).zip(made) {
                    frame.0[slot] = Some(value);
                }
            }
            What::Backward { node, gradient, residual, made } => {
                let op = &self.nodes[*node].op;
                let needs = op.needs();
                let taken = match (needs.backward_takes_gradient, needs.backward_takes_extra) {
                    (true, _) => *gradient,
                    (_, Some(extra)) => Some(self.passes.extra_slots[*node][extra]),
                    _ => None,
                };
                let mut owned = taken.map(|slot| self.own(ctx.kernels, frame, slot, dies(slot)));
                let mut saved = self.saved(frame, *node, &needs.backward, *gradient);
                if needs.backward_takes_gradient {
                    saved.gradient = Arg::Owned(owned.take().flatten());
                } else if let Some(extra) = needs.backward_takes_extra {
                    saved.extras[extra] = Arg::Owned(owned.take().flatten());
                }
                saved.residual = residual.map(|slot| match frame.0[slot].as_ref() {
                    Some(Value::Real(buf)) => buf,
                    other => panic!("a gradient should be here, found {other:?}"),
                });
                let result = op.backward(ctx, saved)?;
                for (slot, gradient) in made.iter().zip(result.gradients) {
                    if let (Some(slot), Some(gradient)) = (slot, gradient) {
                        frame.0[*slot] = Some(gradient);
                    }
                }
                let born = self.passes.extra_slots[*node].iter().zip(op.extras());
                let born = born.filter(|(_, e)| e.born == Born::Backward).map(|(slot, _)| *slot);
                for (slot, value) in born.zip(result.extras) {
                    frame.0[slot] = Some(value);
                }
            }
            What::Sum { a, b, to } => {
                let (into, other) = if dies(*b) && !dies(*a) { (*b, *a) } else { (*a, *b) };
                // A value that was used twice in one place has the same gradient twice.
                let sum = self.own(ctx.kernels, frame, into, dies(into) && into != other);
                let (Some(Value::Real(mut sum)), Some(Value::Real(other))) = (sum, frame.0[other].as_ref())
                else {
                    panic!("gradients are numbers, and are there when they are added");
                };
                ctx.kernels.add(other.into(), (&mut sum).into(), other.len());
                frame.0[*to] = Some(Value::Real(sum));
            }
            What::Weights { .. } => unreachable!("W runs these itself"),
        }
        let dead: Vec<Slot> = step.dead.iter().copied().filter(|&slot| !spared(slot)).collect();
        bury(frame, &dead);
        Ok(())
    }

    /// A value to overwrite: itself, where nobody needs it any more.
    fn own(&self, kernels: &K, frame: &mut Frame<K::Buf>, slot: Slot, dies: bool) -> Option<Value<K::Buf>> {
        match dies {
            true => frame.0[slot].take(),
            false => frame.0[slot].as_ref().map(|value| self.copy(kernels, value)),
        }
    }

    fn saved<'f>(
        &self,
        frame: &'f Frame<K::Buf>,
        n: usize,
        reads: &Reads,
        gradient: Option<Slot>,
    ) -> Saved<'f, K::Buf> {
        let node = &self.nodes[n];
        let seen = |wanted: bool, slot: Slot| match (wanted, &frame.0[slot]) {
            (true, Some(value)) => Arg::Seen(value),
            _ => Arg::Absent,
        };
        let ins = node.ins.iter().enumerate();
        let extras = self.passes.extra_slots[n].iter().enumerate();
        Saved {
            ins: ins.map(|(i, v)| seen(reads.ins.contains(&i), self.passes.value_slot[v.index()])).collect(),
            out: seen(reads.out, self.passes.value_slot[node.out.index()]),
            extras: extras.map(|(e, &slot)| seen(reads.extras.contains(&e), slot)).collect(),
            gradient: gradient.map_or(Arg::Absent, |slot| seen(reads.gradient, slot)),
            residual: None,
        }
    }

    fn copy(&self, kernels: &K, value: &Value<K::Buf>) -> Value<K::Buf> {
        match value {
            Value::Real(buf) => Value::Real(kernels.clone_of(buf)),
            Value::Ids(ids) => Value::Ids(ids.clone()),
            Value::Loss(loss) => Value::Loss(*loss),
            Value::Coming(_) => unreachable!("who copies a value has waited for it"),
        }
    }
}

fn bury<B>(frame: &mut Frame<B>, dead: &[Slot]) {
    for &slot in dead {
        frame.0[slot] = None;
    }
}
