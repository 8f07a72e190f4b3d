//! What a pass waits for: the one place that knows.
//!
//! ```text
//! F    the F before it on its microbatch's way, and the F at the start of every skip that ends here
//! B    its own F (and Load, if it was moved away), the backward after it, and that at the end of every skip that starts here
//! W    its own B
//! S    the last F of its microbatch           T    every S of its microbatch
//! Evict, Offload  its own F                   Load its own Evict or Offload
//! Optimizer       every W or BW of its stage
//! ```
//! The last backward of a microbatch also waits for every T, where the vocabulary is shared out.

use crate::id::{MicrobatchId, StageId};

use super::{Edge, Pass, PassKind, Schedule};

/// A pass that has to be over first, and what it hands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub pass: Pass,
    pub via: Via,
}

/// How what is needed gets there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Via {
    /// It is of the same stage, and stays where it is.
    Own,
    /// An activation, along the edge. It crosses devices if the edge does.
    Activation(Edge),
    /// A gradient, against the edge.
    Gradient(Edge),
    /// The vocabulary's collectives among all devices.
    Vocabulary,
}

impl Schedule {
    /// What `pass` waits for. A pass that the schedule lacks is named all the same; [`check()`](super::check()) finds it.
    pub fn needs(&self, pass: Pass) -> Vec<Need> {
        let mut needs = Vec::with_capacity(3);
        self.each_need(pass, |need| needs.push(need));
        needs
    }

    /// The same without memory of its own.
    pub fn each_need(&self, pass: Pass, mut visit: impl FnMut(Need)) {
        self.each_own_need(pass, &mut visit);
        if let Some(node) = self.node(pass).filter(|node| self.pairs.contains(node)) {
            // Both start together; what the second needs of the first, it gets.
            let device = self.placement.device(pass.stage).index();
            let second = self.devices[device][(node - self.index.first[device]) as usize + 1];
            self.each_own_need(second, &mut |need| {
                if need.pass != pass {
                    visit(need);
                }
            });
        }
    }

    fn each_own_need(&self, pass: Pass, visit: &mut impl FnMut(Need)) {
        let Pass { kind, stage, microbatch } = pass;
        let own = |kind| Need { pass: pass.with_kind(kind), via: Via::Own };
        match kind {
            PassKind::F => self.activations(pass, visit),
            PassKind::B | PassKind::BW => self.backward_needs(pass, visit),
            PassKind::W => visit(own(PassKind::B)),
            PassKind::S => {
                let last = self.last_stage(microbatch);
                visit(Need { pass: Pass::new(PassKind::F, last, microbatch), via: Via::Vocabulary });
            }
            PassKind::T => self.vocabulary(PassKind::S, microbatch, visit),
            PassKind::Evict | PassKind::Offload => visit(own(PassKind::F)),
            PassKind::Load => {
                let evicted = self.has(pass.with_kind(PassKind::Evict));
                visit(own(if evicted { PassKind::Evict } else { PassKind::Offload }));
            }
            PassKind::Optimizer => {
                for microbatch in self.microbatches().filter(|m| self.routes.visits(*m, stage)) {
                    let fused = Pass::new(PassKind::BW, stage, microbatch);
                    let pass = if self.has(fused) { fused } else { fused.with_kind(PassKind::W) };
                    visit(Need { pass, via: Via::Own });
                }
            }
        }
    }

    /// What a pass makes for other stages, and for which: the other end of [`Schedule::needs`].
    pub fn each_message(&self, pass: Pass, mut visit: impl FnMut(Via, StageId)) {
        let Pass { kind, stage, microbatch } = pass;
        if kind == PassKind::F {
            let chain = self.routes.after(microbatch, stage).map(|to| Edge { from: stage, to });
            let edges = chain.into_iter().chain(self.routes.skips_out(microbatch, stage));
            edges.for_each(|edge| visit(Via::Activation(edge), edge.to));
        } else if kind.is_backward() {
            let chain = self.routes.before(microbatch, stage).map(|from| Edge { from, to: stage });
            let edges = chain.into_iter().chain(self.routes.skips_into(microbatch, stage));
            edges.for_each(|edge| visit(Via::Gradient(edge), edge.from));
        }
    }

    fn activations(&self, pass: Pass, visit: &mut impl FnMut(Need)) {
        let Pass { stage, microbatch, .. } = pass;
        let chain = self.routes.before(microbatch, stage).map(|from| Edge { from, to: stage });
        for edge in chain.into_iter().chain(self.routes.skips_into(microbatch, stage)) {
            visit(Need { pass: pass.at_stage(edge.from), via: Via::Activation(edge) });
        }
    }

    fn backward_needs(&self, pass: Pass, visit: &mut impl FnMut(Need)) {
        let Pass { stage, microbatch, .. } = pass;
        let load = pass.with_kind(PassKind::Load);
        let own = if self.has(load) { load } else { pass.with_kind(PassKind::F) };
        visit(Need { pass: own, via: Via::Own });
        let chain = self.routes.after(microbatch, stage).map(|to| Edge { from: stage, to });
        if chain.is_none() {
            self.vocabulary(PassKind::T, microbatch, visit);
        }
        for edge in chain.into_iter().chain(self.routes.skips_out(microbatch, stage)) {
            visit(Need { pass: self.backward(edge.to, microbatch), via: Via::Gradient(edge) });
        }
    }

    /// Every device's vocabulary pass of this kind for the microbatch.
    fn vocabulary(&self, kind: PassKind, microbatch: MicrobatchId, visit: &mut impl FnMut(Need)) {
        if self.index.nodes[kind as usize].is_empty() {
            return;
        }
        let passes = self.placement.stages().map(|stage| Pass::new(kind, stage, microbatch));
        passes.filter(|pass| self.has(*pass)).for_each(|pass| visit(Need { pass, via: Via::Vocabulary }));
    }

    fn last_stage(&self, microbatch: MicrobatchId) -> StageId {
        match self.routes.num_microbatches() {
            None => StageId::at(self.placement.num_stages() - 1),
            Some(_) => *self.routes.stages(microbatch).last().expect("no route is empty"),
        }
    }
}
