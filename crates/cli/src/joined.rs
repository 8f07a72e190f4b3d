//! A process that torchrun, Slurm, mpirun or `crossmesh launch` started as a rank of a job: instead of starting
//! processes, it joins the others and takes the part of its rank in whatever is run.
//!
//! ```text
//! launcher ── r0: crossmesh run …     plans like all of them, moves its part, gathers, prints the result
//!          ├─ r1: crossmesh run …     plans, moves its part, tells r0
//!          └─ r2: crossmesh run …
//! ```
//!
//! Plans are deterministic, so every rank makes the same one. The ranks meet once, however many plans they run.

use std::collections::BTreeMap;
use std::sync::Mutex;

#[cfg(feature = "mpi")]
use anyhow::Context;
use anyhow::{Result, bail};
use crossmesh_comm::auth::Secret;
use crossmesh_comm::deadline::Deadline;
#[cfg(not(feature = "mpi"))]
use crossmesh_comm::environment::EnvironmentError;
#[cfg(feature = "mpi")]
use crossmesh_comm::environment::TRANSPORT_VARIABLE;
use crossmesh_comm::environment::{
    Flags, Place, Transport, Variables, host_name, launcher, place, transport, variables,
};
use crossmesh_comm::protect::Protect;
#[cfg(feature = "mpi")]
use crossmesh_comm::rendezvous::beside::{Beside, Host};
use crossmesh_comm::rendezvous::{Abort, Fault, Meeting, OverSockets, RendezvousError};
use crossmesh_core::id::Rank;

use crate::memory::GpuChoice;
use crate::output::{self, Progress, Told};
#[cfg(feature = "mpi")]
use crate::part::unplaced_patience;
use crate::part::{BARRIER, Ending, Part, Summary, comm_error, fault, log, met_s, patience};
use crate::records::measured_trace;
use crate::runner::{Measured, RunOptions, Started, Work, check_memory, combine};

/// The job, with everybody in it. A process joins one in its life.
struct Joined {
    rank: Rank,
    world: u32,
    launcher: &'static str,
    met_s: Option<f64>,
    meeting: Box<dyn Meeting>,
    ending: Ending,
}

static JOB: Mutex<Option<Joined>> = Mutex::new(None);

/// Takes this rank's part in some work, if the process is a rank; else nothing happens.
pub fn run_work(work: &Work<'_>, options: &RunOptions, progress: &Progress) -> Result<Option<Measured>> {
    let variables = variables();
    if options.standalone {
        return Ok(None);
    }
    let Some((launcher, _)) = launcher(&variables) else { return Ok(None) };
    if options.emulate {
        bail!(
            "hosts cannot be emulated in a job that {launcher} started\nhint: `crossmesh launch --emulate` can, or --standalone"
        );
    }
    let mut job = JOB.lock().expect("no thread panics with it");
    if job.is_none() {
        *job = Some(join(&variables, work, options)?);
    }
    let job = job.as_mut().expect("just joined");
    check_memory(work, options)?;
    check_world(work, job.world, job.launcher, options.spare_ranks)?;
    take_part(job, work, options, progress).map(Some)
}

/// Which rank of somebody else's job this process is, if it is one.
pub fn rank_of_job(standalone: bool) -> Result<Option<Rank>> {
    let variables = variables();
    if standalone || launcher(&variables).is_none() {
        return Ok(None);
    }
    // Where only MPI knows, every rank finds out when it meets the others; until then one that cannot tell is not the first.
    Ok(Some(place(&Flags::default(), &variables).map_or(Rank(u32::MAX), |place| place.rank)))
}

/// Leaves the job, where there is one. Without a farewell the others hear that this rank is gone.
pub fn leave(well: bool) {
    let job = JOB.lock().ok().and_then(|mut job| job.take());
    if let Some(job) = job.filter(|_| well) {
        job.meeting.leave();
    }
}

/// The ranks of a host that have GPUs take them in their order.
fn gpu_of(rank: Rank, hosts: &[String], options: &RunOptions) -> GpuChoice {
    let beside = |other: &u32| {
        hosts.get(*other as usize) == hosts.get(rank.index()) && options.memory.is_on_gpu(Rank(*other))
    };
    GpuChoice { index: (0..rank.0).filter(beside).count(), share: options.share_gpus }
}

