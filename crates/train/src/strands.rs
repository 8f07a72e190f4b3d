//! Strands: a microbatch in two halves that take turns, so that one computes while the other waits for other ranks.
//!
//! ```text
//! one        compute | all-reduce ====== | compute | all-reduce ====== |
//!
//! strand 0   compute | all-reduce ====== | compute | all-reduce ====== |
//! strand 1           | compute | all-reduce ====== | compute |
//! ```
//!
//! Each strand has a thread, and a [`Baton`] goes between them: who holds it computes. It changes hands where a collective is waited for, and nowhere
//! else, so that all ranks ask for the same collectives in the same order, however long each takes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossmesh_comm::clock::{Clock as _, Monotonic};

/// See the module.
#[derive(Debug, Default)]
pub struct Baton {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    holder: usize,
    /// Who has nothing left to do.
    done: [bool; 2],
    /// Since when nobody has computed, in nanoseconds; and how long that was so before.
    idle_since: Option<u64>,
    idle: u64,
}

impl State {
    fn hand_over(&mut self, to: usize) {
        self.holder = to;
        self.idle_since = (!self.done[to]).then(|| Monotonic.now_ns());
    }
}

/// A strand's side of it.
#[derive(Debug, Clone)]
pub struct Turn {
    baton: Arc<Baton>,
    me: usize,
}

impl Baton {
    /// The two sides.
    pub fn pair() -> [Turn; 2] {
        let baton = Arc::new(Self::default());
        [0, 1].map(|me| Turn { baton: Arc::clone(&baton), me })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Both begin anew; the first has the baton.
    pub fn begin(&self) {
        *self.baton.lock() = State::default();
    }

    /// Waits for its turn.
    pub fn take(&self) {
        let waits = |state: &mut State| state.holder != self.me && !state.done[1 - self.me];
        let guard = self.baton.changed.wait_while(self.baton.lock(), waits);
        let mut state = guard.unwrap_or_else(PoisonError::into_inner);
        state.holder = self.me;
        if let Some(since) = state.idle_since.take() {
            state.idle += Monotonic.now_ns() - since;
        }
    }

    /// Lets the other one go on.
    pub fn pass(&self) {
        self.baton.lock().hand_over(1 - self.me);
        self.baton.changed.notify_all();
    }

    /// Has nothing left to do, whether it went well or not. To be called while the value lives: a panic ends a strand too.
    pub fn until_done(&self) -> Done<'_> {
        Done(self)
    }
}

/// Hands the baton over for good when it is dropped.
#[derive(Debug)]
pub struct Done<'a>(&'a Turn);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.0.baton.lock();
        state.done[self.0.me] = true;
        state.hand_over(1 - self.0.me);
        drop(state);
        self.0.baton.changed.notify_all();
    }
}

/// Runs both strands, each on a thread; what they come to, and how long neither computed.
pub fn both<S: Send, R: Send>(strands: [(S, Turn); 2], f: impl Fn(S) -> R + Sync) -> ([R; 2], Duration) {
    let turn = strands[0].1.clone();
    turn.begin();
    let [first, second] = strands;
    let run = |(strand, turn): (S, Turn)| {
        let _done = turn.until_done();
        turn.take();
        f(strand)
    };
    let ended = std::thread::scope(|scope| {
        let second = scope.spawn(|| run(second));
        let first = run(first);
        let second = second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        [first, second]
    });
    let idle = Duration::from_nanos(turn.baton.lock().idle);
    (ended, idle)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever takes how long, turns alternate from collective to collective.
    #[test]
    fn turns_alternate() {
        for (mine, yours) in [(3, 3), (5, 2), (0, 4), (4, 0)] {
            let log = Mutex::new(vec![]);
            let turns = Baton::pair();
            let strands = [(0, mine), (1, yours)].map(|(me, count)| ((me, count), turns[me].clone()));
            both(strands, |(me, count): (usize, usize)| {
                for i in 0..count {
                    log.lock().unwrap().push((me, i));
                    turns[me].pass();
                    if (i + me) % 2 == 0 {
                        std::thread::sleep(std::time::Duration::from_millis(2));
                    }
                    turns[me].take();
                }
            });
            let mut wanted: Vec<_> = (0..mine).map(|i| (0, i)).chain((0..yours).map(|i| (1, i))).collect();
            wanted.sort_by_key(|(me, i)| (*i, *me));
            assert_eq!(log.into_inner().unwrap(), wanted);
        }
    }
}
