//! The ways to run a case, and the case at another scale.
//!
//! Time dilation keeps ratios: with NICs `n` times slower and time running `t` times slower than in the case, tensors
//! are `t / n` of their size, and every pass and every message takes `t` times as long as it would.

use anyhow::{Context, Result, anyhow, bail};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::reshard::doc::ClusterDoc;
use crossmesh_core::reshard::lower_bound;
use crossmesh_core::schedule::{
    Costs, Hop, Name, Placement, Routes, Schedule, Spec, StageCost, bound, generate,
};
use crossmesh_core::sim::simulate;
use crossmesh_core::step::doc::{CrossingDoc, SCHEMA, ScheduleDoc, StepDoc, TimesDoc};
use crossmesh_core::step::{PassTimes, Step, StepProgram, StepReport, lower_step};
use crossmesh_core::trace::Link;

use super::Case;

/// A way to run a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Series {
    SendRecv,
    AllGather,
    Broadcast,
    Overlap,
    Eager,
    MinimalWindow,
    Signal,
    /// A schedule with one stage a device, beside flow plans.
    Scheduled(Name),
}

/// The schedules that are series beside the usual ones: one stage a device, and nobody keeps another's activations.
const SCHEDULED: [Name; 4] = [Name::GPipe, Name::ZbH1, Name::ZbH2, Name::Search];

impl Series {
    /// What is compared where nobody says.
    pub const ALL: [Series; 7] = [
        Series::SendRecv,
        Series::AllGather,
        Series::Broadcast,
        Series::Overlap,
        Series::Eager,
        Series::MinimalWindow,
        Series::Signal,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Series::SendRecv => "sendrecv",
            Series::AllGather => "allgather",
            Series::Broadcast => "broadcast",
            Series::Overlap => "overlap",
            Series::Eager => "eager-1f1b",
            Series::MinimalWindow => "minimal-window",
            Series::Signal => "signal",
            Series::Scheduled(name) => name.name(),
        }
    }

    /// All that can be asked for.
    pub fn names() -> Vec<&'static str> {
        Self::ALL.iter().copied().chain(SCHEDULED.map(Series::Scheduled)).map(Self::name).collect()
    }

    pub fn about(self) -> &'static str {
        match self {
            Series::SendRecv => "1F1B, every tensor by sends and receives, nothing overlaps",
            Series::AllGather => "1F1B, parts sent and gathered inside the host (Alpa), nothing overlaps",
            Series::Broadcast => "1F1B, tensors broadcast (AlpaComm), nothing overlaps",
            Series::Overlap => "1F1B, flow plans beside compute",
            Series::Eager => "eager-1F1B, flow plans beside compute",
            Series::MinimalWindow => {
                "as few microbatches in flight as hide the communication, flow plans beside compute"
            }
            Series::Signal => "1F1B, every message one byte: what no communication costs",
            Series::Scheduled(Name::GPipe) => "all forwards, then all backwards; flow plans beside compute",
            Series::Scheduled(Name::ZbH1) => {
                "weight gradients fill the bubble, in the memory of 1F1B; flow plans beside compute"
            }
            Series::Scheduled(Name::ZbH2) => {
                "weight gradients and more forwards fill the bubble; flow plans beside compute"
            }
            Series::Scheduled(_) => {
                "the best order found for these passes and crossings, flow plans beside compute"
            }
        }
    }

    pub fn parse(text: &str) -> Result<Self> {
        let plain = |s: &str| s.to_lowercase().replace(['-', '/', '_'], "");
        let all = Self::ALL.into_iter().chain(SCHEDULED.map(Series::Scheduled));
        if let Some(found) = all.into_iter().find(|s| plain(s.name()) == plain(text)) {
            return Ok(found);
        }
        let hint = format!("hint: series are {}", Self::names().join(", "));
        match text.to_lowercase().parse::<Name>() {
            // With flow plans beside compute, as all schedules are here.
            Ok(Name::OneF1B) => Ok(Series::Overlap),
            Ok(Name::BPipe) => bail!(
                "bpipe keeps activations on other devices, and a case does not say how large they are\n{hint}"
            ),
            Ok(name) => {
                bail!("{name} has two chunks a device, and a case has one stage on each\n{hint}")
            }
            Err(_) => Err(anyhow!("unknown series `{text}`\n{hint}")),
        }
    }

    fn strategy(self) -> &'static str {
        match self {
            Series::SendRecv => "sendrecv",
            Series::AllGather => "allgather",
            Series::Broadcast => "broadcast:greedy",
            Series::Overlap
            | Series::Eager
            | Series::MinimalWindow
            | Series::Signal
            | Series::Scheduled(_) => "flow",
        }
    }

    fn overlaps(self) -> bool {
        !matches!(self, Series::SendRecv | Series::AllGather | Series::Broadcast)
    }

    fn schedule(self) -> Name {
        match self {
            Series::Eager => Name::Eager1F1B,
            Series::MinimalWindow => Name::MinimalWindow,
            Series::Scheduled(name) => name,
            _ => Name::OneF1B,
        }
    }
}

