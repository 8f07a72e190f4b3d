//! What computes, beside the engine that moves: a device does one pass at a time, and says when it has ended.
//!
//! ```text
//! engine   begin(pass 7) ........ moves bytes, sleeps, moves bytes ........ woken: ended() -> true
//! device   |================ pass 7 ================|
//! ```
//!
//! A device wakes the engine by the engine's own [`Waker`], or by a descriptor that means nothing else ([`crate::wake`]).
//! [`VirtualDevice`] waits for as long as the pass is thought to take: an accelerator that is not there.
//! [`Worker`] computes for real, in a thread of its own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::mpsc;
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

pub use crate::wake::Waker;

/// One pass at a time; no call waits.
pub trait Device: Send {
    /// Readable from the end of a pass until [`Device::ended`] has said so, and at no other time; none where the device
    /// wakes the engine itself, after it has put down that the pass has ended.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Starts a pass: `pass` and `nanos` as the program has them.
    fn begin(&mut self, pass: u32, nanos: u64) -> Result<(), DeviceError>;
    /// Whether the pass under way has ended.
    fn ended(&mut self) -> Result<bool, DeviceError>;
}

/// A pass that could not be computed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    #[error("pass {pass} failed: {why}")]
    Pass { pass: u32, why: String },
    #[error("the program has passes to compute, and this rank has no device")]
    None,
    #[error(transparent)]
    System(#[from] Errno),
}

/// An accelerator that is not there: every pass is a wait of the given length.
#[derive(Debug)]
pub struct VirtualDevice {
    timer: OwnedFd,
}

impl VirtualDevice {
    pub fn new() -> Result<Self, DeviceError> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self { timer: timerfd_create(TimerfdClockId::Monotonic, flags)? })
    }
}

impl Device for VirtualDevice {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }

    fn begin(&mut self, _pass: u32, nanos: u64) -> Result<(), DeviceError> {
        // A timer of zero would be switched off.
        let nanos = nanos.max(1);
        let it_value =
            Timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    fn ended(&mut self) -> Result<bool, DeviceError> {
        match rustix::io::read(&self.timer, &mut [0u8; 8]) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// What a [`Worker`] does for a pass.
pub type Compute = Box<dyn FnMut(u32) -> Result<(), String> + Send>;

/// Computes in a thread of its own, which ends with it.
#[derive(Debug)]
pub struct Worker {
    passes: Option<mpsc::Sender<u32>>,
    results: mpsc::Receiver<Result<(), DeviceError>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// `waker` is of the engine that the device is for.
    pub fn new(waker: Waker, mut compute: Compute) -> Result<Self, DeviceError> {
        let (passes, to_do) = mpsc::channel::<u32>();
        let (done, results) = mpsc::channel();
        let thread = std::thread::Builder::new().name("device".into()).spawn(move || {
            while let Ok(pass) = to_do.recv() {
                // A panic is told as a failed pass: nobody may wait for a thread that is gone.
                let result = std::panic::catch_unwind(AssertUnwindSafe(|| compute(pass)))
                    .unwrap_or_else(|_| Err("it panicked; see its message above".into()));
                let result = result.map_err(|why| DeviceError::Pass { pass, why });
                if done.send(result).is_err() {
                    return;
                }
                waker.wake();
            }
        });
        let thread = thread.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))?;
        Ok(Self { passes: Some(passes), results, thread: Some(thread) })
    }
}

impl Device for Worker {
    fn begin(&mut self, pass: u32, _nanos: u64) -> Result<(), DeviceError> {
        let sent = self.passes.as_ref().is_some_and(|passes| passes.send(pass).is_ok());
        match sent {
            true => Ok(()),
            false => Err(DeviceError::Pass { pass, why: "the device's thread is gone".into() }),
        }
    }

    fn ended(&mut self) -> Result<bool, DeviceError> {
        self.results.try_recv().map_or(Ok(false), |result| result.map(|()| true))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.passes = None;
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, Monotonic};
    use crate::wake::Sleeper;
    use rustix::event::{PollFd, PollFlags, poll};

    fn wait(fd: BorrowedFd<'_>) {
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "the device said nothing for 10 s");
    }

    #[test]
    fn a_virtual_pass_takes_its_time() {
        let mut device = VirtualDevice::new().unwrap();
        let start = Monotonic.now_ns();
        device.begin(0, 20_000_000).unwrap();
        assert!(!device.ended().unwrap());
        wait(device.fd().unwrap());
        assert!(device.ended().unwrap());
        assert!(Monotonic.now_ns() - start >= 20_000_000);
        assert!(!device.ended().unwrap(), "an end is told once");
    }

    #[test]
    fn a_worker_tells_the_end_the_failure_and_the_panic_of_a_pass() {
        let mut sleeper = Sleeper::new().unwrap();
        let compute = |pass| match pass {
            0 => Ok(()),
            1 => Err("no memory".into()),
            _ => panic!("a test panics on purpose"),
        };
        let mut worker = Worker::new(sleeper.waker(), Box::new(compute)).unwrap();
        let mut outcome = |pass| {
            worker.begin(pass, 0).unwrap();
            wait(sleeper.fd());
            sleeper.woke();
            worker.ended()
        };
        assert_eq!(outcome(0), Ok(true));
        assert_eq!(outcome(1), Err(DeviceError::Pass { pass: 1, why: "no memory".into() }));
        assert!(outcome(2).unwrap_err().to_string().contains("panicked"));
    }
}
