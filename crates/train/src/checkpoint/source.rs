//! What a run goes on from, whoever wrote it: a checkpoint of ours, or one of another system under our names.
//!
//! A checkpoint of Hugging Face, torch or Megatron is boxes in files like ours, once a map has said what its tensors are called here. What it
//! may lack is the past: an optimizer's states, and where the run was. A conversion from ours leaves that beside the tensors.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crossmesh_checkpoint::manifest::{Facts, VALUE, key_of};
use crossmesh_checkpoint::model::{config_of, model_of};
use crossmesh_checkpoint::names::OURS;
use crossmesh_checkpoint::{
    Catalog, Element, Format, NameMap, Naming, Tensor, Want, is_ours, load, open, row_major,
};
use serde_json::Value;

use super::error::CheckpointError;
use super::load::{Checkpoint, Restored};
use super::state::{Convert, StageTarget};
use crate::boxes;
use crate::deal::Runs;
use crate::kernels::scalar::Scalar;
use crate::parameter::Parameter;

/// Buffers of a rank that loads.
const MAX_MEMORY: u64 = 64 << 20;
/// Ranks of a host load side by side.
const THREADS: usize = 2;

/// A checkpoint that is open.
#[derive(Debug)]
pub enum Source {
    Ours(Box<Checkpoint>),
    Other(Box<Foreign>),
}

impl Source {
    /// Opens a checkpoint as one of a model, whose sizes are given as [`Facts::model`] has them; with the states of an optimizer, or its
    /// weights alone.
    pub fn open(path: &Path, model: &Value, weights_only: bool) -> Result<Self, CheckpointError> {
        if is_ours(path) {
            return Ok(Self::Ours(Box::new(Checkpoint::open(path)?)));
        }
        Ok(Self::Other(Box::new(Foreign::open(path, model, weights_only)?)))
    }

    /// What a run of ours says of it; None where there was none.
    pub fn facts(&self) -> Option<&Facts> {
        match self {
            Self::Ours(checkpoint) => Some(checkpoint.facts()),
            Self::Other(foreign) => foreign.catalog.facts.as_ref(),
        }
    }

    /// The sizes of its model, as far as they are known.
    pub fn model(&self) -> &Value {
        match self {
            Self::Ours(checkpoint) => &checkpoint.facts().model,
            Self::Other(foreign) => &foreign.model,
        }
    }

    /// Whether its weights are those of a model: all of them, of the same shapes and types, and no others.
    pub fn check_model(&self, parameters: &[Parameter]) -> Result<(), CheckpointError> {
        match self {
            Self::Ours(checkpoint) => {
                parameters.iter().try_for_each(|p| checkpoint.check_dtype(p.layout.dtype(), Convert::No))?;
                checkpoint.check_model(parameters)
            }
            Self::Other(foreign) => foreign.check_model(parameters),
        }
    }

    /// Refuses one that nobody can go on from with an optimizer that remembers these moments, and says what it lacks.
    pub fn check_past(&self, moments: &[&str]) -> Result<(), CheckpointError> {
        let (path, saved) = match self {
            Self::Ours(checkpoint) => (checkpoint.folder(), &checkpoint.facts().optimizer),
            Self::Other(foreign) => {
                foreign.check_past()?;
                return foreign.check_moments(moments);
            }
        };
        match saved {
            None => Err(no_past(path, WEIGHTS_ALONE)),
            Some(saved) => same_moments(path, &saved.moments, moments),
        }
    }

