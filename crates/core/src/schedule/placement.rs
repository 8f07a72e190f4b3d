//! Which device holds which virtual stage.
//!
//! ```text
//! linear(4)           round_robin(2, 2)      zigzag(2, 2), the V
//! stage   0 1 2 3     stage   0 1 2 3        stage   0 1 2 3
//! device  0 1 2 3     device  0 1 0 1        device  0 1 1 0
//! chunk   0 0 0 0     chunk   0 0 1 1        chunk   0 0 1 1
//! ```

use crate::id::{DeviceId, StageId};

use super::ScheduleError;

/// More virtual stages than this is taken for a typing mistake.
pub const MAX_STAGES: usize = 1 << 16;

/// A device for every virtual stage, and at least one stage for every device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    device_of: Vec<DeviceId>,
    /// The stage's index on its device, in model order.
    chunk_of: Vec<u32>,
    stages_on: Vec<Vec<StageId>>,
}

impl Placement {
    /// From the device of every stage, in model order.
    pub fn new(device_of: Vec<DeviceId>) -> Result<Self, ScheduleError> {
        if device_of.is_empty() {
            return Err(ScheduleError::NoStages);
        }
        // A device that holds nothing is refused below, so there are no more devices than stages.
        let too_far = device_of.iter().any(|d| d.index() >= device_of.len());
        if too_far || device_of.len() > MAX_STAGES {
            return Err(first_hole(&device_of));
        }
        let devices = device_of.iter().map(|d| d.index() + 1).max().unwrap_or(0);
        let mut stages_on = vec![Vec::new(); devices];
        let mut chunk_of = Vec::with_capacity(device_of.len());
        for (stage, device) in device_of.iter().enumerate() {
            chunk_of.push(stages_on[device.index()].len() as u32);
            stages_on[device.index()].push(StageId::at(stage));
        }
        match stages_on.iter().any(Vec::is_empty) {
            true => Err(first_hole(&device_of)),
            false => Ok(Self { device_of, chunk_of, stages_on }),
        }
    }

    /// From pairs in any order, such as a file's. Every stage up to the last one needs its device.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (StageId, DeviceId)>) -> Result<Self, ScheduleError> {
        let mut pairs: Vec<_> = pairs.into_iter().collect();
        pairs.sort_unstable();
        pairs.dedup();
        for (at, &(stage, device)) in pairs.iter().enumerate() {
            if at > 0 && pairs[at - 1].0 == stage {
                return Err(ScheduleError::StageTwice { stage, first: pairs[at - 1].1, second: device });
            }
            if stage.index() != at {
                return Err(ScheduleError::StageHole { stage: StageId::at(at), known: stage });
            }
        }
        Self::new(pairs.into_iter().map(|(_, device)| device).collect())
    }

    /// A stage a device.
    pub fn linear(devices: u32) -> Result<Self, ScheduleError> {
        Self::round_robin(devices, 1)
    }

    /// Stage `s` on device `s % devices`: what interleaved schedules use.
    pub fn round_robin(devices: u32, chunks: u32) -> Result<Self, ScheduleError> {
        let stages = sized(devices, chunks)?;
        Self::new((0..stages).map(|s| DeviceId(s % devices)).collect())
    }

    /// Down and up again, `chunks` times in all; two chunks make the V, whose device 0 holds the first stage and the last.
    pub fn zigzag(devices: u32, chunks: u32) -> Result<Self, ScheduleError> {
        let stages = sized(devices, chunks)?;
        let device = |s: u32| match (s / devices).is_multiple_of(2) {
            true => DeviceId(s % devices),
            false => DeviceId(devices - 1 - s % devices),
        };
        Self::new((0..stages).map(device).collect())
    }

    pub fn num_stages(&self) -> usize {
        self.device_of.len()
    }

    pub fn num_devices(&self) -> usize {
        self.stages_on.len()
    }

    /// The most stages that a device holds.
    pub fn num_chunks(&self) -> usize {
        self.stages_on.iter().map(Vec::len).max().unwrap_or(0)
    }

    pub fn stages(&self) -> impl DoubleEndedIterator<Item = StageId> + use<> {
        (0..self.num_stages()).map(StageId::at)
    }

    pub fn devices(&self) -> impl DoubleEndedIterator<Item = DeviceId> + use<> {
        (0..self.num_devices()).map(DeviceId::at)
    }

    pub fn device(&self, stage: StageId) -> DeviceId {
        self.device_of[stage.index()]
    }

    /// The stage's index on its device.
    pub fn chunk(&self, stage: StageId) -> u32 {
        self.chunk_of[stage.index()]
    }

    /// The stages of a device, in model order.
    pub fn stages_on(&self, device: DeviceId) -> &[StageId] {
        &self.stages_on[device.index()]
    }
}

