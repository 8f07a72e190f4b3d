//! Starts the processes of a job and stays responsible for them: output, signals, and an end for every one.
//!
//! ```text
//! launcher ── r0 ── (whatever it starts)      a process group each
//!          ├─ r1                              the first failure ends all: asked, then told
//!          └─ r2                              a launcher that dies takes them along
//! ```
//!
//! A process that fails names the job's exit code. The others get a grace period, in which they may say what they saw,
//! then SIGTERM, then SIGKILL; process groups, so that grandchildren go too. One that is stopped could do nothing with
//! a grace period, and gets none.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crossmesh_core::id::Rank;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::deadline::Deadline;
use janitor::{Keeping, Kept, keep};

pub mod janitor;
mod output;
mod remote;
mod signals;

pub use output::{Line, OnLine, Source};
pub use remote::remote_command;
pub use signals::{Signals, asked_to_end, continued_ns, survive_file_limits};

/// How often the launcher looks after its processes.
const LOOK: Duration = Duration::from_millis(5);
/// How patient a launcher is with processes that should end.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    /// After a failure, for the others to say what they saw.
    pub after_failure: Duration,
    /// Between asking a process to end and ending it.
    pub after_term: Duration,
    /// Where processes come to a good end when they are asked to (SIGTERM, SIGINT): for that.
    pub to_finish: Option<Duration>,
}

/// A process to start.
#[derive(Debug, Clone)]
pub struct Process {
    pub rank: Rank,
    pub program: OsString,
    pub args: Vec<OsString>,
    /// On top of what the launcher has.
    pub env: BTreeMap<String, String>,
    /// The network namespace to run in.
    pub namespace: Option<String>,
    /// What it reads; nothing else comes.
    pub stdin: Option<String>,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    #[error("cannot start `{program}` as {rank}: {cause}")]
    CannotStart { rank: Rank, program: String, cause: io::Error },
    #[error("cannot enter namespace {namespace}: {cause}")]
    NoNamespace { namespace: String, cause: io::Error },
    #[error(
        "cannot follow what the processes print: {0}\nhint: are threads, memory or descriptors limited (ulimit -u, -v, -n)?"
    )]
    Output(io::Error),
    #[error(
        "`{0}` is no name of a host: it would be read as an option\nhint: host names begin with a letter or a digit"
    )]
    BadHost(String),
    #[error("cannot watch over signals: {0}")]
    Signals(io::Error),
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The first process that failed, and how.
    Failed {
        rank: Rank,
        status: ExitStatus,
    },
    /// A signal to the launcher ended it.
    Signalled(i32),
    /// It took too long.
    TimedOut,
}

impl Outcome {
    /// What a shell would say: the culprit's code, or 128 and the signal.
    pub fn exit_code(self) -> u8 {
        use std::os::unix::process::ExitStatusExt;
        let code = match self {
            Outcome::Done => 0,
            Outcome::Failed { status, .. } => {
                status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
            }
            Outcome::Signalled(signal) => 128 + signal,
            Outcome::TimedOut => 124,
        };
        code as u8
    }
}

/// Processes that end with this value.
pub struct Job {
    running: BTreeMap<Rank, Child>,
    /// Their groups, should we be killed.
    groups: BTreeMap<Rank, Keeping>,
    ended: BTreeMap<Rank, ExitStatus>,
    output: output::Pumps,
    grace: Grace,
}

impl Job {
    /// Starts all of them, or none. They end when the calling thread does.
    pub fn start(processes: Vec<Process>, on_line: OnLine, grace: Grace) -> Result<Self, LaunchError> {
        raise_descriptor_limit();
        let mut job = Self {
            running: BTreeMap::new(),
            groups: BTreeMap::new(),
            ended: BTreeMap::new(),
            output: output::Pumps::new(on_line),
            grace,
        };
        for process in processes {
            let rank = process.rank;
            // On failure, dropping the job ends those that run already.
            let mut child = spawn(process)?;
            job.groups.insert(rank, keep(Kept::Group(child.id())));
            let followed = job.output.follow(rank, &mut child);
            job.running.insert(rank, child);
            followed.map_err(LaunchError::Output)?;
        }
        job.output.start().map_err(LaunchError::Output)?;
        Ok(job)
    }

    /// The processes that run, by rank.
    pub fn pids(&self) -> BTreeMap<Rank, u32> {
        self.running.iter().map(|(rank, child)| (*rank, child.id())).collect()
    }

    /// Waits for the end: of all, of the first that fails, or by a signal. Nothing runs afterwards.
    pub fn wait(self, signals: &Signals, deadline: Option<Deadline>) -> Outcome {
        self.wait_each(signals, deadline).0
    }

    /// The same, with how every process ended.
    pub fn wait_each(
        mut self,
        signals: &Signals,
        deadline: Option<Deadline>,
    ) -> (Outcome, BTreeMap<Rank, ExitStatus>) {
        let outcome = loop {
            if let Some(signal) = signals.caught() {
                self.signal_all(signal);
                break if self.finishes(signal, signals) {
                    Outcome::Done
                } else {
                    Outcome::Signalled(signal)
                };
            }
            match self.first_failure() {
                Some(outcome) => break outcome,
                None if self.running.is_empty() => break Outcome::Done,
                None if deadline.is_some_and(Deadline::passed) => break Outcome::TimedOut,
                None => std::thread::sleep(LOOK),
            }
        };
        match outcome {
            Outcome::Failed { .. } => self.reap_until(Deadline::after(self.grace.after_failure), signals),
            Outcome::Signalled(_) => self.reap_until(Deadline::after(self.grace.after_term), signals),
            Outcome::Done | Outcome::TimedOut => {}
        }
        self.end_all(signals);
        (outcome, std::mem::take(&mut self.ended))
    }