/// What dims are made multiples of when they are made smaller.
const EVEN: u64 = 16;

/// How a case is shrunk to what can be run here.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// The rate of NICs; the case's own without.
    pub nic_bytes_per_s: Option<f64>,
    /// Seconds here for a second of the case.
    pub time: f64,
}

impl Scale {
    pub const FULL: Scale = Scale { nic_bytes_per_s: None, time: 1.0 };

    /// Bytes here for a byte of the case.
    pub fn bytes(&self, case: &Case) -> Result<f64> {
        let own = case.nic_bytes_per_s()?;
        Ok(self.nic_bytes_per_s.unwrap_or(own) / own * self.time)
    }
}

/// A case run in one way at one scale: the step, its program, and what is expected of it.
pub struct Specimen {
    pub doc: StepDoc,
    pub step: Step,
    pub lowered: StepProgram,
    pub predicted: StepReport,
    /// No step is shorter: the time in which the busiest NIC carries what crosses.
    pub bandwidth_s: f64,
    /// No step of this case is shorter, in whatever order passes run and however tensors travel.
    pub bound_s: f64,
}

impl Specimen {
    pub fn new(case: &Case, series: Series, scale: &Scale) -> Result<Self> {
        let cluster = cluster(case, scale)?;
        let crossings = crossings(case, series, scale)?;
        let times = times(case, scale)?;
        let ranks: Vec<Vec<u32>> = case.stages.iter().map(|s| s.ranks.clone()).collect();
        let mut doc = StepDoc {
            schema: SCHEMA.into(),
            schedule: ScheduleDoc::new(&bare(case)?),
            cluster: ClusterDoc::new(&cluster),
            ranks,
            times,
            crossings,
            overlap: series.overlaps(),
            lockstep: true,
            strategy: series.strategy().into(),
        };
        // Planned once without passes, to know what the crossings take; the schedule may depend on it.
        let mut step = doc.to_step()?;
        let schedule = schedule(case, series, scale, hop_s(&step, case, scale)?)?;
        doc.schedule = ScheduleDoc::new(&schedule);
        step.schedule = schedule;
        let lowered = lower_step(&step)?;
        let trace = simulate(&lowered.program, &step.cluster)?;
        let bandwidth_s =
            trace.links.iter().filter(|l| is_nic(&l.link)).map(|l| l.busy_s()).fold(0.0, f64::max);
        let predicted = StepReport::of(&step, &lowered, &trace);
        let bound_s = compute_bound(&step)?.max(wire_bound(&step)?);
        Ok(Self { doc, step, lowered, predicted, bandwidth_s, bound_s })
    }
}

/// What the passes take with messages that cost nothing, where weights' gradients may be computed later than inputs'.
fn compute_bound(step: &Step) -> Result<f64> {
    let seconds = |ns: u64| ns as f64 * 1e-9;
    let cost = |t: &PassTimes| StageCost::new(seconds(t.f_ns), seconds(t.b_ns), seconds(t.w_ns));
    let costs = Costs::new(step.times.iter().map(cost).collect(), Hop::default())?;
    let microbatches = step.schedule.num_microbatches();
    // Where a stage needs all of the one before from the start, it waits for its whole pass.
    let waits =
        |from: u32| step.crossings.iter().any(|c| c.edge.from.0 == from && c.made >= 1.0 && c.needed <= 0.0);
    Ok(match (0..step.times.len() as u32 - 1).all(waits) {
        true => bound::placed(step.schedule.placement(), &costs, microbatches),
        false => f64::from(microbatches) * costs.stages().iter().map(StageCost::all).fold(0.0, f64::max),
    })
}

