//! What processes print, line by line, each line whole. One thread reads all of it.
//!
//! ```text
//! r0 stdout ─┐
//! r0 stderr ─┼─ epoll ─ lines ─ on_line        a reader that is slow slows the processes down, and loses nothing
//! r1 stdout ─┘
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crossmesh_core::id::Rank;
use rustix::event::{Timespec, epoll};
use rustix::io::{Errno, ioctl_fionbio, read};

/// A longer line is passed on in parts.
const MAX_LINE_BYTES: usize = 64 << 10;
const READ_BYTES: usize = 64 << 10;
/// A pipe that outlives its process and says nothing for so long is held by somebody else; nobody waits for that one.
const DRAIN: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);
const NO_EVENT: epoll::Event =
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Stdout,
    Stderr,
}

/// A line with what ended it, or its part.
pub struct Line<'a> {
    pub rank: Rank,
    pub source: Source,
    pub text: &'a str,
}

/// Called from another thread.
pub type OnLine = Arc<dyn Fn(Line<'_>) + Send + Sync>;

/// A pipe, and the line that has begun.
struct Pipe {
    rank: Rank,
    source: Source,
    fd: OwnedFd,
    line: Vec<u8>,
}

/// Everything that is read.
pub(super) struct Pumps {
    on_line: OnLine,
    pipes: Vec<Pipe>,
    reading: Option<JoinHandle<()>>,
    state: Arc<State>,
}

/// How far the thread is.
#[derive(Default)]
struct State {
    /// A line is being passed on, which takes as long as its reader likes.
    passing: AtomicBool,
    /// Reads so far.
    reads: AtomicU64,
}

impl Pumps {
    pub(super) fn new(on_line: OnLine) -> Self {
        Self { on_line, pipes: vec![], reading: None, state: Arc::default() }
    }

    pub(super) fn follow(&mut self, rank: Rank, child: &mut Child) -> io::Result<()> {
        let out = child.stdout.take().map(|pipe| (Source::Stdout, OwnedFd::from(pipe)));
        let err = child.stderr.take().map(|pipe| (Source::Stderr, OwnedFd::from(pipe)));
        for (source, fd) in out.into_iter().chain(err) {
            ioctl_fionbio(&fd, true)?;
            self.pipes.push(Pipe { rank, source, fd, line: vec![] });
        }
        Ok(())
    }

    /// Begins to read what was followed so far.
    pub(super) fn start(&mut self) -> io::Result<()> {
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (i, pipe) in self.pipes.iter().enumerate() {
            epoll::add(&poller, &pipe.fd, epoll::EventData::new_u64(i as u64), epoll::EventFlags::IN)?;
        }
        let (on_line, state) = (self.on_line.clone(), self.state.clone());
        let pipes = self.pipes.drain(..).map(Some).collect();
        let reader = Reader { poller, pipes, on_line, state };
        self.reading = Some(Builder::new().name("output".into()).spawn(move || reader.run())?);
        Ok(())
    }

    /// Waits for what is still in the pipes, however slowly it is taken; not for pipes that others hold open, nor when
    /// the user has had enough.
    pub(super) fn finish(&mut self, enough: impl Fn() -> bool) {
        let Some(reading) = self.reading.take() else { return };
        let (mut idle, mut seen) = (Duration::ZERO, 0);
        while !reading.is_finished() && idle < DRAIN && !enough() {
            std::thread::sleep(LOOK);
            let reads = self.state.reads.load(Ordering::SeqCst);
            let moves = reads != seen || self.state.passing.load(Ordering::SeqCst);
            idle = if moves { Duration::ZERO } else { idle + LOOK };
            seen = reads;
        }
    }
}

/// The thread that reads.
struct Reader {
    poller: OwnedFd,
    pipes: Vec<Option<Pipe>>,
    on_line: OnLine,
    state: Arc<State>,
}

impl Reader {
    fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let mut open = self.pipes.len();
        while open > 0 {
            let mut events = [NO_EVENT; 64];
            let forever: Option<&Timespec> = None;
            let Ok(count) = epoll::wait(&self.poller, &mut events, forever) else { continue };
            for event in &events[..count] {
                if !self.take(event.data.u64() as usize, &mut buffer) {
                    open -= 1;
                }
            }
        }
    }

    /// Reads once; false at the end.
    fn take(&mut self, at: usize, buffer: &mut [u8]) -> bool {
        let Some(pipe) = &mut self.pipes[at] else { return true };
        match read(pipe.fd.as_fd(), &mut *buffer) {
            Ok(count) if count > 0 => {
                self.state.passing.store(true, Ordering::SeqCst);
                self.state.reads.fetch_add(1, Ordering::SeqCst);
                pipe.take(&buffer[..count], &self.on_line);
                self.state.passing.store(false, Ordering::SeqCst);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Ok(_) | Err(_) => {
                self.state.passing.store(true, Ordering::SeqCst);
                pipe.pass_on(&self.on_line);
                self.state.passing.store(false, Ordering::SeqCst);
                // Closing it takes it from the poller too.
                self.pipes[at] = None;
                false
            }
        }
    }
}

impl Pipe {
    fn take(&mut self, mut bytes: &[u8], on_line: &OnLine) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            self.pass_line(on_line);
            bytes = &bytes[end + 1..];
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() >= MAX_LINE_BYTES {
            self.pass_line(on_line);
        }
    }

    /// What is left without an end.
    fn pass_on(&mut self, on_line: &OnLine) {
        if !self.line.is_empty() {
            self.pass_line(on_line);
        }
    }

    fn pass_line(&mut self, on_line: &OnLine) {
        on_line(Line { rank: self.rank, source: self.source, text: &String::from_utf8_lossy(&self.line) });
        self.line.clear();
    }
}
