//! `crossmesh launch`: the ranks of a job, started together and ended together.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossmesh_comm::auth::{SECRET_VARIABLE, Secret};
use crossmesh_comm::environment::{
    DEFAULT_PORT, HOST_VARIABLE, LAUNCHER_VARIABLE, Place, STARTED_VARIABLE, Variables, now_ms, variables,
};
use crossmesh_comm::lab::emulate::{Emulation, NicRate};
use crossmesh_comm::launch::{Grace, Job, Line, OnLine, Outcome, Process, Signals, Source, remote_command};
use crossmesh_comm::protect::{PROTECT_VARIABLE, Protect};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::id::Rank;
use serde::Serialize;

use crate::Answer;
use crate::commands::run::protection;
use crate::output::{self, Format};
use crate::rates::NicRates;

/// Others may finish a word after the first failure, and save what they have when they are asked to end.
const GRACE: Grace =
    Grace { after_failure: Duration::from_millis(200), after_term: Duration::from_secs(5), to_finish: None };

/// Start a program once per rank, with rank and world size in the environment, as torchrun does.
#[derive(Debug, clap::Args)]
#[command(after_help = "Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, and the job's secret in CROSSMESH_SECRET. What it prints is passed
on behind its rank. The first failure ends all; its exit status is ours. The
secret is generated, unless CROSSMESH_SECRET or CROSSMESH_SECRET_FILE give one.

Examples:
  crossmesh launch -n 4 -- ./train
  crossmesh launch -n 8 --hosts node1,node2 -- ./train
  # as root
  crossmesh launch -n 8 --per-host 4 --emulate 400Mbit -- python3 train.py")]
pub struct Args {
    /// How many ranks
    #[arg(short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    n: u32,
    /// Hosts to start them on by ssh, the first ranks on the first: `a,b`
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "emulate")]
    hosts: Vec<String>,
    /// Ranks on each host, or on the first, the second and so on: `4`, `1,2,2` [default: as many as it takes]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    per_host: Vec<u32>,
    /// Put every host into a network namespace with a NIC of this rate (`400Mbit`; one host slower: `400Mbit,h1=200Mbit`);
    /// needs root
    #[arg(long, value_name = "RATE", requires = "per_host")]
    emulate: Option<String>,
    /// Where ranks meet, on the first host [default: a free port here, 29500 elsewhere]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// What ranks do to frames between hosts: `none` (checksums), `sign` (nobody can change them) or `encrypt` (nor read them);
    /// they get it in CROSSMESH_PROTECT [default: what that says here, or none]
    #[arg(long, value_name = "WAY")]
    protect: Option<Protect>,
    /// What reaches a host
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes")]
    rsh: String,
    // Said in full: what ranks print goes elsewhere then.
    /// How the job ended as one JSON document; what ranks print goes to stderr, all of it
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// The same as --json, in the words of other commands
    #[arg(long, value_enum, conflicts_with = "json", default_value_t, help_heading = "Output")]
    format: Format,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

pub fn run(args: &Args) -> Result<Answer> {
    let signals = Signals::watch()?;
    let secret = match Secret::from_variables(&variables())? {
        Some(secret) => secret,
        None => Secret::generate()?,
    };
    let hosts = Hosts::of(args)?;
    let processes =
        (0..args.n).map(|rank| process(args, &hosts, Rank(rank), &secret)).collect::<Result<_>>()?;
    let as_json = args.json || args.format == Format::Json;
    // The job is declared last, so that its processes end before their hosts do.
    let job = Job::start(processes, passed_on(as_json), GRACE)?;
    let outcome = job.wait(&signals, None);
    tell(outcome);
    if as_json {
        output::print_json(&Ended::of(args, &hosts, outcome))?;
    }
    Ok(Answer::Code(outcome.exit_code()))
}

/// How a job ended.
#[derive(Debug, Serialize)]
struct Ended {
    schema: &'static str,
    ranks: u32,
    hosts: usize,
    /// `done`, `failed`, `signalled` or `timed-out`.
    outcome: &'static str,
    /// The rank that failed first.
    failed_rank: Option<Rank>,
    exit_code: u8,
}

impl Ended {
    fn of(args: &Args, hosts: &Hosts, outcome: Outcome) -> Self {
        let (word, failed_rank) = match outcome {
            Outcome::Done => ("done", None),
            Outcome::Failed { rank, .. } => ("failed", Some(rank)),
            Outcome::Signalled(_) => ("signalled", None),
            Outcome::TimedOut => ("timed-out", None),
        };
        Self {
            schema: "crossmesh.launch/1",
            ranks: args.n,
            hosts: hosts.places.last().map_or(0, |(host, ..)| host + 1),
            outcome: word,
            failed_rank,
            exit_code: outcome.exit_code(),
        }
    }
}

/// Where the ranks run.
struct Hosts {
    /// Of every rank: its host, its place there, and how many are there.
    places: Vec<(usize, u32, u32)>,
    remote: Vec<String>,
    emulation: Option<Emulation>,
    master_addr: String,
    master_port: u16,
}

