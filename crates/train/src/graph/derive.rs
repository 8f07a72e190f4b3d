//! The passes of a graph, as lists, and what has to be kept between them.
//!
//! Everything that passes read and write has a slot. B walks over the ops from the last to the first; a value that several ops use has
//! as many gradients, which are added up as they come. What a step reads that was not kept is computed again just before. Which
//! slots live on after a pass is then a matter of looking which are read before they are written.

use crate::kernels::Kernels;
use crate::stage::Recompute;

use super::build::{Builder, Keep, Node};
use super::op::{Born, Needs, Reads};
use super::policy::{Action, INPUT, Rule, action};
use super::unit::{Elements, Remembered};
use super::{Kind, Val};

/// Where a value lies while passes run.
pub(super) type Slot = usize;

/// What a step does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum What {
    Forward {
        node: usize,
    },
    Backward {
        node: usize,
        gradient: Option<Slot>,
        residual: Option<Slot>,
        made: Vec<Option<Slot>>,
    },
    Weights {
        node: usize,
        gradient: Option<Slot>,
    },
    /// The sum of two gradients.
    Sum {
        a: Slot,
        b: Slot,
        to: Slot,
    },
}

/// A step of a pass, the slots that it reads, and those that nobody needs any more after it.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub what: What,
    pub reads: Vec<Slot>,
    pub dead: Vec<Slot>,
}

/// The passes of a graph.
pub(super) struct Passes {
    pub slots: Vec<Elements>,
    /// Of every value.
    pub value_slot: Vec<Slot>,
    /// Of every op's extras.
    pub extra_slots: Vec<Vec<Slot>>,
    pub forward: Vec<Step>,
    /// The same without a B behind it.
    pub evaluate: Vec<Step>,
    pub backward: Vec<Step>,
    pub weights: Vec<Step>,
    /// What is kept from F to B, and from B to W.
    pub after_forward: Vec<Slot>,
    /// Of what is kept from F to B, what waits in a file.
    pub filed: Vec<Slot>,
    pub after_backward: Vec<Slot>,
    /// Where the gradients of outputs come in, by output; none for a loss.
    pub output_gradients: Vec<Option<Slot>>,
    /// Where the gradients of inputs are, by input.
    pub input_gradients: Vec<Option<Slot>>,
}

/// Whether F of an op can be run again, so that its result need not be kept.
pub(super) fn can_be_dropped<K: Kernels>(node: &Node<K>) -> bool {
    !node.same && node.op.can_run_again() && !node.op.is_loss()
}

struct Deriver<'g, K: Kernels> {
    nodes: &'g [Node<K>],
    /// The ops whose results are not kept after F.
    dropped: Vec<bool>,
    slots: Vec<Elements>,
    value_slot: Vec<Slot>,
    extra_slots: Vec<Vec<Slot>>,
    /// The op that makes a slot in F.
    maker: Vec<Option<usize>>,
}

impl Passes {
    pub(super) fn of<K: Kernels>(graph: &Builder<'_, '_, K>, recompute: Recompute, rules: &[Rule]) -> Self {
        let drops = |node: &Node<K>| match (action(rules, node.op.name()), node.keep) {
            (_, Keep::Never) => true,
            (Some(Action::Recompute), _) => can_be_dropped(node),
            (Some(_), _) | (None, Keep::Always) => false,
            (None, Keep::Attention) => recompute == Recompute::Attention,
        };
        Self::dropping(graph, graph.nodes.iter().map(drops).collect())
    }

    /// With the results of ops in a file of which rules say so, or say nothing.
    pub(super) fn filing<K: Kernels>(mut self, graph: &Builder<'_, '_, K>, rules: &[Rule]) -> Self {
        let mut makers = vec![INPUT; self.slots.len()];
        for (node, extras) in graph.nodes.iter().zip(&self.extra_slots).filter(|(node, _)| !node.same) {
            let made = std::iter::once(&self.value_slot[node.out.index()]).chain(extras);
            made.for_each(|&slot| makers[slot] = node.op.name());
        }
        let is_filed = |slot: &Slot| matches!(action(rules, makers[*slot]), None | Some(Action::Offload));
        self.filed = self.after_forward.iter().copied().filter(is_filed).collect();
        self
    }

