//! One step of a run, predicted beside measured: the page's data.

use std::collections::BTreeMap;

use anyhow::Result;
use crossmesh_core::id::Rank;
use crossmesh_core::schedule::{Pass, PassKind};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::{PassTimes, Step, StepReport, lower_lists, lower_step};
use crossmesh_train::by_precision;
use crossmesh_train::record::StepRecord;
use crossmesh_train::runtime::step_lists;

use crate::report::train::{RankTimes, Timeline, TimelineRow, TrainReport};

use super::Training;
use super::board::Seen;

pub fn report(training: &Training, seen: &Seen, tokens: bool) -> TrainReport {
    let place = |rank: &Rank| format!("{rank}");
    TrainReport {
        schema: "crossmesh.train-report/1",
        name: training.doc.name.clone(),
        about: training.about(),
        data: training.data.describe(),
        reachable_loss: training.data.reachable_loss(),
        speed_unit: if tokens { "tokens/s" } else { "samples/s" },
        metrics: seen.metrics.clone(),
        ranks: seen.means.iter().map(|(rank, times)| RankTimes::new(place(rank), times)).collect(),
        // A picture that cannot be made must not cost the rest of the page.
        timeline: seen.shown.as_ref().and_then(|records| timeline(training, records).ok()),
        config: training.doc.config.clone(),
    }
}

fn timeline(training: &Training, records: &BTreeMap<Rank, StepRecord>) -> Result<Timeline> {
    let step = &training.wiring.step;
    let predicted = predict(training, measured_times(step.times.len(), records))?.report;
    let mut rows = vec![];
    for device in &predicted.devices {
        let span = |(pass, span): &(Pass, crossmesh_core::trace::OpSpan)| {
            (pass.to_string(), span.start_s, span.end_s)
        };
        let name = format!("d{} predicted", device.device.0);
        rows.push(TimelineRow { name, predicted: true, passes: device.passes.iter().map(span).collect() });
        for rank in step.ranks_of(device.device) {
            let Some(record) = records.get(rank) else { continue };
            let passes = record.passes.iter().map(|p| (p.pass.clone(), p.start, p.end)).collect();
            rows.push(TimelineRow { name: format!("{rank} measured"), predicted: false, passes });
        }
    }
    Ok(Timeline {
        step: records.values().next().map_or(0, |r| r.step + 1),
        rows,
        predicted_s: predicted.step_s,
        measured_s: records.values().map(|r| r.times.step).fold(0.0, f64::max),
    })
}

/// A step that was simulated.
pub struct Predicted {
    pub report: StepReport,
    /// How many ops of collectives inside passes were left out, because they are too many.
    pub left_out: usize,
}

/// Ops of collectives inside passes that are simulated: more would take minutes.
const MAX_OPS: usize = 1 << 18;

/// A step of the job, where passes compute for so long. What ranks say to each other inside them is simulated on the same links as what crosses between
/// stages.
pub fn predict(training: &Training, times: Vec<PassTimes>) -> Result<Predicted> {
    let step = Step { times, ..training.wiring.step.clone() };
    let lists = by_precision!(training.config.train.precision, K => {
        let model = training.resolved.model.with_kernels::<K>();
        step_lists(&*model, &training.resolved.job, &training.wiring)?
    });
    let lowered = lower_step(&step)?;
    let ops = lists.num_ops();
    let (lowered, left_out) = match ops <= MAX_OPS {
        true => {
            let lists = lists.retimed(|_, pass| step.times[pass.stage.index()].of(pass).unwrap_or(0));
            (lower_lists(&lowered, &lists)?, 0)
        }
        false => (lowered, ops),
    };
    let report = StepReport::of(&step, &lowered, &simulate(&lowered.program, &step.cluster)?);
    Ok(Predicted { report, left_out })
}

/// How long the passes of every stage computed, over microbatches and ranks: without what they stood still for others.
pub fn measured_times(stages: usize, records: &BTreeMap<Rank, StepRecord>) -> Vec<PassTimes> {
    let mut sums: BTreeMap<(usize, PassKind), (f64, f64)> = BTreeMap::new();
    for span in records.values().flat_map(|r| &r.passes) {
        if let Ok(pass) = span.pass.parse::<Pass>() {
            let sum = sums.entry((pass.stage.index(), pass.kind)).or_default();
            *sum = (sum.0 + span.end - span.start - span.waited, sum.1 + 1.0);
        }
    }
    let mean = |stage: usize, kind: PassKind| sums.get(&(stage, kind)).map(|(sum, count)| sum / count);
    let ns = |seconds: Option<f64>| (seconds.unwrap_or(0.0) * 1e9).round() as u64;
    let times = |stage: usize| {
        // Of a fused backward only the whole is known, and only the whole matters.
        let half = mean(stage, PassKind::BW).map(|both| both / 2.0);
        PassTimes {
            f_ns: ns(mean(stage, PassKind::F)),
            b_ns: ns(mean(stage, PassKind::B).or(half)),
            w_ns: ns(mean(stage, PassKind::W).or(half)),
            optimizer_ns: ns(mean(stage, PassKind::Optimizer)),
        }
    };
    (0..stages).map(times).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::metrics::tests::record;
    use crossmesh_train::record::PassSpan;

    #[test]
    fn times_are_means_over_microbatches_and_ranks() {
        let pass = |pass: &str, start: f64, end: f64| {
            // A quarter of a second of every pass is for others.
            PassSpan { pass: pass.into(), start, end: end + 0.25, waited: 0.25 }
        };
        let with = |passes: Vec<PassSpan>| StepRecord { passes, ..record(0, 1.0, 1.0) };
        let first = with(vec![pass("0F0", 0.0, 1.0), pass("0F1", 1.0, 3.0), pass("0BW0", 3.0, 7.0)]);
        let second = with(vec![pass("1F0", 0.0, 0.5), pass("1B0", 0.5, 1.0), pass("1W0", 1.0, 1.25)]);
        let times = measured_times(2, &[(Rank(0), first), (Rank(1), second)].into());
        let seconds = |t: &PassTimes| [t.f_ns, t.b_ns, t.w_ns].map(|ns| ns as f64 * 1e-9);
        assert_eq!(seconds(&times[0]), [1.5, 2.0, 2.0]);
        assert_eq!(seconds(&times[1]), [0.5, 0.5, 0.25]);
    }
}
