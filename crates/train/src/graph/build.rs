//! Puts graphs together. Where a value lies otherwise than an op wants it, a reshard goes between them.

use crate::group::chunked;
use crate::kernels::Kernels;
use crate::parameter::{Declaration, Init, Parameters, Weight};
use crate::stage_rank::Along;

use super::op::Op;
use super::ops::reshard::Reshard;
use super::{Axis, Kind, Lie, Spread, Typed, Val};

/// The axes along which ranks compute a pass together, and where this rank is along each.
#[derive(Debug, Clone)]
pub struct Team {
    pub axes: Vec<TeamAxis>,
}

/// One of them.
#[derive(Debug, Clone)]
pub struct TeamAxis {
    pub name: String,
    pub along: Along,
}

impl Team {
    pub fn along(&self, axis: Axis) -> Along {
        self.axes[axis.0].along
    }

    pub fn name(&self, axis: Axis) -> &str {
        &self.axes[axis.0].name
    }

    /// With the parts of an axis behind the others, major first. Ranks say nothing to each other along them: they say only how weights and
    /// columns are shared out, and a value that is to be moved is seen along the whole axis again ([`Builder::seen_along`]).
    pub fn with_parts(mut self, parts: impl IntoIterator<Item = TeamAxis>) -> Self {
        self.axes.extend(parts);
        self
    }

    /// Everywhere alike.
    pub fn whole(&self) -> Lie {
        Lie::of(vec![Spread::Whole; self.axes.len()])
    }
}

/// When an op's result is computed again instead of kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    Always,
    /// It costs next to nothing: computed again wherever it is needed.
    Never,
    /// Of the insides of attention: as the setup says.
    Attention,
}

/// An op and its values.
pub(super) struct Node<K: Kernels> {
    pub op: Box<dyn Op<K>>,
    pub ins: Vec<Val>,
    pub out: Val,
    pub keep: Keep,
    /// The output is the input: nothing happens in F.
    pub same: bool,
}

/// What happens to an input that units behind may look at too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Takes,
    Reads,
}

/// A value that comes in by name.
#[derive(Debug, Clone)]
pub(super) struct Input {
    pub name: String,
    pub val: Val,
    pub access: Access,
    /// Whether somebody waits for its gradient.
    pub gradient: bool,
}

/// A graph on its way.
pub struct Builder<'a, 'p, K: Kernels> {
    pub team: Team,
    pub parameters: &'a mut Parameters<'p>,
    pub(super) values: Vec<Typed>,
    pub(super) nodes: Vec<Node<K>>,
    pub(super) inputs: Vec<Input>,
    pub(super) outputs: Vec<(String, Val)>,
    /// Values that lie otherwise already: several ops that want the same share one reshard.
    resharded: Vec<(Val, Lie, Val)>,
    /// The reshard between ranks, by number, that gets a wrong gradient; and how many there were.
    #[cfg(test)]
    pub(super) spoiled: (Option<usize>, usize),
}

impl<'a, 'p, K: Kernels> Builder<'a, 'p, K> {
    pub fn new(team: Team, parameters: &'a mut Parameters<'p>) -> Self {
        Self {
            team,
            parameters,
            values: vec![],
            nodes: vec![],
            inputs: vec![],
            outputs: vec![],
            resharded: vec![],
            #[cfg(test)]
            spoiled: (None, 0),
        }
    }

    pub fn typed(&self, val: Val) -> &Typed {
        &self.values[val.index()]
    }

    /// A matrix of numbers that lies so.
    pub fn matrix(&self, all_rows: usize, cols: usize, lie: Lie) -> Typed {
        let rows = match lie.value.iter().position(|&s| s == Spread::Rows) {
            Some(axis) => {
                let Along { rank, size } = self.team.along(Axis(axis));
                chunked(all_rows, 1, size)[rank].clone()
            }
            None => 0..all_rows,
        };
        Typed { kind: Kind::Real, all_rows, cols, lie, rows }
    }

    /// A tensor that an earlier unit gave and nobody behind needs.
    pub fn take(&mut self, name: &str, typed: Typed) -> Val {
        self.input(name, typed, Access::Takes, true)
    }

    /// A tensor to look at; its gradient is added to that of others who look at it.
    pub fn read(&mut self, name: &str, typed: Typed) -> Val {
        self.input(name, typed, Access::Reads, true)
    }

    /// Numbers of the data set.
    pub fn data(&mut self, name: &str, typed: Typed) -> Val {
        self.input(name, typed, Access::Reads, false)
    }

    /// Ids of the data set, one a row.
    pub fn ids(&mut self, name: &str, rows: usize) -> Val {
        let typed = self.matrix(rows, 1, self.team.whole());
        self.input(name, Typed { kind: Kind::Ids, ..typed }, Access::Reads, false)
    }

    fn input(&mut self, name: &str, typed: Typed, access: Access, gradient: bool) -> Val {
        let val = self.value(typed);
        self.inputs.push(Input { name: name.into(), val, access, gradient });
        val
    }

