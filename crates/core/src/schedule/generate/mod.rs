//! The named schedules: from a [`Spec`] to a [`Schedule`].
//!
//! ```
//! use crossmesh_core::schedule::{Name, Spec, check, generate, time};
//! let spec = Spec::even(4, 8);
//! let schedule = generate(Name::Eager1F1B, &spec).unwrap();
//! check(&schedule).unwrap();
//! assert_eq!(time(&schedule, &spec.costs(schedule.placement()).unwrap()).unwrap().makespan, 33.0);
//! ```

mod bpipe;
mod dispatch;
mod dual_pipe;
mod interleaved;
mod minimal_window;
mod search;
mod v_shape;
mod windows;
mod zero_bubble;

use std::fmt;
use std::str::FromStr;

pub use minimal_window::windows_that_hide;
pub use search::{Found, SEARCH_STEPS, search};

use crate::id::{DeviceId, StageId};

use super::bound::Bound;
use super::check::CheckError;
use super::{Costs, Footprint, Hop, Pass, Placement, Routes, Schedule, ScheduleError, StageCost};

/// The schedules that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    GPipe,
    OneF1B,
    Eager1F1B,
    Interleaved1F1B,
    ZbH1,
    ZbH2,
    Zbv,
    VHalf,
    VMin,
    VZb,
    BPipe,
    DualPipeV,
    MinimalWindow,
    Search,
}

impl Name {
    pub const ALL: [Name; 14] = [
        Name::GPipe,
        Name::OneF1B,
        Name::Eager1F1B,
        Name::Interleaved1F1B,
        Name::ZbH1,
        Name::ZbH2,
        Name::Zbv,
        Name::VHalf,
        Name::VMin,
        Name::VZb,
        Name::BPipe,
        Name::DualPipeV,
        Name::MinimalWindow,
        Name::Search,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Name::GPipe => "gpipe",
            Name::OneF1B => "1f1b",
            Name::Eager1F1B => "eager-1f1b",
            Name::Interleaved1F1B => "interleaved-1f1b",
            Name::ZbH1 => "zb-h1",
            Name::ZbH2 => "zb-h2",
            Name::Zbv => "zbv",
            Name::VHalf => "v-half",
            Name::VMin => "v-min",
            Name::VZb => "v-zb",
            Name::BPipe => "bpipe",
            Name::DualPipeV => "dualpipev",
            Name::MinimalWindow => "minimal-window",
            Name::Search => "search",
        }
    }

    /// One line about it.
    pub fn about(self) -> &'static str {
        match self {
            Name::GPipe => "all forwards, then all backwards",
            Name::OneF1B => "one forward, one backward: as many microbatches in flight as stages are left",
            Name::Eager1F1B => "1F1B with nearly twice as many in flight, to hide communication",
            Name::Interleaved1F1B => "1F1B over several chunks a device, round robin (Megatron-LM)",
            Name::ZbH1 => "weight gradients fill the bubble, in the memory of 1F1B",
            Name::ZbH2 => "more forwards fill the ramp too, in twice the memory of 1F1B",
            Name::Zbv => {
                "two chunks a device in a V, weight gradients fill the bubble, in the memory of 1F1B"
            }
            Name::VHalf => "two chunks in a V, in about half the memory of 1F1B",
            Name::VMin => "two chunks in a V, in about a third of the memory of 1F1B",
            Name::VZb => "two chunks in a V, the building block with the least bubble, in the memory of 1F1B",
            Name::BPipe => "1F1B whose early stages leave activations with late ones",
            Name::DualPipeV => "two chunks in a V, forwards paired with backwards (DeepSeek)",
            Name::MinimalWindow => "the fewest microbatches in flight that hide the communication",
            Name::Search => "the best order found for these costs, caps and hops",
        }
    }

    /// The chunks a device holds: what was asked for, if the schedule can do that.
    pub fn chunks(self, asked: Option<u32>) -> Result<u32, GenerateError> {
        let (default, allowed) = match self {
            Name::Interleaved1F1B => (2, 1..=u32::MAX),
            Name::Zbv | Name::VHalf | Name::VMin | Name::VZb | Name::DualPipeV => (2, 2..=2),
            Name::Search => (asked.unwrap_or(1), 1..=u32::MAX),
            _ => (1, 1..=1),
        };
        let chunks = asked.unwrap_or(default);
        match allowed.contains(&chunks) {
            true => Ok(chunks),
            false => Err(GenerateError::Chunks { name: self, chunks, wanted: *allowed.start() }),
        }
    }

    /// Whether its backward can be fused, and whether it can be split.
    pub fn backward(self, asked: Option<Backward>) -> Result<Backward, GenerateError> {
        let (default, both) = match self {
            Name::GPipe | Name::OneF1B | Name::Eager1F1B | Name::Interleaved1F1B => (Backward::Fused, true),
            Name::MinimalWindow => (Backward::Split, true),
            Name::BPipe => (Backward::Fused, false),
            _ => (Backward::Split, false),
        };
        match asked {
            Some(asked) if asked != default && !both => Err(GenerateError::Backward { name: self, asked }),
            _ => Ok(asked.unwrap_or(default)),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Name {
    type Err = GenerateError;

    fn from_str(s: &str) -> Result<Self, GenerateError> {
        let plain = |name: &str| name.to_lowercase().replace(['-', '_'], "");
        let found = Name::ALL.into_iter().find(|name| plain(name.name()) == plain(s));
        let also = || match plain(s).as_str() {
            "interleaved" => Some(Name::Interleaved1F1B),
            "eager" => Some(Name::Eager1F1B),
            "zbh1" | "zb1p" => Some(Name::ZbH1),
            "zbh2" | "zb2p" => Some(Name::ZbH2),
            _ => None,
        };
        found.or_else(also).ok_or_else(|| GenerateError::Unknown(s.into()))
    }
}

/// Whether a backward is one pass or two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backward {
    /// BW.
    Fused,
    /// B, and W when there is time.
    Split,
}

impl fmt::Display for Backward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Backward::Fused { "fused" } else { "split" })
    }
}

