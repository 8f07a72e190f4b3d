//! Checkpoints of any format, as Python sees them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossmesh_checkpoint::{
    Catalog, CheckpointError as Refusal, Element, Format, Limits, Loaded, NameMap, Naming, Request,
    RunOptions, Want, diff, load, open, open_within, rounds,
};
use crossmesh_core::region::{Region, Span};
use crossmesh_core::units::parse_bytes;
use pyo3::create_exception;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::CrossmeshError;

create_exception!(
    crossmesh,
    CheckpointError,
    CrossmeshError,
    "A checkpoint that cannot be opened, converted or loaded: the file, the tensor, the box."
);

fn error(error: impl std::fmt::Display) -> PyErr {
    CheckpointError::new_err(error.to_string())
}

/// A checkpoint that is open: its headers were read, no tensor was.
#[pyclass(frozen, module = "crossmesh", name = "Checkpoint")]
pub struct Checkpoint(Catalog);

/// How often Ctrl-C is looked for, and progress told.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[pymethods]
impl Checkpoint {
    /// Opens a folder or a safetensors file; the format is told by its content.
    #[staticmethod]
    #[pyo3(signature = (path, *, max_memory=None))]
    fn open(py: Python<'_>, path: PathBuf, max_memory: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let max_memory = max_memory.map(bytes_of).transpose()?;
        py.detach(|| max_memory.map_or_else(|| open(&path), |max| open_within(&path, max)))
            .map(Self)
            .map_err(error)
    }