/// The ranks of a plan are those of the job.
fn check_world(work: &Work<'_>, world: u32, launcher: &str, spare_ranks: bool) -> Result<()> {
    let used = work.task.ranks().last().map_or(0, |last| last.0 + 1);
    let devices = work.topology.num_ranks() as u32;
    let most = if spare_ranks { u32::MAX } else { devices };
    if (used..=most).contains(&world) {
        return Ok(());
    }
    let needed = if used == devices { used.to_string() } else { format!("{used} to {devices}") };
    bail!(
        "the plan is for {needed} ranks, the job that {launcher} started has {world}\nhint: start {used} ranks, or say --standalone to start the processes of the plan here"
    )
}

/// Meets the other ranks. A world that does not fit is noticed before anybody waits for anybody.
fn join(variables: &Variables, work: &Work<'_>, options: &RunOptions) -> Result<Joined> {
    match transport(variables, cfg!(feature = "mpi"))? {
        Transport::Mpi if options.protect != Protect::None => bail!(
            "frames over MPI cannot be protected, and --protect {} was asked for\nhint: CROSSMESH_TRANSPORT=sockets, or a network that MPI may trust",
            options.protect
        ),
        Transport::Mpi => join_mpi(variables, options, options.deadline_ms(work.predicted_s)),
        Transport::Sockets => {
            let place = place(&Flags::default(), variables)?;
            check_world(work, place.world, place.launcher, options.spare_ranks)?;
            join_sockets(place, variables, options, options.deadline_ms(work.predicted_s))
        }
    }
}

fn join_sockets(
    place: Place,
    variables: &Variables,
    options: &RunOptions,
    deadline_ms: u64,
) -> Result<Joined> {
    answer_if_first(place.rank);
    let ending = Ending::new(|_| {});
    let secret = secret(&place, variables)?.protecting(options.protect);
    let patience = patience(&place, variables, Deadline::after(options.arrive), deadline_ms);
    let roster = (0..place.world).map(Rank).collect();
    let (host, on_news) = (host_name(variables), ending.on_news());
    let (rank, world, launcher) = (place.rank, place.world, place.launcher);
    let met = OverSockets::meet(place, &host, roster, secret, patience, log(), on_news);
    let meeting = met.map_err(|error| ending.not_met(error))?;
    Ok(Joined { rank, world, launcher, met_s: met_s(variables), meeting: Box::new(meeting), ending })
}

#[cfg(feature = "mpi")]
fn join_mpi(variables: &Variables, options: &RunOptions, deadline_ms: u64) -> Result<Joined> {
    let (launcher, told) = launcher(variables).unwrap_or(("MPI", None));
    let arrive = Deadline::after(options.arrive);
    let mut theirs = crossmesh_comm::transport::mpi::OverMpi::meet(arrive)?;
    let (rank, world) = (theirs.rank(), theirs.world());
    answer_if_first(rank);
    if let Some(told) = told.filter(|told| *told != world) {
        bail!(
            "{launcher} started {told} ranks, the MPI library of this program sees {world}\nhint: start it with the mpirun of that library, or set {TRANSPORT_VARIABLE}=sockets"
        );
    }
    let ending = Ending::new(|_| {});
    let host = (rank == Rank(0)).then(|| Host::open(&address(&theirs, variables), arrive)).transpose()?;
    let place = host.as_ref().map_or(Ok(String::new()), |host| serde_json::to_string(&host.place))?;
    let places = theirs.share(place, arrive)?;
    let place = places.first().map_or("", String::as_str);
    let place = serde_json::from_str(place).context("the first rank does not say where to meet")?;
    let patience = unplaced_patience(arrive, deadline_ms);
    let met = Beside::meet(Box::new(theirs), (rank, world), &place, host, patience, ending.on_news(), log());
    let meeting = met.map_err(|error| ending.not_met(error))?;
    Ok(Joined { rank, world, launcher, met_s: met_s(variables), meeting: Box::new(meeting), ending })
}

