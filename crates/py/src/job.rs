//! The engine from Python: a job, and transfers under way.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crossmesh_comm::auth::Secret;
use crossmesh_comm::driver::Promise;
use crossmesh_comm::engine::JobReport;
use crossmesh_comm::environment::{Flags, host_name, variables};
use crossmesh_comm::job::{Job as Inner, JoinOptions, Outcome, StartError, Work};
use crossmesh_comm::protect::Protect;
use crossmesh_core::id::Rank;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::bind::{self, InUse};
use crate::errors::{HandleError, JobError, comm_error};
use crate::plan::Plan;

/// How long to wait without looking for signals.
const SLICE: Duration = Duration::from_millis(50);
/// How long to look for the end before sleeping: to be woken costs more than a small transfer takes.
const LOOK: Duration = Duration::from_micros(100);
/// Looks before somebody else may have the core: on a machine that is busy the engine may be who wants it.
const LOOKS: u32 = 64;
const FORKED: &str = "the engine stays with the process that started it, and this one was forked from it\nhint: call `crossmesh.init` after the fork, or use the spawn method";

/// What a job's handles share with it.
pub struct Shared {
    /// None once it is closed.
    job: Mutex<Option<Inner>>,
    closed: AtomicBool,
    pid: u32,
    rank: Rank,
    in_use: Arc<InUse>,
}

impl Shared {
    fn check_process(&self) -> PyResult<()> {
        // Before any lock: a fork may have left it locked for ever.
        if std::process::id() != self.pid { Err(HandleError::new_err(FORKED)) } else { Ok(()) }
    }

    fn open(&self) -> PyResult<MutexGuard<'_, Option<Inner>>> {
        self.check_process()?;
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        if job.is_none() { Err(HandleError::new_err("the job is closed")) } else { Ok(job) }
    }

    /// Ends the job for everybody, if it goes on.
    fn abort(&self, why: &str) {
        let job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(job) = &*job {
            job.abort(why);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // In a fork there is no thread to wait for.
        if std::process::id() != self.pid {
            std::mem::forget(self.job.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// This process as a rank of a job; see `crossmesh.init`.
#[pyclass(frozen, module = "crossmesh", name = "Job")]
pub struct Job {
    shared: Arc<Shared>,
    size: u32,
    launcher: &'static str,
    hosts: Vec<String>,
}

/// Joins a job.
#[pyfunction]
#[pyo3(signature = (*, rank=None, size=None, address=None, secret=None, protect=None, attempt=0, arrive_s=60.0, deadline_s=10.0))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn join(
    py: Python<'_>,
    rank: Option<u32>,
    size: Option<u32>,
    address: Option<String>,
    secret: Option<&str>,
    protect: Option<&str>,
    attempt: u32,
    arrive_s: f64,
    deadline_s: f64,
) -> PyResult<Job> {
    let job_error = |error: &dyn std::fmt::Display| JobError::new_err(error.to_string());
    let secret = secret.map(Secret::from_text).transpose().map_err(|e| job_error(&e))?;
    let protect = protect.map(str::parse::<Protect>).transpose().map_err(|e| job_error(&e))?;
    let options = JoinOptions {
        flags: Flags { rank, world: size, master: address },
        secret,
        protect,
        attempt,
        arrive: seconds("arrive_s", arrive_s)?,
        deadline_ms: seconds("deadline_s", deadline_s)?.as_millis().max(1) as u64,
        log: Arc::new(log),
    };
    let joined = wait_in_slices(py, move || Inner::join(options, &variables()))?;
    let job = joined.map_err(|e| job_error(&e))?;
    let (size, launcher, hosts) = (job.world(), job.launcher(), job.hosts().to_vec());
    let rank = job.rank();
    let pid = std::process::id();
    let shared = Shared {
        job: Mutex::new(Some(job)),
        closed: AtomicBool::new(false),
        pid,
        rank,
        in_use: Arc::default(),
    };
    Ok(Job { shared: Arc::new(shared), size, launcher, hosts })
}

/// The name of this host, as ranks of a job are told it.
#[pyfunction]
pub fn host() -> String {
    host_name(&variables())
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| JobError::new_err(format!("{name}={value} is not a time in seconds")))
}

/// A line about strangers, or about a secret that is none.
fn log(line: &str) {
    let said = Python::try_attach(|py| -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", ("crossmesh",))?;
        logger.call_method1("info", (line,)).map(drop)
    });
    // At the interpreter's end nobody listens.
    drop(said);
}

/// Runs something in a thread, while signals are looked for here. An interrupt leaves it behind.
fn wait_in_slices<R: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> R + Send + 'static,
) -> PyResult<R> {
    let (send, receive) = channel();
    let thread = std::thread::Builder::new().name("waits".into()).spawn(move || drop(send.send(work())));
    thread.map_err(|e| JobError::new_err(format!("cannot start a thread: {e}")))?;
    let receive = Mutex::new(receive);
    loop {
        let receive = &receive;
        let got = py.detach(|| receive.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SLICE));
        match got {
            Ok(result) => return Ok(result),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(_) => return Err(JobError::new_err("the thread that waits for the others has ended")),
        }
    }
}

