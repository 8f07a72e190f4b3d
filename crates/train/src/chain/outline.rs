//! How a stage is set up, and all that follows before it has anything to run on: ports, parameters, bytes and operations.
//!
//! Of units that are equal but for names only the first is made: the others have the same numbers, and its weights under their own names.

use std::ops::Range;

use crossmesh_comm::collectives::Element as _;
use crossmesh_core::dtype::DType;
use crossmesh_core::layout::Layout;

use super::Model;
use super::flow::{Shape, Tensor, ports};
use crate::flat::Buckets;
use crate::graph::budget::within;
use crate::graph::{Builder, Cost, Elements, Policies, Remembered, Rule, Team, TeamAxis, Unit};
use crate::kernels::Kernels;
use crate::models::ConfigError;
use crate::parameter::{Parameter, Parameters};
use crate::stage::{ActivationBytes, Port, Recompute};
use crate::stage_rank::{StageRank, shard_dims};
use crate::tier::PENDING;

/// How a stage is set up on a rank.
#[derive(Debug, Clone)]
pub struct Setup {
    pub place: StageRank,
    /// Samples of a microbatch, over all ranks along `dp`.
    pub samples: usize,
    /// Whether the rows between tensor-parallel regions are split over `tp`.
    pub sequence_parallel: bool,
    pub recompute: Recompute,
    /// What goes before `recompute` and `offloaded`, by unit and op.
    pub policies: Policies,
    /// Whether what units keep from F to B waits in a file.
    pub offloaded: bool,
    /// Two halves of a microbatch that take turns, or one.
    pub strands: u32,
    /// Of random numbers during training.
    pub seed: u64,
}

impl Setup {
    /// A stage on one rank that remembers everything.
    pub fn alone(samples: usize, seed: u64) -> Self {
        let (place, recompute) = (StageRank::alone(), Recompute::Nothing);
        let (policies, sequence_parallel, offloaded) = (Policies::default(), false, false);
        Self { place, samples, sequence_parallel, recompute, policies, offloaded, strands: 1, seed }
    }

    /// A unit of a model, as it is put together, with passes that keep what is asked for.
    pub(crate) fn unit<K: Kernels>(&self, unit: usize, graph: Builder<'_, '_, K>) -> Unit<K> {
        Unit::ruled(graph, self.recompute, self.policies.of(unit), self.offloaded)
    }

    /// That of one of two strands: half the samples.
    pub(super) fn strand(&self) -> Result<Self, ConfigError> {
        let recompute = match self.recompute {
            // Both remember.
            Recompute::Within(limit) => Recompute::Within(limit / 2),
            other => other,
        };
        let half = Self { samples: self.samples / 2, strands: 1, recompute, ..self.clone() };
        match 2 * half.own_samples().len() == self.own_samples().len() {
            true => Ok(half),
            false => {
                let reason = format!(
                    "{} samples of a microbatch over {} ranks are no two halves on each",
                    self.samples,
                    self.place.dp().size
                );
                Err(ConfigError::new("strands", 2, reason, "use a multiple of twice the data ranks"))
            }
        }
    }

    /// This rank's samples of a microbatch.
    pub fn own_samples(&self) -> Range<usize> {
        self.place.dp().part(self.samples)
    }

    /// The ranks that compute a pass together: those along `tp`.
    pub fn team(&self) -> Team {
        Team { axes: vec![TeamAxis { name: "tp".into(), along: self.place.tp() }] }
    }

    fn layout(&self, tensor: &Tensor, real: DType) -> Layout {
        let place = &self.place;
        match &tensor.shape {
            Shape::Rows { rows, cols } => {
                place.row_layout(real, self.samples, *rows, *cols, self.sequence_parallel)
            }
            Shape::Samples(dims) => place.sample_layout(real, self.samples, dims),
            Shape::Ids { dims, .. } => place.sample_layout(DType::I32, self.samples, dims),
            Shape::Number => place.loss_layout(),
        }
    }
}