    /// What is held between them.
    pub(super) fn remembered(&self) -> Remembered {
        let held = |slots: &[Slot]| slots.iter().map(|&slot| self.slots[slot]).sum();
        Remembered {
            after_forward: held(&self.after_forward),
            filed: held(&self.filed),
            after_backward_input: held(&self.after_backward),
        }
    }

    /// Where the results of these ops are not kept after F.
    pub(super) fn dropping<K: Kernels>(graph: &Builder<'_, '_, K>, dropped: Vec<bool>) -> Self {
        Deriver::new(graph, dropped).derive(graph)
    }
}

impl<'g, K: Kernels> Deriver<'g, K> {
    fn new(graph: &'g Builder<'_, '_, K>, dropped: Vec<bool>) -> Self {
        let mut this = Self {
            nodes: &graph.nodes,
            dropped,
            slots: vec![],
            value_slot: vec![usize::MAX; graph.values.len()],
            extra_slots: vec![],
            maker: vec![],
        };
        for input in &graph.inputs {
            this.value_slot[input.val.index()] = this.slot(elements(graph, input.val));
        }
        for (n, node) in graph.nodes.iter().enumerate() {
            if node.same {
                this.value_slot[node.out.index()] = this.value_slot[node.ins[0].index()];
                this.extra_slots.push(vec![]);
                continue;
            }
            let out = this.slot(elements(graph, node.out));
            this.value_slot[node.out.index()] = out;
            let extras: Vec<(Slot, Born)> =
                node.op.extras().iter().map(|e| (this.slot(e.elements), e.born)).collect();
            this.maker.resize(this.slots.len(), None);
            this.maker[out] = Some(n);
            for &(slot, born) in &extras {
                this.maker[slot] = (born == Born::Forward).then_some(n);
            }
            this.extra_slots.push(extras.into_iter().map(|(slot, _)| slot).collect());
        }
        this
    }

    fn slot(&mut self, elements: Elements) -> Slot {
        self.slots.push(elements);
        self.maker.push(None);
        self.slots.len() - 1
    }

    fn derive(mut self, graph: &Builder<'_, '_, K>) -> Passes {
        let forward: Vec<What> = (0..self.nodes.len())
            .filter(|&n| !self.nodes[n].same)
            .map(|node| What::Forward { node })
            .collect();
        let wanted = self.wants_gradient(graph);
        let mut gradients = Gradients { of: vec![None; graph.values.len()], steps: vec![] };
        let mut output_gradients = vec![];
        for (_, val) in &graph.outputs {
            let loss = graph.typed(*val).kind == Kind::Loss;
            let slot = (!loss && wanted[val.index()]).then(|| self.slot(elements(graph, *val)));
            if let Some(slot) = slot {
                self.contribute(&mut gradients, *val, slot);
            }
            output_gradients.push(slot);
        }
        let mut weights = vec![];
        for n in (0..self.nodes.len()).rev() {
            self.reverse(n, &wanted, &mut gradients, &mut weights);
        }
        let mut backward = self.with_again(gradients.steps, &[]);
        self.make_for_weights(&mut backward, &weights);
        let there = self.made_again(&backward);
        let weights = self.with_again(weights, &there);
        let input_gradients: Vec<Option<Slot>> =
            graph.inputs.iter().map(|i| gradients.of[i.val.index()].filter(|_| i.gradient)).collect();
        let outputs: Vec<Slot> = graph.outputs.iter().map(|(_, val)| self.value_slot[val.index()]).collect();
        let returned: Vec<Slot> = input_gradients.iter().flatten().copied().collect();
        let after_backward = self.live_in(&weights, vec![]);
        let after_forward = {
            let behind = self.live_in(&backward, [after_backward.clone(), returned.clone()].concat());
            let given = |slot: &Slot| !output_gradients.contains(&Some(*slot));
            behind.into_iter().filter(given).collect::<Vec<Slot>>()
        };
        let forward_ends = |kept: &[Slot]| [kept, &outputs].concat();
        Passes {
            evaluate: self.with_deaths(forward.clone(), &outputs),
            forward: self.with_deaths(forward, &forward_ends(&after_forward)),
            backward: self.with_deaths(backward, &[after_backward.clone(), returned].concat()),
            weights: self.with_deaths(weights, &[]),
            slots: self.slots,
            value_slot: self.value_slot,
            extra_slots: self.extra_slots,
            after_forward,
            filed: vec![],
            after_backward,
            output_gradients,
            input_gradients,
        }
    }

