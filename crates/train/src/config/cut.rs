//! Where a model is cut into stages: given, or so that the slowest stage is as fast as it can be.

use std::ops::Range;

/// What is shared out evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    /// Operations of all passes.
    Work,
    /// Weights.
    Parameters,
}

/// Cuts units of these weights into one run a stage, none of them empty, so that the largest sum over a stage's share (its ranks) is as
/// small as possible. Where several cuts are as good, the others' sums are kept even too. `None` where there are fewer units than stages.
pub fn cut(weights: &[f64], shares: &[f64]) -> Option<Vec<Range<usize>>> {
    let (units, stages) = (weights.len(), shares.len());
    if stages == 0 || stages > units {
        return None;
    }
    let mut sums = vec![0.0];
    for weight in weights {
        sums.push(sums.last().expect("it has a zero") + weight);
    }
    let cost = |from: usize, to: usize, stage: usize| (sums[to] - sums[from]) / shares[stage];
    // For the first stages and units: the largest cost, the sum of squares, and where the last stage begins.
    let far = (f64::INFINITY, f64::INFINITY, 0);
    let mut best = vec![vec![far; units + 1]; stages + 1];
    best[0][0] = (0.0, 0.0, 0);
    for stage in 0..stages {
        for end in stage + 1..=units - (stages - stage - 1) {
            // From the shortest run to longer ones, which cost more: once that alone is too much, all others are.
            let first = if stage == 0 { 0..1 } else { stage..end };
            for start in first.rev() {
                let (most, squares, _) = best[stage][start];
                let own = cost(start, end, stage);
                if own > best[stage + 1][end].0 {
                    break;
                }
                let found = (most.max(own), squares + own * own, start);
                let known = best[stage + 1][end];
                if (found.0, found.1) < (known.0, known.1) {
                    best[stage + 1][end] = found;
                }
            }
        }
    }
    let mut cuts = vec![];
    let mut end = units;
    for stage in (0..stages).rev() {
        let start = best[stage + 1][end].2;
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    Some(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn largest(weights: &[f64], shares: &[f64], cuts: &[Range<usize>]) -> f64 {
        let cost = |(cut, share): (&Range<usize>, &f64)| weights[cut.clone()].iter().sum::<f64>() / share;
        cuts.iter().zip(shares).map(cost).fold(0.0, f64::max)
    }

    /// Tries every cut.
    fn least(weights: &[f64], shares: &[f64]) -> f64 {
        let [share, rest @ ..] = shares else { return if weights.is_empty() { 0.0 } else { f64::INFINITY } };
        let ends = 1..=weights.len();
        let tried =
            ends.map(|end| (weights[..end].iter().sum::<f64>() / share).max(least(&weights[end..], rest)));
        tried.fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn a_larger_mesh_gets_more() {
        assert_eq!(cut(&[1.0; 6], &[1.0, 2.0]), Some(vec![0..2, 2..6]));
        assert_eq!(cut(&[1.0; 7], &[1.0, 1.0, 1.0]).unwrap().iter().map(Range::len).max(), Some(3));
        assert_eq!(cut(&[1.0], &[1.0, 1.0]), None);
        assert_eq!(cut(&[0.0; 3], &[1.0, 1.0]).map(|cuts| cuts.len()), Some(2));
    }

    proptest! {
        #[test]
        fn no_cut_is_better(
            weights in prop::collection::vec(0u32..20, 1..9),
            shares in prop::collection::vec(1u32..5, 1..5),
        ) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let shares: Vec<f64> = shares.into_iter().map(f64::from).collect();
            let found = cut(&weights, &shares);
            prop_assert_eq!(found.is_some(), shares.len() <= weights.len());
            if let Some(cuts) = found {
                prop_assert_eq!(cuts[0].start, 0);
                prop_assert_eq!(cuts.last().unwrap().end, weights.len());
                prop_assert!(cuts.windows(2).all(|w| w[0].end == w[1].start));
                prop_assert!(cuts.iter().all(|cut| !cut.is_empty()));
                prop_assert!((largest(&weights, &shares, &cuts) - least(&weights, &shares)).abs() < 1e-9);
            }
        }
    }
}