    /// Whether all come to a good end of their own, having been asked to.
    fn finishes(&mut self, signal: i32, signals: &Signals) -> bool {
        let asks = [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT].contains(&signal);
        let Some(limit) = self.grace.to_finish.filter(|_| asks) else { return false };
        self.reap_until(Deadline::after(limit), signals);
        self.running.is_empty() && self.ended.values().all(ExitStatus::success)
    }

    /// Reaps what has ended; the lowest rank among those that failed.
    fn first_failure(&mut self) -> Option<Outcome> {
        let ended = self.reap();
        let mut failed = ended.into_iter().filter(|(_, status)| !status.success());
        failed.next().map(|(rank, status)| Outcome::Failed { rank, status })
    }

    /// Processes that have ended since the last look, and with them what is left of their groups.
    fn reap(&mut self) -> Vec<(Rank, ExitStatus)> {
        let ended: Vec<Rank> = self.running.iter().filter(|(_, c)| has_ended(c)).map(|(r, _)| *r).collect();
        let ended: Vec<(Rank, ExitStatus)> =
            ended.into_iter().filter_map(|rank| Some((rank, reap(self.running.remove(&rank)?)?))).collect();
        ended.iter().for_each(|(rank, _)| drop(self.groups.remove(rank)));
        self.ended.extend(ended.iter().copied());
        ended
    }

    fn reap_until(&mut self, deadline: Deadline, signals: &Signals) {
        let before = signals.count();
        // Nobody waits for the stopped alone. (Of none at all, all are stopped.)
        while !self.running.values().all(is_stopped) && !deadline.passed() && signals.count() == before {
            self.reap();
            std::thread::sleep(LOOK);
        }
    }

    fn signal_all(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.running.values().for_each(|child| signal_group(child, signal));
        }
    }

    /// Asks, waits, and ends.
    fn end_all(&mut self, signals: &Signals) {
        self.running.values().for_each(|child| signal_group(child, Signal::TERM));
        let deadline = Deadline::after(self.grace.after_term);
        while !self.running.values().all(is_stopped) && !deadline.passed() {
            self.reap();
            std::thread::sleep(LOOK);
        }
        for (rank, child) in std::mem::take(&mut self.running) {
            self.ended.extend(reap(child).map(|status| (rank, status)));
            self.groups.remove(&rank);
        }
        let before = signals.count();
        self.output.finish(|| signals.count() > before);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (_, child) in std::mem::take(&mut self.running) {
            signal_group(&child, Signal::KILL);
            reap(child);
        }
    }
}

/// Takes as many descriptors as the system allows: two for the output of every process, one for every connection. Where
/// that is not enough, the call that fails says so.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}

/// Whether it has ended, without reaping it: until then its group keeps its number.
fn has_ended(child: &Child) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(pid(child)), options), Ok(None))
}

/// Whether it was stopped and not continued. Of a job that fails it is the likely cause; in any case it cannot react.
fn is_stopped(child: &Child) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::Pid(pid(child)), options), Ok(Some(status)) if status.stopped())
}

/// Ends what is left of its group, then takes its status.
fn reap(mut child: Child) -> Option<ExitStatus> {
    signal_group(&child, Signal::KILL);
    child.wait().ok()
}

fn signal_group(child: &Child, signal: Signal) {
    // An empty group is what we want.
    let _ = kill_process_group(pid(child), signal);
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn spawn(process: Process) -> Result<Child, LaunchError> {
    let Process { rank, program, args, env, namespace, stdin } = process;
    let mut command = Command::new(&program);
    command.args(args).envs(env).process_group(0);
    command.stdin(if stdin.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let namespace = namespace.map(|name| open_namespace(&name)).transpose()?;
    tie_to_launcher(&mut command, namespace);
    let program = program.to_string_lossy().into_owned();
    let wrong = |cause| LaunchError::CannotStart { rank, program: program.clone(), cause };
    let mut child = command.spawn().map_err(wrong)?;
    if let (Some(text), Some(mut pipe)) = (stdin, child.stdin.take()) {
        match io::Write::write_all(&mut pipe, text.as_bytes()) {
            // It has ended already; its status says why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            written => written.map_err(wrong)?,
        }
        // It stays open as long as the process: on a remote host, its end is the sign that the launcher is gone.
        child.stdin = Some(pipe);
    }
    Ok(child)
}

fn open_namespace(name: &str) -> Result<File, LaunchError> {
    File::open(Path::new("/run/netns").join(name))
        .map_err(|cause| LaunchError::NoNamespace { namespace: name.into(), cause })
}

/// In the new process: enter the namespace, and end when the launcher does, however that ends.
#[expect(unsafe_code, reason = "code between fork and exec")]
fn tie_to_launcher(command: &mut Command, namespace: Option<File>) {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    let launcher = rustix::process::getpid();
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have died before we asked to be told.
        if rustix::process::getppid() != Some(launcher) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        if let Some(namespace) = &namespace {
            let fd = std::os::fd::AsFd::as_fd(namespace);
            move_into_link_name_space(fd, Some(LinkNameSpaceType::Network))?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only three system calls are made; nothing allocates or takes a lock.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(test)]
mod tests;