    /// Fills a rank's stages, by the boxes it needs and no others.
    pub fn load<T: Scalar>(&self, stages: &mut [StageTarget<'_, T>]) -> Result<Restored, CheckpointError> {
        match self {
            Self::Ours(checkpoint) => checkpoint.load(stages, Convert::No),
            Self::Other(foreign) => foreign.load(stages),
        }
    }
}

/// A checkpoint of another system, under our names.
#[derive(Debug)]
pub struct Foreign {
    path: PathBuf,
    catalog: Catalog,
    /// What it says of its model.
    model: Value,
}

impl Foreign {
    fn open(path: &Path, model: &Value, weights_only: bool) -> Result<Self, CheckpointError> {
        let mut catalog = open(path)?;
        catalog.checked()?;
        let said = match (&catalog.facts, &catalog.config) {
            (Some(facts), _) => facts.model.clone(),
            (None, Some(config)) => model_of(config).map_err(|what| wrong(path, what))?,
            (None, None) => Value::Null,
        };
        let path = path.to_path_buf();
        let Some(config) = config_of(model, Element::F32, None) else {
            // Nobody else has this model, nor other names for its tensors.
            return Ok(Self { path, catalog, model: said });
        };
        let kind = |config: &Value| config.get("model_type").and_then(Value::as_str).map(String::from);
        let (wanted, found) = (kind(&config), catalog.config.as_ref().and_then(kind));
        if let Some(found) = found.filter(|found| Some(found) != wanted.as_ref()) {
            let wanted = wanted.unwrap_or_default();
            let what = format!(
                "its config.json says that it is a `{found}`, and a `{wanted}` is to be trained\nhint: train the model that was saved"
            );
            return Err(CheckpointError::Model { path, what });
        }
        let map = NameMap::built_in(&wanted.unwrap_or_default())?;
        catalog.config = catalog.config.take().or(Some(config));
        let naming = Naming { to: OURS.into(), parameters_only: weights_only, ..Naming::default() };
        let renamed = map.apply(&catalog, &naming).map_err(|error| {
            wrong(&path, format!("{error}\nhint: `crossmesh checkpoint convert --to crossmesh` takes --leave-out, and a map of your own"))
        });
        let catalog = renamed?.catalog;
        Ok(Self { path, catalog, model: said })
    }

    fn values(&self) -> impl Iterator<Item = (&String, &Tensor)> {
        self.catalog.tensors.iter().filter(|(name, _)| self.state_of(name).is_none())
    }

    /// The parameter, and which state of it a tensor is.
    fn state_of<'n>(&self, name: &'n str) -> Option<(&'n str, &'n str)> {
        name.rsplit_once('/').filter(|(parameter, _)| self.catalog.tensors.contains_key(*parameter))
    }

    fn check_model(&self, parameters: &[Parameter]) -> Result<(), CheckpointError> {
        for p in parameters {
            let tensor = self.shaped(&p.name, VALUE, p.layout.shape())?;
            self.fits(&p.name, tensor.element, Element::Of(p.layout.dtype()))?;
        }
        let known: BTreeSet<&str> = parameters.iter().map(|p| p.name.as_str()).collect();
        let left_out: Vec<&String> =
            self.values().map(|(name, _)| name).filter(|name| !known.contains(name.as_str())).collect();
        match left_out.first() {
            None => Ok(()),
            Some(first) => Err(CheckpointError::LeftOut {
                path: self.path.clone(),
                name: first.to_string(),
                count: left_out.len(),
            }),
        }
    }

    fn check_past(&self) -> Result<(), CheckpointError> {
        let states: BTreeSet<&str> =
            self.catalog.tensors.keys().filter_map(|name| Some(self.state_of(name)?.1)).collect();
        let names = states.iter().copied().collect::<Vec<_>>().join(" and ");
        let past = self.catalog.facts.as_ref().and_then(|facts| facts.optimizer.as_ref());
        let what = match (states.is_empty(), past) {
            (true, _) if self.catalog.format == Format::Hf => {
                "it holds weights alone, for Hugging Face's files have no place for an optimizer's states"
                    .to_string()
            }
            (true, _) => WEIGHTS_ALONE.to_string(),
            (false, None) => {
                let steps = self.catalog.optimizer_steps;
                let steps = steps.map_or(String::new(), |n| format!(", behind {n} of its steps"));
                format!(
                    "it holds weights and an optimizer's {names}{steps}, and nothing says at which step and sample the run was: where the learning rate and the data go on"
                )
            }
            (false, Some(past)) => return self.has_all(&past.moments),
        };
        Err(no_past(&self.path, &what))
    }

    /// Every parameter has its moments, of its own shape.
    fn has_all(&self, moments: &[String]) -> Result<(), CheckpointError> {
        for (name, value) in self.values() {
            moments.iter().try_for_each(|state| self.shaped(name, state, &value.shape).map(drop))?;
        }
        Ok(())
    }

    /// The optimizer that goes on is the one that was saved.
    fn check_moments(&self, moments: &[&str]) -> Result<(), CheckpointError> {
        match self.catalog.facts.as_ref().and_then(|facts| facts.optimizer.as_ref()) {
            None => Ok(()),
            Some(saved) => same_moments(&self.path, &saved.moments, moments),
        }
    }

