//! The passes of a chain as lists: what a rank computes, when it starts a collective with ranks of its stage, and where it waits for one.

use std::ops::Range;
use std::sync::Arc;

use crossmesh_core::step::lists::{List, Order};

use super::Model;
use super::outline::{Parts, Setup};
use crate::graph::lists::Coming;
pub use crate::graph::lists::Pace;
use crate::graph::{Rule, Unit};
use crate::kernels::Kernels;
use crate::models::ConfigError;
use crate::parameter::Parameters;
use crate::stage::Recompute;

/// Of one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassLists {
    pub forward: List,
    pub backward: List,
    pub weights: List,
}

impl PassLists {
    /// The units `range` of a model, as the rank at the setup's place runs them, in one strand.
    pub fn of<K: Kernels>(
        model: &dyn Model<K>,
        range: Range<usize>,
        setup: &Setup,
        pace: &Pace<'_>,
    ) -> Result<Self, ConfigError> {
        let listed = Listed::new(model, range, &Setup { strands: 1, ..setup.clone() })?;
        let mut lists = Self::default();
        listed.forward(pace, &mut Nothing, &mut lists.forward);
        listed.backward(pace, &mut Nothing, &mut lists.backward);
        listed.weights(pace, &mut Nothing, &mut lists.weights);
        Ok(lists)
    }
}

/// What a rank does between the units of a pass: it fetches weights, and hands gradients over (see [`crate::flat`]).
pub trait Between {
    /// Before a unit's F or B; `next` is the unit that follows.
    fn fetch(&mut self, _unit: usize, _next: Option<usize>, _list: &mut List) {}

    /// Behind a unit's W.
    fn close(&mut self, _unit: usize, _list: &mut List) {}
}

/// All weights are there, and all gradients stay.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nothing;

impl Between for Nothing {}

/// A stage's units, to be walked through.
pub struct Listed<K: Kernels> {
    units: Vec<Arc<Unit<K>>>,
    everything: bool,
    /// Each with half of the samples, whose units these are.
    in_strands: bool,
}

impl<K: Kernels> Listed<K> {
    /// The units `range` of a model, as the rank at the setup's place runs them.
    pub fn new(model: &dyn Model<K>, range: Range<usize>, setup: &Setup) -> Result<Self, ConfigError> {
        let in_strands = setup.strands == 2;
        let strand = if in_strands { setup.strand()? } else { setup.clone() };
        let everything = setup.recompute == Recompute::Everything;
        Ok(Self { units: units(model, range, &strand)?, everything, in_strands })
    }

    /// F, behind what the list has already.
    pub fn forward(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        match self.in_strands {
            true => take_turns(list, |list| self.one_forward(pace, &mut Nothing, list)),
            false => self.one_forward(pace, between, list),
        }
    }

    /// B.
    pub fn backward(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        match self.in_strands {
            true => take_turns(list, |list| self.one_backward(pace, &mut Nothing, list)),
            false => self.one_backward(pace, between, list),
        }
    }

    /// W. Of two strands the second one's gradients are the last that a unit gets.
    pub fn weights(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        if self.in_strands {
            self.one_weights(pace, &mut Nothing, list);
        }
        self.one_weights(pace, between, list);
    }

    fn one_forward(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        self.run(pace, between, list).settle(list);
    }

    fn run(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) -> Coming {
        let mut flow = Coming::default();
        for (i, unit) in self.units.iter().enumerate() {
            between.fetch(i, (i + 1 < self.units.len()).then_some(i + 1), list);
            unit.lister(pace).forward(&mut flow, list);
        }
        flow
    }

    fn one_backward(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        let mut again = match self.everything {
            true => self.run(pace, between, list),
            false => Coming::default(),
        };
        let mut gradients = Coming::default();
        for (i, unit) in self.units.iter().enumerate().rev() {
            between.fetch(i, i.checked_sub(1), list);
            unit.lister(pace).backward(&mut gradients, list);
        }
        gradients.settle(list);
        // Nobody reads what F came to the second time.
        again.settle(list);
    }

    fn one_weights(&self, pace: &Pace<'_>, between: &mut dyn Between, list: &mut List) {
        for (i, unit) in self.units.iter().enumerate().rev() {
            unit.lister(pace).weights(list);
            between.close(i, list);
        }
    }
}

/// Two strands of a pass, alike, of which one goes on where the other waits.
fn take_turns(list: &mut List, strand: impl Fn(&mut List)) {
    let mut one = List::default();
    strand(&mut one);
    let both = [&one, &one];
    *list = std::mem::take(list).then(&Order::by_turns(&both).applied_to(&both));
}

/// The units themselves. Of those that are alike the first stands for all, unless each keeps something else.
fn units<K: Kernels>(
    model: &dyn Model<K>,
    range: Range<usize>,
    setup: &Setup,
) -> Result<Vec<Arc<Unit<K>>>, ConfigError> {
    if let Recompute::Within(_) = setup.recompute {
        let parts = Parts::new(model, range, setup)?;
        return Ok(parts.units.into_iter().map(Arc::new).collect());
    }
    model.check(setup)?;
    let mut parameters = Parameters::new::<K::Real>(&setup.place);
    let mut known: Option<(&[Rule], Arc<Unit<K>>)> = None;
    let unit = |unit: usize| {
        let (repeated, rules) = (model.repeated(unit).is_some(), setup.policies.of(unit));
        if let Some((_, known)) = known.as_ref().filter(|(of_known, _)| repeated && *of_known == rules) {
            return Arc::clone(known);
        }
        let made = Arc::new(model.unit(unit, setup, &mut parameters));
        if repeated {
            known = Some((rules, Arc::clone(&made)));
        }
        made
    };
    Ok(range.map(unit).collect())
}
