//! DLPack, the way arrays of different libraries share memory: its structures, taken from capsules and put into them.
//!
//! A capsule that is read here stays whole: it is kept as long as its memory is used, and frees it itself. So nothing of another
//! library's runs in a thread of ours.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crossmesh_comm::memory::Memory;
use crossmesh_core::dtype::DType;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{ffi, intern};

const OLD: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const FUNCTIONS: &CStr = c"dlpack_exchange_api";
const READ_ONLY: u64 = 1;
/// The host's memory, and what CUDA has pinned of it.
const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// What a capsule says.
pub struct Described {
    pub address: u64,
    pub dtype: Option<DType>,
    code_bits_lanes: (u8, u8, u16),
    pub on_host: bool,
    pub device: (i32, i32),
    pub shape: Vec<i64>,
    /// In elements.
    pub strides: Option<Vec<i64>>,
    /// None where an old capsule cannot say.
    pub read_only: Option<bool>,
}

impl Described {
    /// As DLPack writes the type, for messages.
    pub fn type_name(&self) -> String {
        let (code, bits, lanes) = self.code_bits_lanes;
        format!("DLPack type {code} of {bits} bits, {lanes} lanes")
    }

    /// Whether it lies without gaps in the order of its dims.
    pub fn is_row_by_row(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut step = 1;
        self.shape.iter().zip(strides).rev().all(|(len, stride)| {
            let fits = *len == 1 || *stride == step;
            step *= len;
            fits || step == 0
        }) || self.shape.contains(&0)
    }

    /// # Safety
    /// Shape and strides point to as many numbers as it has dims, or nowhere.
    unsafe fn of(tensor: &Tensor, read_only: Option<bool>) -> Self {
        let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
        let numbers = |start: *mut i64| -> Option<Vec<i64>> {
            // SAFETY: who calls says so.
            (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, ndim) }.to_vec())
        };
        Self {
            address: tensor.data.addr() as u64 + tensor.byte_offset,
            dtype: if tensor.lanes == 1 { dtype_of(tensor.code, tensor.bits) } else { None },
            code_bits_lanes: (tensor.code, tensor.bits, tensor.lanes),
            on_host: matches!(tensor.device_type, CPU | CUDA_HOST),
            device: (tensor.device_type, tensor.device_id),
            shape: numbers(tensor.shape).unwrap_or_default(),
            strides: numbers(tensor.strides),
            read_only,
        }
    }
}

/// Reads a capsule. It stays whole, and has to be kept while its memory is used.
pub fn describe(capsule: &Bound<'_, PyAny>) -> PyResult<Described> {
    // SAFETY: the object is alive; a name that does not fit is answered with 0.
    let has = |name: &CStr| unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
    // SAFETY: just seen to be valid under this name.
    let pointer = |name: &CStr| unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
    let (tensor, read_only) = if has(VERSIONED) {
        // SAFETY: a capsule of this name holds this structure, by DLPack's standard, until it is renamed.
        let managed = unsafe { &*pointer(VERSIONED).cast::<ManagedVersioned>() };
        if managed.major != 1 {
            return Err(PyBufferError::new_err(format!("DLPack {} is not known, 1 is", managed.major)));
        }
        (managed.tensor, Some(managed.flags & READ_ONLY != 0))
    } else if has(OLD) {
        // SAFETY: as above.
        (unsafe { &*pointer(OLD).cast::<Managed>() }.tensor, None)
    } else {
        return Err(PyBufferError::new_err("__dlpack__ did not return a DLPack capsule"));
    };
    // SAFETY: by the standard, so many numbers lie there, for as long as the capsule is whole.
    Ok(unsafe { Described::of(&tensor, read_only) })
}

/// torch's table of functions, which look at its tensors without a call of Python's: DLPack's `__dlpack_c_exchange_api__`.
#[derive(Clone, Copy)]
pub struct Exchange(&'static Functions);

#[repr(C)]
struct Functions {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    managed: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut *mut ManagedVersioned) -> i32>,
    import: *const c_void,
    borrowed: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Tensor) -> i32>,
    stream: *const c_void,
}

