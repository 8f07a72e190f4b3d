//! Random faults on emulated hosts, and whom every survivor names. The injector's own log is the oracle. Needs root.
//!
//! ```text
//! h0 r0 r1    h1 r2 r3    h2 r4 r5      processes that this test starts itself, as a launcher would
//!    └───────────┼───────────┘          kill, stop, stop and go on, late, never, a cable, the way between two hosts
//! ```
//!
//! Each fault strikes before the ranks meet, while they do, or later; rank 0 as often as all others together.
//! `CROSSMESH_SWEEP=500 cargo test -p crossmesh-cli --test blame -- --nocapture` does it that often and prints a table.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::collections::BTreeMap;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::Scratch;
use crossmesh_comm::environment::now_ms;
use crossmesh_comm::lab::emulate::{Emulation, NicRate};
use crossmesh_testkit::machine::{alive, eventually, inside, needs_root, slowness};

/// How long ranks wait for the others to come, for a silent one, and after that to agree.
const ARRIVE: Duration = Duration::from_secs(4);
const DEADLINE: Duration = Duration::from_secs(1);
const PROMPT: Duration = Duration::from_secs(2);
/// A busy machine is given more before a rank counts as stuck; how long it took is judged apart.
const STUCK: Duration = Duration::from_secs(40);
/// Cases that are under way at once: they mostly wait.
const AT_ONCE: usize = 2;
const PORT: u16 = 29500;
/// How much later than promised still counts as in time: processes and namespaces end, too.
const SLACK: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill(usize),
    Stop(usize),
    /// Stopped for longer than anybody may be, then continued.
    Pause(usize),
    /// Started when the others have given up.
    Late(usize),
    Never(usize),
    /// A host's cable.
    Cable(usize),
    /// The way between two hosts.
    Between(usize, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum When {
    Before,
    Meeting,
    Later,
}

#[derive(Debug)]
struct Case {
    seed: u64,
    /// By rank.
    hosts: Vec<usize>,
    fault: Fault,
    when: When,
    /// After the moment that `when` says.
    delay: Duration,
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % below as u64) as usize
    }
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9e3779b97f4a7c15) + 11);
        let hosts_count = 3 + dice.roll(2);
        let per_host = 1 + dice.roll(2);
        let hosts: Vec<usize> = (0..hosts_count * per_host).map(|rank| rank / per_host).collect();
        let victim = if dice.roll(2) == 0 { 0 } else { dice.roll(hosts.len()) };
        let host = if dice.roll(3) == 0 { 0 } else { dice.roll(hosts_count) };
        let other = (host + 1 + dice.roll(hosts_count - 1)) % hosts_count;
        let fault = match dice.roll(8) {
            0 | 1 => Fault::Kill(victim),
            2 => Fault::Stop(victim),
            3 => Fault::Pause(victim),
            4 => Fault::Late(victim),
            5 => Fault::Never(victim),
            6 => Fault::Cable(host),
            _ => Fault::Between(host.min(other), host.max(other)),
        };
        let when = match (fault, dice.roll(3)) {
            (Fault::Late(_) | Fault::Never(_), _) | (_, 0) => When::Before,
            (_, 1) => When::Meeting,
            _ => When::Later,
        };
        let delay = match when {
            When::Before => Duration::ZERO,
            When::Meeting => Duration::from_micros(dice.roll(60_000) as u64),
            When::Later => Duration::from_millis(dice.roll(800) as u64),
        };
        Self { seed, hosts, fault, when, delay }
    }

    fn num_hosts(&self) -> usize {
        self.hosts.last().map_or(0, |last| last + 1)
    }

    /// The rank that the fault is about, where it is about one.
    fn victim(&self) -> Option<usize> {
        match self.fault {
            Fault::Kill(i) | Fault::Stop(i) | Fault::Pause(i) | Fault::Late(i) | Fault::Never(i) => Some(i),
            Fault::Cable(_) | Fault::Between(..) => None,
        }
    }

    /// Whether a rank can be asked whom it blames.
    fn is_survivor(&self, rank: usize) -> bool {
        !matches!(self.fault, Fault::Kill(i) | Fault::Stop(i) | Fault::Never(i) if i == rank)
    }

    /// From the fault (or, before they met, from their start) to the end of every survivor.
    fn limit(&self) -> Duration {
        let silence = match self.fault {
            Fault::Kill(_) => Duration::ZERO,
            _ => DEADLINE,
        };
        match self.when {
            When::Later => silence + PROMPT,
            // Whoever has not come may still come.
            When::Before | When::Meeting => ARRIVE + silence + PROMPT,
        }
    }
}

