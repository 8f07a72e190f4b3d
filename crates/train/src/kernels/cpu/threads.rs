//! A few threads that share out the jobs of one kernel.
//!
//! [`Threads::each`] hands every item to one thread and returns when all are done. The caller works too, and whoever
//! comes late misses the run instead of delaying it. Items are cut by the caller, so what a job computes does not
//! depend on who does it or when.
//!
//! The crate's `unsafe` is here and in [`super::tile`]. What makes this one sound: a worker enters a run, and leaves it,
//! under the lock; `run` closes the run under the same lock and then waits until nobody is inside, so the borrowed
//! closure outlives every use of it.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// How often a worker looks for the next run before it goes to sleep: some tens of microseconds, about what waking
/// it would cost.
const SPINS: u32 = 4000;

/// More than any machine has cores: who asks for more means something else, and could take all the memory there is.
pub const MOST_THREADS: usize = 4096;

/// A fixed number of threads, the caller's among them.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One run at a time.
    turn: Mutex<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Rises with every run, so that a spinning worker needs no lock to see one.
    runs: AtomicU64,
    wake: Condvar,
    /// Notified when the last worker leaves a run.
    empty: Condvar,
    next: AtomicUsize,
    stop: AtomicBool,
}

#[derive(Default)]
struct State {
    run: Option<Run>,
    /// Workers inside the run.
    inside: usize,
    /// What a worker's job panicked with.
    panic: Option<Box<dyn Any + Send>>,
}

#[derive(Clone, Copy)]
struct Run {
    job: &'static (dyn Fn(usize) + Sync),
    jobs: usize,
}

impl Threads {
    /// `count` threads in all; 1 starts none.
    pub fn new(count: usize) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            runs: AtomicU64::new(0),
            wake: Condvar::new(),
            empty: Condvar::new(),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let start = |i: usize| {
            let shared = Arc::clone(&shared);
            Builder::new().name(format!("kernel-{i}")).spawn(move || shared.work())
        };
        // A machine that refuses a thread has fewer of them; the caller alone gets everything done.
        let workers = (1..count).map_while(|i| start(i).ok()).collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f` with every item, on all threads. Jobs must not call `each` themselves.
    pub fn each<I: Send>(&self, items: impl IntoIterator<Item = I>, f: impl Fn(I) + Sync) {
        if self.workers.is_empty() {
            return items.into_iter().for_each(f);
        }
        let items: Vec<Mutex<Option<I>>> = items.into_iter().map(|i| Mutex::new(Some(i))).collect();
        self.run(items.len(), &|i| {
            let item = lock(&items[i]).take();
            f(item.expect("a job runs once"));
        });
    }

    /// Calls `job` with 0 to `jobs - 1`, each once.
    fn run(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        if jobs < 2 {
            return (0..jobs).for_each(job);
        }
        let _turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. `close` returns when no worker is inside the run and none can enter it any
        // more, and it is called before this function ends in any way (a panic of ours is caught first).
        let job: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(job) };
        self.shared.open(Run { job, jobs });
        let ours = catch_unwind(AssertUnwindSafe(|| self.shared.take_jobs(job, jobs)));
        let theirs = self.shared.close();
        if let Some(panic) = ours.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.runs.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn open(&self, run: Run) {
        self.next.store(0, Ordering::SeqCst);
        self.lock().run = Some(run);
        self.runs.fetch_add(1, Ordering::SeqCst);
        self.wake.notify_all();
    }

    fn close(&self) -> Option<Box<dyn Any + Send>> {
        let mut state = self.lock();
        state.run = None;
        while state.inside > 0 {
            drop(state);
            self.spin_while(|| self.lock().inside > 0);
            state = self.lock();
            if state.inside > 0 {
                state = self.empty.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.panic.take()
    }

    fn take_jobs(&self, job: &(dyn Fn(usize) + Sync), jobs: usize) {
        loop {
            let i = self.next.fetch_add(1, Ordering::SeqCst);
            if i >= jobs {
                return;
            }
            job(i);
        }
    }

    /// A worker's life.
    fn work(&self) {
        let mut seen = 0;
        while !self.stop.load(Ordering::SeqCst) {
            self.spin_while(|| self.runs.load(Ordering::SeqCst) == seen);
            let mut state = self.lock();
            while self.runs.load(Ordering::SeqCst) == seen {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            seen = self.runs.load(Ordering::SeqCst);
            let Some(run) = state.run else { continue };
            state.inside += 1;
            drop(state);
            let done = catch_unwind(AssertUnwindSafe(|| self.take_jobs(run.job, run.jobs)));
            self.leave(done.err());
        }
    }

    fn leave(&self, panic: Option<Box<dyn Any + Send>>) {
        let mut state = self.lock();
        state.inside -= 1;
        state.panic = state.panic.take().or(panic);
        if state.inside == 0 {
            self.empty.notify_one();
        }
    }

    fn spin_while(&self, waiting: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if !waiting() {
                return;
            }
            std::hint::spin_loop();
        }
    }
}

/// A panic of a job poisons nothing that another could find half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_handed_out_once() {
        for count in [1, 2, 5] {
            let threads = Threads::new(count);
            assert_eq!(threads.count(), count);
            for jobs in [0, 1, 2, 3, 50, 1000] {
                let mut out = vec![0; jobs];
                threads.each(out.iter_mut().enumerate(), |(i, out)| *out += i + 1);
                assert!(out.iter().enumerate().all(|(i, &n)| n == i + 1), "{count} threads, {jobs} jobs");
            }
        }
    }

    #[test]
    fn many_short_runs_follow_each_other() {
        let threads = Threads::new(3);
        let total = AtomicUsize::new(0);
        for _ in 0..2000 {
            threads.each(0..4usize, |i| {
                total.fetch_add(i, Ordering::SeqCst);
            });
        }
        assert_eq!(total.into_inner(), 2000 * 6);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_live_on() {
        let threads = Threads::new(2);
        for bad in 0..8 {
            let run = || threads.each(0..8, |i| assert_ne!(i, bad, "job {i}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let total = AtomicUsize::new(0);
        threads.each(0..100usize, |i| {
            total.fetch_add(i, Ordering::SeqCst);
        });
        assert_eq!(total.into_inner(), 4950);
    }

    #[test]
    fn several_callers_take_turns() {
        let threads = Threads::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        threads.each(0..3usize, |i| {
                            total.fetch_add(i, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 400 * 3);
    }
}