    /// Whether a value depends on anything that learns, or somebody waits for its gradient.
    fn wants_gradient(&self, graph: &Builder<'_, '_, K>) -> Vec<bool> {
        let mut wanted = vec![false; graph.values.len()];
        for input in &graph.inputs {
            wanted[input.val.index()] = input.gradient;
        }
        for node in self.nodes {
            let ins = node.ins.iter().any(|v| wanted[v.index()]);
            wanted[node.out.index()] = ins || node.op.has_weights();
        }
        wanted
    }

    /// An op's part in B and in W.
    fn reverse(&mut self, n: usize, wanted: &[bool], gradients: &mut Gradients, weights: &mut Vec<What>) {
        let node = &self.nodes[n];
        let gradient = gradients.of[node.out.index()];
        if gradient.is_none() && !node.op.is_loss() {
            return;
        }
        if node.op.has_weights() {
            weights.push(What::Weights { node: n, gradient });
        }
        let needs = node.op.needs();
        let own = |i: usize| wanted[node.ins[i].index()] && !node.op.passes_gradient(i);
        let residual = needs.adds_to.filter(|&i| own(i)).and_then(|i| gradients.of[node.ins[i].index()]);
        let made: Vec<Option<Slot>> = (0..node.ins.len())
            .map(|i| {
                let elements = self.slots[self.value_slot[node.ins[i].index()]];
                own(i).then(|| self.slot(elements))
            })
            .collect();
        let runs = made.iter().any(Option::is_some) || self.is_born_in_backward(n);
        if runs {
            gradients.steps.push(What::Backward { node: n, gradient, residual, made: made.clone() });
        }
        for (i, &val) in self.nodes[n].ins.iter().enumerate() {
            match (made[i], gradient) {
                (Some(slot), _) if residual.is_some() && needs.adds_to == Some(i) => {
                    gradients.of[val.index()] = Some(slot);
                }
                (Some(slot), _) => self.contribute(gradients, val, slot),
                (None, Some(gradient)) if wanted[val.index()] => self.contribute(gradients, val, gradient),
                _ => {}
            }
        }
    }

    fn is_born_in_backward(&self, n: usize) -> bool {
        self.nodes[n].op.extras().iter().any(|e| e.born == Born::Backward)
    }

    /// Another gradient of a value.
    fn contribute(&mut self, gradients: &mut Gradients, val: Val, slot: Slot) {
        let sum = match gradients.of[val.index()] {
            None => slot,
            Some(a) => {
                let to = self.slot(self.slots[a]);
                gradients.steps.push(What::Sum { a, b: slot, to });
                to
            }
        };
        gradients.of[val.index()] = Some(sum);
    }

    /// Puts before every step what has to be computed again for it. What is in `there` is not.
    fn with_again(&self, steps: Vec<What>, there: &[Slot]) -> Vec<What> {
        let mut list = vec![];
        let mut there = there.to_vec();
        for what in steps {
            for slot in self.reads(&what) {
                self.again(slot, &mut there, &mut list);
            }
            list.push(what);
        }
        list
    }

    fn again(&self, slot: Slot, there: &mut Vec<Slot>, list: &mut Vec<What>) {
        let Some(n) = self.maker.get(slot).copied().flatten().filter(|&n| self.dropped[n]) else { return };
        if there.contains(&slot) {
            return;
        }
        let step = What::Forward { node: n };
        for read in self.reads(&step) {
            self.again(read, there, list);
        }
        there.extend(self.writes(&step));
        list.push(step);
    }

    /// W has no weights to compute with: what it needs again that takes some is made at the end of B.
    fn make_for_weights(&self, backward: &mut Vec<What>, weights: &[What]) {
        let mut there: Vec<Slot> = backward.iter().flat_map(|what| self.writes(what)).collect();
        for slot in weights.iter().flat_map(|what| self.reads(what)) {
            let mut list = vec![];
            self.again(slot, &mut there.clone(), &mut list);
            let takes_weights =
                |what: &What| matches!(what, What::Forward { node } if self.nodes[*node].op.has_weights());
            if list.iter().any(takes_weights) {
                self.again(slot, &mut there, backward);
            }
        }
    }

