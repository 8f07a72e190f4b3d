//! The library itself, as its backend API has it: descriptors with attributes, which are made, filled and finished; every error in its words.

use std::ffi::{CStr, c_char, c_void};

use cudarc::driver::sys::CUstream;

use super::super::{Shared, find};
use crate::CudaError;

/// Lengths that do not divide by 128 came out wrong before the first; from the second on a reshape has a mode that is not set here.
const VERSIONS: std::ops::Range<usize> = 91_501..92_200;

pub(super) type Descriptor = *mut c_void;
type Status = i32;

/// The calls of the library that are needed.
#[derive(Debug, Clone, Copy)]
struct Calls {
    create: unsafe extern "C" fn(*mut *mut c_void) -> Status,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
    set_stream: unsafe extern "C" fn(*mut c_void, *mut c_void) -> Status,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    make: unsafe extern "C" fn(i32, *mut Descriptor) -> Status,
    end: unsafe extern "C" fn(Descriptor) -> Status,
    set: unsafe extern "C" fn(Descriptor, i32, i32, i64, *const c_void) -> Status,
    get: unsafe extern "C" fn(Descriptor, i32, i32, i64, *mut i64, *mut c_void) -> Status,
    finalize: unsafe extern "C" fn(Descriptor) -> Status,
    execute: unsafe extern "C" fn(*mut c_void, Descriptor, Descriptor) -> Status,
}

/// Numbers of the library's header.
mod code {
    pub mod kind {
        pub const POINTWISE: i32 = 0;
        pub const ENGINECFG: i32 = 3;
        pub const ENGINEHEUR: i32 = 4;
        pub const EXECUTION_PLAN: i32 = 5;
        pub const OPERATION_POINTWISE: i32 = 13;
        pub const OPERATIONGRAPH: i32 = 15;
        pub const VARIANT_PACK: i32 = 16;
        pub const TENSOR: i32 = 17;
        pub const MATMUL: i32 = 18;
        pub const OPERATION_MATMUL: i32 = 19;
        pub const REDUCTION: i32 = 21;
        pub const OPERATION_REDUCTION: i32 = 22;
        pub const OPERATION_RESHAPE: i32 = 31;
    }
    pub mod types {
        pub const HANDLE: i32 = 0;
        pub const DATA_TYPE: i32 = 1;
        pub const BOOLEAN: i32 = 2;
        pub const INT64: i32 = 3;
        pub const VOID_PTR: i32 = 6;
        pub const HEUR_MODE: i32 = 8;
        pub const POINTWISE_MODE: i32 = 14;
        pub const DESCRIPTOR: i32 = 15;
        pub const REDUCTION_OPERATOR: i32 = 18;
    }
    pub mod data {
        pub const F32: i32 = 0;
        pub const I32: i32 = 4;
        pub const BF16: i32 = 9;
        pub const BOOLEAN: i32 = 11;
    }
    pub mod mode {
        pub const ADD: i32 = 0;
        pub const MUL: i32 = 1;
        pub const DIV: i32 = 6;
        pub const SUB: i32 = 9;
        pub const EXP: i32 = 13;
        pub const LOG: i32 = 15;
        pub const IDENTITY: i32 = 21;
        pub const CMP_GE: i32 = 303;
        pub const GEN_INDEX: i32 = 501;
        pub const BINARY_SELECT: i32 = 601;
    }
    pub mod reduce {
        pub const ADD: i32 = 0;
        pub const MAX: i32 = 3;
    }
}
pub(super) use code::{data, kind, mode, reduce, types};

/// A descriptor, which goes with the value.
#[derive(Debug)]
pub(super) struct Owned {
    calls: Calls,
    pub(super) raw: Descriptor,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the library, and ended once.
        unsafe { (self.calls.end)(self.raw) };
    }
}

/// An attribute: its name, its type, how many values and where they are.
pub(super) type Attribute = (i32, i32, usize, *const c_void);

/// The library, with a handle whose work is queued on one stream.
#[derive(Debug)]
pub(super) struct Library {
    calls: Calls,
    handle: Shared<*mut c_void>,
    pub(super) version: usize,
    /// The card's.
    name: String,
}