/// What a schedule is wanted for.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Devices of the pipeline; each holds `chunks` stages.
    pub devices: u32,
    pub microbatches: u32,
    /// `None` leaves it to the schedule.
    pub chunks: Option<u32>,
    /// `None` leaves it to the schedule.
    pub backward: Option<Backward>,
    /// The model's work in slices of model order: one for all devices' shares alike, or one for every device's share, or
    /// one for every stage. A share is split evenly over a device's chunks.
    pub work: Vec<StageCost>,
    /// How fast every device is: 0.5 takes twice as long for the same layers. Empty: all alike; one for all, or one for each.
    pub speeds: Vec<f64>,
    /// What an activation and its gradient take from device to device.
    pub hop: Hop,
    /// For every device, how many activations of its whole share of the layers fit.
    pub caps: Option<Vec<f64>>,
}

impl Spec {
    /// f = b = w = 1, communication free, memory without end.
    pub fn even(devices: u32, microbatches: u32) -> Self {
        let work = vec![StageCost::new(1.0, 1.0, 1.0)];
        let hop = Hop::default();
        let speeds = vec![];
        Self { devices, microbatches, chunks: None, backward: None, work, speeds, hop, caps: None }
    }

    pub fn with_hop(mut self, cost: f64) -> Self {
        self.hop = Hop::both(cost);
        self
    }

    pub fn with_work(mut self, f: f64, b: f64, w: f64) -> Self {
        self.work = vec![StageCost::new(f, b, w)];
        self
    }