/// What the busiest crossing takes for all microbatches at its own bound. Gradients may go the other way meanwhile.
fn wire_bound(step: &Step) -> Result<f64> {
    let mut longest: f64 = 0.0;
    for crossing in &step.crossings {
        longest = longest.max(lower_bound(&crossing.forward.problem)?.seconds);
    }
    Ok(longest * f64::from(step.schedule.num_microbatches()))
}

fn is_nic(link: &Link) -> bool {
    matches!(link, Link::NicIn(_) | Link::NicOut(_))
}

fn cluster(case: &Case, scale: &Scale) -> Result<Cluster> {
    let rate = scale.nic_bytes_per_s.unwrap_or(case.nic_bytes_per_s()?);
    let host = |devices: &u32| Host {
        nic_out_bytes_per_s: rate,
        nic_in_bytes_per_s: rate,
        ..Host::with_devices(*devices)
    };
    Ok(Cluster::of_hosts(case.hosts.iter().map(host).collect()))
}

fn times(case: &Case, scale: &Scale) -> Result<Vec<TimesDoc>> {
    let nanos = |seconds: f64| (seconds * scale.time * 1e9).round() as u64;
    let times = |stage: &super::Stage| {
        let [f, b, w] = stage.seconds()?;
        Ok(TimesDoc { f_ns: nanos(f), b_ns: nanos(b), w_ns: nanos(w), optimizer_ns: 0 })
    };
    case.stages.iter().map(times).collect()
}

fn crossings(case: &Case, series: Series, scale: &Scale) -> Result<Vec<CrossingDoc>> {
    let factor = scale.bytes(case)?;
    let layout = |text: &str| match series {
        Series::Signal => signal_layout(text),
        _ => scaled_layout(text, factor),
    };
    let crossing = |c: &super::Crossing| {
        let name = || format!("crossing `{}`", c.name);
        Ok(CrossingDoc {
            name: c.name.clone(),
            from: c.from,
            to: c.to,
            src: layout(&c.src).with_context(name)?,
            dst: layout(&c.dst).with_context(name)?,
            made: c.made,
            needed: c.needed,
            memory: false,
        })
    };
    case.crossings.iter().map(crossing).collect()
}

/// The parts of `f32[8,6]@A{tp:2}=0-1(tp,_)`: dtype, dims, mesh, splits.
fn parts(text: &str) -> Result<(&str, Vec<u64>, &str, Vec<&str>)> {
    let parsed: crossmesh_core::layout::Layout = text.parse()?;
    let cut = || -> Option<(&str, &str, &str)> {
        let (dtype, rest) = text.trim().split_once('[')?;
        let (_, rest) = rest.split_once("]@")?;
        let (mesh, splits) = rest.split_once('(')?;
        Some((dtype, mesh, splits.strip_suffix(')')?))
    };
    let (dtype, mesh, splits) = cut().with_context(|| format!("`{text}` is not in the usual notation"))?;
    Ok((dtype, parsed.shape().to_vec(), mesh, splits.split(',').map(str::trim).collect()))
}

/// The same layout with `factor` of the elements: the dims that are split stay as they are.
fn scaled_layout(text: &str, factor: f64) -> Result<String> {
    if factor == 1.0 {
        return Ok(text.into());
    }
    let (dtype, mut shape, mesh, splits) = parts(text)?;
    let whole: Vec<usize> = (0..shape.len()).filter(|i| splits.get(*i) == Some(&"_")).collect();
    let Some(&last) = whole.last() else {
        bail!("`{text}` has no dim that is not split, so it cannot be made smaller");
    };
    let elements: u64 = whole.iter().map(|i| shape[*i]).product();
    whole.iter().for_each(|i| shape[*i] = 1);
    // A multiple, so that what divided the dim before still does: strategies that split tensors evenly depend on it.
    let wanted = elements as f64 * factor;
    let unit = if wanted >= 32.0 * EVEN as f64 { EVEN } else { 1 };
    shape[last] = ((wanted / unit as f64).round() as u64).max(1) * unit;
    let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
    Ok(format!("{dtype}[{}]@{mesh}({})", shape.join(","), splits.join(",")))
}

