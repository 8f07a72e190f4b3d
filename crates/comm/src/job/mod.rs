//! A process as a rank of a job, for libraries: it meets the others, connects with all of them, and a thread moves what is asked for.
//!
//! ```text
//! join    the launcher's environment, or a place that is given -> a meeting, links, an engine, a thread ([`crate::driver`])
//! start   ranks compare their plans (a number each, an all-gather) -> the plan runs -> a report
//! close   farewell, once nothing is under way; else the others are told
//! ```
//!
//! A failure ends the job and not the process: whoever waits is told who is to blame, the same on all ranks. All ranks of the job start
//! the same plans; those that a plan does not know say so with the others, and move nothing. The first time that a plan is started, all
//! ranks start it in one order.

mod agreed;
mod fault;

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::Rank;

use crate::auth::{AuthError, Secret};
use crate::buffer::{RankBuffers, Sharing};
use crate::clock::Monotonic;
use crate::collectives::{CallError, Collectives, GroupId, Pending};
use crate::deadline::Deadline;
use crate::driver::{Driver, Drives, Promise};
use crate::engine::{Engine, EngineOptions, Handle, Interrupt, JobReport, JobSpec};
use crate::environment::{EnvironmentError, Flags, Place, Variables, host_name, late, place};
use crate::error::CommError;
use crate::protect::{PROTECT_VARIABLE, Protect, UnknownProtect};
use crate::rendezvous::{Abort, Fault, Log, Meeting, News, OverSockets, Patience, RendezvousError};
use agreed::{Agreed, Known};
pub use fault::{comm_error, fault, unconnected};

/// How long the last may take to a barrier that nobody of this module needs.
const BARRIER: Duration = Duration::from_secs(120);