    /// The costs of every stage of a placement: the model's work, at the speed of the stage's device.
    pub fn costs(&self, placement: &Placement) -> Result<Costs, GenerateError> {
        let (stages, devices) = (placement.num_stages(), placement.num_devices());
        let slices = self.work.len();
        let work = |stage: StageId| {
            let chunks = placement.stages_on(placement.device(stage)).len();
            match slices {
                1 => scaled(self.work[0], chunks as f64),
                n if n == stages => self.work[stage.index()],
                // Slices in model order, each split evenly.
                _ => scaled(self.work[stage.index() / (stages / devices)], (stages / devices) as f64),
            }
        };
        let speeds = self.checked_speeds(devices)?;
        let cost = |stage: StageId| scaled(work(stage), speeds[placement.device(stage).index()]);
        let shares = slices == devices && stages.is_multiple_of(devices);
        match slices == 1 || slices == stages || shares {
            true => Ok(Costs::new(placement.stages().map(cost).collect(), self.hop)?),
            false => Err(GenerateError::Slices { slices, devices, stages }),
        }
    }

    /// A time that no schedule beats, whatever its chunks are: one for all that are made for this spec.
    pub fn bound(&self) -> f64 {
        self.bound_of(true)
    }

    /// The same where devices may hold different numbers of layers (`even` is false).
    pub fn bound_of(&self, even: bool) -> f64 {
        let devices = self.devices as usize;
        let shares = match self.work.len() {
            1 => vec![self.work[0]; devices],
            _ => self.work.clone(),
        };
        // Shares that make no whole number for each device only add up.
        let even = even && shares.len().is_multiple_of(devices.max(1));
        let Ok(speeds) = self.checked_speeds(devices) else { return 0.0 };
        let (hop, microbatches) = (self.hop, self.microbatches);
        Bound { shares: &shares, speeds: &speeds, hop, microbatches, even }.any()
    }

    /// The speeds, one for every device.
    fn checked_speeds(&self, devices: usize) -> Result<Vec<f64>, GenerateError> {
        if let Some((at, &speed)) =
            self.speeds.iter().enumerate().find(|(_, s)| !(s.is_finite() && **s > 0.0))
        {
            return Err(GenerateError::Speed { device: DeviceId::at(at), speed });
        }
        match self.speeds.len() {
            0 => Ok(vec![1.0; devices]),
            1 => Ok(vec![self.speeds[0]; devices]),
            n if n == devices => Ok(self.speeds.clone()),
            given => Err(GenerateError::Speeds { given, devices }),
        }
    }

    /// The caps, one for every device.
    fn checked_caps(&self) -> Result<Option<&[f64]>, GenerateError> {
        let Some(caps) = &self.caps else { return Ok(None) };
        if caps.len() != self.devices as usize {
            return Err(CheckError::CapsDiffer { given: caps.len(), devices: self.devices as usize }.into());
        }
        // A microbatch that is to be trained on leaves an activation of every layer of the device.
        match caps.iter().position(|cap| cap.is_nan() || *cap < 1.0 - 1e-9) {
            Some(at) => Err(GenerateError::CapTooSmall { device: DeviceId::at(at), cap: caps[at] }),
            None => Ok(Some(caps)),
        }
    }
}

/// The `n`-th part of it.
fn scaled(share: StageCost, n: f64) -> StageCost {
    StageCost {
        f: share.f / n,
        b: share.b / n,
        w: share.w / n,
        s: share.s / n,
        t: share.t / n,
        optimizer: share.optimizer / n,
    }
}

