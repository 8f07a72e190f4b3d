//! A unit of a model: a graph with its passes, and how they are run.

use crate::chain::Flow;
use crate::flat::FlatMut;
use crate::kernels::scalar::Scalar as _;
use crate::kernels::{Buffer, Kernels};
use crate::stage::{Recompute, StageError, Value};

use super::budget::{again, frontier};
use super::build::{Access, Builder, Input, Node};
use super::derive::{Passes, Slot, Step, What};
use super::op::{Arg, Born, Cost, Ctx, Mode, Reads, Saved};

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
        for value in self.0.iter_mut().flatten() {
            match value {
                Value::Real(buf) => f(Item::Real(buf)),
                Value::Ids(ids) => f(Item::Ids(ids)),
                Value::Loss(_) => {}
            }
        }
    }

    pub fn elements(&self) -> Elements {
        self.0.iter().flatten().map(Elements::of).sum()
    }
}

/// How much is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Elements {
    pub real: usize,
    pub ids: usize,
}

impl Elements {
    pub fn real(real: usize) -> Self {
        Self { real, ids: 0 }
    }

    pub fn of<B: Buffer>(value: &Value<B>) -> Self {
        match value {
            Value::Real(buf) => Self::real(buf.len()),
            Value::Ids(ids) => Self { real: 0, ids: ids.len() },
            Value::Loss(_) => Self::default(),
        }
    }

    pub fn bytes(self, real_bytes: u64) -> u64 {
        self.real as u64 * real_bytes + self.ids as u64 * 4
    }
}

impl std::ops::Add for Elements {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { real: self.real + other.real, ids: self.ids + other.ids }
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
    pub after_backward_input: Elements,
}

impl std::ops::Add for Remembered {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            after_forward: self.after_forward + other.after_forward,
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
    nodes: Vec<Node<K>>,
    inputs: Vec<Input>,
    /// Names of what it gives, and their slots.
    outputs: Vec<(String, Slot)>,
    passes: Passes,
    /// Operations that B and W spend on values that F had made.
    again: f64,
    /// Where memory is to be kept within a limit: passes that keep less and less.
    frugal: Vec<(Passes, f64)>,
}

impl<K: Kernels> Unit<K> {
    pub fn new(graph: Builder<'_, '_, K>, recompute: Recompute) -> Self {
        let passes = Passes::of(&graph, recompute);
        let frugal = match recompute {
            Recompute::Within(_) => {
                let choices = frontier(&graph, K::Real::DTYPE.bytes());
                choices.iter().map(|c| (Passes::dropping(&graph, c.dropped.clone()), c.again)).collect()
            }
            _ => vec![],
        };
        let again = again(&graph, &passes);
        let Builder { nodes, inputs, outputs, .. } = graph;
        let outputs = outputs.into_iter().map(|(name, val)| (name, passes.value_slot[val.index()])).collect();
        Self { nodes, inputs, outputs, passes, again, frugal }
    }

    /// Where memory is to be kept within a limit: what it may hold from F to B, and the operations that each choice costs, from the most held to the least.
    pub fn choices(&self) -> Vec<(Elements, f64)> {
        let held = |p: &Passes| p.after_forward.iter().map(|&slot| p.slots[slot]).sum();
        self.frugal.iter().map(|(passes, again)| (held(passes), *again)).collect()
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
        let held = |slots: &[Slot]| slots.iter().map(|&slot| self.passes.slots[slot]).sum();
        Remembered {
            after_forward: held(&self.passes.after_forward),
            after_backward_input: held(&self.passes.after_backward),
        }
    }

    /// The operations of its forward pass on this rank.
    pub fn cost(&self) -> Cost {
        self.nodes.iter().map(|node| node.op.cost()).fold(Cost::default(), |a, b| Cost {
            matrix: a.matrix + b.matrix,
            attention: a.attention + b.attention,
        })
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
        for (i, &(name, slot)) in handed.iter().enumerate() {
            let again = kept.contains(&slot) || handed[i + 1..].iter().any(|&(_, s)| s == slot);
            let value = if again {
                self.copy(ctx.kernels, frame.0[slot].as_ref().expect("an op made it"))
            } else {
                frame.0[slot].take().expect("an op made it")
            };
            flow.put(name, value);
        }
        Ok(frame)
    }

    fn is_handed_back(&self, slot: Slot) -> bool {
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
                frame.0[slot] = Some(Value::Real(flow.take_real(name)));
            }
        }
        for step in &self.passes.backward {
            self.run(ctx, step, frame, |_| false)?;
        }
        for (input, slot) in self.inputs.iter().zip(&self.passes.input_gradients) {
            let Some(slot) = *slot else { continue };
            let kept = self.passes.after_backward.contains(&slot);
            let value = if kept {
                self.copy(ctx.kernels, frame.0[slot].as_ref().expect("B made it"))
            } else {
                frame.0[slot].take().expect("B made it")
            };
            let Value::Real(gradient) = value else { unreachable!("gradients are numbers") };
            flow.add_real(ctx.kernels, &input.name, gradient);
        }
        Ok(())
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
                        frame.0[*slot] = Some(Value::Real(gradient));
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
                ctx.kernels.add(other, (&mut sum).into());
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
            Value::Real(buf) => {
                let mut second = kernels.buffer(buf.len());
                kernels.copy(buf.into(), (&mut second).into(), buf.len());
                Value::Real(second)
            }
            Value::Ids(ids) => Value::Ids(ids.clone()),
            Value::Loss(loss) => Value::Loss(*loss),
        }
    }
}

fn bury<B>(frame: &mut Frame<B>, dead: &[Slot]) {
    for &slot in dead {
        frame.0[slot] = None;
    }
}
