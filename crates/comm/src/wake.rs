//! Sleeping without missing anything: how other threads wake an engine, and why no wake is lost.
//!
//! ```text
//! source     push what there is to do, then count up                      (a call, the end of a pass, an interrupt)
//! sleeper    look at every source | sleep until the counter is above 0 | take the counter | look at every source ...
//! ```
//!
//! One counter serves all sources of a rank, so a count says only that there is something somewhere. Three rules make
//! that enough:
//!
//! 1. A source counts up *after* it has put down what there is to do.
//! 2. Only the sleeper takes the counter, in one place, when it has slept.
//! 3. Between two sleeps every source is looked at.
//!
//! Suppose something was put down and the sleeper sleeps for good. Its count came after it (1), and is not in the counter,
//! or nobody could sleep; so it was taken, by the sleeper, after an earlier sleep (2). Since then every source was looked
//! at (3), and what was put down before that was seen: a contradiction. Whoever breaks a rule loses wakes. Passes once took
//! the counter to see whether one had ended, and so took the counts of calls; one training step in five then stood still
//! until the next heartbeat.
//!
//! An engine cannot look at all sources by itself: calls lie with whoever drives it. It may sleep in several places (in
//! [`crate::engine::Engine::wait`] too, which looks at one job only), but it is [`crate::engine::Engine::turn`] that returns to
//! where calls are looked at. So a count that was taken stays *untold* until then, and while it is, no turn sleeps: rule 3
//! over two floors. The end of a job is news of the same kind.
//!
//! Descriptors that mean one thing (sockets, timers, the queue of a link between threads) need no counter: they stay
//! readable until their one source was looked at. The tests run this very code through all interleavings of its threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Counts wakes. While it is above zero, whoever waits for it does not sleep.
pub(crate) trait Counter: Send + Sync {
    fn add(&self);
    /// Sets it to zero; whether it was above.
    fn take(&self) -> bool;
}

/// A counter of the kernel's: it can be waited for along with sockets.
#[derive(Debug)]
pub struct EventCounter(OwnedFd);

impl Counter for EventCounter {
    fn add(&self) {
        // A counter that is full already wakes too.
        let _full = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn take(&self) -> bool {
        // Empty, or interrupted: then it still wakes.
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }
}

/// Wakes a rank's engine, from any thread. See rule 1.
#[derive(Debug)]
pub struct Waker<C = EventCounter>(Arc<C>);

impl<C> Clone for Waker<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[expect(private_bounds, reason = "who wakes need not know how it is counted")]
impl<C: Counter> Waker<C> {
    pub fn wake(&self) {
        self.0.add();
    }
}

/// The one that sleeps.
#[derive(Debug)]
pub(crate) struct Sleeper<C = EventCounter> {
    counter: Arc<C>,
    /// A count was taken, and who drives the engine has not looked at its sources since.
    untold: bool,
}

impl Sleeper {
    pub fn new() -> Result<Self, Errno> {
        let counter = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self::of(EventCounter(counter)))
    }

    /// Readable while there is something to take.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.counter.0.as_fd()
    }
}

impl<C: Counter> Sleeper<C> {
    pub fn of(counter: C) -> Self {
        Self { counter: Arc::new(counter), untold: false }
    }

    pub fn waker(&self) -> Waker<C> {
        Waker(Arc::clone(&self.counter))
    }

    /// Whether all that woke us so far has been acted on.
    pub fn may_sleep(&self) -> bool {
        !self.untold
    }

    /// After sleeping, and before any source is looked at.
    pub fn woke(&mut self) {
        self.untold |= self.counter.take();
    }

    /// The engine itself has something to tell.
    pub fn note(&mut self) {
        self.untold = true;
    }

