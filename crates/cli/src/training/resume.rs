//! What a run goes on from, and what it means that its config has changed since.
//!
//! A checkpoint has the config it was saved under. Every key that differs is one of three: it cannot differ (the model would be another
//! one), it changes what is learnt from here on, which is said, or it changes nothing but speed.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use crossmesh_checkpoint::Format;
use crossmesh_train::chain::parameters;
use crossmesh_train::checkpoint::hf::LADDER;
use crossmesh_train::checkpoint::{Checkpoint, Facts, Source, Store};
use crossmesh_train::config::{Config, Precision, StageSection};
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::Residual;

use super::save::model_facts;
use super::{Training, mesh_text};
use crate::commands::checkpoint::is_foreign;

/// A checkpoint to go on from.
#[derive(Debug, Clone)]
pub struct From {
    pub folder: PathBuf,
    /// Steps done, and samples seen.
    pub step: u64,
    pub samples: u64,
    /// Whether only its weights count: the run starts at step 0.
    pub weights_only: bool,
    pub format: Format,
    /// The config it was saved under; none where another program made it.
    config: Option<String>,
}

impl From {
    /// Opens a checkpoint to go on from, whoever wrote it.
    pub fn open(folder: &Path, weights_only: bool) -> Result<Self> {
        if is_foreign(folder) {
            return Self::open_foreign(folder, weights_only);
        }
        let checkpoint = Checkpoint::open(folder)?;
        checkpoint.verify()?;
        let facts = checkpoint.facts();
        Ok(Self {
            folder: folder.to_path_buf(),
            step: if weights_only { 0 } else { facts.step },
            samples: if weights_only { 0 } else { facts.samples },
            weights_only,
            format: Format::Crossmesh,
            config: config_of(facts),
        })
    }

    /// One of another system: what it lacks is said when it is held against the model.
    fn open_foreign(path: &Path, weights_only: bool) -> Result<Self> {
        let catalog = crossmesh_checkpoint::open(path)?;
        let facts = catalog.facts.as_ref().filter(|_| !weights_only);
        Ok(Self {
            folder: path.to_path_buf(),
            step: facts.map_or(0, |f| f.step),
            samples: facts.map_or(0, |f| f.samples),
            weights_only,
            format: catalog.format,
            config: facts.and_then(config_of),
        })
    }

    /// The newest checkpoint, which has to be whole: nobody goes back to an older one unasked.
    pub fn newest(store: &Store) -> Result<Option<Self>> {
        let Some(path) = store.latest()? else { return Ok(None) };
        match Self::open(&path, false) {
            Ok(from) => Ok(Some(from)),
            Err(error) => {
                let steps = store.steps()?;
                let older = steps.iter().rev().nth(1).map(|step| store.complete(*step));
                let hint = match older {
                    Some(older) => format!("an older one has to be asked for: --resume {}", older.display()),
                    None => "there is no older one".into(),
                };
                bail!("the newest checkpoint cannot be used: {error:#}\nhint: {hint}")
            }
        }
    }

    /// Refuses a checkpoint of another model; answers what differs from the run that saved it, a line each.
    pub fn check(&self, training: &Training) -> Result<Vec<String>> {
        let old = self.config.as_deref().map(|text| Config::read("the checkpoint's config", text, &[]));
        let changes = match &old {
            // An imported model has none: its tensors still tell.
            None => vec![],
            Some(Err(error)) => vec![format!("what has changed is not known: {error}")],
            // A run of its own compares with nothing.
            Some(Ok(_)) if self.weights_only => vec![],
            Some(Ok(old)) => self.compare(old, training)?,
        };
        let model = &training.resolved.model;
        let sizes = model_facts(model);
        let source = Source::open(&self.folder, &sizes, self.weights_only)?;
        self.check_sizes(source.model(), &sizes)?;
        // In bf16 it is the masters that go on, and those are f32.
        let wanted = match training.config.train.precision {
            Precision::F64 => parameters(&*model.with_kernels::<Cpu<f64>>()),
            Precision::F32 | Precision::Bf16 => parameters(&*model.with_kernels::<Cpu<f32>>()),
        };
        source.check_model(&wanted)?;
        if !self.weights_only {
            source.check_past(training.resolved.job.update.optimizer.moment_names())?;
        }
        Ok(changes)
    }