fn sized(devices: u32, chunks: u32) -> Result<u32, ScheduleError> {
    let stages = u64::from(devices) * u64::from(chunks);
    match stages {
        0 => Err(ScheduleError::NoStages),
        1.. if stages <= MAX_STAGES as u64 => Ok(stages as u32),
        _ => Err(ScheduleError::TooManyStages { stages, limit: MAX_STAGES }),
    }
}

/// The first device without a stage although a later one has some, or what else keeps a map from being one.
fn first_hole(device_of: &[DeviceId]) -> ScheduleError {
    if device_of.len() > MAX_STAGES {
        return ScheduleError::TooManyStages { stages: device_of.len() as u64, limit: MAX_STAGES };
    }
    let hole = (0..).map(DeviceId).find(|d| !device_of.contains(d));
    let last = device_of.iter().copied().max();
    let (device, last) = hole.zip(last).expect("a map of few stages to many devices leaves one empty");
    ScheduleError::EmptyDevice { device, last }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(placement: &Placement) -> Vec<u32> {
        placement.stages().map(|s| placement.device(s).0).collect()
    }

    #[test]
    fn stages_go_to_devices() {
        assert_eq!(devices(&Placement::linear(4).unwrap()), [0, 1, 2, 3]);
        assert_eq!(devices(&Placement::round_robin(2, 3).unwrap()), [0, 1, 0, 1, 0, 1]);
        let v = Placement::zigzag(3, 2).unwrap();
        assert_eq!(devices(&v), [0, 1, 2, 2, 1, 0]);
        assert_eq!(v.stages_on(DeviceId(1)), [StageId(1), StageId(4)]);
        assert_eq!((v.chunk(StageId(1)), v.chunk(StageId(4))), (0, 1));
        assert_eq!(devices(&Placement::zigzag(2, 3).unwrap()), [0, 1, 1, 0, 0, 1]);
    }

    #[test]
    fn holes_are_named() {
        let map = |devices: &[u32]| Placement::new(devices.iter().map(|d| DeviceId(*d)).collect());
        assert_eq!(
            map(&[0, 2, 3]).unwrap_err().to_string(),
            "device 1 holds no stage, but device 3 does\nhint: number the devices from 0 without a hole"
        );
        assert!(matches!(map(&[0, u32::MAX]), Err(ScheduleError::EmptyDevice { .. })));
        assert!(matches!(map(&[]), Err(ScheduleError::NoStages)));
        let pairs = |pairs: &[(u32, u32)]| {
            Placement::from_pairs(pairs.iter().map(|&(s, d)| (StageId(s), DeviceId(d))))
        };
        assert_eq!(devices(&pairs(&[(1, 1), (0, 0), (2, 0)]).unwrap()), [0, 1, 0]);
        assert_eq!(
            pairs(&[(0, 0), (2, 1)]).unwrap_err().to_string(),
            "stage 1 is on no device, although stage 2 is on one"
        );
        assert_eq!(
            pairs(&[(0, 0), (0, 1)]).unwrap_err().to_string(),
            "stage 0 is on device 0 and on device 1"
        );
        assert!(Placement::round_robin(u32::MAX, u32::MAX).is_err());
        assert!(Placement::linear(0).is_err());
    }
}
