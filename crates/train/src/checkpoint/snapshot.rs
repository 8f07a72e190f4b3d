//! A copy of what a rank will write, taken between two steps.
//!
//! The copy is the file: the runs that this rank owns, one behind the other, as they will lie on disk. A rank copies no more than it writes, so of
//! four replicas each copies a quarter.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::ops::Range;

use crossmesh_core::id::Rank;

use super::boxes;
use super::error::CheckpointError;
use super::manifest::{FileEntry, PartTensor, RankPart, VALUE, file_name, spans_of};
use super::owned::owned;
use super::state::{Sharding, StageState};
use super::tensor_file::header_bytes;
use crate::kernels::scalar::Scalar;
use crate::parameter::Parameter;

/// What one rank will write.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) part: RankPart,
    pub(super) header: Vec<u8>,
    pub(super) body: Vec<u8>,
    /// A number of a tensor that is not finite.
    not_finite: fn(&[u8]) -> Option<f64>,
}

/// A snapshot that is being taken, stage by stage.
#[derive(Debug)]
pub struct Draft<T> {
    step: u64,
    rank: Rank,
    tensors: Vec<PartTensor>,
    /// As the header has them.
    entries: Vec<(String, String, Vec<u64>)>,
    body: Vec<u8>,
    number: PhantomData<T>,
}

impl<T: Scalar> Draft<T> {
    /// Of nothing yet. `step` counts the steps done.
    pub fn new(step: u64, rank: Rank) -> Self {
        Self { step, rank, tensors: vec![], entries: vec![], body: vec![], number: PhantomData }
    }

    /// Copies what this rank writes of a stage.
    pub fn add(&mut self, stage: &StageState<'_, T>) -> Result<(), CheckpointError> {
        check(stage)?;
        let all = 0..stage.values.len();
        let mut pieces = tensors(stage, VALUE, stage.values, &all, Sharding::Replicated);
        let moments = &stage.moments;
        for (name, values) in moments.names.iter().zip(&moments.values) {
            pieces.extend(tensors(stage, name, values, &moments.shard, moments.sharding));
        }
        let dtype = T::DTYPE.name().to_uppercase();
        self.body.reserve_exact(pieces.iter().map(|(_, v)| size_of_val(*v)).sum());
        for (tensor, values) in pieces {
            self.entries.push((tensor.key.clone(), dtype.clone(), shape(&tensor, values.len())));
            self.tensors.push(tensor);
            self.body.extend_from_slice(bytemuck::cast_slice(values));
        }
        Ok(())
    }

    /// What is to be written.
    pub fn finish(self) -> Result<Snapshot, CheckpointError> {
        let Self { step, rank, tensors, entries, body, .. } = self;
        twice(&tensors)?;
        let header = header_bytes(&BTreeMap::new(), &entries);
        let (name, bytes) = (file_name(rank), (header.len() + body.len()) as u64);
        let file = FileEntry { name, bytes, blake3: String::new() };
        let part = RankPart { rank: rank.0, step, dtype: T::DTYPE.to_string(), file, tensors };
        Ok(Snapshot { part, header, body, not_finite: not_finite::<T> })
    }
}