/// What a stage will be, before it has anything to run on.
#[derive(Debug, Clone)]
pub struct Outline {
    pub inputs: Vec<Port>,
    pub outputs: Vec<Port>,
    pub parameters: Vec<Parameter>,
    pub buckets: Buckets,
    pub activations: ActivationBytes,
    /// Operations of a microbatch's F on this rank.
    pub forward: Cost,
    /// Operations of a microbatch that B and W spend on values that F had made.
    pub again: f64,
    /// Bytes on their way to a file and back, where activations wait there: of the largest unit, for every one that may be under way.
    pub in_flight: u64,
}

impl Outline {
    /// The units `range` of a model, as the rank at the setup's place holds them.
    pub fn new<K: Kernels>(
        model: &dyn Model<K>,
        range: Range<usize>,
        setup: &Setup,
    ) -> Result<Self, ConfigError> {
        let (sketches, laid) = sketched(model, range.clone(), setup)?;
        let activations = match setup.strands {
            2 => {
                let half = setup.strand()?;
                let (sketches, laid) = sketched(model, range, &half)?;
                laid.activation_bytes::<K>(&half, held(&sketches)).twice()
            }
            _ => laid.activation_bytes::<K>(setup, held(&sketches)),
        };
        let again = sketches.iter().map(|sketch| sketch.again(setup.recompute)).sum();
        let forward = sketches.iter().map(|sketch| sketch.forward).sum();
        let largest = sketches.iter().map(|sketch| sketch.remembered.filed.bytes::<K>()).max();
        let in_flight = if setup.offloaded { largest.unwrap_or(0) * (PENDING as u64 + 2) } else { 0 };
        let LaidOut { inputs, outputs, parameters, buckets, .. } = laid;
        Ok(Self { inputs, outputs, parameters, buckets, activations, forward, again, in_flight })
    }

    /// Operations of a microbatch's F, B and W on this rank.
    pub fn passes(&self) -> [f64; 3] {
        self.forward.passes(self.again)
    }

    /// Weights of the unit that has the most, with those that it shares with another.
    pub fn largest_unit(&self) -> usize {
        let unit = |unit| self.buckets.ranges(unit).iter().map(|range| range.len()).sum();
        (0..self.buckets.borrowed.len()).map(unit).max().unwrap_or(0)
    }

    /// The most that units' gradients are, where W hands each unit's over when it is through: what a tied weight gets waits for the first unit that uses it.
    pub fn most_opened(&self) -> usize {
        let (mut open, mut most): (Vec<Range<usize>>, usize) = (vec![], 0);
        for unit in (0..self.buckets.borrowed.len()).rev() {
            for range in self.buckets.ranges(unit) {
                open.retain(|o| o.start < range.start || range.end < o.end);
                open.push(range);
            }
            most = most.max(open.iter().map(|range| range.len()).sum());
            let own = self.buckets.own(unit);
            open.retain(|range| *range != own);
        }
        most
    }

    /// Elements of the flat buffers.
    pub fn num_elements(&self) -> usize {
        self.parameters.last().map_or(0, |p| p.range.end)
    }
}

/// What a stage holds of a microbatch, whatever limit it is given: what each of its units may leave out is found once.
#[derive(Debug, Clone)]
pub struct Limits {
    choices: Vec<Vec<(Remembered, f64)>>,
    offloaded: bool,
    /// Two strands share a limit.
    strands: u64,
}

impl Limits {
    /// The units `range` of a model, as the rank at the setup's place holds them.
    pub fn new<K: Kernels>(
        model: &dyn Model<K>,
        range: Range<usize>,
        setup: &Setup,
    ) -> Result<Self, ConfigError> {
        let setup = Setup { recompute: Recompute::Within(0), ..setup.clone() };
        let strand = if setup.strands == 2 { setup.strand()? } else { setup.clone() };
        let (sketches, _) = sketched(model, range, &strand)?;
        let choices = sketches.into_iter().map(|sketch| sketch.choices).collect();
        Ok(Self { choices, offloaded: setup.offloaded, strands: u64::from(setup.strands) })
    }

