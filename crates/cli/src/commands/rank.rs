//! One rank of `crossmesh run`: joins the others, moves its part of the plan, and tells what it saw.
//!
//! It reads its place from the environment and says, to the process that started it, a JSON line for each of these:
//!
//! ```text
//! {"round":1}                      the first rank: everybody was ready, a run begins
//! {"report":{"rank":3,...}}        all runs are over
//! {"abort":{"culprit":2,...}}      the run failed, and why; the same is said on stderr
//! ```

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use crossmesh_comm::auth::Secret;
use crossmesh_comm::clock::{Clock, Monotonic};
use crossmesh_comm::deadline::{Deadline, Socket};
use crossmesh_comm::engine::{EngineOptions, Interrupt};
use crossmesh_comm::environment::{Flags, Place, Variables, host_name, place, variables};
use crossmesh_comm::error::CommError;
use crossmesh_comm::execute::{ExecuteOptions, Failure, RankReport, execute, peers_of};
use crossmesh_comm::flight::FlightRecord;
use crossmesh_comm::rendezvous::{
    Abort, Fault, Lobby, Log, Member, OnAbort, Patience, RendezvousError, Ticket, Word, connect,
};
use crossmesh_comm::transport::Link;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::{Plan, lower};
use serde::{Deserialize, Serialize};

use crate::Answer;
use crate::input::{PlanFile, read_plan};
use crate::output;

/// If the lobby itself is gone, the engine gets this long to find out more from its peers.
const LOBBY_GONE: Duration = Duration::from_millis(500);
/// An aborted rank has this long to come to its own end, and write down where it stood.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Ranks come to a barrier when their part is done, and checking every element takes a while on a small machine. One that
/// is stopped or dies meanwhile is noticed by other means, and sooner.
const BARRIER: Duration = Duration::from_secs(120);
const BARRIER_DEADLINES: u32 = 20;

/// Run one rank of a plan; `crossmesh run` starts these.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plan document
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    #[arg(long, default_value_t = 1)]
    repeat: u32,
    /// How long nothing may move
    #[arg(long, value_name = "MS")]
    deadline_ms: u64,
    /// How long ranks may take to arrive
    #[arg(long, value_name = "MS")]
    arrive_ms: u64,
    /// Where to write down when every op ran or, after a failure, how far it was
    #[arg(long, value_name = "FOLDER")]
    records: Option<PathBuf>,
}

/// A connection to every rank that the plan needs.
type Links = Vec<(Rank, Box<dyn Link>)>;

/// A line to the process that started us.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    Round(u32),
    Report(Summary),
    Abort(Abort),
}

/// When every op of a rank's last run ran: a file beside the others'.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spans {
    pub rank: Rank,
    /// By the clock of the first rank, and by how much that may be wrong.
    pub started_ns: u64,
    pub clock_error_ns: Option<u64>,
    /// Seconds from there.
    pub ops: Vec<(f64, f64)>,
}

impl Spans {
    pub fn file(folder: &Path, rank: Rank) -> PathBuf {
        folder.join(format!("{rank}-spans.json"))
    }
}

/// Where a rank's flight record is.
pub fn flight_file(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("{rank}-flight.json"))
}

/// What a rank saw.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    pub rank: Rank,
    /// By run: when the barrier opened, by the clock of the first rank, and how long the rank's part took.
    pub started_ns: Vec<u64>,
    /// By how much that clock may be wrong, where it was compared.
    pub clock_error_ns: Option<u64>,
    pub seconds: Vec<f64>,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub verified: bool,
    pub wrong: Option<String>,
    /// The most memory the process had, by the system's account.
    pub peak_rss_bytes: Option<u64>,
}

pub fn run(args: &Args) -> Result<Answer> {
    let variables = variables();
    let place = place(&Flags::default(), &variables)?;
    let secret = Secret::from_variables(&variables)?.context("no secret was given to this rank")?;
    let PlanFile { plan, .. } = read_plan(&args.plan)?;
    let arrive = Deadline::after(Duration::from_millis(args.arrive_ms));
    let patience = args.patience(arrive);
    let lobby = open_lobby(&plan, &place, &secret, patience)?;
    let ending = Ending::default();
    let (member, links) = meet(&plan, &place, &variables, &secret, patience, &ending)?;
    let answer = match work(args, &plan, &place, member, links, &ending.interrupt) {
        Ok(answer) => answer,
        Err(abort) => {
            ending.say_once(&abort);
            Answer::Code(2)
        }
    };
    if let Some(lobby) = lobby {
        lobby.close();
    }
    Ok(answer)
}

