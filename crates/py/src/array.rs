//! Arrays: ours, which peers of the host can read, and whatever a caller brings.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crossmesh_comm::arrays::{Strided, share_bytes};
use crossmesh_comm::buffer::Base;
use crossmesh_comm::memory::Memory;
use crossmesh_core::dtype::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dlpack::{self, Exchange};
use crate::errors::ArrayError;

/// Memory that we made, by address: a view of it that comes back through another library is known again.
static OURS: Mutex<BTreeMap<u64, Weak<Memory>>> = Mutex::new(BTreeMap::new());

/// An array in memory that ranks of the host read without a copy. `numpy.asarray` and `torch.from_dlpack` look at it in place; bf16 and
/// 8-bit floats, which numpy does not know, are unsigned numbers there.
#[pyclass(frozen, module = "crossmesh", name = "Array")]
pub struct Array {
    pub memory: Arc<Memory>,
    pub at: u64,
    pub dtype: DType,
    pub shape: Vec<u64>,
}

impl Array {
    /// Arrays of these types and shapes, in one piece of memory.
    pub fn make(wanted: Vec<(DType, Vec<u64>)>) -> std::io::Result<Vec<Self>> {
        const ALIGN: u64 = 64;
        let bytes = |(dtype, shape): &(DType, Vec<u64>)| shape.iter().product::<u64>() * dtype.bytes();
        let total = wanted.iter().map(|w| bytes(w).next_multiple_of(ALIGN)).sum();
        let memory = Arc::new(Memory::shared(total)?);
        let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
        ours.retain(|_, memory| memory.strong_count() > 0);
        ours.insert(memory.address(), Arc::downgrade(&memory));
        let mut next = 0;
        let array = |w: (DType, Vec<u64>)| {
            let at = next;
            next += bytes(&w).next_multiple_of(ALIGN);
            Array { memory: memory.clone(), at, dtype: w.0, shape: w.1 }
        };
        Ok(wanted.into_iter().map(array).collect())
    }

    pub fn address(&self) -> u64 {
        self.memory.address() + self.at
    }
}

#[pymethods]
impl Array {
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    #[getter]
    pub fn nbytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    /// Where it lies.
    #[getter]
    fn data_ptr(&self) -> u64 {
        self.address()
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let kind = match self.dtype {
            DType::F64 | DType::F32 | DType::F16 => 'f',
            DType::I64 | DType::I32 | DType::I8 => 'i',
            DType::Bool => 'b',
            DType::Bf16 | DType::F8E4M3 | DType::F8E5M2 | DType::U8 => 'u',
        };
        let order = if self.dtype.bytes() == 1 { '|' } else { '<' };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", format!("{order}{kind}{}", self.dtype.bytes()))?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (self.data_ptr(), false))?;
        Ok(interface)
    }

    /// numpy's view of it.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _host_memory_has_no_stream = stream;
        if copy == Some(true) || dl_device.is_some_and(|device| device != (1, 0)) {
            return Err(pyo3::exceptions::PyBufferError::new_err("it is shared where it lies, on the host"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, &self.memory, self.at, self.dtype, &self.shape, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    fn __repr__(&self) -> String {
        format!("<Array {}{:?}>", self.dtype, self.shape)
    }
}

/// Arrays of these dtypes and shapes, in one piece of memory that ranks of the host read without a copy.
#[pyfunction]
pub fn arrays(py: Python<'_>, wanted: Vec<(String, Vec<u64>)>) -> PyResult<Vec<Array>> {
    let wanted = wanted.into_iter().map(|(name, shape)| Ok((parse_dtype(&name)?, shape)));
    let wanted = wanted.collect::<PyResult<Vec<_>>>()?;
    py.detach(|| Array::make(wanted)).map_err(|e| ArrayError::new_err(format!("no memory for arrays: {e}")))
}

/// An array where it lies: address, shape, strides in elements, bytes of an element, whether it is written to.
type Lies = (u64, Vec<u64>, Vec<u64>, u64, bool);

/// Two arrays that have bytes in common, one of which is written to, by their places in the list.
#[pyfunction]
pub fn sharing(arrays: Vec<Lies>) -> Option<(usize, usize)> {
    let mut lie: Vec<_> = (0..).zip(&arrays).filter_map(|(at, array)| Some((extent(array)?, at))).collect();
    lie.sort_unstable();
    let writes = |at: usize| arrays[at].4;
    lie.iter().enumerate().find_map(|(i, ((_, end), one))| {
        let near = lie[i + 1..].iter().take_while(|((start, _), _)| start < end);
        let mut near = near.filter(|(_, other)| writes(*one) || writes(*other));
        near.find(|(_, other)| meet(&arrays[*one], &arrays[*other])).map(|(_, other)| (*one, *other))
    })
}

/// First byte, and behind the last; None of an array without elements.
fn extent((address, shape, strides, width, _): &Lies) -> Option<(u64, u64)> {
    let mut dims = shape.iter().zip(strides);
    let last = dims.try_fold(0u64, |last, (len, stride)| {
        Some(last.saturating_add(len.checked_sub(1)?.saturating_mul(*stride)))
    })?;
    Some((*address, address.saturating_add(last.saturating_add(1).saturating_mul(*width))))
}

fn meet(one: &Lies, other: &Lies) -> bool {
    let strided = |(_, shape, strides, width, _): &Lies| {
        // A dim that does not step, as of an expanded tensor, is the same bytes again.
        let shape = shape.iter().zip(strides).map(|(len, stride)| if *stride == 0 { 1 } else { *len });
        Strided {
            shape: shape.collect(),
            strides: strides.iter().map(|stride| stride.saturating_mul(*width)).collect(),
        }
    };
    share_bytes((one.0, &strided(one)), (other.0, &strided(other)), (one.3, other.3))
}

/// The notation's word for a dtype of torch, numpy or JAX.
#[pyfunction]
pub fn dtype(name: &str) -> PyResult<&'static str> {
    parse_dtype(name).map(DType::name)
}

fn parse_dtype(name: &str) -> PyResult<DType> {
    let known = || DType::ALL.map(DType::name).join(", ");
    name.parse()
        .map_err(|()| ArrayError::new_err(format!("unknown dtype `{name}`\nhint: one of {}", known())))
}

/// Whose array it is, for messages.
#[derive(Clone, Copy)]
pub struct Whose<'a> {
    pub tensor: &'a str,
    pub rank: u32,
    /// It is written to.
    pub out: bool,
}

impl Whose<'_> {
    pub fn error(&self, what: impl std::fmt::Display) -> PyErr {
        let side = if self.out { "out" } else { "source" };
        ArrayError::new_err(format!("tensor `{}` of rank {}, {side}: {what}", self.tensor, self.rank))
    }
}

