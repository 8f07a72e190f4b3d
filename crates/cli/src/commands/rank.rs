//! One rank of `crossmesh run`: joins the others, moves its part of the plan, and tells what it saw.
//!
//! It reads its place from the environment and says, to the process that started it, a JSON line for each of these:
//!
//! ```text
//! {"round":1}                      the first rank: everybody was ready, a run begins
//! {"report":{"rank":3,...}}        all runs are over
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
use crossmesh_comm::engine::EngineOptions;
use crossmesh_comm::environment::{Flags, Place, Variables, host_name, place, variables};
use crossmesh_comm::error::CommError;
use crossmesh_comm::execute::{ExecuteOptions, Failure, RankReport, execute, peers_of};
use crossmesh_comm::rendezvous::{
    Abort, Fault, Lobby, Log, Member, OnAbort, RendezvousError, Ticket, connect,
};
use crossmesh_comm::transport::Link;
use crossmesh_comm::transport::stream::StreamLink;
use crossmesh_comm::transport::tcp::{Shares, set_window};
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::{Plan, lower};
use serde::{Deserialize, Serialize};

use crate::Answer;
use crate::input::{PlanFile, read_plan};
use crate::output;

/// An aborted rank has this long to come to its own end, and write down where it stood.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// Checking every element between runs takes a while on a small machine.
const BARRIER: Duration = Duration::from_secs(120);

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
    /// Where to write down, after a failure, how far every op was
    #[arg(long, value_name = "FOLDER")]
    flight: Option<PathBuf>,
}

/// A connection to every rank that the plan needs.
type Links = Vec<(Rank, Box<dyn Link>)>;

/// A line to the process that started us.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    Round(u32),
    Report(Summary),
}

/// What a rank saw.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Summary {
    pub rank: Rank,
    /// By run: when the barrier opened, by the machine's clock, and how long the rank's part took.
    pub started_ns: Vec<u64>,
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
    let lobby = open_lobby(&plan, &place, &secret, arrive)?;
    let said = Arc::new(AtomicBool::new(false));
    let (member, links) = meet(&plan, &place, &variables, &secret, arrive, &said)?;
    let answer = match work(args, &plan, &place, member, links) {
        Ok(answer) => answer,
        Err(abort) => {
            say_once(&said, &abort);
            Answer::Code(2)
        }
    };
    if let Some(lobby) = lobby {
        lobby.close();
    }
    Ok(answer)
}

/// The lobby is beside the first rank.
fn open_lobby(plan: &Plan, place: &Place, secret: &Secret, arrive: Deadline) -> Result<Option<Lobby>> {
    let roster: BTreeSet<Rank> = plan.problem.meshes_of_ranks().into_keys().collect();
    if roster.first() != Some(&place.rank) {
        return Ok(None);
    }
    let listener = Lobby::listen((&place.master_addr, place.master_port))?;
    Ok(Some(Lobby::open(listener, secret.clone(), roster, arrive, log())?))
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
    deadline: Deadline,
    said: &Arc<AtomicBool>,
) -> Result<(Member, Links)> {
    let host = host_name(variables);
    let master = (place.master_addr.as_str(), place.master_port);
    let ticket = Ticket { master, rank: place.rank, host: &host, secret, deadline };
    let (member, doors) = Member::join(&ticket, leave_soon(said.clone()))?;
    let program = lower(plan);
    let shares = Shares::of(&plan.problem, &program);
    let peers: BTreeSet<Rank> = peers_of(&program, place.rank).into_iter().collect();
    let sockets = connect(&member.me, &member.table, &peers, doors, secret, deadline, &log())?;
    let link = |(peer, socket)| -> Result<(Rank, Box<dyn Link>)> {
        let link = match socket {
            Socket::Tcp(stream) => {
                if let Some(share) = shares.bytes_per_s(peer, place.rank) {
                    set_window(&stream, share)?;
                }
                StreamLink::tcp(place.rank, peer, stream)
            }
            Socket::Unix(stream) => StreamLink::local(place.rank, peer, stream),
        };
        Ok((peer, Box::new(link.with_context(|| format!("the connection to {peer}"))?)))
    };
    Ok((member, sockets.into_iter().map(link).collect::<Result<_>>()?))
}

/// Ends this process soon after the job was aborted, in case it does not come to an end itself.
fn leave_soon(said: Arc<AtomicBool>) -> OnAbort {
    Box::new(move |abort| {
        std::thread::sleep(LAST_WORDS);
        say_once(&said, abort);
        std::process::exit(2);
    })
}

fn say_once(said: &AtomicBool, abort: &Abort) {
    if !said.swap(true, Ordering::SeqCst) {
        output::print_error(&anyhow::anyhow!("{abort}"));
    }
}

/// Moves the tensors; an error is what the job agreed on.
fn work(args: &Args, plan: &Plan, place: &Place, mut member: Member, links: Links) -> Result<Answer, Abort> {
    let hosts = (0..place.world).map(|r| member.table.get(&Rank(r)).map_or("?".into(), |e| e.host.clone()));
    let engine = EngineOptions { deadline_ms: args.deadline_ms, hosts: hosts.collect() };
    let options = ExecuteOptions { engine, repeat: args.repeat, ..ExecuteOptions::default() };
    let first = member.table.keys().next() == Some(&place.rank);
    let mut started_ns = vec![];
    let mut barrier = || {
        member.barrier(Deadline::after(BARRIER)).map_err(|e| comm_error(place.rank, e))?;
        started_ns.push(Monotonic.now_ns());
        if first {
            say(&Said::Round(started_ns.len() as u32));
        }
        Ok(())
    };
    match execute(plan, place.rank, links, &options, &mut barrier) {
        Ok(report) => {
            let verified = report.verified;
            say(&Said::Report(summary(report, started_ns)));
            member.leave();
            Ok(if verified { Answer::Yes } else { Answer::No })
        }
        Err(failure) => {
            write_flight(args.flight.as_deref(), place.rank, &failure);
            Err(member.fail(fault(&failure.error)))
        }
    }
}

fn comm_error(me: Rank, error: RendezvousError) -> CommError {
    match error {
        RendezvousError::Aborted(Abort { culprit, host, text }) => {
            CommError::Aborted { me, culprit, host, reason: text }
        }
        other => CommError::System { me, what: "wait for the others", cause: other.to_string() },
    }
}

/// What to report: of an abort, the reason of the one who found out first.
fn fault(error: &CommError) -> Fault {
    let text = match error {
        CommError::Aborted { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    Fault { blames: error.culprit(), text: text.lines().next().unwrap_or_default().to_string() }
}

fn summary(report: RankReport, started_ns: Vec<u64>) -> Summary {
    Summary {
        rank: report.rank,
        started_ns,
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

fn write_flight(folder: Option<&Path>, rank: Rank, failure: &Failure) {
    let (Some(folder), Some(flight)) = (folder, &failure.flight) else { return };
    // The record helps; that it cannot be written must not hide what went wrong.
    if let Ok(text) = serde_json::to_string(flight) {
        let _ = std::fs::write(folder.join(format!("{rank}.json")), text);
    }
}
