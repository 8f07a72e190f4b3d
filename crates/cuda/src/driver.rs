//! The calls that a GPU's driver is asked for. Few, so that a stand-in can be trusted to do them all.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use crate::{BoxCopy, CudaError};

/// A card, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    pub name: String,
    pub ordinal: usize,
    /// The same in every process of the host.
    pub uuid: [u8; 16],
    pub capability: (i32, i32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
}

/// Dense products in a second, by NVIDIA's datasheets: in bf16, and in f32 without tensor cores. The first name that a card's contains counts.
const PEAKS: [(&str, f64, f64); 11] = [
    ("B200", 2250e12, 80e12),
    ("H200", 989e12, 67e12),
    ("GH200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("A40", 150e12, 37.4e12),
    ("A10", 125e12, 31.2e12),
    ("L4", 121e12, 30.3e12),
];

impl Card {
    /// Operations in a second at most, where they are known.
    pub fn peak_flops(&self, bf16: bool) -> Option<f64> {
        let known = PEAKS.iter().find(|(name, ..)| self.name.contains(name));
        known.map(|(_, narrow, wide)| if bf16 { *narrow } else { *wide })
    }
}

/// Where copies queue: those of one direction run one behind the other, directions beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// From the device to the host.
    Out,
    /// From the host to the device.
    In,
    /// Inside the device, or between two.
    Local,
}

impl Way {
    pub const ALL: [Way; 3] = [Way::Out, Way::In, Way::Local];
}

/// Memory of a device.
#[derive(Debug)]
pub struct Allocated {
    pub address: u64,
    /// As asked for; the driver may have rounded up.
    pub bytes: u64,
    /// What the driver needs to free it.
    pub reserved: u64,
    /// What another process needs to map it.
    pub handle: Option<OwnedFd>,
}

/// The end of a copy: a number that means something to its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event(pub u64);

/// Something to call from another thread. It must not call the driver.
pub type Then = Box<dyn FnOnce() + Send>;

/// See the module. Calls come from any thread.
pub trait Driver: Send + Sync + fmt::Debug {
    fn card(&self) -> &Card;

    /// Memory of the device; `export` where other processes are to map it.
    fn allocate(&self, bytes: u64, export: bool) -> Result<Allocated, CudaError>;
    /// Memory of another process on the same device.
    fn import(&self, handle: OwnedFd, bytes: u64) -> Result<Allocated, CudaError>;
    /// Gives memory back. Nothing reads or writes it any more.
    fn free(&self, allocated: Allocated);

    /// Host memory that the device reaches at the same address, and copies beside the host's work.
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, CudaError>;
    fn unpin(&self, start: NonNull<u8>, bytes: usize);

    /// Queues a copy, and returns its end.
    ///
    /// # Safety
    /// Until the end has passed, both sides stay, nobody writes to what is read, and nobody touches what is written. Each is memory of this
    /// device or pinned.
    #[expect(unsafe_code, reason = "addresses are the driver's language")]
    unsafe fn copy(&self, way: Way, copy: &BoxCopy) -> Result<Event, CudaError>;
    /// Whether it has passed.
    fn passed(&self, event: Event) -> Result<bool, CudaError>;
    /// Waits until it has.
    fn wait(&self, event: Event) -> Result<(), CudaError>;
    /// Calls back once it has passed.
    fn after(&self, way: Way, event: Event, then: Then) -> Result<(), CudaError>;
    /// Nobody asks for it any more.
    fn forget(&self, event: Event);
}