/// An array that a caller brought: where it is, and what keeps it there.
pub struct Brought {
    address: u64,
    pub array: Strided,
    pub read_only: bool,
    ours: Option<(Arc<Memory>, u64)>,
    keeps: Vec<Py<PyAny>>,
}

impl Brought {
    /// Takes an array of ours, of numpy, or one that speaks DLPack, and holds it against the type that is expected.
    pub fn take(given: &Bound<'_, PyAny>, dtype: DType, whose: Whose<'_>) -> PyResult<Self> {
        let brought = if let Ok(array) = given.cast::<Array>() {
            Self::ours(array.get(), dtype, whose)?
        } else if let Some(capsule) = Exchange::of(given).and_then(|exchange| exchange.capsule(given)) {
            Self::described(&capsule, given, dtype, whose)?
        } else if given.hasattr("__array_interface__")? {
            Self::of_numpy(given, dtype, whose)?
        } else if given.hasattr("__dlpack__")? {
            Self::of_dlpack(given, dtype, whose)?
        } else {
            return Err(whose.error(format!(
                "{} is no array\nhint: numpy arrays, torch tensors and whatever has __dlpack__ are",
                given.get_type().name()?
            )));
        };
        if whose.out && brought.read_only {
            return Err(whose.error(
                "it is read-only\nhint: give one that can be written to, such as those of `plan.empty`",
            ));
        }
        Ok(brought)
    }

    fn ours(array: &Array, dtype: DType, whose: Whose<'_>) -> PyResult<Self> {
        check_dtype(Some(array.dtype), array.dtype.name(), dtype, whose)?;
        let strided = Strided::packed(&array.shape, dtype.bytes());
        let ours = Some((array.memory.clone(), array.at));
        let address = array.memory.address() + array.at;
        Ok(Self { address, array: strided, read_only: false, ours, keeps: vec![] })
    }

    fn of_numpy(given: &Bound<'_, PyAny>, dtype: DType, whose: Whose<'_>) -> PyResult<Self> {
        let interface = given.getattr("__array_interface__")?;
        let part = |key: &str| interface.get_item(key);
        let typestr: String = part("typestr")?.extract()?;
        // numpy's names of its types are made in Python, each time.
        let found = match (&*typestr, dtype) {
            ("<f4", _) => Some(DType::F32),
            ("<f8", _) => Some(DType::F64),
            ("<f2", _) => Some(DType::F16),
            // numpy has no bf16 and no 8-bit floats: their bits are taken as they are.
            ("<u2", DType::Bf16) | ("|u1", DType::F8E4M3 | DType::F8E5M2) => Some(dtype),
            _ => None,
        };
        if found != Some(dtype) {
            let name: String = given.getattr("dtype")?.getattr("name")?.extract()?;
            if typestr.starts_with('>') {
                return Err(whose.error(format!("dtype {dtype} is expected, big-endian {name} was given")));
            }
            check_dtype(name.parse().ok(), &name, dtype, whose)?;
        }
        let (address, read_only): (u64, bool) = part("data")?.extract()?;
        let shape: Vec<u64> = part("shape")?.extract()?;
        let strides: Option<Vec<i64>> = match part("strides") {
            Ok(strides) => strides.extract()?,
            Err(_) => None,
        };
        let array = strided(shape, strides, 1, dtype, whose)?;
        Ok(Self::foreign(address, array, read_only, vec![given.clone().unbind()]))
    }