#[pymethods]
impl Job {
    #[getter]
    fn rank(&self) -> u32 {
        self.shared.rank.0
    }

    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    /// Who started the processes.
    #[getter]
    fn launcher(&self) -> &'static str {
        self.launcher
    }

    /// The host of every rank.
    #[getter]
    fn hosts(&self) -> Vec<String> {
        self.hosts.clone()
    }

    /// Starts a plan on this rank's shards, by name, and returns at once. All ranks of the job start the same plans; of `mine` and `out`
    /// nobody else may touch anything before the handle's `wait` has returned. Without `out`, arrays are made: `handle.out`.
    #[pyo3(signature = (plan, mine=None, out=None))]
    fn start(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, Plan>,
        mine: Option<&Bound<'_, PyDict>>,
        out: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Handle> {
        drop(self.shared.open()?);
        let (of, rank) = (plan.get(), self.shared.rank);
        let needed = of.num_ranks();
        if needed > self.size as usize {
            return Err(JobError::new_err(format!(
                "the plan is for {needed} ranks, the job has {}; nothing was moved\nhint: start {needed} ranks",
                self.size
            )));
        }
        let out = match out {
            Some(out) => out,
            None if rank.index() < needed => of.empty(py, rank.0, "dst")?,
            None => PyDict::new(py),
        };
        let nothing = PyDict::new(py);
        let bound = bind::bind(py, of, rank, mine.unwrap_or(&nothing), &out, &self.shared.in_use)?;
        let bell = Arc::new(Bell::default());
        let rings = bell.clone();
        let work = Work { fingerprint: of.fingerprint(py) as u64, buffers: bound.buffers, keep: bound.keep };
        let promise = self.shared.open()?.as_ref().expect("just seen").start(work, move || rings.ring());
        Ok(Handle {
            shared: self.shared.clone(),
            state: Mutex::new(State::UnderWay(promise)),
            bell,
            out: out.unbind(),
        })
    }

    /// Starts a plan, waits for it, and returns what arrived.
    #[pyo3(signature = (plan, mine=None, out=None, *, timeout_s=None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        plan: &Bound<'py, Plan>,
        mine: Option<&Bound<'py, PyDict>>,
        out: Option<Bound<'py, PyDict>>,
        timeout_s: Option<f64>,
    ) -> PyResult<Py<PyDict>> {
        let handle = self.start(py, plan, mine, out)?;
        handle.wait(py, timeout_s)?;
        Ok(handle.out)
    }

    /// Leaves the job, once the others are ready to; where a transfer is under way, they are told that this rank left it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.shared.check_process().is_err() {
            return Ok(()); // it is not ours to close
        }
        self.shared.closed.store(true, Ordering::SeqCst);
        let shared = self.shared.clone();
        let job = py.detach(|| shared.job.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some(job) = job else { return Ok(()) };
        wait_in_slices(py, move || job.close())?.map_err(|e| comm_error(py, &e))
    }

    /// Leaves at once and without a farewell: the others hear that this rank is gone. Its threads take a moment to end, and may be at the arrays
    /// of a transfer until then; `wait` waits for that.
    #[pyo3(signature = (*, wait=false))]
    fn abandon(&self, py: Python<'_>, wait: bool) {
        if self.shared.check_process().is_err() {
            return; // it is not ours to leave
        }
        self.shared.closed.store(true, Ordering::SeqCst);
        let shared = self.shared.clone();
        let leave = move || {
            let job = shared.job.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(job);
        };
        if wait {
            py.detach(leave);
        } else {
            let _ended = std::thread::Builder::new().name("leaves".into()).spawn(leave);
        }
    }

    fn __repr__(&self) -> String {
        format!("<Job: rank {} of {}, by {}>", self.shared.rank.0, self.size, self.launcher)
    }
}

/// What a transfer did on this rank.
#[pyclass(frozen, module = "crossmesh", name = "Report")]
pub struct Report(JobReport);

#[pymethods]
impl Report {
    /// From its start on this rank to its end.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    #[getter]
    fn bytes_sent(&self) -> u64 {
        self.0.bytes_sent
    }

    #[getter]
    fn bytes_received(&self) -> u64 {
        self.0.bytes_received
    }

    fn __repr__(&self) -> String {
        let JobReport { seconds, bytes_sent, bytes_received, .. } = &self.0;
        format!("<Report: {bytes_sent} B sent, {bytes_received} B received in {seconds:.6} s>")
    }
}

enum State {
    UnderWay(Promise<Outcome>),
    /// Nobody has asked for it yet.
    Ended(Outcome),
    Waited,
}

/// A transfer under way.
#[pyclass(frozen, module = "crossmesh", name = "Handle")]
pub struct Handle {
    shared: Arc<Shared>,
    state: Mutex<State>,
    bell: Arc<Bell>,
    out: Py<PyDict>,
}