    /// `hf`, `dcp`, `dcp-hf`, `torch_dist` or `crossmesh`.
    #[getter]
    fn format(&self) -> &'static str {
        self.0.format.name()
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.0.folder.clone()
    }

    /// Of all tensors, each element once.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// By name: dtype and shape.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, tensor) in &self.0.tensors {
            let shape = pyo3::types::PyTuple::new(py, &tensor.shape)?;
            dict.set_item(name, (tensor.element.name(), shape))?;
        }
        Ok(dict)
    }

    /// What is no tensor, by name.
    #[getter]
    fn objects(&self) -> Vec<String> {
        self.0.objects.keys().cloned().collect()
    }

    /// The text of the model's config.json, where there is one.
    #[getter]
    fn config(&self) -> Option<String> {
        self.0.config.as_ref().map(ToString::to_string)
    }

    /// Where the boxes of a tensor lie: spans, file, first byte and strides in bytes.
    #[expect(clippy::type_complexity, reason = "Python has tuples for it")]
    fn boxes(&self, name: &str) -> PyResult<Vec<(Vec<(u64, u64)>, String, u64, Vec<u64>)>> {
        let tensor =
            self.0.tensors.get(name).ok_or_else(|| error(format!("no tensor is called `{name}`")))?;
        let stored = |b: &crossmesh_checkpoint::StoredBox| {
            let spans = b.region.spans().iter().map(|s| (s.start, s.end)).collect();
            (spans, self.0.files[b.file as usize].name.clone(), b.offset, b.strides.clone())
        };
        Ok(tensor.boxes.iter().map(stored).collect())
    }

    /// All problems: what kind, whether it is a warning, and what it is.
    fn check(&self, py: Python<'_>) -> Vec<(&'static str, bool, String)> {
        let problems = py.detach(|| self.0.check());
        problems.into_iter().map(|p| (p.kind.name(), p.kind.is_warning(), p.what)).collect()
    }

    /// The same tensors under the names of another side of a map.
    #[pyo3(signature = (names, to, *, config=None, spelling=None, leave_out=vec![]))]
    fn renamed(
        &self,
        py: Python<'_>,
        names: &str,
        to: String,
        config: Option<PathBuf>,
        spelling: Option<String>,
        leave_out: Vec<String>,
    ) -> PyResult<Self> {
        let mut catalog = self.0.clone();
        if let Some(path) = config {
            catalog.config = Some(read_config(&path).map_err(error)?);
        }
        let naming = Naming { to, spelling, leave_out, ..Naming::default() };
        py.detach(|| Ok(NameMap::find(names)?.apply(&catalog, &naming)?.catalog))
            .map(Self)
            .map_err(|e: crossmesh_checkpoint::CheckpointError| error(e))
    }

    /// Which bytes come from where, as text; nothing is written.
    #[pyo3(signature = (**options))]
    fn explain(&self, py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<String> {
        let asked = Asked::read(options)?;
        let planned = py.detach(|| asked.request.plan(self.0.clone())).map_err(error)?;
        let run = RunOptions::default();
        let limits = Limits::new(asked.max_memory, run.threads).map_err(error)?;
        Ok(planned.explain(limits).to_string())
    }

    /// Writes it as another: complete, or not there. `progress` is called with the bytes done and all bytes.
    #[pyo3(signature = (output, *, progress=None, **options))]
    fn convert<'py>(
        &self,
        py: Python<'py>,
        output: PathBuf,
        progress: Option<Py<PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let asked = Asked::read(options)?;
        let planned = py.detach(|| asked.request.plan(self.0.clone())).map_err(error)?;
        let stop = AtomicBool::new(false);
        let at = [AtomicU64::new(0), AtomicU64::new(planned.conversion.bytes())];
        let note = |p: crossmesh_checkpoint::Progress| {
            at[1].store(p.bytes, Ordering::Relaxed);
            at[0].store(p.bytes_done, Ordering::Relaxed);
        };
        let tell = || match &progress {
            Some(callable) => {
                let [done, all] = [&at[0], &at[1]].map(|n| n.load(Ordering::Relaxed));
                callable.call1(py, (done, all)).map(drop)
            }
            None => Ok(()),
        };
        let run = RunOptions {
            max_memory: asked.max_memory,
            progress: Some(&note),
            stop: Some(&stop),
            ..RunOptions::default()
        };
        let pause = LOOK_EVERY.min(Duration::from_millis(1 + planned.conversion.bytes() / (16 << 20)));
        let mut interrupted = None;
        let result = std::thread::scope(|scope| {
            let thread = scope.spawn(|| planned.conversion.run(&output, &run));
            while !thread.is_finished() {
                py.detach(|| std::thread::sleep(pause));
                if let Err(error) = py.check_signals().and_then(|()| tell()) {
                    stop.store(true, Ordering::Relaxed);
                    interrupted.get_or_insert(error);
                }
            }
            py.detach(|| thread.join())
        });
        let result = result.map_err(|_| error("the conversion's thread panicked"))?;
        if let Some(interruption) = interrupted {
            // What stays, and what can be done with it, is said with whatever ended it.
            if let Err(stopped @ Refusal::Stopped { .. }) = &result {
                interruption.value(py).call_method1("add_note", (stopped.to_string(),))?;
            }
            return Err(interruption);
        }
        let report = result.map_err(error)?;
        tell()?;
        let dict = PyDict::new(py);
        dict.set_item("tensors", report.tensors)?;
        dict.set_item("files", report.files)?;
        dict.set_item("bytes_read", report.bytes_read)?;
        dict.set_item("bytes_written", report.bytes_written)?;
        dict.set_item("bytes_read_again", report.bytes_read_again)?;
        dict.set_item("bytes_kept", report.bytes_kept)?;
        dict.set_item("left_out", planned.left_out)?;
        dict.set_item("map", planned.map)?;
        Ok(dict)
    }

    /// Fills memory: of every box the tensor, the spans, the dtype, the address, and strides in bytes. The caller answers for
    /// the addresses; `crossmesh.checkpoint.load` takes arrays.
    #[expect(clippy::type_complexity, reason = "Python has tuples for it")]
    fn load_at(
        &self,
        py: Python<'_>,
        wants: Vec<(String, Vec<(u64, u64)>, String, usize, Vec<u64>)>,
        max_memory: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, u64)> {
        let max_memory = bytes_of(max_memory)?;
        let mut list = Vec::with_capacity(wants.len());
        for (tensor, spans, dtype, address, strides) in wants {
            let element: Element =
                dtype.parse().map_err(|()| error(format!("tensor `{tensor}`: unknown dtype `{dtype}`")))?;
            if spans.iter().any(|(start, end)| start > end) || spans.len() != strides.len() {
                return Err(error(format!("tensor `{tensor}`: {spans:?} is no box")));
            }
            let region = Region::new(spans.into_iter().map(|(a, b)| Span::new(a, b)).collect());
            let len = len_of(address, &region, &strides, element)
                .ok_or_else(|| error(format!("tensor `{tensor}`: {region} is larger than memory")))?;
            list.push(Array { tensor, region, element, strides, address, len });
        }
        let loaded = py.detach(|| fill(&self.0, list, max_memory)).map_err(error)?;
        Ok((loaded.bytes, loaded.bytes_read))
    }

    /// In what another differs, tensor by tensor.
    #[pyo3(signature = (other, *, max_memory=None))]
    fn diff(
        &self,
        py: Python<'_>,
        other: &Checkpoint,
        max_memory: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<String>> {
        let max_memory = max_memory.map_or(Ok(MAX_MEMORY), bytes_of)?;
        let threads = RunOptions::default().threads;
        let found = py.detach(|| diff::diff(&self.0, &other.0, max_memory, threads)).map_err(error)?;
        Ok(found.iter().map(ToString::to_string).collect())
    }

    fn __repr__(&self) -> String {
        format!("<Checkpoint {} of {} tensors: {} B>", self.0.format, self.0.tensors.len(), self.0.bytes())
    }
}