/// What a user may set.
pub struct JoinOptions {
    /// Who we are and where to meet, where the environment does not say.
    pub flags: Flags,
    /// Where the environment has none.
    pub secret: Option<Secret>,
    /// What is done to what passes between hosts, before what the environment says.
    pub protect: Option<Protect>,
    /// The how-manieth time the job's processes meet, from 0: after a failure those that are left, with others or without, may meet
    /// again, as ranks of a new world. Whoever still holds on to an earlier meeting is a stranger then.
    pub attempt: u32,
    /// How long ranks may take to arrive.
    pub arrive: Duration,
    /// How long nothing may move.
    pub deadline_ms: u64,
    /// Where a line about strangers, or a secret that is none, goes.
    pub log: Log,
}

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(transparent)]
    Auth(#[from] AuthError),
    #[error("{PROTECT_VARIABLE}: {0}")]
    Protect(#[from] UnknownProtect),
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    #[error(transparent)]
    Engine(#[from] CommError),
    #[error(transparent)]
    Group(#[from] CallError),
}

/// Why a plan did not run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(
        "{} has plan {:016x}, {} has plan {:016x}; nothing was moved\nhint: plan with the same layouts, cluster and options on every rank",
        .one.0, .one.1, .other.0, .other.1
    )]
    PlansDiffer { one: (Rank, u64), other: (Rank, u64) },
    #[error("{0}")]
    Call(CallError),
    #[error("the plan was started {0} times without an end\nhint: wait for some of them")]
    TooMany(u32),
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// A plan's part on this rank.
pub struct Work {
    /// The same on ranks with the same plan.
    pub fingerprint: u64,
    /// None on a rank that the plan does not know.
    pub buffers: Option<RankBuffers>,
    /// Dropped when the plan has run, before anybody hears of it.
    pub keep: Box<dyn Any + Send>,
}

/// What a started plan comes to.
pub type Outcome = Result<JobReport, StartError>;

/// See the module.
pub struct Job {
    driver: Driver<Party>,
    /// Plans that were started and have not come to an end. The engine does not know those that it was not given yet.
    under_way: Arc<AtomicUsize>,
    rank: Rank,
    world: u32,
    launcher: &'static str,
    hosts: Vec<String>,
}

impl Job {
    /// Joins by what the variables and the options say, and waits until everybody has.
    pub fn join(options: JoinOptions, variables: &Variables) -> Result<Self, JoinError> {
        let place = place(&options.flags, variables)?;
        let (rank, world, launcher) = (place.rank, place.world, place.launcher);
        let interrupt = Interrupt::default();
        let mut meeting = meet(place, variables, &options, &interrupt)?;
        let peers: BTreeSet<Rank> = (0..world).map(Rank).filter(|peer| *peer != rank).collect();
        let links = match meeting.connect(&peers, Deadline::after(options.arrive)) {
            Ok(links) => links,
            Err(error) => return Err(RendezvousError::Aborted(meeting.fail(unconnected(rank, error))).into()),
        };
        let hosts = meeting.hosts().to_vec();
        let engine =
            EngineOptions { deadline_ms: options.deadline_ms, hosts: hosts.clone(), interrupt, threads: 2 };
        let engine = Engine::new(rank, links, Box::new(Monotonic), engine)?;
        let sharing = meeting.sharing();
        let mut comm =
            Collectives::new(rank, engine, cluster_of(&hosts), sharing, CollectiveOptions::default());
        let world_group = comm.world()?;
        let party = Party { comm, meeting: Some(meeting), all: world_group, agreed: Agreed::default() };
        Ok(Self { driver: Driver::start(party)?, under_way: Arc::default(), rank, world, launcher, hosts })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.world
    }

    /// Who started the process.
    pub fn launcher(&self) -> &'static str {
        self.launcher
    }

    /// By rank.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Hosts in the order of their ranks, with links that nobody measured.
    pub fn cluster(&self) -> Cluster {
        cluster_of(&self.hosts)
    }

    /// What memory of this job's tensors should be, so that peers can read it.
    pub fn sharing(&self) -> Sharing {
        Sharing::Host
    }

    /// Compares plans with the others, then runs. `then` is called when there is an outcome.
    pub fn start(&self, work: Work, then: impl FnOnce() + Send + 'static) -> Promise<Outcome> {
        let mut run = Run::New(work);
        let under_way = self.under_way.clone();
        under_way.fetch_add(1, Ordering::SeqCst);
        let step = move |party: &mut Party| {
            let outcome = run.step(party).transpose();
            // Before anybody hears of it: who has heard may close the job.
            under_way.fetch_sub(usize::from(outcome.is_some()), Ordering::SeqCst);
            outcome
        };
        self.driver.when_then(step, then)
    }

    /// Ends the job for all: this rank is to blame, and why.
    pub fn abort(&self, why: &str) {
        let why = why.to_string();
        let _told = self.driver.call(move |party| party.abort(why));
    }

    /// Says farewell; where something is under way, tells the others instead. Waits for them, at most for the deadline.
    pub fn close(self) -> Result<(), CommError> {
        let Ok(mut party) = self.driver.stop() else { return Ok(()) };
        if self.under_way.load(Ordering::SeqCst) > 0 || party.comm.engine_ref().is_busy() {
            party.abort("it left with a transfer under way".into());
            return Ok(());
        }
        let Party { comm, meeting, .. } = party;
        comm.close();
        meeting.into_iter().for_each(|meeting| meeting.leave());
        Ok(())
    }
}

/// Comes together with the ranks of a job; what is heard of it interrupts an engine.
fn meet(
    place: Place,
    variables: &Variables,
    options: &JoinOptions,
    interrupt: &Interrupt,
) -> Result<Box<dyn Meeting>, JoinError> {
    let secret = match &options.secret {
        Some(secret) => secret.clone(),
        None => {
            let (secret, note) = Secret::of_job(&place, variables)?;
            note.filter(|_| place.rank == Rank(0)).into_iter().for_each(|note| (options.log)(&note));
            secret
        }
    };
    let protect = options.protect.map_or_else(|| Protect::from_variables(variables), Ok)?;
    let secret = if options.attempt > 0 { secret.again(options.attempt) } else { secret };
    let secret = secret.protecting(protect);
    let patience = patience(&place, variables, Deadline::after(options.arrive), options.deadline_ms, BARRIER);
    let roster = (0..place.world).map(Rank).collect();
    let heard = interrupt.clone();
    let on_news = Arc::new(move |news: News<'_>| match news {
        News::Suspect(rank, why) => heard.suspect(rank, why),
        News::Abort(abort) => heard.raise(abort.culprit, &abort.host, &abort.text),
    });
    let host = host_name(variables);
    let met = OverSockets::meet(place, &host, roster, secret, patience, options.log.clone(), on_news)?;
    Ok(Box::new(met))
}

/// How long the ranks of a job wait for each other.
pub fn patience(
    place: &Place,
    variables: &Variables,
    arrive: Deadline,
    deadline_ms: u64,
    barrier: Duration,
) -> Patience {
    let silence = Duration::from_millis(deadline_ms);
    Patience { arrive, silence, barrier, late: late(variables), local_world: place.local_world }
}

