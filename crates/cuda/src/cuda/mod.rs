//! NVIDIA's driver, through the bindings' `sys` layer.
//!
//! One context a process and card (its primary one), shared by all threads. Copies have a stream for each direction, and beside each a stream
//! that only waits and calls back: a callback in the stream of the copies would hold up the next of them.
#![allow(unsafe_code)]

pub mod attend;
pub mod dnn;
pub mod find;
pub mod image;
pub mod lab;
pub mod lt;
pub mod marks;
pub mod moves;
pub mod ops;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use crate::boxes::Means;
use crate::driver::{Allocated, Card, Driver, Event, Then, Way};
use crate::{BoxCopy, CudaError};

/// Streams, events and functions are addresses of the driver's, which any thread may use.
#[derive(Debug, Clone, Copy)]
struct Shared<T>(T);

unsafe impl<T> Send for Shared<T> {}
unsafe impl<T> Sync for Shared<T> {}

#[derive(Debug)]
struct Streams {
    copies: Shared<sys::CUstream>,
    calls: Shared<sys::CUstream>,
}

/// A card and its context.
#[derive(Debug)]
pub struct Cuda {
    card: Card,
    device: i32,
    context: Shared<sys::CUcontext>,
    ways: [Streams; 3],
    granularity: usize,
    /// Functions by name, of modules that stay loaded.
    functions: Mutex<HashMap<String, Shared<sys::CUfunction>>>,
    idle_events: Mutex<Vec<Shared<sys::CUevent>>>,
}