/// A box that is wanted, at an address.
struct Array {
    tensor: String,
    region: Region,
    element: Element,
    strides: Vec<u64>,
    address: usize,
    len: usize,
}

/// The bytes between the first and the last element of a box in memory; None for what is larger than memory, or nowhere.
fn len_of(address: usize, region: &Region, strides: &[u64], element: Element) -> Option<usize> {
    if region.is_empty() {
        return Some(0);
    }
    let mut steps =
        region.spans().iter().zip(strides).map(|(span, stride)| (span.len() - 1).checked_mul(*stride));
    let bytes = steps.try_fold(element.bytes(), |at, step| at.checked_add(step?))?;
    usize::try_from(bytes).ok().filter(|n| *n <= isize::MAX as usize && address != 0)
}

/// Loads, of arrays that interleave one after the other: two threads never have the same byte.
fn fill(catalog: &Catalog, arrays: Vec<Array>, max_memory: u64) -> Result<Loaded, Refusal> {
    let pieces: Vec<(usize, usize)> = arrays.iter().map(|a| (a.address, a.len)).collect();
    let mut arrays: Vec<Option<Array>> = arrays.into_iter().map(Some).collect();
    let mut all = Loaded::default();
    for round in rounds(&pieces) {
        let wants = round.into_iter().filter_map(|i| arrays[i].take()).map(want).collect();
        let loaded = load(catalog, wants, max_memory, RunOptions::default().threads)?;
        all.bytes += loaded.bytes;
        all.bytes_read += loaded.bytes_read;
    }
    Ok(all)
}

/// With the memory of an array, which nobody else of its round has.
#[expect(unsafe_code, reason = "arrays of other libraries are addresses")]
fn want<'a>(array: Array) -> Want<'a> {
    let Array { tensor, region, element, strides, address, len } = array;
    let memory: &mut [u8] = match len {
        0 => &mut [],
        // SAFETY: the caller of `load_at` has an array of this extent at the address, which is not null, writable, and keeps it until that
        // returns. No other slice of its bytes is there meanwhile: those of a round have no byte in common, and rounds follow each other.
        _ => unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(address), len)
        },
    };
    Want { tensor, region, element, strides, memory }
}

/// Of all buffers together, where nobody says.
const MAX_MEMORY: u64 = 1 << 30;

/// A number of bytes, or a text as `1GiB`.
fn bytes_of(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    parse_bytes(&value.str()?.to_string()).map_err(error)
}

fn read_config(path: &std::path::Path) -> Result<serde_json::Value, String> {
    let text = std::fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    serde_json::from_slice(&text).map_err(|e| format!("{}: it is no JSON: {e}", path.display()))
}

/// Keywords of `convert` and `explain`.
struct Asked {
    request: Request,
    max_memory: u64,
}

impl Asked {
    fn read(options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut asked = Self { request: Request::new(Format::Hf), max_memory: MAX_MEMORY };
        for (key, value) in options.into_iter().flat_map(|o| o.iter()) {
            if value.is_none() {
                continue;
            }
            let key: String = key.extract()?;
            let bytes = || bytes_of(&value);
            let r = &mut asked.request;
            match key.as_str() {
                "to" => r.format = value.extract::<String>()?.parse().map_err(error)?,
                "names" => r.names = Some(value.str()?.to_string()),
                "from_names" => r.from_names = Some(value.extract()?),
                "to_names" => r.to_names = Some(value.extract()?),
                "spelling" => r.spelling = Some(value.extract()?),
                "tp" => r.tp = Some(value.extract()?),
                "pp" => r.pp = Some(value.extract()?),
                "ep" => r.ep = Some(value.extract()?),
                "ranks" => r.ranks = Some(value.extract()?),
                "dtype" => {
                    let name = value.str()?.to_string();
                    let element = name.trim_start_matches("torch.").parse();
                    r.element = Some(element.map_err(|()| error(format!("unknown dtype `{name}`")))?);
                }
                "shard_size" => r.shard_bytes = bytes()?,
                "leave_out" => r.leave_out = value.extract()?,
                "config" => r.config = Some(value.extract()?),
                "max_memory" => asked.max_memory = bytes()?,
                other => {
                    return Err(pyo3::exceptions::PyTypeError::new_err(format!("unknown option `{other}`")));
                }
            }
        }
        Ok(asked)
    }
}