    /// Hands a value to the units behind.
    pub fn give(&mut self, name: &str, val: Val) {
        self.outputs.push((name.into(), val));
    }

    fn value(&mut self, typed: Typed) -> Val {
        self.values.push(typed);
        Val(self.values.len() as u32 - 1)
    }

    /// Another op.
    pub(super) fn push(&mut self, op: impl Op<K> + 'static, ins: &[Val], out: Typed, keep: Keep) -> Val {
        self.add(Box::new(op), ins, out, keep, false)
    }

    fn add(&mut self, op: Box<dyn Op<K>>, ins: &[Val], out: Typed, keep: Keep, same: bool) -> Val {
        let out = self.value(out);
        self.nodes.push(Node { op, ins: ins.to_vec(), out, keep, same });
        out
    }

    /// The same value, seen along the parts of an axis instead of the axis, or the other way round. Whole or a summand along it is whole or a
    /// summand along all of them.
    pub fn seen_along(&mut self, x: Val, from: &[Axis], to: &[Axis]) -> Val {
        let typed = self.typed(x).clone();
        let size = |axes: &[Axis]| axes.iter().map(|axis| self.team.along(*axis).size).product::<usize>();
        assert_eq!(size(from), size(to), "they are the same ranks");
        let at = |axis: Axis| (typed.lie.value[axis.0], typed.lie.gradient[axis.0]);
        let same = |s: Spread| matches!(s, Spread::Whole | Spread::Summand);
        let (value, gradient) = at(from[0]);
        assert!(same(value) && same(gradient), "parts of it lie elsewhere along the parts of an axis");
        assert!(from.iter().all(|axis| at(*axis) == (value, gradient)), "it lies alike along all parts");
        let mut lie = typed.lie.clone();
        let whole = (Spread::Whole, Spread::Whole);
        let each = from.iter().map(|axis| (axis, whole)).chain(to.iter().map(|a| (a, (value, gradient))));
        for (axis, spread) in each {
            (lie.value[axis.0], lie.gradient[axis.0]) = spread;
        }
        self.add(Box::new(Reshard::nothing(from[0])), &[x], Typed { lie, ..typed }, Keep::Always, true)
    }

    /// Declares a weight of an op that sees `x`: some rows of it, or in a region where every rank computes a part. Dims of it may be split.
    pub(super) fn weight(
        &mut self,
        x: Val,
        name: String,
        shape: &[usize],
        split: &[(usize, Axis)],
        (init, decay): (Init, bool),
    ) -> Weight {
        let lie = &self.values[x.index()].lie;
        // Where a rank has some rows, or its part of the region leaves it a summand of the gradient, so it has of the weight's.
        let summed = |axis: &Axis| match (lie.value[axis.0], lie.gradient[axis.0]) {
            (Spread::Rows, _) => true,
            (Spread::Whole, Spread::Summand) => !split.iter().any(|(_, by)| by == axis),
            _ => false,
        };
        let axes = (0..self.team.axes.len()).map(Axis).filter(summed);
        let summed_over: Vec<&str> = axes.map(|axis| self.team.name(axis)).collect();
        let split: Vec<(usize, &str)> =
            split.iter().map(|(dim, axis)| (*dim, self.team.name(*axis))).collect();
        let (split, summed_over) = (&split[..], &summed_over[..]);
        self.parameters.declare(Declaration { name, shape, split, init, decay, summed_over })
    }

    /// The value as an op wants it to lie.
    pub fn want(&mut self, x: Val, lie: &Lie) -> Val {
        if let Some((_, _, known)) = self.resharded.iter().find(|(from, to, _)| (*from, to) == (x, lie)) {
            return *known;
        }
        let y = self.reshard(x, lie);
        self.resharded.push((x, lie.clone(), y));
        y
    }

    fn reshard(&mut self, mut x: Val, lie: &Lie) -> Val {
        for axis in (0..self.team.axes.len()).map(Axis) {
            let now = self.typed(x).clone();
            let at = |lie: &Lie| (lie.value[axis.0], lie.gradient[axis.0]);
            if at(&now.lie) == at(lie) {
                continue;
            }
            let mut next = now.lie.clone();
            (next.value[axis.0], next.gradient[axis.0]) = at(lie);
            let out = self.matrix(now.all_rows, now.cols, next);
            let reshard = Reshard::new(
                axis,
                self.team.along(axis).size,
                (now.all_rows, now.cols),
                at(&now.lie),
                at(lie),
            );
            #[cfg(test)]
            let reshard = if self.team.along(axis).size > 1 {
                self.spoiled.1 += 1;
                if self.spoiled.0 == Some(self.spoiled.1 - 1) { reshard.spoiled() } else { reshard }
            } else {
                reshard
            };
            let same = reshard.is_same();
            x = self.add(Box::new(reshard), &[x], out, Keep::Always, same);
        }
        x
    }
}