impl Snapshot {
    /// Copies what this rank writes of the stages it holds. `step` counts the steps done.
    pub fn take<T: Scalar>(
        step: u64,
        rank: Rank,
        stages: &[StageState<'_, T>],
    ) -> Result<Self, CheckpointError> {
        let mut draft = Draft::new(step, rank);
        stages.iter().try_for_each(|stage| draft.add(stage))?;
        draft.finish()
    }

    /// Refuses numbers that nobody could go on from. Where the snapshot is written, so that training does not wait for it.
    pub(super) fn check_finite(&self) -> Result<(), CheckpointError> {
        let Some(value) = (self.not_finite)(&self.body) else { return Ok(()) };
        let mut start = 0;
        for tensor in &self.part.tensors {
            let volume = |spans: &Vec<[u64; 2]>| spans.iter().map(|[a, b]| b - a).product::<u64>() as usize;
            let elements: usize = tensor.boxes.iter().map(volume).sum();
            let end = start + elements * self.width();
            if (self.not_finite)(&self.body[start..end]).is_some() {
                let (key, step) = (tensor.key.clone(), self.part.step);
                return Err(CheckpointError::NotFinite { key, step, value });
            }
            start = end;
        }
        unreachable!("{value} is in none of the tensors")
    }

    fn width(&self) -> usize {
        if self.part.dtype == "f64" { 8 } else { 4 }
    }

    /// Bytes of this rank's file.
    pub fn bytes(&self) -> u64 {
        self.part.file.bytes
    }

    /// Of those, the tensors'.
    pub fn tensor_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    pub fn step(&self) -> u64 {
        self.part.step
    }
}

fn not_finite<T: Scalar>(bytes: &[u8]) -> Option<f64> {
    let values = bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
    values.map(T::to_f64).find(|value| !value.is_finite())
}

/// What this rank writes of one state of a stage's parameters: `held` is the shard that `values` are.
fn tensors<'a, T>(
    stage: &StageState<'_, T>,
    state: &str,
    values: &'a [T],
    held: &Range<usize>,
    sharding: Sharding,
) -> Vec<(PartTensor, &'a [T])> {
    let runs = owned(stage.parameters, stage.place, held, sharding, stage.elsewhere);
    let piece = |(p, run): (&Parameter, Range<usize>)| {
        if run.is_empty() {
            return None;
        }
        let of_shard = (run.start - p.range.start) as u64..(run.end - p.range.start) as u64;
        let boxes = boxes::of_run(&p.layout, stage.place.coord(), &of_shard);
        let key = if state == VALUE { p.name.clone() } else { format!("{}/{state}", p.name) };
        let tensor = PartTensor {
            name: p.name.clone(),
            state: state.into(),
            shape: p.layout.shape().to_vec(),
            layout: p.layout.to_string(),
            key,
            boxes: boxes.iter().map(spans_of).collect(),
        };
        Some((tensor, &values[run.start - held.start..run.end - held.start]))
    };
    stage.parameters.iter().zip(runs).filter_map(piece).collect()
}

/// A box keeps its dims, so that other programs find a tensor where there is one; a run of several is a row.
fn shape(tensor: &PartTensor, len: usize) -> Vec<u64> {
    match &tensor.boxes[..] {
        [one] => one.iter().map(|[start, end]| end - start).collect(),
        _ => vec![len as u64],
    }
}

fn twice(tensors: &[PartTensor]) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    match tensors.iter().find(|t| !seen.insert(&t.key)) {
        None => Ok(()),
        Some(t) => Err(CheckpointError::State {
            what: format!(
                "two stages of this rank save `{}`\nhint: one of them lists it as saved elsewhere",
                t.key
            ),
        }),
    }
}

/// Whether a stage's buffers are as long as its parameters say.
fn check<T>(stage: &StageState<'_, T>) -> Result<(), CheckpointError> {
    let lens: Vec<usize> = stage.moments.values.iter().map(|m| m.len()).collect();
    fits(stage.parameters, stage.values.len(), stage.moments.names, &lens, &stage.moments.shard)
}

pub(super) fn fits(
    parameters: &[Parameter],
    values: usize,
    names: &[&str],
    moments: &[usize],
    shard: &Range<usize>,
) -> Result<(), CheckpointError> {
    let wrong = |what: String| Err(CheckpointError::State { what });
    let wanted = parameters.last().map_or(0, |p| p.range.end);
    if values != wanted {
        return wrong(format!("the flat buffer has {values} elements, and the parameters {wanted}"));
    }
    if names.len() != moments.len() {
        return wrong(format!("{} moments are given for the names {names:?}", moments.len()));
    }
    if shard.start > shard.end || shard.end > wanted {
        return wrong(format!("the shard {shard:?} is no part of {wanted} elements"));
    }
    match moments.iter().find(|len| **len != shard.len()) {
        Some(len) => wrong(format!("a moment has {len} elements, and the shard {}", shard.len())),
        None => Ok(()),
    }
}