    fn of_dlpack(given: &Bound<'_, PyAny>, dtype: DType, whose: Whose<'_>) -> PyResult<Self> {
        let py = given.py();
        // A parameter that learns does not speak DLPack; its values do.
        let learns = given.getattr("requires_grad").and_then(|learns| learns.is_truthy()).unwrap_or(false);
        let plain = if learns { given.call_method0("detach")? } else { given.clone() };
        let (device, _): (i32, i32) = plain.call_method0("__dlpack_device__")?.extract()?;
        if !matches!(device, 1 | 3) {
            return Err(whose.error(format!(
                "memory of the host is expected, device {device} of DLPack was given\nhint: bring it to the host first, or run the plan with `crossmesh.torch.reshard`"
            )));
        }
        let newer = PyDict::new(py);
        newer.set_item("max_version", (1, 0))?;
        let capsule = match plain.call_method("__dlpack__", (), Some(&newer)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => plain.call_method0("__dlpack__"),
            other => other,
        };
        let capsule =
            capsule.map_err(|error| whose.error(format!("it cannot be shared: {}", error.value(py))))?;
        Self::described(&capsule, &plain, dtype, whose)
    }

    /// Of a capsule, which is kept, and so is what it was made of.
    fn described(
        capsule: &Bound<'_, PyAny>,
        given: &Bound<'_, PyAny>,
        dtype: DType,
        whose: Whose<'_>,
    ) -> PyResult<Self> {
        let said = dlpack::describe(capsule)?;
        if !said.on_host {
            return Err(
                whose.error(format!("memory of the host is expected, device {:?} was given", said.device))
            );
        }
        if said.dtype != Some(dtype) {
            check_dtype(said.dtype, &said.type_name(), dtype, whose)?;
        }
        let shape = said.shape.iter().map(|len| u64::try_from(*len).unwrap_or(0)).collect();
        let array = strided(shape, said.strides, dtype.bytes() as i64, dtype, whose)?;
        let read_only = match said.read_only {
            Some(read_only) => read_only,
            None => {
                // JAX answers with an old capsule, which has no flag: its arrays are never written to.
                let module: String = given.get_type().getattr("__module__")?.extract().unwrap_or_default();
                module.starts_with("jax")
            }
        };
        let keeps = vec![capsule.clone().unbind(), given.clone().unbind()];
        Ok(Self::foreign(said.address, array, read_only, keeps))
    }

    fn foreign(address: u64, array: Strided, read_only: bool, keeps: Vec<Py<PyAny>>) -> Self {
        let ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = ours.range(..=address).next_back().and_then(|(_, memory)| memory.upgrade());
        let ours = known.filter(|memory| address < memory.address() + memory.len());
        let ours = ours.map(|memory| (memory.clone(), address - memory.address()));
        Self { address, array, read_only, ours, keeps }
    }

    /// The first byte, and how many there are up to the last.
    pub fn extent(&self, dtype: DType) -> (u64, u64) {
        (self.address, self.array.extent_bytes(dtype.bytes()).unwrap_or(u64::MAX))
    }

    /// Its memory for the engine.
    #[expect(unsafe_code, reason = "memory of somebody else's is what an array is")]
    pub fn base(self, dtype: DType) -> (Base, Strided) {
        let (_, bytes) = self.extent(dtype);
        if let Some((memory, at)) = self.ours {
            return (Base { memory, at }, self.array);
        }
        let start = dlpack::start_of(self.address);
        // SAFETY: what is kept owns the bytes until it is dropped; while a transfer has them, others of this process are refused
        // (`job::InUse`), and the caller is told to leave them alone. Of a read-only array nothing is written: a program does
        // not write to its sources.
        let memory = unsafe { Memory::foreign(self.keeps, start, bytes as usize) };
        (Base { memory: Arc::new(memory), at: 0 }, self.array)
    }
}

fn check_dtype(found: Option<DType>, name: &str, wanted: DType, whose: Whose<'_>) -> PyResult<()> {
    if found == Some(wanted) {
        return Ok(());
    }
    let found = found.map_or_else(|| name.to_string(), |found| found.to_string());
    Err(whose.error(format!(
        "dtype {wanted} is expected, {found} was given\nhint: cast it, or plan with its dtype"
    )))
}

/// A shape with strides, in units of so many bytes.
fn strided(
    shape: Vec<u64>,
    strides: Option<Vec<i64>>,
    unit: i64,
    dtype: DType,
    whose: Whose<'_>,
) -> PyResult<Strided> {
    let Some(strides) = strides else { return Ok(Strided::packed(&shape, dtype.bytes())) };
    let one_or_none = |len: &u64| *len < 2;
    let bytes = strides.iter().zip(&shape).map(|(stride, len)| match stride.checked_mul(unit) {
        // Of one element or none, no step is made.
        _ if one_or_none(len) => Some(dtype.bytes()),
        Some(stride) => u64::try_from(stride).ok(),
        None => None,
    });
    let bytes: Option<Vec<u64>> = bytes.collect();
    let strides = bytes.ok_or_else(|| {
        whose.error(format!("strides {strides:?} go backwards\nhint: give a copy of it in its own order"))
    })?;
    Ok(Strided { shape, strides })
}