/// Whom a rank names: one, or one of two.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Named(Vec<usize>);

impl Named {
    /// From `error: r1 on h0 ...` or `error: cannot tell between r1 on h0 and r2 on h1: ...`.
    fn of(stderr: &str) -> Option<(Self, String)> {
        let line = stderr.lines().find_map(|line| line.strip_prefix("error: "))?;
        let rank = |text: &str| text.strip_prefix('r')?.split(' ').next()?.parse().ok();
        let named = match line.strip_prefix("cannot tell between ") {
            Some(rest) => {
                let (first, second) = rest.split_once(" and ")?;
                vec![rank(first)?, rank(second)?]
            }
            None => vec![rank(line)?],
        };
        Some((Self(named), line.to_string()))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Score {
    Right,
    /// What can be known there is said, but as if one end were to blame where the way is, or of both ends where it is one: see [`Case::score`].
    Partial,
    /// One of two, and the right one among them.
    CannotTell,
    Wrong,
}

impl Case {
    /// Whether a cut separated a rank from rank 0, or rank 0 from all others, before they met.
    fn knew_nobody(&self, rank: usize, cut: usize) -> bool {
        let (here, first) = (self.hosts[rank], self.hosts[0]);
        self.when != When::Later && (here == cut || first == cut)
    }

    fn score(&self, rank: usize, named: &Named, line: &str) -> Score {
        let on = |host: usize| named.0.iter().any(|r| self.hosts.get(*r) == Some(&host));
        match (self.fault, named.0.as_slice()) {
            (Fault::Cable(host), [one]) if self.hosts[*one] == host => Score::Right,
            // Cut off from rank 0 before it knew anybody: there is nobody to ask, and both ends is all that can be said.
            (Fault::Cable(host), [_, _]) if on(host) && self.knew_nobody(rank, host) => Score::Partial,
            (Fault::Cable(host), [_, _]) if on(host) => Score::CannotTell,
            // Nobody is at fault but the way: both ends. That one of them did not arrive is true of it, and half of the truth.
            (Fault::Between(a, b), [_, _]) if on(a) && on(b) => Score::Right,
            (Fault::Between(a, b), [_]) if line.contains("did not arrive") && (on(a) || on(b)) => {
                Score::Partial
            }
            (Fault::Cable(_) | Fault::Between(..), _) => Score::Wrong,
            (_, [one]) if Some(*one) == self.victim() => Score::Right,
            (_, [a, b]) if [a, b].iter().any(|r| Some(**r) == self.victim()) => Score::CannotTell,
            _ => Score::Wrong,
        }
    }
}

/// A job of processes that this test started.
struct Running<'a> {
    case: &'a Case,
    emulation: Emulation,
    ranks: BTreeMap<usize, Child>,
    scratch: Scratch,
    started_ms: u64,
}

impl<'a> Running<'a> {
    fn new(case: &'a Case) -> Self {
        let rate = NicRate { out_bytes_per_s: 1.5e6, in_bytes_per_s: 1.5e6 };
        let emulation = Emulation::up(&vec![rate; case.num_hosts()]).unwrap();
        Self { case, emulation, ranks: BTreeMap::new(), scratch: Scratch::new(), started_ms: now_ms() }
    }

