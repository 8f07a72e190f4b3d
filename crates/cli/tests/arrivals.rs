//! Ranks that should not be there, in every role: one with another job's secret, and one that is there already. Nobody is
//! taken in, and everybody hears what is wrong.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{Scratch, ok};
use crossmesh_testkit::machine::eventually;

const PATIENCE: Duration = Duration::from_secs(30);
const ARRIVE: Duration = Duration::from_secs(5);
const WORLD: u32 = 7;
/// A rank that has come in has this many: its three streams, a connection, two doors, a poller and a counter.
const DESCRIPTORS: usize = 8;
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
        Self::of(PAIRS)
    }

    fn of(pairs: &str) -> Self {
        let scratch = Scratch::new();
        let pairs = scratch.file("pairs.txt", pairs);
        let plan = scratch.at("plan.json");
        ok(&["plan", "--pairs", pairs.to_str().unwrap(), "--devices-per-host", "2", "-o", &plan]);
        Self { scratch, port: crossmesh_testkit::sockets::free_port() }
    }

    fn start(&self, rank: u32, secret: &str, arrive: Duration) -> Child {
        self.command(rank, secret, arrive).spawn().unwrap()
    }

    fn command(&self, rank: u32, secret: &str, arrive: Duration) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_crossmesh"));
        command.args(["rank", "--plan", &self.scratch.at("plan.json"), "--deadline-ms", "2000"]);
        command.args(["--arrive-ms", &arrive.as_millis().to_string()]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", WORLD.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command.env("CROSSMESH_SECRET", secret).env("CROSSMESH_HOST", format!("h{}", rank / 2));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
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

/// Runs the case for every rank, two jobs at a time and whichever test asks: more would keep each other from arriving in time.
fn for_every_role(case: impl Fn(u32) + Sync) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let next = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    match next.fetch_add(1, Ordering::SeqCst) {
                        rank if rank < WORLD => case(rank),
                        _ => return,
                    }
                }
            });
        }
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn a_rank_with_a_wrong_secret_is_turned_away_and_named() {
    for_every_role(|stranger| {
        let site = Site::new();
        let secret = |rank| if rank == stranger { "the secret of another job" } else { SECRET };
        let processes: Vec<Child> = (0..WORLD).map(|rank| site.start(rank, secret(rank), ARRIVE)).collect();
        let start = Instant::now();
        for (rank, process) in (0..).zip(processes) {
            let (code, said) = end_of(process, PATIENCE);
            assert_eq!(code, Some(2), "r{rank}: {said}");
            let line = said.lines().find(|l| l.starts_with("error: ")).unwrap_or_default();
            let told = match (rank == stranger, stranger) {
                // The others cannot prove themselves to it.
                (true, 0) => line.contains("ranks 1, 2, 3, 4, 5, 6 did not within 5.0 s"),
                (false, 0) | (true, _) => line.contains("the rendezvous at 127.0.0.1") && wrong(line),
                (false, _) => line.contains(&format!("error: r{stranger} on ")) && wrong(line),
            };
            assert!(told, "r{stranger} is a stranger, r{rank} says: {said}");
        }
        let (last, arrive) = (start.elapsed().as_secs_f64(), ARRIVE.as_secs_f64());
        println!("| wrong secret | r{stranger} | 1 | {last:.2} s | | {arrive:.1} s to arrive |");
    });
}

fn wrong(line: &str) -> bool {
    line.contains("turned away: wrong secret")
}

#[test]
fn a_rank_that_is_there_already_is_turned_away_and_the_run_goes_on() {
    for_every_role(|twin| {
        let site = Site::new();
        let start = |rank| site.start(rank, SECRET, PATIENCE);
        // The run cannot begin, let alone end, before one of the twins is turned away: a rank is still to come.
        let late = 1 + twin % (WORLD - 1); // not rank 0, which keeps the rendezvous
        let mut twins = [start(twin), start(twin)];
        let mut rest: Vec<Child> = (0..WORLD).filter(|r| ![twin, late].contains(r)).map(start).collect();
        let turned_away = || twins.iter_mut().any(|process| process.try_wait().unwrap().is_some());
        assert!(eventually(PATIENCE, turned_away), "both ranks {twin} are still there");
        rest.push(start(late));
        for process in rest {
            let (code, said) = end_of(process, PATIENCE);
            assert_eq!(code, Some(0), "{said}");
        }
        let [one, other] = twins.map(|process| end_of(process, PATIENCE));
        let (well, failed) = if one.0 == Some(0) { (one, other) } else { (other, one) };
        assert_eq!((well.0, failed.0), (Some(0), Some(2)), "{} and {}", well.1, failed.1);
        let why = if twin == 0 { "cannot listen at 127.0.0.1" } else { "this rank is here already" };
        assert!(failed.1.contains(why), "{}", failed.1);
        println!("| duplicate rank | r{twin} | 1 | turned away; the run goes on | | |");
    });
}

/// The first rank is killed in the middle of the crowd: whoever was in, was just coming, or came later, names it and nobody else.
/// `CROSSMESH_SWEEP=120` takes as many survivors, three times.
#[test]
#[expect(clippy::disallowed_methods, reason = "how many ranks to test with is no part of a plan")]
fn all_name_a_first_rank_that_is_killed_while_they_meet() {
    let sweep: Option<u32> = std::env::var("CROSSMESH_SWEEP").ok().map(|n| n.parse().unwrap());
    let (survivors, rounds) = sweep.map_or((24, 1), |survivors| (survivors, 3));
    for round in 0..rounds {
        let n = survivors + 1;
        let site = Site::of(&format!(
            "w: u8[{n}]@A{{x:{n}}}=0-{survivors}(x) -> u8[{n}]@B{{x:{n}}}=0-{survivors}(_)\n"
        ));
        // By it a rank that finds nobody knows that it is not late itself.
        let started_ms = crossmesh_comm::environment::now_ms().to_string();
        let start = |rank: u32| {
            let mut command = site.command(rank, SECRET, 2 * ARRIVE);
            command.env("WORLD_SIZE", n.to_string()).env("CROSSMESH_STARTED_MS", &started_ms);
            command.spawn().unwrap()
        };
        let mut first = start(0);
        // One comes when it is over: until then nobody can be done.
        let mut others: Vec<Child> = (1..survivors).map(start).collect();
        let is_in = |child: &&Child| {
            std::fs::read_dir(format!("/proc/{}/fd", child.id())).map_or(0, Iterator::count) >= DESCRIPTORS
        };
        let enough = survivors as usize / (2 + round);
        let some = eventually(PATIENCE, || others.iter().filter(is_in).count() >= enough);
        first.kill().unwrap();
        first.wait().unwrap();
        others.push(start(survivors));
        assert!(some, "nobody came");
        let mut wrong = vec![];
        for (rank, process) in (1..).zip(others) {
            let (code, said) = end_of(process, ARRIVE + PATIENCE);
            let line = said.lines().find(|line| line.starts_with("error: ")).unwrap_or("no error");
            if code != Some(2) || !line.starts_with("error: r0 on ") {
                wrong.push(format!("r{rank} ended with {code:?}: {line}"));
            }
        }
        assert_eq!(wrong, Vec::<String>::new(), "of {survivors} survivors");
    }
}