    fn load<T: Scalar>(&self, stages: &mut [StageTarget<'_, T>]) -> Result<Restored, CheckpointError> {
        let moments = stages.iter().filter_map(|stage| stage.moments.as_ref());
        moments.map(|moments| moments.names).try_for_each(|names| self.check_moments(names))?;
        let mut wants = Vec::new();
        let mut with_moments = false;
        for stage in stages {
            let (parameters, coord) = (stage.parameters, stage.place.coord());
            wants.extend(self.wants(parameters, coord, VALUE, &stage.share.runs, stage.values)?);
            let Some(moments) = stage.moments.as_mut() else { continue };
            with_moments = true;
            for (name, values) in moments.names.iter().zip(&mut moments.values) {
                wants.extend(self.wants(parameters, coord, name, &moments.share.runs, values)?);
            }
        }
        let loaded = load(&self.catalog, wants, MAX_MEMORY, THREADS)?;
        Ok(Restored { moments: with_moments, bytes_read: loaded.bytes_read })
    }

    /// The boxes of one state of a stage's parameters: `held` are the runs of the flat buffer that `values` are.
    fn wants<'a, T: Scalar>(
        &self,
        parameters: &[Parameter],
        coord: &[u32],
        state: &str,
        held: &Runs,
        values: &'a mut [T],
    ) -> Result<Vec<Want<'a>>, CheckpointError> {
        let element = Element::Of(T::DTYPE);
        let mut wants = Vec::new();
        // Parameters lie one behind the other, as do the runs of them that are held.
        let (mut rest, mut done) = (values, 0);
        for p in parameters {
            for (run, mut at) in held.within(&p.range) {
                let tensor = self.shaped(&p.name, state, p.layout.shape())?;
                self.fits(&p.name, tensor.element, element)?;
                let run = (run.start - p.range.start) as u64..(run.end - p.range.start) as u64;
                for region in boxes::of_run(&p.layout, coord, &run) {
                    let len = region.volume() as usize;
                    let (memory, behind) = rest[at - done..].split_at_mut(len);
                    (rest, at, done) = (behind, at + len, at + len);
                    let strides = row_major(region.spans().iter().map(|s| s.len()), element.bytes());
                    let (tensor, memory) = (key_of(&p.name, state), bytemuck::cast_slice_mut(memory));
                    wants.push(Want { tensor, region, element, strides, memory });
                }
            }
        }
        Ok(wants)
    }

    /// Narrow numbers become wider ones as they are; the reverse would lose digits unasked.
    fn fits(&self, name: &str, found: Element, wanted: Element) -> Result<(), CheckpointError> {
        if found.widens_to(wanted) {
            return Ok(());
        }
        let what = format!(
            "`{name}` is {found}, and {wanted} is trained\nhint: train in {found}, or round it first: `crossmesh checkpoint convert --to crossmesh --dtype {wanted}`"
        );
        Err(wrong(&self.path, what))
    }

    fn shaped(&self, name: &str, state: &str, wanted: &[u64]) -> Result<&Tensor, CheckpointError> {
        let key = key_of(name, state);
        let path = self.path.clone();
        let Some(tensor) = self.catalog.tensors.get(&key) else {
            let alike = |other: &&String| other.ends_with(&key) || key.ends_with(other.as_str());
            let near = self.catalog.tensors.keys().find(alike).filter(|_| state == VALUE).cloned();
            return Err(CheckpointError::NoTensor { path, name: key, near });
        };
        match tensor.shape == wanted {
            true => Ok(tensor),
            false => {
                let found = tensor.shape.clone();
                Err(CheckpointError::Shape { path, name: key, found, wanted: wanted.to_vec() })
            }
        }
    }
}

fn same_moments(path: &Path, found: &[String], wanted: &[&str]) -> Result<(), CheckpointError> {
    match found == wanted {
        true => Ok(()),
        false => Err(CheckpointError::Optimizer {
            path: path.to_path_buf(),
            found: found.to_vec(),
            wanted: wanted.iter().map(|name| name.to_string()).collect(),
        }),
    }
}

const WEIGHTS_ALONE: &str = "it holds weights alone: no states of an optimizer";

fn no_past(path: &Path, what: &str) -> CheckpointError {
    let from = path.display();
    wrong(path, format!("{what}\nhint: `--from {from}` starts a run of its own with these weights"))
}

fn wrong(path: &Path, what: impl Into<String>) -> CheckpointError {
    CheckpointError::Model { path: path.to_path_buf(), what: what.into() }
}
