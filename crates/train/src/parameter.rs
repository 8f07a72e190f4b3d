//! Parameters: weights by name, their layouts, and where they lie in a rank's flat buffer.
//!
//! A stage's weights on one rank lie one behind the other in one buffer, and their gradients in another, at the same places. So
//! an optimizer, a bucketed all-reduce, ZeRO's shards and a checkpoint all work on runs of one buffer:
//!
//! ```text
//! h.0.ln_1.weight | h.0.ln_1.bias | h.0.attn.c_attn.weight (this rank's heads) | ..
//! ```
//!
//! What a weight is initially depends on (seed, name, its index in the whole weight) alone, so every layout of a model starts from the
//! same one. A name that occurs in several stages is one parameter (tied embeddings): the runtime adds up its gradients.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crossmesh_core::layout::Layout;
use crossmesh_core::region::Region;

use crate::boxes::of_run;
use crate::deal::Runs;
use crate::kernels::random::Stream;
use crate::kernels::scalar::Scalar;
use crate::stage_rank::{StageRank, shard_dims};

/// What a parameter is before the first step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    Normal { deviation: f64 },
}

/// A weight of a stage, as one rank holds it.
#[derive(Debug, Clone)]
pub struct Parameter {
    pub name: String,
    /// The whole weight over the stage's mesh.
    pub layout: Layout,
    /// Its gradient as W leaves it: split in the same way, with sums over ranks still to be taken.
    pub grad: Layout,
    /// This rank's shard in the flat buffer, row-major.
    pub range: Range<usize>,
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub decay: bool,
}

impl Parameter {
    /// Fills a run of this rank's shard.
    pub fn initialize<T: Scalar>(&self, coord: &[u32], seed: u64, run: Range<usize>, values: &mut [T]) {
        match self.init {
            Init::Zeros => values.fill(T::ZERO),
            Init::Ones => values.fill(T::ONE),
            Init::Normal { deviation } => {
                let stream = Stream::named(seed, &self.name);
                let boxes = of_run(&self.layout, coord, &(run.start as u64..run.end as u64));
                let mut values = values.iter_mut();
                for region in boxes {
                    each_index(self.layout.shape(), &region, |index| {
                        let value = values.next().expect("a run is as long as its boxes");
                        *value = T::from_f64(deviation * stream.normal(index));
                    });
                }
            }
        }
    }
}

/// All of a rank's parameters, initialized.
pub fn initial<T: Scalar>(parameters: &[Parameter], coord: &[u32], seed: u64) -> Vec<T> {
    initial_runs(parameters, coord, seed, &Runs::whole(parameters.last().map_or(0, |p| p.range.end)))
}

/// Some runs of them.
pub fn initial_runs<T: Scalar>(parameters: &[Parameter], coord: &[u32], seed: u64, runs: &Runs) -> Vec<T> {
    let mut kept = vec![T::ZERO; runs.len()];
    let (mut rest, mut before) = (&mut kept[..], 0);
    let mut jobs = vec![];
    for p in parameters {
        for (run, at) in runs.within(&p.range) {
            let (_, behind) = rest.split_at_mut(at - before);
            let (of_run, behind) = behind.split_at_mut(run.len());
            (rest, before) = (behind, at + run.len());
            for (i, piece) in of_run.chunks_mut(PIECE).enumerate() {
                let start = run.start - p.range.start + i * PIECE;
                jobs.push((p, start..start + piece.len(), piece));
            }
        }
    }
    let threads =
        if runs.len() < MANY { 1 } else { std::thread::available_parallelism().map_or(1, usize::from) };
    let jobs = Mutex::new(jobs.into_iter());
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((p, of_shard, piece)) = next() {
            p.initialize(coord, seed, of_shard, piece);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    kept
}

/// Elements that are drawn together; fewer than so many are not worth more threads. Every element is drawn by its own address: who draws it makes no
/// difference.
const PIECE: usize = 1 << 20;
const MANY: usize = 4 * PIECE;

/// The index in the whole tensor of every element of a rank's shard, in the shard's order.
pub fn shard_indices(layout: &Layout, coord: &[u32]) -> Vec<u64> {
    let shape = layout.shape();
    let mut indices = Vec::new();
    for region in layout.shard_at(coord) {
        each_index(shape, &region, |index| indices.push(index));
    }
    indices
}

/// The index in the whole tensor of every element of a box, row-major.
fn each_index(shape: &[u64], region: &Region, mut f: impl FnMut(u64)) {
    let spans = region.spans();
    let mut at: Vec<u64> = spans.iter().map(|s| s.start).collect();
    for _ in 0..region.volume() {
        f(at.iter().zip(shape).fold(0, |index, (i, len)| index * len + i));
        for dim in (0..at.len()).rev() {
            at[dim] += 1;
            if at[dim] < spans[dim].end {
                break;
            }
            at[dim] = spans[dim].start;
        }
    }
}

/// Where a rank's shard of a weight lies, and its dims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    pub start: usize,
    pub dims: Vec<usize>,
}