    /// Within so many bytes from F to B, or the least there are. What is computed again in B may be held for W: that is not always less where less is held before.
    pub fn held<K: Kernels>(&self, limit: u64) -> ActivationBytes {
        let picks = picked::<K>(limit / self.strands, self.choices.iter().map(Vec::as_slice));
        let held: Remembered = self.choices.iter().zip(picks).map(|(unit, pick)| unit[pick].0).sum();
        let forward = if self.offloaded { 0 } else { held.after_forward.bytes::<K>() };
        ActivationBytes {
            after_forward: self.strands * forward,
            after_backward_input: self.strands * held.after_backward_input.bytes::<K>(),
        }
    }
}

/// What a unit of a model computes and weighs, on a rank that has all of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct UnitWork {
    /// Operations of F for one sample.
    pub forward: Cost,
    /// Those that B and W spend on what F had made.
    pub again: f64,
    pub parameters: u64,
}

impl UnitWork {
    /// Operations of F, B and W.
    pub fn passes(&self) -> [f64; 3] {
        self.forward.passes(self.again)
    }
}

/// By unit of a model, from the ops that it consists of. What is computed again to stay within a limit is known when that is shared out.
pub fn unit_work<K: Kernels>(model: &dyn Model<K>, recompute: Recompute) -> Vec<UnitWork> {
    let setup = Setup { recompute, ..Setup::alone(1, 0) };
    let mut sketcher = Sketcher::default();
    let (sketches, laid) = laid_out(model, 0..model.num_units(), &setup, |unit, parameters| {
        sketcher.sketch(model, unit, &setup, parameters)
    });
    let work = |(unit, sketch): (usize, &Sketch)| UnitWork {
        forward: sketch.forward,
        again: sketch.again(recompute),
        // A stage has a copy of what it ties to another one's.
        parameters: laid.buckets.ranges(unit).iter().map(|range| range.len() as u64).sum(),
    };
    sketches.iter().enumerate().map(work).collect()
}

/// The parameters of a whole model, as one rank would hold them; tied ones once.
pub fn parameters<K: Kernels>(model: &dyn Model<K>) -> Vec<Parameter> {
    let setup = Setup::alone(1, 0);
    let mut sketcher = Sketcher::default();
    let (_, laid) = laid_out(model, 0..model.num_units(), &setup, |unit, parameters| {
        sketcher.sketch(model, unit, &setup, parameters)
    });
    laid.parameters
}

/// What of a unit does not depend on what its weights are called.
#[derive(Debug, Clone, PartialEq)]
struct Sketch {
    remembered: Remembered,
    forward: Cost,
    again: f64,
    /// Where memory is to be kept within a limit: the same of every choice.
    choices: Vec<(Remembered, f64)>,
}

impl Sketch {
    /// Operations that B and W spend on what F had made: where only a stage's inputs are kept, all of F runs a second time.
    fn again(&self, recompute: Recompute) -> f64 {
        match recompute {
            Recompute::Everything => self.again + self.forward.matrix + self.forward.attention,
            _ => self.again,
        }
    }
}

/// Sketches units, and remembers the one that others are equal to.
#[derive(Default)]
struct Sketcher {
    /// What its names begin with, its rules, and which weights it declared.
    known: Option<(String, Vec<Rule>, Range<usize>, Sketch)>,
}

impl Sketcher {
    fn sketch<K: Kernels>(
        &mut self,
        model: &dyn Model<K>,
        unit: usize,
        setup: &Setup,
        parameters: &mut Parameters<'_>,
    ) -> Sketch {
        let (prefix, rules) = (model.repeated(unit), setup.policies.of(unit));
        let known = self.known.as_ref().filter(|(_, of_known, ..)| of_known == rules);
        if let (Some(to), Some((from, _, list, sketch))) = (&prefix, known) {
            parameters.repeat(list.clone(), from, to);
            return sketch.clone();
        }
        let before = parameters.count();
        let made = model.unit(unit, setup, parameters);
        let sketch = Sketch {
            remembered: made.remembered(),
            forward: made.cost(),
            again: made.again(),
            choices: made.choices(),
        };
        if let Some(prefix) = prefix {
            self.known = Some((prefix, rules.to_vec(), before..parameters.count(), sketch.clone()));
        }
        sketch
    }
}

