//! Where the data of a job comes from, as its ranks see it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::passes::PassFailure;
pub use crate::data::Column;
use crate::data::{DataSet, Split};

/// Samples have numbers, from step to step. Which is which does not depend on who asks.
pub trait Feed: Send + Sync {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure>;
}

/// What a data set has.
pub struct Samples(pub Arc<dyn DataSet>);

impl Feed for Samples {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure> {
        Ok(self.0.read(port, samples, split)?)
    }
}

/// A feed that is read ahead of the passes, in a thread of its own.
///
/// Whoever has asked for some samples of a port will ask for those of the next microbatch, which lie `stride` further on, across steps
/// too. So many microbatches are read before they are asked for, in order, and no more. What nobody foresaw is read when it is asked
/// for, and what was read in vain is let go.
pub struct Ahead {
    shared: Arc<Shared>,
    stride: u64,
    thread: Option<JoinHandle<()>>,
}

/// How many microbatches of a port are read ahead at most.
const DEPTH: u64 = 2;

struct Shared {
    feed: Arc<dyn Feed>,
    desk: Mutex<Desk>,
    changed: Condvar,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    port: String,
    samples: Range<u64>,
    split: Split,
}

/// What is to be read, what is being read, and what is there. It is a handful of microbatches.
#[derive(Default)]
struct Desk {
    wanted: VecDeque<Key>,
    reading: Option<Key>,
    there: Vec<(Key, Result<Column, PassFailure>)>,
    /// Nobody reads any longer.
    closed: bool,
}

impl Ahead {
    /// Samples of a microbatch, over all ranks, are the stride. Where no thread can be started, nothing is read ahead.
    pub fn new(feed: Arc<dyn Feed>, stride: u64) -> Self {
        let shared = Arc::new(Shared { feed, desk: Mutex::default(), changed: Condvar::new() });
        let reader = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("read ahead".into()).spawn(move || reader.run()).ok();
        shared.lock().closed = thread.is_none();
        Self { shared, stride, thread }
    }
}