/// Where the others reach the first rank: where the user says, or by the name that MPI has for its host.
#[cfg(feature = "mpi")]
fn address(theirs: &dyn Meeting, variables: &Variables) -> String {
    let one_host = theirs.num_hosts() == 1;
    let name = if one_host { Some("127.0.0.1".into()) } else { theirs.hosts().first().cloned() };
    variables.get("MASTER_ADDR").cloned().or(name).unwrap_or_default()
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(_: &Variables, _: &RunOptions, _: u64) -> Result<Joined> {
    Err(EnvironmentError::NoMpi.into())
}

fn answer_if_first(rank: Rank) {
    if rank != Rank(0) {
        output::leave_answers_to_the_first_rank();
    }
}

/// The job's secret; the first rank says what it is worth, where that is little.
fn secret(place: &Place, variables: &Variables) -> Result<Secret> {
    let (secret, note) = Secret::of_job(place, variables)?;
    if let Some(note) = note.filter(|_| place.rank == Rank(0)) {
        log()(&note);
    }
    Ok(secret)
}

fn take_part(
    job: &mut Joined,
    work: &Work<'_>,
    options: &RunOptions,
    progress: &Progress,
) -> Result<Measured> {
    let rank = job.rank;
    let flight = options.flight.as_ref().map(|path| path.with_extension(format!("{rank}.json")));
    let deadline_ms = options.deadline_ms(work.predicted_s);
    let (repeat, trace, interrupt) = (options.repeat, options.trace, job.ending.interrupt.clone());
    let gpu = options.memory.is_on_gpu(rank).then(|| gpu_of(rank, job.meeting.hosts(), options));
    let met_s = job.met_s;
    let part = Part { task: work.task, rank, met_s, repeat, deadline_ms, flight, trace, interrupt, gpu };
    let meeting = &mut *job.meeting;
    if let Err(abort) = check_same_work(meeting, rank, work) {
        job.ending.say_once(&abort);
        return Err(Told.into());
    }
    let summary = match work.task.ranks().contains(&rank) {
        true => part.connect(meeting, Deadline::after(options.arrive)).and_then(|links| {
            part.take(meeting, links, |round| progress.say(&format!("run {round} of {}", options.repeat)))
        }),
        false => part.watch(meeting),
    };
    let abort = match summary {
        Ok(summary) => match gather(meeting, &summary) {
            Ok(summaries) => return Ok(measured(job, work, &summaries, options)),
            Err(error) => meeting.fail(fault(&comm_error(rank, error))),
        },
        Err(abort) => abort,
    };
    job.ending.say_once(&abort);
    Err(Told.into())
}

/// Ranks were started one by one, and each of them read for itself what to do: the first one looks whether it is the same.
fn check_same_work(meeting: &mut dyn Meeting, rank: Rank, work: &Work<'_>) -> Result<(), Abort> {
    let told = match meeting.gather(work.identity(), Deadline::after(BARRIER)) {
        Ok(told) => told.unwrap_or_default(),
        Err(error) => return Err(meeting.fail(fault(&comm_error(rank, error)))),
    };
    match odd_one(&told) {
        None => Ok(()),
        Some((odd, text)) => Err(meeting.fail(Fault { blames: Some(odd), hearsay: false, text })),
    }
}

/// The first rank that does something else than most, and what.
fn odd_one(told: &BTreeMap<Rank, String>) -> Option<(Rank, String)> {
    let count = |text: &String| told.values().filter(|other| *other == text).count();
    // Of as many, what the first rank does.
    let most = told.values().rev().max_by_key(|text| count(text))?;
    let (odd, text) = told.iter().find(|(_, text)| *text != most)?;
    Some((*odd, format!("it was started to do something else than the others: {text} instead of {most}")))
}

/// What all ranks saw, at the first; elsewhere what this one did.
fn gather(meeting: &mut dyn Meeting, summary: &Summary) -> Result<Vec<Summary>, RendezvousError> {
    let text = serde_json::to_string(summary).expect("a summary is made of numbers and text");
    let Some(told) = meeting.gather(text, Deadline::after(BARRIER))? else {
        return Ok(vec![summary.clone()]);
    };
    let parse = |text: &String| {
        serde_json::from_str(text).map_err(|_| RendezvousError::Unexpected { expected: "summaries" })
    };
    told.values().map(parse).collect()
}

fn measured(job: &Joined, work: &Work<'_>, summaries: &[Summary], options: &RunOptions) -> Measured {
    let hosts = job.meeting.num_hosts();
    let (launcher, transport) = (job.launcher, job.meeting.transport());
    let by = Started::ByOthers { launcher, hosts, transport };
    let trace = if options.trace { measured_trace(work.task, summaries) } else { None };
    Measured { trace, ..combine(summaries, work.task.num_times(options.repeat), by) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_one_is_found() {
        let odd = |texts: &[&str]| {
            let told = texts.iter().enumerate().map(|(i, t)| (Rank(i as u32), t.to_string())).collect();
            odd_one(&told).map(|(rank, text)| (rank.0, text))
        };
        assert_eq!(odd(&[]), None);
        assert_eq!(odd(&["a", "a", "a"]), None);
        let text = "it was started to do something else than the others: b instead of a";
        assert_eq!(odd(&["a", "a", "b"]), Some((2, text.into())));
        assert_eq!(odd(&["b", "a", "a"]).unwrap().0, 0, "it may be the first one");
        assert_eq!(odd(&["a", "b"]), Some((1, text.into())));
    }
}
