//! Signals to the launcher, noted down to be looked at: the launcher ends its processes before it ends itself. And one
//! that is better an error: see [`survive_file_limits`].

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};
use signal_hook::low_level::{register, unregister};

use super::LaunchError;
use crate::clock::{Clock, Monotonic};

/// While this value exists, the signals that end a process are noted instead.
pub struct Signals {
    last: Arc<AtomicUsize>,
    count: Arc<AtomicUsize>,
    registered: Vec<signal_hook::SigId>,
}

impl Signals {
    pub fn watch() -> Result<Self, LaunchError> {
        let mut signals = Self { last: Arc::default(), count: Arc::default(), registered: vec![] };
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            let (last, count) = (signals.last.clone(), signals.count.clone());
            let note = move || {
                last.store(signal as usize, Ordering::SeqCst);
                count.fetch_add(1, Ordering::SeqCst);
            };
            #[expect(unsafe_code, reason = "signal handlers are")]
            // SAFETY: the handler stores two numbers, which is allowed at any moment.
            let registered = unsafe { register(signal, note) };
            signals.registered.push(registered.map_err(LaunchError::Signals)?);
        }
        Ok(signals)
    }

    /// The last signal, if there was one.
    pub fn caught(&self) -> Option<i32> {
        match self.last.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// How many there were: who asks twice is in a hurry.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

/// Becomes true when somebody asks this process to end (SIGTERM, or SIGINT: Ctrl-C). It does not end by itself from now on: it is to come to a
/// good end, and soon.
pub fn asked_to_end() -> Result<Arc<AtomicBool>, LaunchError> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, asked.clone()).map_err(LaunchError::Signals)?;
    }
    Ok(asked)
}

/// When this process was last continued after it had been stopped, by the machine's clock; 0 if it never was. By this it
/// tells that it was stopped itself from a machine that stalled with everybody on it.
pub fn continued_ns() -> Arc<AtomicU64> {
    static LAST: OnceLock<Arc<AtomicU64>> = OnceLock::new();
    let watch = || {
        let last = Arc::new(AtomicU64::new(0));
        let noted = last.clone();
        #[expect(unsafe_code, reason = "signal handlers are")]
        // SAFETY: the handler reads a clock and stores a number, which is allowed at any moment.
        let registered =
            unsafe { register(SIGCONT, move || noted.store(Monotonic.now_ns(), Ordering::SeqCst)) };
        debug_assert!(registered.is_ok());
        last
    };
    LAST.get_or_init(watch).clone()
}

/// A file, or a shared segment, that would be larger than the system allows (`ulimit -f`) is an error from now on. Without
/// this it ends the process.
pub fn survive_file_limits() {
    #[expect(unsafe_code, reason = "signal handlers are")]
    // SAFETY: the handler does nothing.
    let registered = unsafe { register(SIGXFSZ, || {}) };
    debug_assert!(registered.is_ok());
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            unregister(id);
        }
    }
}