impl Feed for Ahead {
    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure> {
        let key = Key { port: port.into(), samples, split };
        match self.shared.foreseen(&key, self.stride) {
            Some(column) => column,
            None => self.shared.feed.read(port, key.samples, split),
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        // A read that is under way ends by itself.
        self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was read ahead, or is about to be; none where nobody thought of it. What comes next is asked for.
    fn foreseen(&self, key: &Key, stride: u64) -> Option<Result<Column, PassFailure>> {
        let mut desk = self.lock();
        desk.forget_all_but(key, stride);
        let is_coming = desk.knows(key);
        desk.ask_for_those_behind(key, stride);
        self.changed.notify_all();
        if !is_coming {
            return None;
        }
        let coming = |desk: &mut Desk| !desk.closed && !desk.there.iter().any(|(known, _)| known == key);
        let mut desk = self.changed.wait_while(desk, coming).unwrap_or_else(PoisonError::into_inner);
        let at = desk.there.iter().position(|(known, _)| known == key)?;
        Some(desk.there.swap_remove(at).1)
    }

    /// The thread: reads what is wanted, one after the other.
    fn run(&self) {
        // However it ends, nobody waits for it any longer.
        let _closing = Closing(self);
        loop {
            let idle = |desk: &mut Desk| !desk.closed && desk.wanted.is_empty();
            let mut desk = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(key) = desk.wanted.pop_front().filter(|_| !desk.closed) else { return };
            desk.reading = Some(key.clone());
            drop(desk);
            let read = self.feed.read(&key.port, key.samples.clone(), key.split);
            let mut desk = self.lock();
            // It may have been let go meanwhile.
            if desk.reading.take().as_ref() == Some(&key) {
                desk.there.push((key, read));
            }
            self.changed.notify_all();
        }
    }
}

struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Desk {
    fn knows(&self, key: &Key) -> bool {
        self.reading.as_ref() == Some(key)
            || self.wanted.contains(key)
            || self.there.iter().any(|(known, _)| known == key)
    }

    /// Lets go of what was read for this port and is not what comes now.
    fn forget_all_but(&mut self, key: &Key, stride: u64) {
        let stays = |known: &Key| {
            let comes = (0..=DEPTH).any(|i| *known == key.later(i * stride));
            (&known.port, known.split) != (&key.port, key.split) || comes
        };
        self.wanted.retain(stays);
        self.there.retain(|(known, _)| stays(known));
        self.reading.take_if(|known| !stays(known));
    }

    fn ask_for_those_behind(&mut self, key: &Key, stride: u64) {
        let behind = (1..=DEPTH).map(|i| key.later(i * stride));
        for key in behind.filter(|_| !self.closed && stride > 0) {
            if !self.knows(&key) {
                self.wanted.push_back(key);
            }
        }
    }
}

impl Key {
    fn later(&self, by: u64) -> Self {
        let Range { start, end } = self.samples;
        Self { samples: start.saturating_add(by)..end.saturating_add(by), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that tell where they are from; notes which thread read what.
    #[derive(Default)]
    struct Noted(Mutex<Vec<(String, Range<u64>, bool)>>);

    impl Feed for Noted {
        fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, PassFailure> {
            let ahead = std::thread::current().name() == Some("read ahead");
            self.0.lock().unwrap().push((port.into(), samples.clone(), ahead));
            if samples.end > 1000 {
                return Err(format!("there is no sample {}", samples.end).into());
            }
            let salt = port.len() as i32 + if split == Split::Validation { 5000 } else { 0 };
            Ok(Column::Ids(samples.map(|s| s as i32 * 10 + salt).collect()))
        }
    }

    fn ids(column: Result<Column, PassFailure>) -> Result<Vec<i32>, String> {
        match column {
            Ok(Column::Ids(ids)) => Ok(ids),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn what_is_read_ahead_is_what_would_be_read() {
        let noted = Arc::new(Noted::default());
        let feed = Ahead::new(noted.clone(), 4);
        let plain = Noted::default();
        // Two ports and both splits in turns, a jump back and one ahead, the end of the data.
        let mut asked = vec![];
        for first in (0..40).step_by(4).chain((8..20).step_by(4)).chain((980..1010).step_by(4)) {
            asked.extend([
                ("a", first..first + 2, Split::Training),
                ("bb", first + 2..first + 4, Split::Training),
            ]);
            if first % 16 == 0 {
                asked.push(("a", 0..4, Split::Validation));
            }
        }
        for (port, samples, split) in &asked {
            let got = ids(feed.read(port, samples.clone(), *split));
            assert_eq!(got, ids(plain.read(port, samples.clone(), *split)), "{port} {samples:?}");
        }
        drop(feed);
        let read = noted.0.lock().unwrap();
        // In order without a jump, all but the first of a port are read by the thread, in order.
        let of_a = |ahead| {
            let of_a = read.iter().filter(move |(port, samples, by)| {
                port == "a" && samples.end - samples.start == 2 && *by == ahead
            });
            of_a.map(|(_, samples, _)| samples.start)
        };
        assert_eq!(of_a(true).take(9).collect::<Vec<_>>(), (4..40).step_by(4).collect::<Vec<u64>>());
        assert_eq!(of_a(false).take(2).collect::<Vec<_>>(), [0, 8], "the first, and where it jumped");
    }

    #[test]
    fn no_more_is_read_than_was_agreed() {
        let noted = Arc::new(Noted::default());
        let feed = Ahead::new(noted.clone(), 2);
        feed.read("a", 0..2, Split::Training).unwrap();
        feed.read("a", 2..4, Split::Training).unwrap();
        drop(feed);
        let read = noted.0.lock().unwrap();
        assert!(read.iter().all(|(_, samples, _)| samples.start <= 2 + 2 * DEPTH), "{read:?}");
    }
}