    /// What B computed again and W may use: not what is cheaper to compute than to keep.
    fn made_again(&self, backward: &[What]) -> Vec<Slot> {
        let again = backward.iter().filter(|what| match what {
            What::Forward { node } => self.nodes[*node].keep != Keep::Never,
            _ => false,
        });
        again.flat_map(|what| self.writes(what)).collect()
    }

    fn reads(&self, what: &What) -> Vec<Slot> {
        match what {
            What::Forward { node } => {
                self.nodes[*node].ins.iter().map(|v| self.value_slot[v.index()]).collect()
            }
            What::Backward { node, gradient, residual, .. } => {
                let Needs { backward, .. } = self.nodes[*node].op.needs();
                self.read_by(*node, &backward, *gradient).chain(*residual).collect()
            }
            What::Weights { node, gradient } => {
                let Needs { weights, .. } = self.nodes[*node].op.needs();
                self.read_by(*node, &weights, *gradient).collect()
            }
            What::Sum { a, b, .. } => vec![*a, *b],
        }
    }

    fn read_by(
        &self,
        n: usize,
        reads: &Reads,
        gradient: Option<Slot>,
    ) -> impl Iterator<Item = Slot> + use<K> {
        let node = &self.nodes[n];
        let mut slots: Vec<Slot> = reads.ins.iter().map(|&i| self.value_slot[node.ins[i].index()]).collect();
        slots.extend(reads.out.then(|| self.value_slot[node.out.index()]));
        slots.extend(reads.extras.iter().map(|&e| self.extra_slots[n][e]));
        slots.extend(gradient.filter(|_| reads.gradient));
        slots.into_iter()
    }

    fn writes(&self, what: &What) -> Vec<Slot> {
        let extras = |n: usize, born: Born| {
            let list = self.nodes[n].op.extras();
            let slots = self.extra_slots[n].clone();
            slots.into_iter().zip(list).filter(move |(_, e)| e.born == born).map(|(slot, _)| slot)
        };
        match what {
            What::Forward { node } => {
                let out = self.value_slot[self.nodes[*node].out.index()];
                [out].into_iter().chain(extras(*node, Born::Forward)).collect()
            }
            What::Backward { node, made, .. } => {
                made.iter().flatten().copied().chain(extras(*node, Born::Backward)).collect()
            }
            What::Weights { .. } => vec![],
            What::Sum { to, .. } => vec![*to],
        }
    }

    /// What has to be there before a list, if `after` is wanted behind it; in ascending order.
    fn live_in(&self, list: &[What], after: Vec<Slot>) -> Vec<Slot> {
        let mut live: std::collections::BTreeSet<Slot> = after.into_iter().collect();
        for what in list.iter().rev() {
            for slot in self.writes(what) {
                live.remove(&slot);
            }
            live.extend(self.reads(what));
        }
        live.into_iter().collect()
    }

    /// Says after every step what dies there: read or written for the last time, and not wanted behind the list.
    fn with_deaths(&self, list: Vec<What>, after: &[Slot]) -> Vec<Step> {
        let mut wanted: std::collections::BTreeSet<Slot> = after.iter().copied().collect();
        let mut steps: Vec<Step> = list
            .into_iter()
            .rev()
            .map(|what| {
                let (reads, writes) = (self.reads(&what), self.writes(&what));
                let touched = reads.iter().chain(&writes).copied();
                let mut dead: Vec<Slot> = touched.filter(|slot| !wanted.contains(slot)).collect();
                dead.sort_unstable();
                dead.dedup();
                for slot in writes {
                    wanted.remove(&slot);
                }
                wanted.extend(&reads);
                Step { what, reads, dead }
            })
            .collect();
        steps.reverse();
        steps
    }
}

/// The gradients that are known so far, and what it took.
struct Gradients {
    of: Vec<Option<Slot>>,
    steps: Vec<What>,
}

fn elements<K: Kernels>(graph: &Builder<'_, '_, K>, val: Val) -> Elements {
    let typed = graph.typed(val);
    match typed.kind {
        Kind::Real => Elements::elems(typed.len()),
        Kind::Ids => Elements { ids: typed.len(), ..Elements::default() },
        Kind::Loss => Elements::default(),
    }
}