/// The units of a stage, sketched.
fn sketched<K: Kernels>(
    model: &dyn Model<K>,
    range: Range<usize>,
    setup: &Setup,
) -> Result<(Vec<Sketch>, LaidOut), ConfigError> {
    model.check(setup)?;
    let mut sketcher = Sketcher::default();
    let (mut sketches, laid) =
        laid_out(model, range, setup, |unit, parameters| sketcher.sketch(model, unit, setup, parameters));
    if let Some(picks) = picks::<K>(setup, sketches.iter().map(|s| &s.choices[..])) {
        for (sketch, choice) in sketches.iter_mut().zip(picks) {
            (sketch.remembered, sketch.again) = sketch.choices[choice];
        }
    }
    Ok((sketches, laid))
}

fn held(sketches: &[Sketch]) -> Remembered {
    sketches.iter().map(|sketch| sketch.remembered).sum()
}

/// Which choice every unit takes, where memory is to be kept within a limit.
fn picks<'a, K: Kernels>(
    setup: &Setup,
    choices: impl Iterator<Item = &'a [(Remembered, f64)]>,
) -> Option<Vec<usize>> {
    let Recompute::Within(limit) = setup.recompute else { return None };
    Some(picked::<K>(limit, choices))
}

fn picked<'a, K: Kernels>(limit: u64, choices: impl Iterator<Item = &'a [(Remembered, f64)]>) -> Vec<usize> {
    let bytes = |(held, again): &(Remembered, f64)| (held.after_forward.bytes::<K>(), *again);
    let choices: Vec<Vec<(u64, f64)>> = choices.map(|unit| unit.iter().map(bytes).collect()).collect();
    within(&choices, limit)
}

/// What some units in a row come to, however they are made.
struct LaidOut {
    buckets: Buckets,
    parameters: Vec<Parameter>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    classes: Vec<Option<usize>>,
    coord: Vec<u32>,
}