// SAFETY: a table that nobody writes to. What is called through it is called with the interpreter's lock.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

/// torch's own two types of tensors, once one of each was seen. Subclasses may be anything.
static KNOWN: Mutex<Vec<(Py<PyType>, Exchange)>> = Mutex::new(vec![]);
const PLAIN: [(&str, &str); 2] = [("torch", "Tensor"), ("torch.nn.parameter", "Parameter")];

impl Exchange {
    /// That of a plain tensor of torch, where it has one.
    pub fn of(value: &Bound<'_, PyAny>) -> Option<Self> {
        let kind = value.get_type();
        // Never across a call of Python's, in which another thread may get the interpreter's lock and wait for this one.
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, exchange)) = known().iter().find(|(of, _)| of.is(&kind)) {
            return Some(*exchange);
        }
        let module = kind.module().ok()?;
        let name = kind.name().ok()?;
        let is_plain = PLAIN.iter().any(|(in_module, called)| module == *in_module && name == *called);
        let capsule = is_plain.then(|| kind.getattr("__dlpack_c_exchange_api__").ok()).flatten()?;
        // SAFETY: the object is alive. A capsule of this name holds this structure, by DLPack's standard, for as long as the process lives.
        let table = unsafe {
            ffi::PyCapsule_GetPointer(capsule.as_ptr(), FUNCTIONS.as_ptr()).cast::<Functions>().as_ref()
        };
        let Some(table) = table else {
            drop(PyErr::take(value.py()));
            return None;
        };
        if table.major != 1 {
            return None;
        }
        let found = (kind.unbind(), Self(table));
        known().push(found);
        Some(Self(table))
    }

    /// Where a tensor is and what it is like, at this moment; None where it is not what its memory says.
    pub fn look(self, value: &Bound<'_, PyAny>) -> Option<Described> {
        let borrowed = self.0.borrowed?;
        let mut tensor = MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is alive and of the type that the table came from, and the lock is ours.
        if unsafe { borrowed(value.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            drop(PyErr::take(value.py()));
            return None;
        }
        // SAFETY: it was filled in, and what it points to is the tensor's, which nobody else can touch as long as the lock is ours.
        let found = unsafe { Described::of(&tensor.assume_init(), None) };
        let negated = value.call_method0(intern!(value.py(), "is_neg")).and_then(|is| is.is_truthy());
        negated.is_ok_and(|negated| !negated).then_some(found)
    }

    /// What `__dlpack__` returns; None where that has to say what is wrong.
    pub fn capsule<'py>(self, value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let (managed, py) = (self.0.managed?, value.py());
        let mut made: *mut ManagedVersioned = std::ptr::null_mut();
        // SAFETY: the object is alive and of the type that the table came from, and the lock is ours.
        if unsafe { managed(value.as_ptr(), &raw mut made) } != 0 || made.is_null() {
            drop(PyErr::take(py));
            return None;
        }
        // SAFETY: what was made is ours, and goes with the capsule.
        let capsule = unsafe { ffi::PyCapsule_New(made.cast(), VERSIONED.as_ptr(), Some(destroy_theirs)) };
        // SAFETY: a new reference, or null with an error set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.ok()
    }
}

/// # Safety
/// Python calls it with a capsule that [`Exchange::capsule`] made, which nobody has renamed: it does not leave this crate.
unsafe extern "C" fn destroy_theirs(capsule: *mut ffi::PyObject) {
    // SAFETY: it holds this structure, whose deleter may be called once.
    unsafe {
        let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast::<ManagedVersioned>();
        if let Some(deleter) = (*managed).deleter {
            deleter(managed);
        }
    }
}