/// A host for every run of ranks on it.
fn cluster_of(hosts: &[String]) -> Cluster {
    let runs = hosts.chunk_by(|one, next| one == next);
    Cluster::of_hosts(runs.map(|run| Host::with_devices(run.len() as u32)).collect())
}

/// What the thread drives.
pub struct Party {
    comm: Collectives,
    /// Until the job has failed.
    meeting: Option<Box<dyn Meeting>>,
    all: GroupId,
    agreed: Agreed,
}

impl Drives for Party {
    fn engine(&mut self) -> &mut Engine {
        self.comm.engine()
    }

    fn failed(&mut self, error: CommError) -> CommError {
        let Some(mut meeting) = self.meeting.take() else { return error };
        let Abort { culprit, host, text, .. } = meeting.fail(fault(&error));
        // What we saw of it ourselves says more: which tensor, how much of it.
        if error.culprit() == Some(culprit) && !matches!(error, CommError::Aborted { .. }) {
            return error;
        }
        CommError::Interrupted { me: self.comm.rank(), culprit, host, reason: text }
    }
}

impl Party {
    fn abort(&mut self, why: String) {
        let me = self.comm.rank();
        if let Some(mut meeting) = self.meeting.take() {
            meeting.fail(Fault { blames: Some(me), hearsay: false, text: why.clone() });
        }
        self.comm.engine().abandon(me, &why);
    }
}

/// A started plan.
enum Run {
    New(Work),
    Agreeing(Pending<i64>, Work),
    /// Somebody else's agreement on the same plan is under way.
    Following(Work),
    Running(Handle, Box<dyn Any + Send>),
    Over,
}

impl Run {
    fn step(&mut self, party: &mut Party) -> Result<Option<JobReport>, StartError> {
        loop {
            *self = match std::mem::replace(self, Run::Over) {
                Run::New(work) => match party.agreed.look(work.fingerprint) {
                    Known::Agreed => party.run(work)?,
                    Known::UnderWay => Run::Following(work),
                    Known::No => {
                        party.agreed.begin(work.fingerprint);
                        Run::Agreeing(party.say(work.fingerprint)?, work)
                    }
                },
                Run::Following(work) => match party.agreed.look(work.fingerprint) {
                    Known::UnderWay => {
                        *self = Run::Following(work);
                        return Ok(None);
                    }
                    _ => Run::New(work),
                },
                Run::Agreeing(pending, work) => match party.comm.finish(pending) {
                    Err(pending) => {
                        *self = Run::Agreeing(pending, work);
                        return Ok(None);
                    }
                    Ok(said) => {
                        let differs = differing(&said);
                        party.agreed.end(work.fingerprint, differs.is_none());
                        differs.map_or(Ok(()), Err)?;
                        party.run(work)?
                    }
                },
                Run::Running(handle, keep) => match party.comm.engine().finish(handle) {
                    Some(report) => return Ok(Some(report)),
                    None => {
                        *self = Run::Running(handle, keep);
                        return Ok(None);
                    }
                },
                Run::Over => return Ok(Some(JobReport::default())),
            }
        }
    }
}

impl Party {
    fn say(&mut self, fingerprint: u64) -> Result<Pending<i64>, StartError> {
        let ranks = self.comm.ranks_of(self.all).map_err(StartError::Call)?.len() as u64;
        let mine = self.comm.buffer_of(&[fingerprint as i64]).map_err(StartError::Call)?;
        self.comm.start_all_gather(self.all, mine, ranks).map_err(StartError::Call)
    }

    fn run(&mut self, work: Work) -> Result<Run, StartError> {
        let id = self.agreed.next_id(work.fingerprint);
        let Some(buffers) = work.buffers else { return Ok(Run::Over) };
        if self.comm.engine_ref().has_job(id) {
            return Err(StartError::TooMany(agreed::MOST_USES));
        }
        let spec = JobSpec::new(id, &buffers)?;
        Ok(Run::Running(self.comm.engine().start(spec)?, work.keep))
    }
}

/// The first rank whose plan is not the first rank's.
fn differing(said: &[i64]) -> Option<StartError> {
    let first = *said.first()?;
    let (rank, other) = (0..).map(Rank).zip(said).find(|(_, other)| **other != first)?;
    Some(StartError::PlansDiffer { one: (Rank(0), first as u64), other: (rank, *other as u64) })
}