fn laid_out<K: Kernels, U>(
    model: &dyn Model<K>,
    range: Range<usize>,
    setup: &Setup,
    mut make: impl FnMut(usize, &mut Parameters<'_>) -> U,
) -> (Vec<U>, LaidOut) {
    assert!(range.end <= model.num_units(), "{range:?} of {} units", model.num_units());
    let mut parameters = Parameters::new::<K::Real>(&setup.place);
    let (mut buckets, mut units) = (Buckets::default(), Vec::new());
    for unit in range.clone() {
        buckets.starts.push(parameters.end());
        units.push(make(unit, &mut parameters));
        let start = buckets.starts[units.len() - 1];
        buckets.borrowed.push(parameters.take_borrowed(start));
    }
    buckets.starts.push(parameters.end());
    let (inputs, outputs) = ports(model, range);
    let port =
        |t: &Tensor| Port { name: t.name.clone(), layout: setup.layout(t, K::Elem::DTYPE), role: t.role };
    let classes = inputs.iter().map(|t| match &t.shape {
        Shape::Ids { classes, .. } => Some(*classes),
        _ => None,
    });
    let laid = LaidOut {
        buckets,
        parameters: parameters.into_list(),
        classes: classes.collect(),
        inputs: inputs.iter().map(port).collect(),
        outputs: outputs.iter().map(port).collect(),
        coord: setup.place.coord().to_vec(),
    };
    (units, laid)
}

impl LaidOut {
    fn activation_bytes<K: Kernels>(&self, setup: &Setup, remembered: Remembered) -> ActivationBytes {
        activation_bytes::<K>(setup, &self.inputs, &self.coord, remembered)
    }
}

fn activation_bytes<K: Kernels>(
    setup: &Setup,
    inputs: &[Port],
    coord: &[u32],
    remembered: Remembered,
) -> ActivationBytes {
    let input = |port: &Port| {
        let len = shard_dims(&port.layout, coord).iter().product();
        match port.layout.dtype() {
            DType::I32 => Elements { ids: len, ..Elements::default() },
            _ => Elements::elems(len),
        }
    };
    let forward = match setup.recompute {
        Recompute::Everything => inputs.iter().map(input).sum::<Elements>().bytes::<K>(),
        _ => remembered.after_forward.bytes::<K>() - remembered.filed.bytes::<K>(),
    };
    ActivationBytes {
        after_forward: forward,
        after_backward_input: remembered.after_backward_input.bytes::<K>(),
    }
}

/// The units of a stage, and what follows from them.
pub(super) struct Parts<K: Kernels> {
    pub(super) units: Vec<Unit<K>>,
    pub(super) buckets: Buckets,
    pub(super) parameters: Vec<Parameter>,
    pub(super) inputs: Vec<Port>,
    pub(super) outputs: Vec<Port>,
    /// How many classes an input of ids has.
    pub(super) classes: Vec<Option<usize>>,
}

impl<K: Kernels> Parts<K> {
    pub(super) fn new(model: &dyn Model<K>, range: Range<usize>, setup: &Setup) -> Result<Self, ConfigError> {
        model.check(setup)?;
        let (mut units, laid) =
            laid_out(model, range, setup, |unit, parameters| model.unit(unit, setup, parameters));
        let choices: Vec<Vec<(Remembered, f64)>> = units.iter().map(Unit::choices).collect();
        if let Some(picks) = picks::<K>(setup, choices.iter().map(Vec::as_slice)) {
            units.iter_mut().zip(picks).for_each(|(unit, choice)| unit.choose(choice));
        }
        let LaidOut { buckets, parameters, inputs, outputs, classes, .. } = laid;
        Ok(Self { units, buckets, parameters, classes, inputs, outputs })
    }

    pub(super) fn activation_bytes(&self, setup: &Setup) -> ActivationBytes {
        let remembered = self.units.iter().map(Unit::remembered).sum();
        activation_bytes::<K>(setup, &self.inputs, setup.place.coord(), remembered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Action;
    use crate::kernels::cpu::Cpu;
    use crate::models::gpt::{Gpt, GptConfig, Residual};
    use crate::models::unet::{Unet, UnetConfig};

    /// Some blocks have one rule, some another.
    fn ruled(units: usize) -> (Policies, bool) {
        let rule = |ops: &[&'static str], action| Rule { ops: ops.to_vec(), action };
        let of = |unit: usize| match unit % 3 {
            0 => vec![rule(&["attention", "norm"], Action::Recompute)],
            1 => vec![rule(&["linear"], Action::Offload), rule(&[], Action::Keep)],
            _ => vec![],
        };
        (Policies::new((0..units).map(of).collect()), true)
    }

    /// What is said of a stage without making its units is what they say.
    #[test]
    fn sketches_are_what_units_come_to() {
        let gpt2 = |tied| GptConfig { tied, hidden: 31, ..GptConfig::new(13, 7, 20, 5, 5) };
        let llama = GptConfig::llama((13, 7), 24, 6, (4, 2), 31);
        let ladder = GptConfig { residual: Residual::Ladder, ..llama.clone() };
        let all =
            [Recompute::Nothing, Recompute::Attention, Recompute::Everything, Recompute::Within(20_000)];
        for config in [gpt2(true), gpt2(false), llama, ladder] {
            let (model, units) = (Gpt::new(config.clone()).unwrap(), config.layers + 2);
            let model: &dyn Model<Cpu<f64>> = &model;
            for (mesh, position, range) in
                [("A{tp:2}", 1, 0..units), ("A{dp:2}", 0, 2..units), ("A{tp:1}", 0, 1..4)]
            {
                let without = (Policies::default(), false);
                let cases = all.map(|recompute| (recompute, without.clone()));
                for (recompute, (policies, offloaded)) in cases.into_iter().chain([(all[0], ruled(units))]) {
                    let place = StageRank::new(model.mesh(&mesh.parse().unwrap()), position).unwrap();
                    let setup = Setup { place, recompute, policies, offloaded, ..Setup::alone(4, 1) };
                    let outline = Outline::new(model, range.clone(), &setup).unwrap();
                    let parts = Parts::new(model, range.clone(), &setup).unwrap();
                    let what = format!("{config:?} {setup:?} {range:?}");
                    assert_eq!(outline.activations, parts.activation_bytes(&setup), "{what}");
                    let again = parts.units.iter().map(Unit::again).sum::<f64>();
                    let Cost { matrix, attention } = outline.forward;
                    let all = if recompute == Recompute::Everything { matrix + attention } else { 0.0 };
                    assert_eq!(outline.again, again + all, "{what}");
                    assert_eq!(outline.forward, parts.units.iter().map(Unit::cost).sum(), "{what}");
                    assert_eq!(outline.buckets, parts.buckets, "{what}");
                    assert_eq!(outline.parameters.len(), parts.parameters.len(), "{what}");
                    for (a, b) in outline.parameters.iter().zip(&parts.parameters) {
                        assert_eq!((&a.name, &a.layout, &a.grad), (&b.name, &b.layout, &b.grad), "{what}");
                        assert_eq!((&a.range, a.init, a.decay), (&b.range, b.init, b.decay), "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_gpt_weighs_what_the_formulas_say() {
        let gpt = Gpt::new(GptConfig::new(100, 16, 24, 3, 4)).unwrap();
        let work = |recompute| unit_work::<Cpu<f32>>(&gpt, recompute);
        let plain = work(Recompute::Nothing);
        assert_eq!(plain.len(), 5);
        // GPT-2's block: 12 d² and 13 d.
        assert_eq!(plain[1].parameters, 12 * 24 * 24 + 13 * 24);
        assert_eq!(plain[0].parameters, 100 * 24 + 16 * 24);
        assert_eq!(plain[0].forward.matrix, 16.0 * 24.0);
        assert_eq!(plain[1].forward.matrix, 2.0 * 16.0 * 12.0 * 24.0 * 24.0);
        // Scores and their sums of values, for the half of the pairs that is not masked.
        assert_eq!(plain[1].forward.attention, 2.0 * 16.0 * 16.0 * 24.0);
        assert_eq!((plain[4].forward.matrix, plain[4].forward.attention), (2.0 * 16.0 * 24.0 * 100.0, 0.0));
        let [f, b, w] = plain[1].passes();
        assert!(f < b && w < f);
        assert_eq!(work(Recompute::Everything)[1].passes(), [f, b + f, w]);
        // The products that make queries, keys and values run again too: 3 d² for every row; and each of the 4 d elements that is made is written.
        let attention = 2.0 * 16.0 * 3.0 * 24.0 * 24.0 + plain[1].forward.attention + 8.0 * 16.0 * 4.0 * 24.0;
        assert_eq!(plain[4].parameters, 100 * 24 + 2 * 24, "a norm, and the table that is tied");
        assert_eq!(work(Recompute::Attention)[1].passes(), [f, b + attention, w]);
    }

    #[test]
    fn most_of_a_u_transformer_is_where_images_are_large() {
        let config = UnetConfig { groups: 8, heads: 4, ..UnetConfig::new(16, 32) };
        let work = unit_work::<Cpu<f32>>(&Unet::new(config).unwrap(), Recompute::Nothing);
        assert!(work.iter().all(|w| w.forward.matrix > 0.0 && w.parameters > 0), "{work:?}");
        let attend = work.iter().filter(|w| w.forward.attention > 0.0).count();
        assert_eq!(attend, 3 + 1 + 6, "three levels down, the middle, and up");
    }
}