/// One byte, on every device of the mesh.
fn signal_layout(text: &str) -> Result<String> {
    let (_, _, mesh, _) = parts(text)?;
    Ok(format!("u8[1]@{mesh}(_)"))
}

/// A schedule without passes, for a step that is only planned.
fn bare(case: &Case) -> Result<Schedule> {
    let stages = case.stages.len() as u32;
    let placement = Placement::linear(stages)?;
    let devices = vec![vec![]; case.stages.len()];
    Ok(Schedule::new("none", placement, Routes::model_order(case.stages.len()), case.microbatches, devices)?)
}

/// What the tensors of the slowest edge take, one way, beyond what is hidden inside the passes that make and need them.
fn hop_s(step: &Step, case: &Case, scale: &Scale) -> Result<f64> {
    let mut slowest: f64 = 0.0;
    for from in 0..case.stages.len().saturating_sub(1) as u32 {
        let mut crossings: Vec<_> = step.crossings.iter().filter(|c| c.edge.from.0 == from).collect();
        crossings.sort_by(|a, b| a.made.total_cmp(&b.made));
        let f_s = case.stages[from as usize].seconds()?[0] * scale.time;
        let mut free_at = 0.0;
        for crossing in crossings {
            let trace = simulate(&crossmesh_core::reshard::lower(&crossing.forward), &step.cluster)?;
            free_at = f64::max(free_at, crossing.made * f_s) + trace.makespan_s;
        }
        slowest = slowest.max(free_at - f_s);
    }
    Ok(slowest.max(0.0))
}

fn schedule(case: &Case, series: Series, scale: &Scale, hop_s: f64) -> Result<Schedule> {
    let work = |stage: &super::Stage| {
        let [f, b, w] = stage.seconds()?;
        Ok(StageCost::new(f * scale.time, b * scale.time, w * scale.time))
    };
    let spec = Spec {
        work: case.stages.iter().map(work).collect::<Result<_>>()?,
        hop: Hop::both(hop_s),
        chunks: Some(1),
        ..Spec::even(case.stages.len() as u32, case.microbatches)
    };
    Ok(generate(series.schedule(), &spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_shrink_where_they_are_whole() {
        let layout = "f16[16,1024,2560]@S0{dp:2,op:2}=0-3(dp,_,_)";
        assert_eq!(scaled_layout(layout, 0.004).unwrap(), "f16[16,1,10480]@S0{dp:2,op:2}=0-3(dp,_,_)");
        assert_eq!(signal_layout(layout).unwrap(), "u8[1]@S0{dp:2,op:2}=0-3(_)");
        assert!(scaled_layout("f16[16]@A{dp:2}=0-1(dp)", 0.5).unwrap_err().to_string().contains("not split"));
    }

    #[test]
    fn series_are_known_by_name() {
        for series in Series::ALL {
            assert_eq!(Series::parse(series.name()).unwrap(), series);
        }
        for name in SCHEDULED {
            assert_eq!(Series::parse(name.name()).unwrap(), Series::Scheduled(name));
        }
        assert_eq!(Series::parse("1F1B").unwrap(), Series::Overlap);
        for (name, why) in [("zbv", "two chunks"), ("bpipe", "keeps activations")] {
            let error = Series::parse(name).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("hint: series are "), "{error}");
        }
        for old in ["send/recv", "send-recv", "Send_Recv"] {
            assert_eq!(Series::parse(old).unwrap(), Series::SendRecv);
        }
        assert_eq!(Series::parse("all-gather").unwrap(), Series::AllGather);
        for series in [Series::SendRecv, Series::AllGather, Series::Broadcast] {
            assert!(series.strategy().starts_with(series.name()), "one name for one thing");
        }
        assert!(Series::parse("magic").unwrap_err().to_string().contains("series are sendrecv"));
    }
}
