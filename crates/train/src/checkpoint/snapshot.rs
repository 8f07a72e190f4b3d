//! A copy of what a rank will write, taken between two steps.
//!
//! The copy is the file: the runs that this rank owns, one behind the other, as they will lie on disk. A rank copies no more than it writes, so of
//! four replicas each copies a quarter.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::ops::Range;

use crossmesh_checkpoint::Element;
use crossmesh_checkpoint::manifest::{FileEntry, VALUE, file_name, key_of, spans_of};
use crossmesh_checkpoint::safetensors::header_bytes;
use crossmesh_core::id::Rank;

use super::error::CheckpointError;
use super::owned::owned;
use super::parts::{PartTensor, RankPart};
use super::state::StageState;
use crate::boxes;
use crate::deal::Share;
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
    entries: Vec<(String, Element, Vec<u64>)>,
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
        let mut pieces = tensors(stage, VALUE, stage.values, &stage.share);
        let moments = &stage.moments;
        for (name, values) in moments.names.iter().zip(&moments.values) {
            pieces.extend(tensors(stage, name, values, &moments.share));
        }
        let elements: usize = pieces.iter().flat_map(|(_, runs)| runs).map(|run| run.len()).sum();
        self.body.reserve_exact(elements * size_of::<T>());
        for (tensor, runs) in pieces {
            let len = runs.iter().map(|run| run.len()).sum();
            self.entries.push((tensor.key.clone(), Element::Of(T::DTYPE), shape(&tensor, len)));
            self.tensors.push(tensor);
            runs.iter().for_each(|run| self.body.extend_from_slice(bytemuck::cast_slice(run)));
        }
        Ok(())
    }

    /// What is to be written.
    pub fn finish(self) -> Result<Snapshot, CheckpointError> {
        let Self { step, rank, tensors, entries, body, .. } = self;
        twice(&tensors)?;
        let header = header_bytes(&BTreeMap::new(), entries.into_iter());
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

/// What this rank writes of one state of a stage's parameters, of which it keeps a share: tensors, each in one run or several.
fn tensors<'a, T>(
    stage: &StageState<'_, T>,
    state: &str,
    values: &'a [T],
    share: &Share,
) -> Vec<(PartTensor, Vec<&'a [T]>)> {
    let runs = owned(stage.parameters, stage.place, share, stage.elsewhere);
    let piece = |(p, runs): (&Parameter, Vec<(Range<usize>, usize)>)| {
        if runs.is_empty() {
            return None;
        }
        let of_run = |(run, _): &(Range<usize>, usize)| {
            let of_shard = (run.start - p.range.start) as u64..(run.end - p.range.start) as u64;
            boxes::of_run(&p.layout, stage.place.coord(), &of_shard)
        };
        let boxes: Vec<_> = runs.iter().flat_map(of_run).collect();
        let key = key_of(&p.name, state);
        let tensor = PartTensor {
            name: p.name.clone(),
            state: state.into(),
            shape: p.layout.shape().to_vec(),
            layout: p.layout.to_string(),
            key,
            boxes: boxes.iter().map(spans_of).collect(),
        };
        Some((tensor, runs.iter().map(|(run, at)| &values[*at..at + run.len()]).collect()))
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
    fits(stage.parameters, stage.values.len(), &stage.share, stage.moments.names, &lens, &stage.moments.share)
}

pub(super) fn fits(
    parameters: &[Parameter],
    values: usize,
    share: &Share,
    names: &[&str],
    moments: &[usize],
    states: &Share,
) -> Result<(), CheckpointError> {
    let wrong = |what: String| Err(CheckpointError::State { what });
    let wanted = parameters.last().map_or(0, |p| p.range.end);
    let end = |share: &Share| share.runs.iter().map(|(run, _)| run.end).max().unwrap_or(0);
    if values != share.runs.len() || (share.axes.is_empty() && values != wanted) {
        return wrong(format!("the flat buffer has {values} elements, and the parameters {wanted}"));
    }
    if names.len() != moments.len() {
        return wrong(format!("{} moments are given for the names {names:?}", moments.len()));
    }
    if end(share).max(end(states)) > wanted {
        return wrong(format!("a share ends behind {wanted} elements"));
    }
    match moments.iter().find(|len| **len != states.runs.len()) {
        Some(len) => wrong(format!("a moment has {len} elements, and its share {}", states.runs.len())),
        None => Ok(()),
    }
}