    /// From rows to columns: everybody has something for everybody.
    fn command(&self, rank: usize) -> Command {
        let (n, host) = (self.case.hosts.len(), self.case.hosts[rank]);
        let local = self.case.hosts.iter().filter(|h| **h == host).count();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.emulation.namespace(host), env!("CARGO_BIN_EXE_crossmesh")]);
        command.args(["run", "--strategy", "flow", "--repeat", "2000", "--deadline", "1s", "--arrive", "4s"]);
        let layout = |name: &str, split: &str| {
            format!("u8[{},{}]@{name}{{x:{n}}}=0-{}({split})", 24 * n, 4096 * n, n - 1)
        };
        command.arg(layout("A", "x,_")).arg(layout("B", "_,x"));
        let rank_text = |n: usize| n.to_string();
        command.envs([
            ("RANK", rank_text(rank)),
            ("WORLD_SIZE", rank_text(n)),
            ("LOCAL_RANK", rank_text(rank % local)),
            ("LOCAL_WORLD_SIZE", rank_text(local)),
            ("MASTER_ADDR", Emulation::address(0).to_string()),
            ("MASTER_PORT", PORT.to_string()),
            ("CROSSMESH_HOST", format!("h{host}")),
            ("CROSSMESH_SECRET", "only for this very test".into()),
            ("CROSSMESH_STARTED_MS", self.started_ms.to_string()),
            ("CROSSMESH_LAUNCHER", "crossmesh".into()),
        ]);
        command
    }

    fn start(&mut self, rank: usize) {
        let mut command = self.command(rank);
        let stderr = File::create(self.scratch.path().join(format!("r{rank}"))).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        self.ranks.insert(rank, command.spawn().unwrap());
    }

    fn signal(&self, rank: usize, signal: &str) {
        if let Some(child) = self.ranks.get(&rank) {
            let _ = Command::new("kill").args([signal, &child.id().to_string()]).status();
        }
    }

    fn inject(&self) {
        match self.case.fault {
            Fault::Kill(i) => self.signal(i, "-KILL"),
            Fault::Stop(i) | Fault::Pause(i) => self.signal(i, "-STOP"),
            Fault::Cable(host) => self.emulation.cut(host).unwrap(),
            Fault::Between(a, b) => self.cut_between(a, b),
            Fault::Late(_) | Fault::Never(_) => {}
        }
    }

    /// Ports of a switch that are isolated reach all others but each other.
    fn cut_between(&self, a: usize, b: usize) {
        let switch = format!("{}-switch", self.emulation);
        for host in [a, b] {
            let port = format!("p{host}");
            let args = ["-n", &switch, "link", "set", "dev", &port, "isolated", "on"];
            assert!(Command::new("bridge").args(args).status().unwrap().success());
        }
    }

    /// Whether bytes of tensors have left a host.
    fn moves(&self) -> bool {
        let sent = |host: usize| {
            let read = || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
            let counters = inside(&self.emulation.namespace(host), read);
            let nic = counters.lines().find(|l| l.trim_start().starts_with("nic:")).unwrap_or("").to_string();
            nic.split_whitespace().nth(9).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
        };
        (0..self.case.num_hosts()).map(sent).sum::<u64>() > 400_000
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        for child in self.ranks.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a survivor said, and when after the fault it had ended.
struct Said {
    rank: usize,
    score: Score,
    line: String,
    after: Duration,
}

#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn run(case: &Case) -> Vec<Said> {
    let mut running = Running::new(case);
    let begun = Instant::now();
    let absent = match case.fault {
        Fault::Late(i) | Fault::Never(i) => Some(i),
        _ => None,
    };
    if case.when == When::Before && matches!(case.fault, Fault::Cable(_) | Fault::Between(..)) {
        running.inject();
    }
    (0..case.hosts.len()).filter(|rank| Some(*rank) != absent).for_each(|rank| running.start(rank));
    match case.when {
        When::Before if case.victim().is_some() => running.inject(),
        When::Before => {}
        When::Meeting => {
            std::thread::sleep(case.delay);
            running.inject();
        }
        When::Later => {
            assert!(eventually(STUCK, || running.moves()), "seed {}: nothing moves", case.seed);
            std::thread::sleep(case.delay);
            running.inject();
        }
    }
    let struck = if case.when == When::Later { Instant::now() } else { begun };
    if let Fault::Late(i) = case.fault {
        std::thread::sleep((ARRIVE + PROMPT).saturating_sub(begun.elapsed()));
        running.start(i);
    }
    let pause = case.limit() + Duration::from_millis(500);
    let mut ends: BTreeMap<usize, Duration> = BTreeMap::new();
    let mut continued = false;
    let over = eventually(STUCK, || {
        if let (Fault::Pause(i), false) = (case.fault, continued || struck.elapsed() < pause) {
            running.signal(i, "-CONT");
            continued = true;
        }
        for (rank, child) in &running.ranks {
            if !alive(child.id()) {
                ends.entry(*rank).or_insert_with(|| struck.elapsed());
            }
        }
        (0..case.hosts.len()).all(|rank| !case.is_survivor(rank) || ends.contains_key(&rank))
    });
    let said = |rank: usize| {
        let text =
            std::fs::read_to_string(running.scratch.path().join(format!("r{rank}"))).unwrap_or_default();
        let named = Named::of(&text);
        let (score, line) = match named {
            Some((named, line)) => (case.score(rank, &named, &line), line),
            None => (Score::Wrong, format!("names nobody: {text:?}")),
        };
        Said { rank, score, line, after: ends.get(&rank).copied().unwrap_or(STUCK) }
    };
    let survivors = (0..case.hosts.len()).filter(|rank| case.is_survivor(*rank));
    let said: Vec<Said> = survivors.map(said).collect();
    assert!(over || said.iter().any(|s| s.after >= STUCK));
    said
}

