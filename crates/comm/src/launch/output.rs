//! What processes print, line by line, each line whole.

use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

use crossmesh_core::id::Rank;

use crate::deadline::Deadline;

/// A longer line is passed on in parts.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Pipes that outlive their process are held by somebody else; nobody waits for that one.
const DRAIN: Duration = Duration::from_millis(500);

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

/// Called from several threads.
pub type OnLine = Arc<dyn Fn(Line<'_>) + Send + Sync>;

/// The threads that read.
pub(super) struct Pumps {
    on_line: OnLine,
    done: Sender<()>,
    finished: Receiver<()>,
    running: usize,
}

impl Pumps {
    pub(super) fn new(on_line: OnLine) -> Self {
        let (done, finished) = channel();
        Self { on_line, done, finished, running: 0 }
    }

    pub(super) fn follow(&mut self, rank: Rank, child: &mut Child) {
        if let Some(pipe) = child.stdout.take() {
            self.pump(rank, Source::Stdout, pipe);
        }
        if let Some(pipe) = child.stderr.take() {
            self.pump(rank, Source::Stderr, pipe);
        }
    }

    fn pump(&mut self, rank: Rank, source: Source, pipe: impl Read + Send + 'static) {
        let (on_line, done) = (self.on_line.clone(), self.done.clone());
        let pump = move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while matches!(pipe.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line), Ok(1..)) {
                on_line(Line { rank, source, text: String::from_utf8_lossy(&line).trim_end_matches('\n') });
                line.clear();
            }
            let _ = done.send(());
        };
        // Without a thread its output is lost, not the process.
        if Builder::new().name(format!("output-{rank}")).spawn(pump).is_ok() {
            self.running += 1;
        }
    }

    /// Waits for what is still in the pipes.
    pub(super) fn finish(&mut self) {
        let deadline = Deadline::after(DRAIN);
        while self.running > 0 {
            let Some(left) = deadline.left() else { return };
            if self.finished.recv_timeout(left).is_err() {
                return;
            }
            self.running -= 1;
        }
    }
}
