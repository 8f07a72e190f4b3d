//! How a model is cut over ranks: tensors by `tp`, layers by `pp`, experts by `ep`, as a map says.

use std::collections::BTreeMap;

use crossmesh_core::region::{Region, Span};

use super::apply::{Renamed, part_range};
use super::notation::Axis;
use super::view::{Factor, merge};
use super::{NameMap, Stage};
use crate::error::CheckpointError;

/// The axis of layers.
const LAYERS: &str = "l";

/// How many ranks along each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    pub tp: u32,
    pub pp: u32,
    pub ep: u32,
}

impl Parallel {
    /// Ranks in the order of Megatron: tp closest, then ep, then pp.
    fn rank(self, pp: u64, ep: u64, tp: u64) -> u32 {
        ((pp * u64::from(self.ep) + ep) * u64::from(self.tp) + tp) as u32
    }
}

impl NameMap {
    /// The boxes of every tensor that was renamed, each with the rank that has it. Of replicas the first writes.
    pub fn cut(
        &self,
        renamed: &Renamed,
        parallel: Parallel,
    ) -> Result<BTreeMap<String, Vec<(u32, Region)>>, CheckpointError> {
        if parallel.tp == 0 || parallel.pp == 0 || parallel.ep == 0 {
            return Err(CheckpointError::target("tp, pp and ep are 1 at least"));
        }
        let Parallel { tp, pp, ep } = parallel;
        if [pp, ep].into_iter().try_fold(tp, u32::checked_mul).is_none() {
            return Err(CheckpointError::target(format!(
                "tp {tp} x pp {pp} x ep {ep} are more than {} ranks",
                u32::MAX
            )));
        }
        let mut cuts = BTreeMap::new();
        for (name, made) in &renamed.made {
            let rule = &self.rules[made.rule];
            let term = &rule.terms[&renamed.side][made.term];
            let sizes = &renamed.sizes;
            let parts = term.parts().map_or(1, |p| p.len());
            let fixed = |axis: &str| made.holes.get(axis).copied();
            let last = u64::from(parallel.pp) - 1;
            let mut boxes = Vec::new();
            for part in 0..parts {
                let axes = term.axes(part);
                let ranges =
                    |axis: Option<&str>, count: u32| chunks(axis.filter(|a| axes.contains(*a)), count, sizes);
                let layers = axes.contains(LAYERS);
                for (pp, layer) in singles(layers.then_some(LAYERS), parallel.pp, sizes, fixed(LAYERS)) {
                    let experts = rule.ep.as_deref().filter(|a| axes.contains(*a));
                    for (ep, expert) in singles(experts, parallel.ep, sizes, experts.and_then(fixed)) {
                        for (tp, span) in ranges(rule.tp.as_deref(), parallel.tp) {
                            let stage = match (layers, rule.stage) {
                                (true, _) => pp,
                                (false, Stage::First) => 0,
                                (false, Stage::Last) => last,
                            };
                            let span_of = |axis: &str| match axis {
                                LAYERS => layer,
                                a if Some(a) == rule.ep.as_deref() => expert,
                                a if Some(a) == rule.tp.as_deref() => span,
                                _ => None,
                            };
                            let rank = parallel.rank(stage, ep, tp);
                            boxes.extend(
                                regions(&term.dims, part, sizes, &span_of).into_iter().map(|r| (rank, r)),
                            );
                        }
                    }
                }
            }
            cuts.insert(name.clone(), boxes);
        }
        Ok(cuts)
    }
}

type Sizes = super::sizes::Sizes;
/// Which rank along an axis has which part of it; None where it is not cut.
type Ranges = Vec<(u64, Option<Span>)>;

/// torch.chunk's rule.
fn chunks(axis: Option<&str>, count: u32, sizes: &Sizes) -> Ranges {
    let Some(axis) = axis else { return vec![(0, None)] };
    let (len, count) = (sizes[axis], u64::from(count));
    let step = len.div_ceil(count).max(1);
    let range = |i: u64| Span::new(i * step, ((i + 1) * step).min(len));
    // Ranks behind the last element have nothing.
    let all: Ranges = (0..len.div_ceil(step)).map(|i| (i, Some(range(i)))).collect();
    if all.is_empty() { vec![(0, None)] } else { all }
}

/// The same, each index on its own: layers and experts are read one by one. Of an axis in the name, the one index.
fn singles(axis: Option<&str>, count: u32, sizes: &Sizes, fixed: Option<u64>) -> Ranges {
    let one = |rank: u64, range: Option<Span>| {
        let range = range.map_or(0..0, |r| r.start..r.end);
        range.map(move |i| (rank, Some(Span::new(i, i + 1)))).collect::<Vec<_>>()
    };
    let all = chunks(axis, count, sizes);
    if all.iter().all(|(_, range)| range.is_none()) {
        return all;
    }
    let all = all.into_iter().flat_map(|(rank, range)| one(rank, range));
    all.filter(|(_, range)| fixed.is_none_or(|i| range.is_some_and(|r| r.start == i))).collect()
}

/// The boxes of a tensor whose axes are cut like this.
fn regions(
    dims: &[Vec<Axis>],
    part: usize,
    sizes: &Sizes,
    span_of: &dyn Fn(&str) -> Option<Span>,
) -> Vec<Region> {
    let mut boxes: Vec<Vec<Span>> = vec![vec![]];
    for axes in dims {
        let mut stride = 1;
        let mut factors: Vec<Factor> = Vec::new();
        for axis in axes.iter().rev() {
            let (size, span) = match axis {
                Axis::Named { name, .. } => (sizes[name], span_of(name).unwrap_or(Span::new(0, sizes[name]))),
                Axis::Parts(parts) => {
                    let (first, len) = part_range(parts, part, sizes);
                    let inner = parts[part].as_deref().and_then(span_of).unwrap_or(Span::new(0, len));
                    let all = (0..parts.len()).map(|p| part_range(parts, p, sizes).1).sum();
                    (all, Span::new(first + inner.start, first + inner.end))
                }
            };
            factors.push(Factor { size, span, stride });
            stride *= size;
        }
        factors.reverse();
        let flats = merge(&factors);
        boxes = boxes
            .iter()
            .flat_map(|b| flats.iter().map(|f| [&b[..], &[f.span]].concat()).collect::<Vec<_>>())
            .collect();
    }
    boxes.into_iter().map(Region::new).filter(|r| !r.is_empty()).collect()
}
