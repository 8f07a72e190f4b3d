//! How a stage's gradients are summed: which of its parameters' in which way, over which axes, and in which pieces.
//!
//! Whoever sums them goes by this ([`crate::runtime`]), and whoever only says what is summed when (its `lists`).

use std::ops::Range;

use crate::deal::Runs;
use crate::job::Update;
use crate::optim::is_split_over_tp;
use crate::parameter::Parameter;
use crate::stage_rank::StageRank;

/// How a parameter's gradient is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Over the data axes; a part is enough where states are dealt out.
    Plain,
    /// Over the data axes, and all of it is needed.
    Tied,
    /// Over all ranks of the mesh.
    Partial,
    /// Over `dp` and the ranks along `tp` that share it.
    Shared,
    /// The same on all ranks along `tp`: over the mesh, where the first one's counts.
    Replica,
}

/// The axes that parameters, gradients and states are dealt out over, and those along which ranks gather and scatter in between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ways {
    pub parameters: Vec<usize>,
    pub gradients: Vec<usize>,
    pub states: Vec<usize>,
    pub data: Vec<usize>,
    /// Every microbatch's gradients are summed over these.
    pub summed: Vec<usize>,
    /// From the gradients that are kept to those that states are kept of.
    pub scatter: Vec<usize>,
    /// The ranks among which these are summed then.
    pub rest: Vec<usize>,
    /// From the parameters that were updated to those that are kept.
    pub gather: Vec<usize>,
}

impl Ways {
    pub fn new(rule: &Update, place: &StageRank) -> Self {
        let dealt = &rule.dealt;
        let [parameters, gradients, states] =
            [&dealt.parameters, &dealt.gradients, &dealt.states].map(|over| over.axes(place));
        let data = place.data_axes();
        let without = |axes: &[usize], others: &[usize]| -> Vec<usize> {
            axes.iter().copied().filter(|axis| !others.contains(axis)).collect()
        };
        let summed = if rule.fixed_order { data.clone() } else { gradients.clone() };
        let scatter = without(&without(&states, &gradients), if rule.fixed_order { &data } else { &[] });
        let rest = without(&without(&data, &states), &summed);
        let gather = without(&states, &parameters);
        Self { parameters, gradients, states, data, summed, scatter, rest, gather }
    }

    /// Whether each microbatch's gradients are summed by themselves.
    pub fn sums_each(&self, rule: &Update) -> bool {
        !self.gradients.is_empty() || rule.fixed_order
    }
}

/// A stage's parameters, each with how its gradient is summed.
#[derive(Debug, Clone)]
pub struct Sums {
    parameters: Vec<Parameter>,
    kinds: Vec<Kind>,
}

/// A run is summed in pieces of at most so many buckets, so that what is sent is never much of what there is.
const MAX_BUCKETS: usize = 4;

/// How many numbers such a piece has.
pub fn longest_piece(rule: &Update, bytes_each: usize) -> usize {
    (rule.bucket_bytes.max(1) as usize).saturating_mul(MAX_BUCKETS) / bytes_each
}

impl Sums {
    pub fn new(place: &StageRank, parameters: &[Parameter], tied: &[&str]) -> Self {
        let several = place.tp().size > 1 && place.dp().size > 1;
        let data = place.data_axes();
        let kind = |p: &Parameter| {
            let partial = p.grad.partial().map(|partial| partial.axes.clone()).unwrap_or_default();
            let over_tp = partial.iter().any(|axis| !data.contains(axis));
            match (over_tp, tied.contains(&p.name.as_str())) {
                (true, _) if is_split_over_tp(p) => Kind::Shared,
                (true, _) => Kind::Partial,
                (false, true) => Kind::Tied,
                (false, false) if several && !is_split_over_tp(p) => Kind::Replica,
                (false, false) => Kind::Plain,
            }
        };
        Self { kinds: parameters.iter().map(kind).collect(), parameters: parameters.to_vec() }
    }

    /// Where the flat buffer ends.
    pub fn end(&self) -> usize {
        self.parameters.last().map_or(0, |p| p.range.end)
    }

    /// The runs of a part of the flat buffer whose sums may be dealt out.
    pub fn plain(&self, part: &Range<usize>) -> Vec<Range<usize>> {
        let inside = |p: &&Parameter| part.start <= p.range.start && p.range.end <= part.end;
        let plain = self.parameters.iter().zip(&self.kinds).filter(|(_, kind)| **kind == Kind::Plain);
        let ranges = plain.map(|(p, _)| p).filter(inside).map(|p| p.range.clone());
        Runs::new(ranges).iter().map(|(run, _)| run).collect()
    }

    /// Of the gradients that are kept of a part of the flat buffer: those that cannot be dealt out are kept whole.
    pub fn kept(&self, dealt: &Runs) -> Runs {
        let kept = |(p, kind): (&Parameter, &Kind)| -> Vec<Range<usize>> {
            match kind {
                Kind::Plain => dealt.within(&p.range).map(|(run, _)| run).collect(),
                _ => vec![p.range.clone()],
            }
        };
        Runs::new(self.parameters.iter().zip(&self.kinds).flat_map(kept))
    }

    /// A run of whole parameters in pieces of one kind, from the last to the first, of `longest` numbers at most. What is needed whole stays whole.
    pub fn pieces(&self, run: &Range<usize>, longest: usize) -> Vec<(Kind, Range<usize>)> {
        self.runs(run).into_iter().flat_map(|(kind, run)| pieces(kind, run, longest)).collect()
    }

    /// Neighbours of one kind within a run of whole parameters, from the last to the first.
    fn runs(&self, run: &Range<usize>) -> Vec<(Kind, Range<usize>)> {
        let mut runs: Vec<(Kind, Range<usize>)> = vec![];
        let inside = self.parameters.iter().zip(&self.kinds).rev();
        for (p, kind) in inside.filter(|(p, _)| run.start <= p.range.start && p.range.end <= run.end) {
            match runs.last_mut() {
                Some((last, run)) if last == kind && *kind == Kind::Plain && run.start == p.range.end => {
                    run.start = p.range.start;
                }
                _ => runs.push((*kind, p.range.clone())),
            }
        }
        runs
    }
}

fn pieces(kind: Kind, run: Range<usize>, longest: usize) -> Vec<(Kind, Range<usize>)> {
    if kind != Kind::Plain || run.len() <= longest {
        return vec![(kind, run)];
    }
    let count = run.len().div_ceil(longest.max(1));
    let at = |i: usize| run.start + run.len() * i / count;
    (0..count).rev().map(|i| (kind, at(i)..at(i + 1))).collect()
}
