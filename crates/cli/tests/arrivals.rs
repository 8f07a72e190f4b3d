//! Ranks that should not be there, in every role: one with another job's secret, and one that is there already. Nobody is
//! taken in, and everybody hears what is wrong.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Scratch, ok};
use crossmesh_testkit::machine::eventually;

const PATIENCE: Duration = Duration::from_secs(30);
const ARRIVE: Duration = Duration::from_millis(2500);
/// Whoever is left ends within this time of the deadline.
const PROMPT: Duration = Duration::from_secs(2);
const WORLD: u32 = 7;
const SECRET: &str = "the secret of this very job";

/// A chain of two hosts behind two sources, and a rank with nothing to do.
const PAIRS: &str = "w: i32[64,64]@A{x:2}=0-1(x,_) -> i32[64,64]@B{h:2,g:2}=2-5(_,_)\n\
                     still: u8[64]@C{x:1}=6(_) -> u8[64]@D{x:1}=6(_)\n";

/// The processes of a job on this machine, started one by one, as a batch system would.
struct Site {
    scratch: Scratch,
    port: u16,
}

impl Site {
    fn new() -> Self {
        let scratch = Scratch::new();
        let pairs = scratch.file("pairs.txt", PAIRS);
        let plan = scratch.at("plan.json");
        ok(&["plan", "--pairs", pairs.to_str().unwrap(), "--devices-per-host", "2", "-o", &plan]);
        Self { scratch, port: crossmesh_testkit::sockets::free_port() }
    }

    fn start(&self, rank: u32, secret: &str) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crossmesh"));
        command.args(["rank", "--plan", &self.scratch.at("plan.json"), "--deadline-ms", "2000"]);
        command.args(["--arrive-ms", &ARRIVE.as_millis().to_string()]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", WORLD.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command.env("CROSSMESH_SECRET", secret).env("CROSSMESH_HOST", format!("h{}", rank / 2));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// How a process ended: its exit status, and what it said.
fn end_of(mut process: Child, limit: Duration) -> (Option<i32>, String) {
    if !eventually(limit, || process.try_wait().unwrap().is_some()) {
        process.kill().unwrap();
        let said = process.wait_with_output().unwrap();
        panic!("still there after {limit:?}: {}", String::from_utf8_lossy(&said.stderr));
    }
    let Output { status, stderr, .. } = process.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Runs the case for every rank at once.
fn for_every_role(case: impl Fn(u32) + Sync) {
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let case = &case;
            scope.spawn(move || case(rank));
        }
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn a_rank_with_a_wrong_secret_is_turned_away_and_named() {
    for_every_role(|stranger| {
        let site = Site::new();
        let secret = |rank| if rank == stranger { "the secret of another job" } else { SECRET };
        let processes: Vec<Child> = (0..WORLD).map(|rank| site.start(rank, secret(rank))).collect();
        let start = Instant::now();
        for (rank, process) in (0..).zip(processes) {
            let left = (ARRIVE + PROMPT).saturating_sub(start.elapsed());
            let (code, said) = end_of(process, left);
            assert_eq!(code, Some(2), "r{rank}: {said}");
            let line = said.lines().find(|l| l.starts_with("error: ")).unwrap_or_default();
            let told = match (rank == stranger, stranger) {
                // The others cannot prove themselves to it.
                (true, 0) => line.contains("ranks 1, 2, 3, 4, 5, 6 did not within 2.5 s"),
                (false, 0) | (true, _) => line.contains("the rendezvous at 127.0.0.1") && wrong(line),
                (false, _) => line.contains(&format!("error: r{stranger} on ")) && wrong(line),
            };
            assert!(told, "r{stranger} is a stranger, r{rank} says: {said}");
        }
        let (last, limit) = (start.elapsed().as_secs_f64(), (ARRIVE + PROMPT).as_secs_f64());
        println!("| wrong secret | r{stranger} | 1 | {last:.2} s | | {limit:.1} s |");
    });
}

fn wrong(line: &str) -> bool {
    line.contains("turned away: wrong secret")
}

#[test]
fn a_rank_that_is_there_already_is_turned_away_and_the_run_goes_on() {
    for_every_role(|twin| {
        let site = Site::new();
        let ranks = (0..WORLD).chain([twin]);
        let processes: Vec<(u32, Child)> = ranks.map(|rank| (rank, site.start(rank, SECRET))).collect();
        let ends: Vec<_> = processes.into_iter().map(|(r, process)| (r, end_of(process, PATIENCE))).collect();
        let (well, failed): (Vec<_>, Vec<_>) = ends.iter().partition(|(_, (code, _))| *code == Some(0));
        assert_eq!(well.len(), WORLD as usize, "{ends:?}");
        let (rank, (code, said)) = failed[0];
        assert_eq!((*rank, *code), (twin, Some(2)));
        let why = if twin == 0 { "cannot listen at 127.0.0.1" } else { "this rank is here already" };
        assert!(said.contains(why), "{said}");
        println!("| duplicate rank | r{twin} | 1 | turned away; the run goes on | | |");
    });
}