    fn compare(&self, old: &Config, training: &Training) -> Result<Vec<String>> {
        let before = old.written();
        // With what was found out from the data: the vocabulary.
        let now = Config::read("the config", &training.doc.config, &[])?.written();
        let mut said = vec![];
        let mut layout_changed = false;
        for (key, value) in &now {
            let Some((_, was)) =
                before.iter().find(|(other, _)| other == key).filter(|(_, was)| was != value)
            else {
                continue;
            };
            match Meaning::of(key) {
                Meaning::Learns(means) => said.push(format!("{key} is {value}, and was {was}: {means}")),
                Meaning::Layout => layout_changed = true,
                Meaning::Rate | Meaning::Nothing => {}
            }
        }
        said.extend(self.rates(old, &training.config));
        let meshes = |stages: &[StageSection]| {
            stages.iter().map(|s| mesh_text(&s.mesh)).collect::<Vec<_>>().join(" → ")
        };
        let (was, is) = (meshes(&old.stages), meshes(&training.config.stages));
        if layout_changed || was != is {
            said.push(format!(
                "it ran on {was}, and goes on on {is}: sums are added in another order, so numbers differ in their last digits"
            ));
        }
        Ok(said)
    }

    /// Refuses another model. Some of what makes one is in no tensor: epsilon, say.
    fn check_sizes(&self, saved: &serde_json::Value, wanted: &serde_json::Value) -> Result<()> {
        // Before there were ladders nobody said that a model is none.
        let serial = serde_json::json!(Residual::Serial.name());
        let was = |key: &str| saved.get(key).or((key == "residual" && saved.is_object()).then_some(&serial));
        // A kind says so too; the hint names the key that a config has for it.
        let kind = |value: &serde_json::Value| {
            value.as_str().map(|kind| kind.strip_prefix(LADDER).unwrap_or(kind).to_string())
        };
        let differs = |key: &str, is: &serde_json::Value, was: &serde_json::Value| match key {
            "kind" => kind(is) != kind(was),
            _ => is != was,
        };
        let keys = wanted.as_object().into_iter().flatten().filter(|(key, _)| *key != "dropout");
        let differ =
            keys.filter_map(|(key, is)| Some((key, is, was(key).filter(|was| differs(key, is, was))?)));
        let differ: Vec<_> = differ.collect();
        if differ.is_empty() {
            return Ok(());
        }
        let said = differ.iter().map(|(key, is, was)| format!("model.{key} is {is} and not {was}"));
        let sets: String = differ.iter().map(|(key, _, was)| format!(" --set model.{key}={was}")).collect();
        bail!(
            "{}: that is another model than the one in {}\nhint: take the one that was saved:{sets}",
            said.collect::<Vec<_>>().join(", "),
            self.folder.display()
        )
    }

    /// Where the learning rate takes another way.
    fn rates(&self, old: &Config, new: &Config) -> Option<String> {
        let (was, is) = (&old.optimizer.update.rate, &new.optimizer.update.rate);
        let last = new.train.steps.saturating_sub(1);
        (was != is).then(|| {
            format!(
                "the learning rate follows another schedule from here on: {:.3e} at step {} where it would have been {:.3e}, {:.3e} at step {}",
                is.at(self.step),
                self.step + 1,
                was.at(self.step),
                is.at(last),
                last + 1,
            )
        })
    }
}

fn config_of(facts: &Facts) -> Option<String> {
    facts.run.get("config").and_then(|text| text.as_str()).map(String::from)
}

/// What another value of a key means for a run that goes on.
enum Meaning {
    Learns(&'static str),
    /// Part of the learning rate's schedule.
    Rate,
    Layout,
    Nothing,
}

impl Meaning {
    fn of(key: &str) -> Self {
        let (section, name) = key.split_once('.').unwrap_or((key, ""));
        match (section, name) {
            ("model", "dropout") => Meaning::Learns("training drops another share from here on"),
            ("data", "seed") => Meaning::Learns(
                "samples come in another order: some of this epoch come twice, others not at all",
            ),
            ("data", _) => Meaning::Learns("other samples from here on"),
            ("train", "batch") => {
                Meaning::Learns("the run goes on at the sample where it stopped, with so many a step")
            }
            ("train", "device") => {
                Meaning::Learns("other kernels, whose numbers differ in their last digits")
            }
            ("train", "seed") => Meaning::Learns("dropout draws other numbers; weights are the checkpoint's"),
            ("train", "steps")
            | ("optimizer", "learning_rate" | "schedule" | "warmup" | "floor" | "decay") => Meaning::Rate,
            (
                "optimizer",
                "zero" | "bucket" | "parameters_over" | "gradients_over" | "states_over" | "fixed_order",
            )
            | ("train", "microbatches" | "strands") => Meaning::Layout,
            ("optimizer", _) => Meaning::Learns("weights are updated by the new value from here on"),
            _ => Meaning::Nothing,
        }
    }
}

/// Whether a folder of checkpoints is the one that a checkpoint lies in.
pub fn lies_in(checkpoint: &Path, store: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = real(checkpoint).and_then(|path| path.parent().map(Path::to_path_buf));
    parent.is_some() && parent == real(store)
}