impl Hosts {
    fn of(args: &Args) -> Result<Self> {
        let spread = [args.n.div_ceil(args.hosts.len().max(1) as u32)];
        let places = spread_ranks(args.n, if args.per_host.is_empty() { &spread } else { &args.per_host });
        let needed = places.last().map_or(1, |(host, ..)| host + 1);
        if !args.hosts.is_empty() && args.hosts.len() < needed {
            bail!("{} ranks need {needed} hosts; --hosts names {}", args.n, args.hosts.len());
        }
        let emulation = args.emulate.as_deref().map(|rate| emulate(rate, needed)).transpose()?;
        let (master_addr, default_port) = match (&emulation, args.hosts.first()) {
            (Some(_), _) => (Emulation::address(0).to_string(), DEFAULT_PORT),
            (None, Some(first)) => (first.clone(), DEFAULT_PORT),
            (None, None) => ("127.0.0.1".into(), if args.master_port.is_some() { 0 } else { free_port()? }),
        };
        let master_port = args.master_port.unwrap_or(default_port);
        Ok(Self { places, remote: args.hosts.clone(), emulation, master_addr, master_port })
    }
}

/// Host, place and number of ranks there, rank by rank. The last of `per_host` goes on.
fn spread_ranks(n: u32, per_host: &[u32]) -> Vec<(usize, u32, u32)> {
    let mut places = Vec::with_capacity(n as usize);
    let last = per_host.last().copied().unwrap_or(n);
    for (host, wanted) in per_host.iter().copied().chain(std::iter::repeat(last)).enumerate() {
        let here = wanted.min(n - places.len() as u32);
        places.extend((0..here).map(|local| (host, local, here)));
        if places.len() as u32 == n {
            break;
        }
    }
    places
}

fn emulate(rate: &str, hosts: usize) -> Result<Emulation> {
    let mut cluster = Cluster::of_hosts(vec![Host::with_devices(1); hosts]);
    NicRates::parse(rate).and_then(|rates| rates.apply(&mut cluster)).context("--emulate")?;
    let nic = |h: &Host| NicRate { out_bytes_per_s: h.out_bytes_per_s(), in_bytes_per_s: h.in_bytes_per_s() };
    Ok(Emulation::up(&cluster.hosts.iter().map(nic).collect::<Vec<_>>())?)
}

/// A port that nobody uses now. Somebody else may take it before rank 0 does; then rank 0 says so.
/// Below those that systems give to outgoing connections: one of these may come between looking and listening.
pub fn free_port() -> Result<u16> {
    let first = 20_000 + std::process::id() % 10_000;
    let mut ports = (0..10_000).map(|i| (20_000 + (first + 7 * i) % 10_000) as u16);
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(free).context("no free port between 20000 and 30000 on loopback")
}

fn process(args: &Args, hosts: &Hosts, rank: Rank, secret: &Secret) -> Result<Process> {
    let (host, local_rank, local_world) = hosts.places[rank.index()];
    let place = Place {
        rank,
        world: args.n,
        local_rank,
        local_world: Some(local_world),
        master_addr: hosts.master_addr.clone(),
        master_port: hosts.master_port,
        launcher: "crossmesh",
    };
    let mut env: Variables = place.to_variables();
    env.insert("GROUP_RANK".into(), host.to_string());
    env.insert(LAUNCHER_VARIABLE.into(), "crossmesh".into());
    env.insert(STARTED_VARIABLE.into(), now_ms().to_string());
    env.insert(SECRET_VARIABLE.into(), secret.to_hex());
    env.insert(PROTECT_VARIABLE.into(), protection(args.protect)?.to_string());
    if let Some(name) = hosts.remote.get(host) {
        let rsh: Vec<String> = args.rsh.split_whitespace().map(String::from).collect();
        if rsh.is_empty() {
            bail!("--rsh is empty\nhint: leave it out to use ssh");
        }
        return Ok(remote_command(rank, &rsh, name, &env, &args.command)?);
    }
    if hosts.emulation.is_some() {
        env.insert(HOST_VARIABLE.into(), format!("h{host}"));
    }
    let (program, words) = args.command.split_first().context("no program was given")?;
    Ok(Process {
        rank,
        program: program.into(),
        args: words.iter().map(Into::into).collect(),
        env,
        namespace: hosts.emulation.as_ref().map(|e| e.namespace(host)),
        stdin: None,
    })
}

/// Lines go where they came from, behind their rank; or all to stderr, where stdout is for a document.
fn passed_on(all_to_stderr: bool) -> OnLine {
    Arc::new(move |line: Line<'_>| {
        let text = format!("[{}] {}\n", line.rank.0, line.text);
        // A reader that has seen enough does not end the job.
        let _ = match line.source {
            Source::Stdout if !all_to_stderr => std::io::stdout().write_all(text.as_bytes()),
            _ => std::io::stderr().write_all(text.as_bytes()),
        };
    })
}

fn tell(outcome: Outcome) {
    let text = match outcome {
        Outcome::Done => return,
        Outcome::Failed { rank, status } => format!("{rank} failed ({status}); the others were ended"),
        Outcome::Signalled(signal) => format!("ended by signal {signal}"),
        Outcome::TimedOut => "it took too long and was ended".into(),
    };
    let _ = writeln!(std::io::stderr(), "launch: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fill_hosts_in_order() {
        assert_eq!(spread_ranks(3, &[2]), [(0, 0, 2), (0, 1, 2), (1, 0, 1)]);
        let hosts: Vec<usize> = spread_ranks(6, &[1, 2]).iter().map(|place| place.0).collect();
        assert_eq!(hosts, [0, 1, 1, 2, 2, 3]);
        assert_eq!(spread_ranks(2, &[9]), [(0, 0, 2), (0, 1, 2)]);
    }
}