impl Library {
    /// The context has to be the calling thread's; the stream outlives what is queued on it.
    #[expect(clippy::missing_transmute_annotations, reason = "a field's type is the function's")]
    pub(super) fn open(name: &str, stream: CUstream) -> Result<Self, CudaError> {
        let (library, version) = find::cudnn(&VERSIONS)?;
        macro_rules! calls {
            ($($field:ident: $name:literal),* $(,)?) => {
                Calls { $($field: {
                    // SAFETY: the function of that name, as the library's header has it.
                    let found = unsafe { libc::dlsym(library, $name.as_ptr()) };
                    if found.is_null() {
                        let looked = $name.to_string_lossy().into_owned();
                        return Err(CudaError::NoLibrary { library: "cuDNN", looked, hint: "the file is not cuDNN 9" });
                    }
                    // SAFETY: as above.
                    unsafe { std::mem::transmute::<*mut c_void, _>(found) }
                }),* }
            };
        }
        let calls = calls! {
            create: c"cudnnCreate",
            destroy: c"cudnnDestroy",
            set_stream: c"cudnnSetStream",
            last_error: c"cudnnGetLastErrorString",
            make: c"cudnnBackendCreateDescriptor",
            end: c"cudnnBackendDestroyDescriptor",
            set: c"cudnnBackendSetAttribute",
            get: c"cudnnBackendGetAttribute",
            finalize: c"cudnnBackendFinalize",
            execute: c"cudnnBackendExecute",
        };
        let none = Shared(std::ptr::null_mut());
        let mut opened = Self { calls, handle: none, version, name: name.to_owned() };
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes the handle; a context is current.
        opened.check("cudnnCreate", unsafe { (calls.create)(&raw mut handle) })?;
        opened.handle = Shared(handle);
        // SAFETY: as the caller says.
        opened.check("cudnnSetStream", unsafe { (calls.set_stream)(handle, stream.cast()) })?;
        Ok(opened)
    }

    pub(super) fn handle(&self) -> *mut c_void {
        self.handle.0
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0 as c_char; 512];
        // SAFETY: writes at most so many bytes, and a zero behind them.
        let said = unsafe {
            (self.calls.last_error)(text.as_mut_ptr(), text.len());
            text[text.len() - 1] = 0;
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        Err(CudaError::Call { call, name: self.name.clone(), why: format!("status {status}, {said}") })
    }

    /// A descriptor with its attributes.
    pub(super) fn descriptor(&self, what: i32, attributes: &[Attribute]) -> Result<Owned, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes the descriptor.
        self.check("cudnnBackendCreateDescriptor", unsafe { (self.calls.make)(what, &raw mut raw) })?;
        let made = Owned { calls: self.calls, raw };
        for (name, of, count, values) in attributes {
            // SAFETY: as many values of the type as there are.
            let status = unsafe { (self.calls.set)(raw, *name, *of, *count as i64, *values) };
            self.check("cudnnBackendSetAttribute", status).map_err(|error| named(error, *name))?;
        }
        // SAFETY: all that it needs was set.
        let status = unsafe { (self.calls.finalize)(raw) };
        self.check("cudnnBackendFinalize", status).map_err(|error| named(error, what))?;
        Ok(made)
    }

    /// Queues a plan with its pack of places, which are as the plan wants them.
    pub(super) unsafe fn execute(&self, plan: &Owned, pack: &Owned) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        self.check("cudnnBackendExecute", unsafe { (self.calls.execute)(self.handle.0, plan.raw, pack.raw) })
    }

    /// Bytes of scratch memory that a plan wants.
    pub(super) fn workspace(&self, plan: &Owned) -> Result<u64, CudaError> {
        let (mut bytes, mut count) = (0i64, 0i64);
        // SAFETY: writes one number.
        let status = unsafe {
            (self.calls.get)(plan.raw, 402, types::INT64, 1, &raw mut count, (&raw mut bytes).cast())
        };
        self.check("cudnnBackendGetAttribute", status)?;
        Ok(bytes.max(0) as u64)
    }

    /// Engines that the heuristics name, the best first.
    pub(super) fn results(&self, heuristics: &Owned) -> Result<Vec<Owned>, CudaError> {
        let mut count = 0i64;
        // SAFETY: asks how many there are.
        let status = unsafe {
            (self.calls.get)(heuristics.raw, 202, types::DESCRIPTOR, 0, &raw mut count, std::ptr::null_mut())
        };
        self.check("cudnnBackendGetAttribute", status)?;
        let mut configs = vec![];
        for _ in 0..count {
            let mut raw = std::ptr::null_mut();
            // SAFETY: writes the descriptor.
            let status = unsafe { (self.calls.make)(kind::ENGINECFG, &raw mut raw) };
            self.check("cudnnBackendCreateDescriptor", status)?;
            configs.push(Owned { calls: self.calls, raw });
        }
        let mut raws: Vec<Descriptor> = configs.iter().map(|config| config.raw).collect();
        let room = raws.len() as i64;
        // SAFETY: as many descriptors as there is room for.
        let status = unsafe {
            (self.calls.get)(
                heuristics.raw,
                202,
                types::DESCRIPTOR,
                room,
                &raw mut count,
                raws.as_mut_ptr().cast(),
            )
        };
        self.check("cudnnBackendGetAttribute", status)?;
        configs.truncate(count.max(0) as usize);
        Ok(configs)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: made by `open`, or null; plans went before.
        unsafe { (self.calls.destroy)(self.handle.0) };
    }
}

/// Says which attribute or descriptor it was about.
fn named(error: CudaError, number: i32) -> CudaError {
    match error {
        CudaError::Call { call, name, why } => {
            CudaError::Call { call, name, why: format!("{number}: {why}") }
        }
        other => other,
    }
}
