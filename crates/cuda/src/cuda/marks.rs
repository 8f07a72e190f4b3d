//! Moments of a queue, by the card's clock: what was queued between two of them took so long.

use cudarc::driver::sys::{self, CUresult};

use super::Shared;
use super::ops::Queue;
use crate::CudaError;

/// A moment that a queue passes.
#[derive(Debug)]
pub struct Mark(Shared<sys::CUevent>);

impl Queue {
    pub fn mark(&self) -> Result<Mark, CudaError> {
        let mut event = std::ptr::null_mut();
        let check = |call, code| match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(self.cuda().failed(call, code)),
        };
        // SAFETY: writes the event, then records it in a stream of ours.
        unsafe {
            check("cuEventCreate", sys::cuEventCreate(&raw mut event, 0))?;
            let mark = Mark(Shared(event));
            check("cuEventRecord", sys::cuEventRecord(event, self.stream()))?;
            Ok(mark)
        }
    }
}

impl Mark {
    /// Seconds from this moment to a later one; the queue has passed both, or it is none.
    pub fn until(&self, later: &Mark) -> f64 {
        let mut milliseconds = 0.0f32;
        // SAFETY: events of ours, recorded.
        match unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, self.0.0, later.0.0) } {
            CUresult::CUDA_SUCCESS => f64::from(milliseconds) / 1e3,
            _ => 0.0,
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: an event of ours, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.0.0) };
    }
}