/// Times are those of the machine, too.
fn is_in_time(case: &Case, said: &Said, slowness: f64) -> bool {
    // One that went on, or came late, has a time of its own.
    let own = Some(said.rank) == case.victim();
    own || said.after <= (case.limit() + SLACK).mul_f64(slowness)
}

#[expect(clippy::disallowed_methods, reason = "how often to test is no part of a plan")]
#[test]
fn every_survivor_names_the_right_one() {
    needs_root();
    let count: u64 = std::env::var("CROSSMESH_SWEEP").map_or(8, |n| n.parse().unwrap());
    let first: u64 = std::env::var("CROSSMESH_SEED").map_or(0, |n| n.parse().unwrap());
    let left = Mutex::new((first..first + count).map(Case::of));
    let results = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(case) = left.lock().unwrap().next() else { return };
                    let before = slowness();
                    let said = run(&case);
                    results.lock().unwrap().push((case, said, before.max(slowness())));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    assert_right(&results);
}

fn assert_right(results: &[(Case, Vec<Said>, f64)]) {
    let mut table: BTreeMap<(String, When), [usize; 5]> = BTreeMap::new();
    let mut totals = [0; 5];
    for (case, said, slowness) in results {
        let worst = said.iter().map(|s| s.score).max().unwrap_or(Score::Right);
        let late = !said.iter().all(|s| is_in_time(case, s, *slowness));
        let kind = format!("{:?}", case.fault);
        let at_root = if case.victim() == Some(0) { " at r0" } else { "" };
        let kind = format!("{}{at_root}", kind.split('(').next().unwrap_or(""));
        let row = table.entry((kind, case.when)).or_default();
        for counts in [&mut *row, &mut totals] {
            counts[worst as usize] += 1;
            counts[4] += usize::from(late);
        }
        if worst != Score::Right || late {
            println!(
                "seed {}: {:?} {:?} +{:?} on {:?}",
                case.seed, case.fault, case.when, case.delay, case.hosts
            );
            said.iter().for_each(|s| println!("    [{}] {:?} {:.1?}: {}", s.rank, s.score, s.after, s.line));
        }
    }
    println!(
        "| fault | when | right | partial | cannot tell | wrong | late |\n|---|---|---:|---:|---:|---:|---:|"
    );
    for ((kind, when), [right, partial, cannot, wrong, late]) in &table {
        println!("| {kind} | {when:?} | {right} | {partial} | {cannot} | {wrong} | {late} |");
    }
    let [right, partial, cannot, wrong, late] = totals;
    println!(
        "{} faults: {right} right, {partial} partial, {cannot} cannot tell, {wrong} wrong, {late} late",
        results.len()
    );
    assert_eq!(wrong, 0, "innocents were named");
    // One in a hundred; of a few, one.
    let few = (results.len() / 100).max(1);
    assert!(cannot <= few, "too many cannot tell");
    assert!(late <= few, "too many ended late");
    // Only of ways and cables that were cut before the ranks knew each other is half of it all there is to say.
    let cut_early =
        |(kind, when): &(String, When)| matches!(kind.as_str(), "Cable" | "Between") && *when != When::Later;
    assert!(table.iter().all(|(row, counts)| counts[1] == 0 || cut_early(row)), "half of it is said");
}
