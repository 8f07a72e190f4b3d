//! Bytes on their way between a device and something else: another place of it, pinned memory, or memory of the host.
//!
//! ```text
//! device -> pinned    sending: the frame is written once it is there
//! pinned -> device    receiving: the part has arrived once it is there
//! device -> device    a copy, or a peer's memory that is mapped here; one kernel from any box to any other
//! device -> host      by way of pinned memory, and so the other way round
//! ```
//!
//! The device works beside the engine, and wakes it. What it touches is kept until it is done, also where a job is given up: a [`Moving`] that
//! is dropped waits for the device, for the microseconds or milliseconds that a part takes.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crossmesh_cuda::driver::Way;
use crossmesh_cuda::{BoxCopy, CudaError, Gpu, Side, Staging, Ticket};

use super::Memory;
use super::place::Lent;
use crate::combine::Combine;
use crate::view::View;
use crate::wake::Waker;

/// What a device could not do.
pub(crate) fn failed(error: CudaError) -> io::Error {
    match error {
        CudaError::OutOfMemory { .. } => io::Error::new(io::ErrorKind::OutOfMemory, error.to_string()),
        other => io::Error::other(other.to_string()),
    }
}

impl Lent {
    /// The device that it is on.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.memory().gpu()
    }

    fn side(&self, start: u64) -> Side {
        self.memory().side(self.view(), start)
    }
}

impl Memory {
    /// The part of a box's stream that begins at `start`, as a device sees it.
    fn side(&self, view: &View, start: u64) -> Side {
        assert!(view.end() <= self.len(), "a box ends at {} of a memory of {} B", view.end(), self.len());
        let outer = view.outer().iter().map(|o| (o.count, o.stride)).collect();
        Side { base: self.address() + view.base(), run: view.run_bytes(), outer, start }
    }

    /// Appends a part of a box's stream, and waits for the device.
    ///
    /// # Safety
    /// Nobody writes to these bytes meanwhile.
    pub(super) unsafe fn pack_from_device(
        &self,
        view: &View,
        part: Range<u64>,
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        let gpu = self.gpu().expect("memory of a device");
        let bytes = part.end - part.start;
        let staging = gpu.stage(bytes as usize).map_err(failed)?;
        let (from, into) = (self.side(view, part.start), staging.side(0..bytes as usize));
        // SAFETY: both stay until it is done.
        let ticket = unsafe { gpu.copy(Way::Out, &BoxCopy { from, into, bytes, combine: None }) };
        ticket.and_then(Ticket::wait).map_err(failed)?;
        out.extend_from_slice(staging.bytes());
        Ok(())
    }