    /// The caller looks at all sources before the next sleep.
    pub fn tell(&mut self) {
        self.untold = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;

    /// An event counter, as loom sees it.
    #[derive(Default)]
    struct Modelled {
        count: Mutex<u64>,
        above_zero: Condvar,
    }

    impl Counter for Modelled {
        fn add(&self) {
            *self.count.lock().unwrap() += 1;
            self.above_zero.notify_all();
        }

        fn take(&self) -> bool {
            std::mem::take(&mut *self.count.lock().unwrap()) > 0
        }
    }

    impl Modelled {
        /// As `epoll_wait` without a limit.
        fn sleep(&self) {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.above_zero.wait(count).unwrap();
            }
        }
    }

    /// Something that is put down by one thread, and found by another.
    #[derive(Default)]
    struct Source(Mutex<u32>);

    impl Source {
        fn put(&self, waker: &Waker<Modelled>) {
            *self.0.lock().unwrap() += 1;
            waker.wake();
        }

        fn look(&self) -> u32 {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }

    /// What a rank's engine does, with a device that calls it in the middle of a pass.
    struct Rank {
        sleeper: Sleeper<Modelled>,
        pass: Arc<Source>,
        calls: Arc<Source>,
        computing: bool,
        served: u32,
    }

    impl Rank {
        /// As `Engine::step`: whether the pass has ended, then a sleep.
        fn step(&mut self) {
            self.compute();
            if self.sleeper.may_sleep() {
                self.sleeper.counter.sleep();
            }
            self.sleeper.woke();
        }

        fn compute(&mut self) {
            if self.pass.look() > 0 {
                self.computing = false;
                self.sleeper.note();
            }
        }

        /// As `Engine::turn`, and the desk of calls behind it.
        fn turn(&mut self) {
            self.step();
            self.sleeper.tell();
            self.served += self.calls.look();
        }
    }

    fn rank() -> (Rank, Waker<Modelled>) {
        let sleeper = Sleeper::of(Modelled::default());
        let waker = sleeper.waker();
        (Rank { sleeper, pass: Arc::default(), calls: Arc::default(), computing: true, served: 0 }, waker)
    }

    /// A sleep that nothing ends is a deadlock, and loom finds it.
    #[test]
    fn no_wake_is_lost() {
        loom::model(|| {
            let (mut rank, waker) = rank();
            let (pass, calls) = (rank.pass.clone(), rank.calls.clone());
            let device = loom::thread::spawn(move || {
                calls.put(&waker);
                pass.put(&waker);
            });
            while rank.served == 0 || rank.computing {
                rank.turn();
            }
            device.join().unwrap();
        });
    }

    /// A wait inside the engine takes counts that are meant for calls; the turn after it must not sleep on them.
    #[test]
    fn a_wake_that_a_wait_took_is_told_later() {
        loom::model(|| {
            let (mut rank, waker) = rank();
            let calls = rank.calls.clone();
            let device = loom::thread::spawn(move || calls.put(&waker));
            rank.sleeper.counter.sleep();
            rank.sleeper.woke();
            while rank.served == 0 {
                rank.turn();
            }
            device.join().unwrap();
        });
    }

    /// Two threads put down calls while a third ends its pass.
    #[test]
    fn many_sources_share_a_counter() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let (mut rank, waker) = rank();
            let put = |source: &Arc<Source>| {
                let (source, waker) = (source.clone(), waker.clone());
                loom::thread::spawn(move || source.put(&waker))
            };
            let threads = [put(&rank.calls), put(&rank.calls), put(&rank.pass)];
            while rank.served < 2 || rank.computing {
                rank.turn();
            }
            threads.into_iter().for_each(|t| t.join().unwrap());
        });
    }

    /// What the model is good for: the rule that was broken, broken again.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_source_that_takes_the_counter_loses_wakes() {
        loom::model(|| {
            let (mut rank, waker) = rank();
            let calls = rank.calls.clone();
            let device = loom::thread::spawn(move || calls.put(&waker));
            while rank.served == 0 {
                if rank.sleeper.counter.take() {
                    rank.compute(); // the end of a pass was all that it looked for
                }
                rank.turn();
            }
            device.join().unwrap();
        });
    }
}
