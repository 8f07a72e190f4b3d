//! A thread that drives an engine, for callers that have other things to do.
//!
//! ```text
//! caller   call(start) ... computes, or waits for something else ... wait() -> result
//!            | wakes                                                   ^
//! thread   turn, turn, turn: moves bytes, beats, looks whether the job has ended
//! ```
//!
//! Whoever drives an engine by [`Engine::wait`] moves nothing, and gives no sign of life, while it does not wait: its peers go
//! slower, and may take it for dead. A driver owns the engine, or the collectives over it; others hand it closures, which it
//! runs between two turns. They wake it as a device wakes an engine ([`crate::wake`]).

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crossmesh_core::id::Rank;

use crate::collectives::Collectives;
use crate::engine::Engine;
use crate::error::CommError;
use crate::wake::Waker;

/// Something with an engine inside.
pub trait Drives: Send + 'static {
    fn engine(&mut self) -> &mut Engine;

    /// The engine has failed. What whoever waits is told: the error, or what the job agreed on.
    fn failed(&mut self, error: CommError) -> CommError {
        error
    }
}

impl Drives for Engine {
    fn engine(&mut self) -> &mut Engine {
        self
    }
}

impl Drives for Collectives {
    fn engine(&mut self) -> &mut Engine {
        Collectives::engine(self)
    }
}

/// Asked between turns, until it says that it is done; with the error once the engine has failed.
type Question<T> = Box<dyn FnMut(Result<&mut T, &CommError>) -> bool + Send>;

/// See the module. When it is dropped, the thread ends without a farewell to the peers; see [`Driver::stop`].
pub struct Driver<T: Drives> {
    questions: Option<Sender<Question<T>>>,
    waker: Waker,
    me: Rank,
    thread: Option<JoinHandle<T>>,
}

impl<T: Drives> Driver<T> {
    pub fn start(mut driven: T) -> Result<Self, CommError> {
        let (me, waker) = (driven.engine().rank(), driven.engine().waker());
        let (questions, desk) = channel();
        let thread = std::thread::Builder::new().name("driver".into()).spawn(move || drive(driven, &desk));
        let thread = thread.map_err(|e| CommError::System {
            me,
            what: "start a thread that drives its engine",
            cause: e.to_string(),
        })?;
        Ok(Self { questions: Some(questions), waker, me, thread: Some(thread) })
    }

    /// Runs something in the driver's thread, at once.
    pub fn call<R: Send + 'static>(
        &self,
        call: impl FnOnce(&mut T) -> R + Send + 'static,
    ) -> Result<R, CommError> {
        let mut call = Some(call);
        self.when(move |driven| call.take().map(|call| call(driven))).wait()
    }

    /// Asks again and again, whenever something has happened, until there is an answer. The question must not wait.
    pub fn when<R: Send + 'static>(
        &self,
        question: impl FnMut(&mut T) -> Option<R> + Send + 'static,
    ) -> Promise<R> {
        self.when_then(question, || {})
    }

    /// The same, and calls something once the answer is there, or an error: to wake whoever looks for it.
    pub fn when_then<R: Send + 'static>(
        &self,
        mut question: impl FnMut(&mut T) -> Option<R> + Send + 'static,
        then: impl FnOnce() + Send + 'static,
    ) -> Promise<R> {
        let (reply, answer) = channel();
        let mut then = Some(then);
        let ask = move |driven: Result<&mut T, &CommError>| {
            let answer = match driven {
                Ok(driven) => question(driven).map(Ok),
                Err(error) => Some(Err(error.clone())),
            };
            let Some(answer) = answer else { return false };
            // Who dropped its promise needs no answer.
            let _unheard = reply.send(answer);
            then.take().into_iter().for_each(|then| then());
            true
        };
        // Where nobody takes the question, nobody keeps the sender, and waiting ends.
        let _ended = self.questions.as_ref().map(|questions| questions.send(Box::new(ask)));
        self.waker.wake();
        Promise { answer, me: self.me }
    }

    /// Ends the thread and gives back what it drove: to drive it otherwise, or to close it.
    pub fn stop(mut self) -> Result<T, CommError> {
        self.end().unwrap_or_else(|| Err(ended(self.me)))
    }

    fn end(&mut self) -> Option<Result<T, CommError>> {
        self.questions = None;
        self.waker.wake();
        self.thread.take().map(|thread| thread.join().map_err(|_| ended(self.me)))
    }
}

impl<T: Drives> Drop for Driver<T> {
    fn drop(&mut self) {
        let _driven = self.end();
    }
}

/// A result that comes when the driver has it.
#[must_use = "a result comes when it is waited for"]
pub struct Promise<R> {
    answer: Receiver<Result<R, CommError>>,
    me: Rank,
}

impl<R> Promise<R> {
    /// Waits; an error is what the engine failed of.
    pub fn wait(self) -> Result<R, CommError> {
        self.answer.recv().unwrap_or_else(|_| Err(ended(self.me)))
    }

    /// Waits for so long; none where it takes longer.
    pub fn wait_for(&self, time: Duration) -> Option<Result<R, CommError>> {
        match self.answer.recv_timeout(time) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(ended(self.me))),
        }
    }

    /// The result if it is there.
    pub fn now(&self) -> Option<Result<R, CommError>> {
        match self.answer.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(ended(self.me))),
        }
    }
}

fn ended(me: Rank) -> CommError {
    CommError::System {
        me,
        what: "get a result",
        cause: "the thread that drives its engine has ended".into(),
    }
}

/// The thread: it ends when nobody can ask any more, and gives back what it drove.
fn drive<T: Drives>(mut driven: T, desk: &Receiver<Question<T>>) -> T {
    let (mut open, mut failed): (Vec<Question<T>>, Option<CommError>) = (vec![], None);
    loop {
        match desk.try_recv() {
            Ok(question) => open.push(question),
            Err(TryRecvError::Disconnected) => return driven,
            Err(TryRecvError::Empty) => {
                open.retain_mut(|question| !question(failed.as_ref().map_or(Ok(&mut driven), Err)));
                match &failed {
                    None => failed = driven.engine().turn().err().map(|error| driven.failed(error)),
                    // Nothing moves any more; whoever asks is told why.
                    Some(_) => match desk.recv() {
                        Ok(question) => open.push(question),
                        Err(_) => return driven,
                    },
                }
            }
        }
    }
}