/// Why a schedule cannot be had.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    #[error("unknown schedule `{0}`\nhint: schedules are {names}", names = names())]
    Unknown(String),
    #[error(
        "{name} needs the number of microbatches to be a multiple of the number of stages: {microbatches} is no multiple of {devices}\nhint: {} microbatches would do", next_multiple(*.microbatches, *.devices)
    )]
    NotAMultiple { name: Name, microbatches: u32, devices: u32 },
    #[error("{name} needs at least {least} microbatches for {devices} stages: {microbatches} are too few")]
    TooFew { name: Name, microbatches: u32, devices: u32, least: u64 },
    #[error("{name} cannot have {chunks} chunks a device\nhint: it has {wanted}")]
    Chunks { name: Name, chunks: u32, wanted: u32 },
    #[error("the backward of {name} cannot be {asked}")]
    Backward { name: Name, asked: Backward },
    #[error(
        "costs for {slices} slices of the model fit neither {devices} devices nor {stages} stages\nhint: give one for all, one for each device's share of the layers or one for each stage, in model order"
    )]
    Slices { slices: usize, devices: usize, stages: usize },
    #[error(
        "the speed of {device} is {speed}\nhint: speeds are factors above 0: 0.5 is a device that takes twice as long"
    )]
    Speed { device: DeviceId, speed: f64 },
    #[error("{given} speeds for {devices} devices\nhint: give one for each device")]
    Speeds { given: usize, devices: usize },
    #[error(
        "no schedule fits: {device} may hold {cap} activations, and a single microbatch leaves 1 there\nhint: raise its memory cap to 1 at least"
    )]
    CapTooSmall { device: DeviceId, cap: f64 },
    #[error("no schedule of this kind keeps to the memory caps: {0}")]
    OverCap(CheckError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Check(#[from] CheckError),
}

fn names() -> String {
    Name::ALL.map(Name::name).join(", ")
}

fn next_multiple(microbatches: u32, devices: u32) -> u64 {
    u64::from(microbatches).next_multiple_of(u64::from(devices.max(1)))
}

/// Makes a schedule. With memory caps, one that keeps to them, or none.
pub fn generate(name: Name, spec: &Spec) -> Result<Schedule, GenerateError> {
    let chunks = name.chunks(spec.chunks)?;
    let backward = name.backward(spec.backward)?;
    let placement = placement(name, spec.devices, chunks)?;
    super::bounded(placement.num_stages(), spec.microbatches)?;
    spec.checked_caps()?;
    let costs = spec.costs(&placement)?;
    let schedule = match name {
        Name::GPipe => windows::gpipe(spec, placement, backward),
        Name::OneF1B => windows::one_f_one_b(spec, placement, backward),
        Name::Eager1F1B => windows::eager(spec, placement, backward),
        Name::Interleaved1F1B => interleaved::interleaved(spec, placement, backward),
        Name::ZbH1 => zero_bubble::h1(spec, placement),
        Name::ZbH2 => zero_bubble::h2(spec, placement),
        Name::Zbv => v_shape::zbv(spec, placement, &costs),
        Name::VHalf => v_shape::block(v_shape::Block::Half, spec, placement, &costs),
        Name::VMin => v_shape::block(v_shape::Block::Min, spec, placement, &costs),
        Name::VZb => v_shape::block(v_shape::Block::ZeroBubble, spec, placement, &costs),
        Name::BPipe => bpipe::bpipe(spec, placement),
        Name::DualPipeV => dual_pipe::dual_pipe_v(spec, placement),
        Name::MinimalWindow => minimal_window::minimal_window(spec, placement, &costs, backward),
        Name::Search => search::search(spec, SEARCH_STEPS).map(|found| found.schedule),
    }?;
    keeps_to_caps(spec, &schedule)?;
    Ok(schedule)
}

fn placement(name: Name, devices: u32, chunks: u32) -> Result<Placement, ScheduleError> {
    match name {
        Name::Zbv | Name::VHalf | Name::VMin | Name::VZb | Name::DualPipeV => {
            Placement::zigzag(devices, chunks)
        }
        _ => Placement::round_robin(devices, chunks),
    }
}

/// Names a schedule's orders.
fn named(
    name: Name,
    spec: &Spec,
    placement: Placement,
    orders: Vec<Vec<Pass>>,
) -> Result<Schedule, GenerateError> {
    let routes = Routes::model_order(placement.num_stages());
    Ok(Schedule::new(name.name(), placement, routes, spec.microbatches, orders)?)
}

fn keeps_to_caps(spec: &Spec, schedule: &Schedule) -> Result<(), GenerateError> {
    let Some(caps) = spec.checked_caps()? else { return Ok(()) };
    let timed = super::time(schedule, &spec.costs(schedule.placement())?)?;
    let footprint = Footprint::shares(schedule.placement());
    super::memory::within(schedule, &timed, &footprint, caps).map_err(GenerateError::OverCap)
}

#[cfg(test)]
mod tests;