/// What a call returned, in the driver's words.
fn words(code: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const i8) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: writes the address of a constant string, or null.
        unsafe {
            get(code, &raw mut text);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (name, _) if name.is_empty() => format!("error {}", code as u32),
        (name, what) => format!("{name}, {what}"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls the driver, and says which call failed. The context is the calling thread's from then on.
macro_rules! call {
    ($cuda:expr, $function:ident ( $($argument:expr),* )) => {
        match unsafe { sys::$function($($argument),*) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err($cuda.failed(stringify!($function), code)),
        }
    };
}

impl Cuda {
    /// The card of that number, if everything that it needs is there.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let count = count()?;
        if ordinal >= count {
            let name = |i| card(i).map_or_else(|e| e.to_string(), |(card, _)| card.name);
            let found: Vec<String> = (0..count).map(|i| format!("{i} ({})", name(i))).collect();
            return Err(CudaError::NoSuchDevice { asked: ordinal, found: found.join(", ") });
        }
        let (card, device) = card(ordinal)?;
        if card.capability.0 < 8 {
            return Err(CudaError::OldCard { name: card.name, capability: card.capability });
        }
        Self::of(card, device)
    }

    fn of(card: Card, device: i32) -> Result<Self, CudaError> {
        let null = || Streams { copies: Shared(std::ptr::null_mut()), calls: Shared(std::ptr::null_mut()) };
        let mut cuda = Self {
            card,
            device,
            context: Shared(std::ptr::null_mut()),
            ways: [null(), null(), null()],
            granularity: 0,
            functions: Mutex::default(),
            idle_events: Mutex::default(),
        };
        call!(cuda, cuDevicePrimaryCtxRetain(&raw mut cuda.context.0, device))?;
        cuda.enter()?;
        for way in 0..3 {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            call!(cuda, cuStreamCreate(&raw mut cuda.ways[way].copies.0, flags))?;
            call!(cuda, cuStreamCreate(&raw mut cuda.ways[way].calls.0, flags))?;
        }
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let kind = cuda.shareable();
        call!(cuda, cuMemGetAllocationGranularity(&raw mut cuda.granularity, &raw const kind, least))?;
        Ok(cuda)
    }

    /// Makes the context the calling thread's.
    pub fn enter(&self) -> Result<(), CudaError> {
        call!(self, cuCtxSetCurrent(self.context.0))
    }

    fn failed(&self, call: &'static str, code: CUresult) -> CudaError {
        CudaError::Call { call, name: self.card.name.clone(), why: words(code) }
    }

    fn out_of_memory(&self, what: &'static str, bytes: u64, error: CudaError) -> CudaError {
        let CudaError::Call { why, .. } = &error else { return error };
        if !why.starts_with("CUDA_ERROR_OUT_OF_MEMORY") {
            return error;
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        let name = self.card.name.clone();
        CudaError::OutOfMemory { what, name, bytes, free: free as u64, total: total as u64 }
    }

    fn shareable(&self) -> sys::CUmemAllocationProp {
        // SAFETY: plain numbers and a null pointer.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        kind.location = self.location();
        kind
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    /// Maps physical memory, and keeps the mapping alone: the handle may go.
    fn map(&self, handle: u64, bytes: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        call!(self, cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0))?;
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mapped = call!(self, cuMemMap(address, bytes, 0, handle, 0));
        let allowed = mapped.and_then(|()| {
            let allowed = call!(self, cuMemSetAccess(address, bytes, &raw const access, 1));
            if allowed.is_err() {
                let _undone = call!(self, cuMemUnmap(address, bytes));
            }
            allowed
        });
        if allowed.is_err() {
            let _undone = call!(self, cuMemAddressFree(address, bytes));
        }
        allowed.map(|()| address)
    }

    fn streams(&self, way: Way) -> &Streams {
        &self.ways[way as usize]
    }

    /// A kernel of one of our modules, loaded when it is first asked for.
    fn function(&self, module: &str, name: &str) -> Result<sys::CUfunction, CudaError> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function.0);
        }
        let key = format!("module {module}");
        let loaded = functions.get(&key).map(|m| m.0.cast());
        let loaded: sys::CUmodule = match loaded {
            Some(loaded) => loaded,
            None => {
                let loaded = self.load(module)?;
                functions.insert(key, Shared(loaded.cast()));
                loaded
            }
        };
        let mut function = std::ptr::null_mut();
        let text = CString::new(name).expect("kernels are named in this crate");
        call!(self, cuModuleGetFunction(&raw mut function, loaded, text.as_ptr()))?;
        functions.insert(name.into(), Shared(function));
        Ok(function)
    }

    fn load(&self, module: &str) -> Result<sys::CUmodule, CudaError> {
        let image = image::image(module, &crate::kernels::arch(self.card.capability))?;
        let mut loaded = std::ptr::null_mut();
        call!(self, cuModuleLoadData(&raw mut loaded, image.bytes.as_ptr().cast())).map_err(|error| {
            CudaError::WrongImage {
                module: module.into(),
                card: format!(
                    "{} (compute capability {}.{})",
                    self.card.name, self.card.capability.0, self.card.capability.1
                ),
                path: image.path.display().to_string(),
                why: match error {
                    CudaError::Call { why, .. } => why,
                    other => other.to_string(),
                },
            }
        })?;
        Ok(loaded)
    }

    /// Launches a kernel. `shared` is dynamic shared memory.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and what they point to stays until it has run.
    unsafe fn launch(
        &self,
        (module, name): (&str, &str),
        grid: (u32, u32),
        (threads, shared): (u32, u32),
        stream: sys::CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let function = self.function(module, name)?;
        if shared > 48 << 10 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(self, cuFuncSetAttribute(function, most, shared as i32))?;
        }
        let (none, list) = (std::ptr::null_mut(), arguments.as_mut_ptr());
        call!(self, cuLaunchKernel(function, grid.0, grid.1, 1, threads, 1, 1, shared, stream, list, none))
            .map_err(|error| match error {
                CudaError::Call { name: card, why, .. } => {
                    CudaError::Call { call: "cuLaunchKernel", name: card, why: format!("{name}: {why}") }
                }
                other => other,
            })
    }

    fn new_event(&self) -> Result<sys::CUevent, CudaError> {
        if let Some(event) = lock(&self.idle_events).pop() {
            return Ok(event.0);
        }
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        call!(self, cuEventCreate(&raw mut event, flags))?;
        Ok(event)
    }

    /// Queues what a copy is.
    ///
    /// # Safety
    /// As of [`Driver::copy`].
    unsafe fn queue(&self, copy: &BoxCopy, stream: sys::CUstream) -> Result<(), CudaError> {
        match copy.means() {
            Means::Nothing => Ok(()),
            Means::Plain { from, into, bytes } => {
                call!(self, cuMemcpyAsync(into, from, bytes as usize, stream))
            }
            Means::Kernel { name, mut from, mut into, mut vectors } => {
                // Four vectors a thread, and enough blocks to keep the card busy.
                let blocks =
                    vectors.div_ceil(256 * 4).clamp(1, u64::from(self.card.multiprocessors) * 16) as u32;
                let mut arguments =
                    [(&raw mut from).cast(), (&raw mut into).cast(), (&raw mut vectors).cast()];
                // SAFETY: the arguments of `boxes.cu`; memory as the caller says.
                unsafe { self.launch(("boxes", &name), (blocks, 1), (256, 0), stream, &mut arguments) }
            }
        }
    }
}