impl Weight {
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A weight to be declared.
#[derive(Debug, Clone)]
pub struct Declaration<'a> {
    pub name: String,
    pub shape: &'a [usize],
    /// Dims that are split, and the axes that split them.
    pub split: &'a [(usize, &'a str)],
    pub init: Init,
    pub decay: bool,
    /// Axes along which a rank sees only a part of what the gradient sums over.
    pub summed_over: &'a [&'a str],
}

/// Lays out the parameters of a stage while its layers are made.
#[derive(Debug)]
pub struct Parameters<'a> {
    pub place: &'a StageRank,
    dtype: crossmesh_core::dtype::DType,
    list: Vec<Parameter>,
    /// Where they are in it: a model of thousands of layers has many.
    by_name: std::collections::BTreeMap<String, usize>,
    /// Declared again, since somebody asked.
    again: Vec<Range<usize>>,
}

impl<'a> Parameters<'a> {
    pub fn new<T: Scalar>(place: &'a StageRank) -> Self {
        Self { place, dtype: T::DTYPE, list: Vec::new(), by_name: Default::default(), again: vec![] }
    }

    /// A new weight behind the others; or the one of this name, if there is one already.
    pub fn declare(&mut self, declaration: Declaration<'_>) -> Weight {
        let Declaration { name, shape, split, init, decay, summed_over } = declaration;
        let layout = self.place.weight_layout(self.dtype, shape, split);
        let dims = shard_dims(&layout, self.place.coord());
        if let Some(known) = self.by_name.get(&name).map(|at| &self.list[*at]) {
            assert_eq!(known.layout, layout, "{name} is declared twice, with different layouts");
            self.again.push(known.range.clone());
            return Weight { start: known.range.start, dims };
        }
        let start = self.end();
        let weight = Weight { start, dims };
        let grad = self.place.grad_layout(&layout, summed_over);
        let range = start..start + weight.len();
        self.by_name.insert(name.clone(), self.list.len());
        self.list.push(Parameter { name, layout, grad, range, init, decay });
        weight
    }

    /// Weights that were declared so far, each once.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Declares some again that were declared before, under names that begin otherwise.
    pub fn repeat(&mut self, list: Range<usize>, from: &str, to: &str) {
        for at in list {
            let mut parameter = self.list[at].clone();
            let rest = parameter.name.strip_prefix(from).expect("the names of a repeated unit begin alike");
            let (start, len) = (self.end(), parameter.range.len());
            (parameter.name, parameter.range) = (format!("{to}{rest}"), start..start + len);
            let old = self.by_name.insert(parameter.name.clone(), self.list.len());
            assert_eq!(old, None, "{} is declared twice", parameter.name);
            self.list.push(parameter);
        }
    }

    /// Weights before `start` that were declared again since the last call.
    pub fn take_borrowed(&mut self, start: usize) -> Vec<Range<usize>> {
        let mut borrowed = std::mem::take(&mut self.again);
        borrowed.retain(|range| range.start < start);
        borrowed.sort_by_key(|range| range.start);
        borrowed.dedup();
        borrowed
    }

    /// Elements so far.
    pub fn end(&self) -> usize {
        self.list.last().map_or(0, |p| p.range.end)
    }

    pub fn into_list(self) -> Vec<Parameter> {
        self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declare(place: &StageRank) -> Vec<Parameter> {
        let mut parameters = Parameters::new::<f64>(place);
        let normal = Init::Normal { deviation: 0.5 };
        for (name, split) in [("a", Some(0)), ("b", Some(1)), ("c", None), ("a", Some(0))] {
            let name = name.to_string();
            let (init, decay, summed_over) = (normal, true, &[][..]);
            let split: Vec<_> = split.map(|dim| (dim, "tp")).into_iter().collect();
            let shape = &[5, 4];
            parameters.declare(Declaration { name, shape, split: &split, init, decay, summed_over });
        }
        parameters.into_list()
    }

    #[test]
    fn every_layout_starts_from_the_same_weights() {
        let alone = StageRank::alone();
        let whole_list = declare(&alone);
        assert_eq!(whole_list.len(), 3);
        let whole = initial::<f64>(&whole_list, alone.coord(), 7);
        for tp in 1..4 {
            for position in 0..2 * tp {
                let mesh = format!("A{{dp:2,tp:{tp}}}").parse().unwrap();
                let place = StageRank::new(mesh, position).unwrap();
                let list = declare(&place);
                let shard = initial::<f64>(&list, place.coord(), 7);
                for (p, all) in list.iter().zip(&whole_list) {
                    let wanted: Vec<f64> = shard_indices(&p.layout, place.coord())
                        .iter()
                        .map(|&i| whole[all.range.clone()][i as usize])
                        .collect();
                    assert_eq!(shard[p.range.clone()], wanted[..], "{} at {position}", p.layout);
                }
            }
        }
    }

    #[test]
    fn names_and_seeds_tell_weights_apart() {
        let alone = StageRank::alone();
        let list = declare(&alone);
        let first = initial::<f64>(&list, alone.coord(), 7);
        assert_ne!(first[list[0].range.clone()], first[list[2].range.clone()]);
        assert_ne!(first, initial::<f64>(&list, alone.coord(), 8));
    }
}