const CODES: [(DType, u8, u8); 11] = [
    (DType::F64, 2, 64),
    (DType::F32, 2, 32),
    (DType::F16, 2, 16),
    (DType::Bf16, 4, 16),
    (DType::F8E4M3, 10, 8),
    (DType::F8E5M2, 12, 8),
    (DType::I64, 0, 64),
    (DType::I32, 0, 32),
    (DType::I8, 0, 8),
    (DType::U8, 1, 8),
    (DType::Bool, 6, 8),
];

fn dtype_of(code: u8, bits: u8) -> Option<DType> {
    CODES.iter().find(|(_, c, b)| (*c, *b) == (code, bits)).map(|(dtype, ..)| *dtype)
}

/// What a capsule of ours keeps.
struct Kept {
    _memory: Arc<Memory>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// A capsule for memory of ours, which lives as long as anybody has it.
pub fn capsule(
    py: Python<'_>,
    memory: &Arc<Memory>,
    at: u64,
    dtype: DType,
    shape: &[u64],
    versioned: bool,
) -> PyResult<Py<PyAny>> {
    let shape: Vec<i64> = shape.iter().map(|len| *len as i64).collect();
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    let mut kept = Box::new(Kept { _memory: memory.clone(), shape, strides });
    let (_, code, bits) = *CODES.iter().find(|(of, ..)| *of == dtype).expect("every dtype has a code");
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut((memory.address() + at) as usize),
        device_type: CPU,
        device_id: 0,
        ndim: kept.shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: kept.shape.as_mut_ptr(),
        strides: kept.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(kept).cast::<c_void>();
    let (pointer, name, destructor): (*mut c_void, &CStr, ffi::PyCapsule_Destructor) = if versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut ManagedVersioned));
        let managed = ManagedVersioned { major: 1, minor: 0, context, deleter, flags: 0, tensor };
        (Box::into_raw(Box::new(managed)).cast(), VERSIONED, destroy_versioned)
    } else {
        let deleter = Some(delete as unsafe extern "C" fn(*mut Managed));
        (Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast(), OLD, destroy)
    };
    // SAFETY: the name lives as long as the program; the pointer is freed by the destructor, or by whoever renames the capsule.
    let made = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)) };
    // SAFETY: a new reference, or null with an error set.
    unsafe { Bound::from_owned_ptr_or_err(py, made) }.map(Bound::unbind)
}

/// # Safety
/// The pointer is one that `capsule` made, and nobody has it any more.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: both came out of boxes.
    unsafe {
        drop(Box::from_raw((*managed).context.cast::<Kept>()));
        drop(Box::from_raw(managed));
    }
}

/// # Safety
/// As above.
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    unsafe {
        drop(Box::from_raw((*managed).context.cast::<Kept>()));
        drop(Box::from_raw(managed));
    }
}

/// # Safety
/// Python calls it with a capsule of ours.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: under this name it is still ours: who takes it over renames it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, OLD.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, OLD.as_ptr()).cast());
        }
    }
}

/// # Safety
/// As above.
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// Copies bytes of one array into another. Who calls holds both: arrays that were looked at in the same call, of which nobody else may write to the one nor
/// touch the other until it returns, as Python is told.
pub fn copy(from: u64, into: u64, len: u64) {
    // SAFETY: as above.
    unsafe { std::ptr::copy(start_of(from).as_ptr(), start_of(into).as_ptr(), len as usize) }
}

/// Where somebody's bytes start.
pub fn start_of(address: u64) -> NonNull<u8> {
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    NonNull::new(pointer).unwrap_or(NonNull::dangling())
}

/// Bytes of an array that somebody keeps alive, and nobody writes to, while they are looked at.
pub fn bytes_of<T>(address: u64, len: u64, _kept: &T) -> &[u8] {
    // SAFETY: who calls has an array of numpy's whose interface says that these bytes are its own, and holds it; Python is told that
    // nobody may write to it meanwhile.
    unsafe { std::slice::from_raw_parts(start_of(address).as_ptr(), len as usize) }
}