/// How many cards there are, if everything that they need is there; at least one.
pub fn count() -> Result<usize, CudaError> {
    find::driver()?;
    let no_device = |code| CudaError::NoDevice { why: words(code) };
    // SAFETY: may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        code => return Err(no_device(code)),
    }
    let mut count = 0;
    // SAFETY: writes a number.
    match unsafe { sys::cuDeviceGetCount(&raw mut count) } {
        CUresult::CUDA_SUCCESS if count > 0 => Ok(count as usize),
        CUresult::CUDA_SUCCESS => Err(no_device(CUresult::CUDA_ERROR_NO_DEVICE)),
        code => Err(no_device(code)),
    }
}

/// A card, without a context of its own.
pub fn describe(ordinal: usize) -> Result<Card, CudaError> {
    card(ordinal).map(|(card, _)| card)
}

/// A card, and the driver's number of it.
fn card(ordinal: usize) -> Result<(Card, i32), CudaError> {
    let failed = |call, code| CudaError::Call { call, name: format!("GPU {ordinal}"), why: words(code) };
    let check = |call, code| match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failed(call, code)),
    };
    let (mut device, mut name, mut bytes) = (0, [0i8; 128], 0);
    // SAFETY: plain old data.
    let mut uuid: sys::CUuuid = unsafe { std::mem::zeroed() };
    // SAFETY: each writes what it is asked for into a place of ours.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 128, device))?;
        check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut bytes, device))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes a number.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok(value)
    };
    use sys::CUdevice_attribute as A;
    let card = Card {
        // SAFETY: the driver ends it with a zero.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
        ordinal,
        uuid: uuid.bytes.map(|b| b as u8),
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        memory_bytes: bytes as u64,
    };
    Ok((card, device))
}

/// Calls what it is given, and frees it.
unsafe extern "C" fn call_back(data: *mut c_void) {
    // SAFETY: the box that `after` made, handed over once.
    let then = unsafe { Box::from_raw(data.cast::<Then>()) };
    then();
}

impl Driver for Cuda {
    fn card(&self) -> &Card {
        &self.card
    }

