//! How much memory a rank needed beside its tensors, by the system's account.
//!
//! ```text
//! counted   private memory, segments that this process made, its share of what others made (but for peers' tensors)
//!
//! before    ----+                          heap trimmed, nothing allocated yet
//! tensors       +=========
//! run                     +--/\__/\---+    the peak: samples, and the system's high-water mark
//!                                          extra = peak - before - tensors
//! ```
//!
//! A peer's segment that is mapped here counts to the peer. What the kernel holds in sockets is nobody's private
//! memory; it is told apart. Program text is not counted.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::memory::{segment_name, trim_heap};

/// Between two samples: often enough for anything that lasts, seldom enough to cost nothing.
const SAMPLE: Duration = Duration::from_millis(10);

/// What a process has now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counted {
    private: u64,
    /// Segments that it made.
    own: u64,
    /// Its share of other shared memory.
    share: u64,
}

impl Counted {
    fn now() -> Option<Self> {
        Some(Self::of_mappings(&fs::read_to_string("/proc/self/smaps").ok()?, &segment_name()))
    }

    /// From the text of `smaps`, for the process whose segments have this name.
    fn of_mappings(smaps: &str, own_name: &str) -> Self {
        let (mut counted, mut name) = (Self::default(), "");
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
            let bytes = || second.parse::<u64>().unwrap_or(0) << 10;
            match first {
                // A mapping: its name is behind range, access, offset, device and inode.
                _ if !first.ends_with(':') => name = words.nth(3).unwrap_or(""),
                "Anonymous:" if !is_shared(name) => counted.private += bytes(),
                "Rss:" if segment_of(name) == Some(own_name) => counted.own += bytes(),
                "Pss:" if is_shared(name) && segment_of(name).is_none() => counted.share += bytes(),
                _ => {}
            }
        }
        counted
    }

    fn sum(&self) -> u64 {
        self.private + self.own + self.share
    }
}

fn is_shared(name: &str) -> bool {
    ["/memfd:", "/dev/shm/", "/SYSV", "/dev/zero"].iter().any(|start| name.starts_with(start))
}

/// The name of a segment of ours or of a peer.
fn segment_of(name: &str) -> Option<&str> {
    name.strip_prefix("/memfd:").filter(|rest| rest.starts_with("crossmesh."))
}

/// A field of `/proc/self/status`, in bytes.
fn status(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// A rank's memory beside its tensors, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtraMemory {
    /// The most there was during a run.
    pub extra_bytes_measured: u64,
    /// The staging buffers of its program.
    pub extra_bytes_proven: u64,
    /// The most that the kernel may hold for it in sockets.
    pub socket_bytes: u64,
}

/// Measures one rank, in a process of its own.
pub struct Meter {
    before: Counted,
    peak: u64,
    samples: Option<Samples>,
}

impl Meter {
    /// Before anything of the rank is allocated. None where the system does not tell.
    pub fn start() -> Option<Self> {
        trim_heap();
        Some(Self { before: Counted::now()?, peak: 0, samples: None })
    }

    /// A run begins: whatever was there for a while before is forgotten.
    pub fn begin(&mut self) {
        self.samples = Samples::start();
        // Where the mark cannot be reset, only samples count; it would only be too high.
        let _kept = fs::write("/proc/self/clear_refs", "5");
    }

    /// The run is over.
    pub fn end(&mut self) {
        let mark = status("VmHWM").zip(status("VmRSS"));
        let Some(now) = Counted::now() else { return };
        let above = mark.map_or(0, |(mark, rss)| mark.saturating_sub(rss));
        let sampled = self.samples.take().map_or(0, Samples::stop);
        self.peak = self.peak.max(now.sum() + above).max(sampled + now.own + now.share);
    }

    /// Looks once more: what later runs added stays.
    pub fn look(&mut self) {
        self.peak = self.peak.max(Counted::now().map_or(0, |now| now.sum()));
    }

    /// The most that was there in a run, beside tensors of so many bytes.
    pub fn extra_bytes(&self, tensor_bytes: u64) -> u64 {
        self.peak.saturating_sub(self.before.sum() + tensor_bytes)
    }
}

/// A thread that looks at private memory now and then.
struct Samples {
    stop: Arc<AtomicBool>,
    most: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Samples {
    fn start() -> Option<Self> {
        let (stop, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, seen) = (stop.clone(), most.clone());
        let sample = move || {
            while !stopped.load(Ordering::Relaxed) {
                seen.fetch_max(status("RssAnon").unwrap_or(0), Ordering::Relaxed);
                std::thread::park_timeout(SAMPLE);
            }
        };
        let thread = Builder::new().name("memory".into()).stack_size(64 << 10).spawn(sample).ok()?;
        Some(Self { stop, most, thread })
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        // A thread that panicked has seen what it has seen.
        let _seen = self.thread.join();
        self.most.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_count_to_whoever_made_them() {
        let mapping = |name: &str, anonymous: u64| {
            format!(
                "7f0000000000-7f0000100000 rw-s 00000000 00:01 7  {name}\nSize: 1024 kB\nRss: 100 kB\nPss: 50 kB\nAnonymous: {anonymous} kB\nVmFlags: rd wr\n"
            )
        };
        let smaps = [
            mapping("[heap]", 100),
            mapping("", 30),
            mapping("/usr/bin/crossmesh", 8),
            mapping("/memfd:crossmesh.7 (deleted)", 0),
            mapping("/memfd:crossmesh.8 (deleted)", 0),
            mapping("/dev/shm/somebody", 0),
        ];
        let counted = Counted::of_mappings(&smaps.concat(), "crossmesh.7");
        assert_eq!(counted, Counted { private: 138 << 10, own: 100 << 10, share: 50 << 10 });
    }
}