    /// Puts bytes at `offset` of a box's stream, or combines them with what is there, and waits for the device.
    ///
    /// # Safety
    /// Nobody touches these bytes meanwhile.
    pub(super) unsafe fn unpack_to_device(
        &self,
        view: &View,
        offset: u64,
        bytes: &[u8],
        combine: Option<Combine>,
    ) -> io::Result<()> {
        let gpu = self.gpu().expect("memory of a device");
        assert!(self.writable, "a peer's memory is not written to");
        let mut staging = gpu.stage(bytes.len()).map_err(failed)?;
        staging.bytes_mut().copy_from_slice(bytes);
        let (from, into) = (staging.side(0..bytes.len()), self.side(view, offset));
        let combine = combine.map(|c| c.on_device());
        // SAFETY: both stay until it is done.
        let ticket =
            unsafe { gpu.copy(Way::In, &BoxCopy { from, into, bytes: bytes.len() as u64, combine }) };
        ticket.and_then(Ticket::wait).map_err(failed)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Moving {
    // First, so that it goes first: it waits.
    ticket: Option<Ticket>,
    staging: Option<Staging>,
    /// Where staged bytes go when they are there, if that is memory of the host.
    then: Option<(Lent, u64, Option<Combine>)>,
    /// What the device touches.
    _places: [Option<Lent>; 2],
}

impl Moving {
    fn start(gpu: &Arc<Gpu>, way: Way, copy: &BoxCopy, waker: Option<&Waker>) -> io::Result<Ticket> {
        // SAFETY: the places are lent to an engine, which keeps to its program's order, and kept beside the ticket, as is the staging buffer.
        let ticket = unsafe { gpu.copy(way, copy) }.map_err(failed)?;
        if let Some(waker) = waker.cloned() {
            ticket.then(Box::new(move || waker.wake())).map_err(failed)?;
        }
        Ok(ticket)
    }

    /// A part of a device's place, to pinned memory.
    pub fn pack(from: &Lent, part: Range<u64>, waker: Option<&Waker>) -> io::Result<Self> {
        let gpu = from.gpu().expect("only places on a device are staged");
        let bytes = part.end - part.start;
        let staging = gpu.stage(bytes as usize).map_err(failed)?;
        let into = staging.side(0..bytes as usize);
        let copy = BoxCopy { from: from.side(part.start), into, bytes, combine: None };
        let ticket = Self::start(gpu, Way::Out, &copy, waker)?;
        Ok(Self {
            ticket: Some(ticket),
            staging: Some(staging),
            then: None,
            _places: [Some(from.clone()), None],
        })
    }

    /// All that is staged, to `offset` of a device's place, or combined with what is there.
    pub fn unpack(
        into: &Lent,
        offset: u64,
        staging: Staging,
        combine: Option<Combine>,
        waker: Option<&Waker>,
    ) -> io::Result<Self> {
        let gpu = into.gpu().expect("only places on a device are staged");
        let bytes = staging.len() as u64;
        let combine = combine.map(|c| c.on_device());
        let copy = BoxCopy { from: staging.side(0..staging.len()), into: into.side(offset), bytes, combine };
        let ticket = Self::start(gpu, Way::In, &copy, waker)?;
        Ok(Self {
            ticket: Some(ticket),
            staging: Some(staging),
            then: None,
            _places: [Some(into.clone()), None],
        })
    }

    /// A part of one place's stream to the same part of another's, at least one of them on a device.
    pub fn copy(
        from: &Lent,
        into: &Lent,
        part: Range<u64>,
        combine: Option<Combine>,
        waker: Option<&Waker>,
    ) -> io::Result<Self> {
        match (from.gpu(), into.gpu()) {
            (Some(one), Some(gpu)) => {
                if !Arc::ptr_eq(one, gpu) {
                    let (one, gpu) = (one.card(), gpu.card());
                    return Err(io::Error::other(format!(
                        "GPUs {} and {} of one process do not copy to each other\nhint: give each rank one GPU",
                        one.ordinal, gpu.ordinal
                    )));
                }
                let (source, target) = (from.side(part.start), into.side(part.start));
                let combine = combine.map(|c| c.on_device());
                let copy = BoxCopy { from: source, into: target, bytes: part.end - part.start, combine };
                let ticket = Self::start(gpu, Way::Local, &copy, waker)?;
                let places = [Some(from.clone()), Some(into.clone())];
                Ok(Self { ticket: Some(ticket), staging: None, then: None, _places: places })
            }
            (None, Some(gpu)) => {
                let mut staging = gpu.stage((part.end - part.start) as usize).map_err(failed)?;
                from.read(part.clone(), staging.bytes_mut());
                Self::unpack(into, part.start, staging, combine, waker)
            }
            (Some(_), None) => {
                let then = Some((into.clone(), part.start, combine));
                Ok(Self { then, ..Self::pack(from, part, waker)? })
            }
            (None, None) => unreachable!("one of them is on a device"),
        }
    }

    /// Whether the bytes are where they belong.
    pub fn is_done(&mut self) -> io::Result<bool> {
        if let Some(ticket) = &mut self.ticket {
            if !ticket.is_done().map_err(failed)? {
                return Ok(false);
            }
            self.ticket = None;
        }
        if let (Some((into, offset, combine)), Some(staging)) = (self.then.take(), &self.staging) {
            into.unpack(offset, staging.bytes(), combine)?;
        }
        Ok(true)
    }

    /// What was staged, once it is done.
    pub fn staged(&self) -> &[u8] {
        assert!(self.ticket.is_none(), "nobody looks at bytes that a device is writing");
        self.staging.as_ref().map_or(&[], Staging::bytes)
    }
}