    fn allocate(&self, bytes: u64, export: bool) -> Result<Allocated, CudaError> {
        self.enter()?;
        let full = |error| self.out_of_memory("device memory", bytes, error);
        if !export {
            let mut address = 0;
            call!(self, cuMemAlloc_v2(&raw mut address, bytes.max(1) as usize)).map_err(full)?;
            return Ok(Allocated { address, bytes, reserved: 0, handle: None });
        }
        let reserved = bytes.max(1).next_multiple_of(self.granularity as u64);
        let (kind, mut handle) = (self.shareable(), 0);
        call!(self, cuMemCreate(&raw mut handle, reserved as usize, &raw const kind, 0)).map_err(full)?;
        let mut descriptor: i32 = -1;
        let posix = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let exported =
            call!(self, cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, posix, 0));
        // SAFETY: the driver just made it for us.
        let exported = exported.map(|()| unsafe { OwnedFd::from_raw_fd(descriptor) });
        let mapped = exported.and_then(|fd| Ok((self.map(handle, reserved as usize)?, fd)));
        // The mapping and the descriptor keep the memory.
        let released = call!(self, cuMemRelease(handle));
        let (address, fd) = mapped?;
        released?;
        Ok(Allocated { address, bytes, reserved, handle: Some(fd) })
    }

    fn import(&self, handle: OwnedFd, bytes: u64) -> Result<Allocated, CudaError> {
        self.enter()?;
        let reserved = bytes.max(1).next_multiple_of(self.granularity as u64);
        let posix = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let (mut memory, fd) = (0, handle.as_raw_fd() as usize as *mut c_void);
        call!(self, cuMemImportFromShareableHandle(&raw mut memory, fd, posix))?;
        let mapped = self.map(memory, reserved as usize);
        let released = call!(self, cuMemRelease(memory));
        let address = mapped?;
        released?;
        Ok(Allocated { address, bytes, reserved, handle: None })
    }

    fn free(&self, allocated: Allocated) {
        // What cannot be freed goes with the process.
        let _freed = self.enter().and_then(|()| match allocated.reserved {
            0 => call!(self, cuMemFree_v2(allocated.address)),
            reserved => {
                call!(self, cuMemUnmap(allocated.address, reserved as usize))?;
                call!(self, cuMemAddressFree(allocated.address, reserved as usize))
            }
        });
    }

    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, CudaError> {
        self.enter()?;
        let mut start = std::ptr::null_mut();
        // Portable: for every context. Mapped at the same address, as all of it is on a 64-bit system.
        call!(self, cuMemHostAlloc(&raw mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE))
            .map_err(|error| self.out_of_memory("pinned host memory", bytes as u64, error))?;
        // SAFETY: just allocated; bytes that were never written are no bytes to Rust.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(NonNull::new(start.cast()).expect("the driver allocated it"))
    }

    fn unpin(&self, start: NonNull<u8>, _: usize) {
        let _freed = self.enter().and_then(|()| call!(self, cuMemFreeHost(start.as_ptr().cast())));
    }

    unsafe fn copy(&self, way: Way, copy: &BoxCopy) -> Result<Event, CudaError> {
        self.enter()?;
        let stream = self.streams(way).copies.0;
        // SAFETY: as the caller says.
        unsafe { self.queue(copy, stream)? };
        let event = self.new_event()?;
        call!(self, cuEventRecord(event, stream))?;
        Ok(Event(event.addr() as u64))
    }

    fn passed(&self, event: Event) -> Result<bool, CudaError> {
        self.enter()?;
        // SAFETY: an event of ours that was not forgotten.
        match unsafe { sys::cuEventQuery(event.0 as usize as sys::CUevent) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => Err(self.failed("cuEventQuery", code)),
        }
    }

    fn wait(&self, event: Event) -> Result<(), CudaError> {
        self.enter()?;
        call!(self, cuEventSynchronize(event.0 as usize as sys::CUevent))
    }

    fn after(&self, way: Way, event: Event, then: Then) -> Result<(), CudaError> {
        self.enter()?;
        let calls = self.streams(way).calls.0;
        call!(self, cuStreamWaitEvent(calls, event.0 as usize as sys::CUevent, 0))?;
        let data: *mut c_void = Box::into_raw(Box::new(then)).cast();
        let queued = call!(self, cuLaunchHostFunc(calls, Some(call_back), data));
        if queued.is_err() {
            // SAFETY: nobody else will have it.
            drop(unsafe { Box::from_raw(data.cast::<Then>()) });
        }
        queued
    }

    fn forget(&self, event: Event) {
        lock(&self.idle_events).push(Shared(event.0 as usize as sys::CUevent));
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        for event in lock(&self.idle_events).drain(..) {
            let _gone = call!(self, cuEventDestroy_v2(event.0));
        }
        for Streams { copies, calls } in &self.ways {
            for stream in [copies, calls].into_iter().filter(|stream| !stream.0.is_null()) {
                let _gone = call!(self, cuStreamDestroy_v2(stream.0));
            }
        }
        let _gone = call!(self, cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU it opens; on others the error says what is missing, and nothing panics.
    #[test]
    fn what_is_missing_is_named() {
        let said = match Cuda::open(0) {
            Ok(_) => return,
            Err(error) => error.to_string(),
        };
        let known = [
            "there is no CUDA driver: none of libcuda.so.1",
            "the driver finds no GPU",
            "the driver knows CUDA",
        ];
        assert!(known.iter().any(|start| said.starts_with(start)), "{said}");
        assert!(said.contains("\nhint: "), "{said}");
    }
}