#[pymethods]
impl Handle {
    /// The arrays that are filled, by name.
    #[getter]
    fn out(&self, py: Python<'_>) -> Py<PyDict> {
        self.out.clone_ref(py)
    }

    /// Waits for the end, once; TimeoutError after `timeout_s`, and it may be waited for again. An interrupt ends the job for all.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Report> {
        let timeout = timeout_s.map(|s| seconds("timeout_s", s)).transpose()?;
        let mut state = self.state()?;
        let (start, mut looks) = (now(), true);
        loop {
            match std::mem::replace(&mut *state, State::Waited) {
                State::Waited => return Err(HandleError::new_err("it was waited for before")),
                State::Ended(outcome) => return self.told(py, outcome),
                State::UnderWay(promise) => {
                    let left = timeout.map(|t| t.saturating_sub(now() - start));
                    let slice = left.map_or(SLICE, |left| left.min(SLICE));
                    let look = std::mem::take(&mut looks);
                    let (promise, ended) = py.detach(move || {
                        let seen = if look { look_for(&promise, slice.min(LOOK)) } else { None };
                        let ended = seen.or_else(|| promise.wait_for(slice));
                        (promise, ended)
                    });
                    if let Some(outcome) = ended {
                        *state = State::Ended(outcome.unwrap_or_else(|error| Err(error.into())));
                        continue;
                    }
                    *state = State::UnderWay(promise);
                    if let Err(interrupt) = py.check_signals() {
                        let shared = &self.shared;
                        py.detach(|| shared.abort("it was interrupted"));
                        return Err(interrupt);
                    }
                    if left.is_some_and(|left| left.is_zero()) {
                        let waited = timeout_s.unwrap_or_default();
                        return Err(PyTimeoutError::new_err(format!(
                            "the transfer goes on after {waited} s"
                        )));
                    }
                }
            }
        }
    }

    /// Whether it has ended; `wait` then returns at once.
    fn test(&self) -> PyResult<bool> {
        let mut state = self.state()?;
        if let State::UnderWay(promise) = &*state
            && let Some(outcome) = promise.now()
        {
            *state = State::Ended(outcome.unwrap_or_else(|error| Err(error.into())));
        }
        Ok(!matches!(&*state, State::UnderWay(_)))
    }

    /// A descriptor that can be read once the transfer has ended.
    fn fileno(&self) -> PyResult<i32> {
        self.shared.check_process()?;
        self.bell.descriptor().map_err(|e| HandleError::new_err(format!("no descriptor: {e}")))
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let waiting = slf.py().import("crossmesh._wait")?.call_method1("until_ended", (slf,))?;
        waiting.call_method0("__await__")
    }
}

impl Handle {
    fn state(&self) -> PyResult<MutexGuard<'_, State>> {
        self.shared.check_process()?;
        match self.state.try_lock() {
            Ok(state) => {
                let under_way = matches!(&*state, State::UnderWay(_));
                if under_way && self.shared.closed.load(Ordering::SeqCst) {
                    return Err(HandleError::new_err("the job was closed with this transfer under way"));
                }
                Ok(state)
            }
            Err(TryLockError::WouldBlock) => Err(HandleError::new_err("another thread waits for it")),
            Err(TryLockError::Poisoned(state)) => Ok(state.into_inner()),
        }
    }

    fn told(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Report> {
        outcome.map(Report).map_err(|error| match error {
            StartError::Comm(error) => comm_error(py, &error),
            other => JobError::new_err(other.to_string()),
        })
    }
}

fn look_for<R>(promise: &Promise<R>, time: Duration) -> Option<Result<R, crossmesh_comm::error::CommError>> {
    let start = now();
    loop {
        let look = |_| {
            std::hint::spin_loop();
            promise.now()
        };
        if let Some(found) = (0..LOOKS).find_map(look) {
            return Some(found);
        }
        if now() - start >= time {
            return None;
        }
        std::thread::yield_now();
    }
}

#[expect(clippy::disallowed_methods, reason = "a caller's patience is measured by the clock")]
fn now() -> Instant {
    Instant::now()
}

/// Tells an event loop that something has ended.
#[derive(Default)]
struct Bell(Mutex<(bool, Option<(UnixStream, UnixStream)>)>);

impl Bell {
    fn lock(&self) -> MutexGuard<'_, (bool, Option<(UnixStream, UnixStream)>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        let mut bell = self.lock();
        bell.0 = true;
        if let Some((_, writes)) = &mut bell.1 {
            let _nobody_listens = writes.write(&[1]);
        }
    }

    fn descriptor(&self) -> std::io::Result<i32> {
        let mut bell = self.lock();
        let rung = bell.0;
        if bell.1.is_none() {
            let (reads, mut writes) = UnixStream::pair()?;
            if rung {
                writes.write_all(&[1])?;
            }
            bell.1 = Some((reads, writes));
        }
        Ok(bell.1.as_ref().expect("just made").0.as_raw_fd())
    }
}