impl Args {
    fn patience(&self, arrive: Deadline) -> Patience {
        let silence = Duration::from_millis(self.deadline_ms);
        Patience { arrive, silence, barrier: BARRIER + BARRIER_DEADLINES * silence }
    }
}

/// The lobby is beside the first rank.
fn open_lobby(plan: &Plan, place: &Place, secret: &Secret, patience: Patience) -> Result<Option<Lobby>> {
    let roster: BTreeSet<Rank> = plan.problem.meshes_of_ranks().into_keys().collect();
    if roster.first() != Some(&place.rank) {
        return Ok(None);
    }
    let listener = Lobby::listen((&place.master_addr, place.master_port))?;
    Ok(Some(Lobby::open(listener, secret.clone(), roster, patience, log())?))
}

fn log() -> Log {
    Arc::new(|line: &str| drop(writeln!(std::io::stderr(), "{line}")))
}

/// Joins, and connects with the ranks that the plan needs.
fn meet(
    plan: &Plan,
    place: &Place,
    variables: &Variables,
    secret: &Secret,
    patience: Patience,
    ending: &Ending,
) -> Result<(Member, Links)> {
    let host = host_name(variables);
    let master = (place.master_addr.as_str(), place.master_port);
    let Patience { arrive: deadline, silence, .. } = patience;
    let ticket = Ticket { master, rank: place.rank, host: &host, secret, deadline, silence };
    let (member, doors) = Member::join(&ticket, ending.clone().on_abort())?;
    let peers: BTreeSet<Rank> = peers_of(&lower(plan), place.rank).into_iter().collect();
    let sockets = connect(&member.me, &member.table, &peers, doors, secret, deadline, &log())?;
    let link = |(peer, socket)| -> Result<(Rank, Box<dyn Link>)> {
        let link = match socket {
            Socket::Tcp(stream) => StreamLink::tcp(place.rank, peer, stream),
            Socket::Unix(stream) => StreamLink::local(place.rank, peer, stream),
        };
        Ok((peer, Box::new(link.with_context(|| format!("the connection to {peer}"))?)))
    };
    Ok((member, sockets.into_iter().map(link).collect::<Result<_>>()?))
}

/// How this rank ends when the job is aborted.
#[derive(Debug, Clone, Default)]
struct Ending {
    said: Arc<AtomicBool>,
    interrupt: Interrupt,
}

impl Ending {
    /// Interrupts the engine, and ends this process soon if it does not come to an end itself.
    fn on_abort(self) -> OnAbort {
        Box::new(move |abort, word| {
            if word == Word::Ours {
                self.interrupt.suspect(abort.culprit, "the rendezvous beside it is not there either");
                std::thread::sleep(LOBBY_GONE);
            }
            self.interrupt.raise(abort.culprit, &abort.host, &abort.text);
            std::thread::sleep(LAST_WORDS);
            self.say_once(abort);
            std::process::exit(2);
        })
    }

    fn say_once(&self, abort: &Abort) {
        if !self.said.swap(true, Ordering::SeqCst) {
            say(&Said::Abort(abort.clone()));
            output::print_error(&anyhow::anyhow!("{abort}"));
        }
    }
}

/// Moves the tensors; an error is what the job agreed on.
fn work(
    args: &Args,
    plan: &Plan,
    place: &Place,
    mut member: Member,
    links: Links,
    interrupt: &Interrupt,
) -> Result<Answer, Abort> {
    let hosts = (0..place.world).map(|r| member.table.get(&Rank(r)).map_or("?".into(), |e| e.host.clone()));
    let (hosts, interrupt) = (hosts.collect(), interrupt.clone());
    let engine = EngineOptions { deadline_ms: args.deadline_ms, hosts, interrupt };
    let options = ExecuteOptions { engine, repeat: args.repeat, ..ExecuteOptions::default() };
    let first = member.table.keys().next() == Some(&place.rank);
    let mut clock = Starts::default();
    // The lobby is less patient, and says whom it waited for.
    let wait = 2 * args.patience(Deadline::after(BARRIER)).barrier;
    let mut barrier = || {
        member.barrier(Deadline::after(wait)).map_err(|e| comm_error(place.rank, e))?;
        clock.note(&member);
        if first {
            say(&Said::Round(clock.started_ns.len() as u32));
        }
        Ok(())
    };
    match execute(plan, place.rank, links, &options, &mut barrier) {
        Ok(report) => {
            write_spans(args.records.as_deref(), &clock, &report);
            // A run is over when it is for all: who is done early hears how it ended.
            if let Err(error) = member.barrier(Deadline::after(wait)) {
                return Err(member.fail(fault(&comm_error(place.rank, error))));
            }
            let verified = report.verified;
            say(&Said::Report(summary(report, clock)));
            member.leave();
            Ok(if verified { Answer::Yes } else { Answer::No })
        }
        Err(failure) => {
            write_flight(args.records.as_deref(), place.rank, &clock, &failure);
            Err(member.fail(fault(&failure.error)))
        }
    }
}

fn comm_error(me: Rank, error: RendezvousError) -> CommError {
    match error {
        RendezvousError::Aborted(Abort { culprit, host, text }) => {
            CommError::Interrupted { me, culprit, host, reason: text }
        }
        other => CommError::System { me, what: "wait for the others", cause: other.to_string() },
    }
}

/// What to report: of an abort, the reason of the one who found out first.
fn fault(error: &CommError) -> Fault {
    let (hearsay, text) = match error {
        CommError::Aborted { reason, .. } | CommError::Interrupted { reason, .. } => (true, reason.clone()),
        other => (false, other.to_string()),
    };
    Fault { blames: error.culprit(), hearsay, text: text.lines().next().unwrap_or_default().to_string() }
}

/// When runs started, by the first rank's clock.
#[derive(Debug, Default)]
struct Starts {
    started_ns: Vec<u64>,
    /// By how much that may be wrong, where clocks were compared.
    error_ns: Option<u64>,
}

impl Starts {
    /// A barrier opened just now.
    fn note(&mut self, member: &Member) {
        let now = Monotonic.now_ns();
        self.started_ns.push(member.clock.map_or(now, |clock| clock.to_lobby(now)));
        self.error_ns = member.clock.map(|clock| clock.error_ns);
    }
}

fn summary(report: RankReport, clock: Starts) -> Summary {
    Summary {
        rank: report.rank,
        started_ns: clock.started_ns,
        clock_error_ns: clock.error_ns,
        seconds: report.seconds,
        bytes_sent: report.bytes_sent,
        bytes_received: report.bytes_received,
        verified: report.verified,
        wrong: report.wrong,
        peak_rss_bytes: peak_rss_bytes(),
    }
}

/// `VmHWM:  1234 kB` of this process.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).expect("a report is made of numbers and text");
    // If nobody listens any more, the launcher is gone, and we soon are.
    let _ = output::print(&(line + "\n"));
}

fn write_flight(folder: Option<&Path>, rank: Rank, clock: &Starts, failure: &Failure) {
    let Some(folder) = folder else { return };
    let mut flight = match &failure.flight {
        Some(flight) => (**flight).clone(),
        None => FlightRecord::idle(rank, Some(&failure.error)),
    };
    flight.started_ns = clock.started_ns.last().copied();
    flight.clock_error_ns = clock.error_ns;
    write_record(&flight_file(folder, rank), &flight);
}

fn write_spans(folder: Option<&Path>, clock: &Starts, report: &RankReport) {
    let Some(folder) = folder else { return };
    let started_ns = clock.started_ns.last().copied().unwrap_or(0);
    let spans =
        Spans { rank: report.rank, started_ns, clock_error_ns: clock.error_ns, ops: report.ops.clone() };
    write_record(&Spans::file(folder, report.rank), &spans);
}

/// A record helps; that it cannot be written is said, and must not hide what went wrong.
fn write_record(path: &Path, record: &impl Serialize) {
    let written = output::to_json(record).and_then(|text| output::write_file(path, &text));
    if let Err(error) = written {
        let _ = writeln!(std::io::stderr(), "{error:#}");
    }
}
