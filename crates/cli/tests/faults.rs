//! The fault matrix: every fault in every role, on emulated hosts. Whoever is left names the culprit in time and ends, and
//! nothing remains.
//!
//! ```text
//! h0 r0   h1 r1     h2 r2 ~ r3     h3 r4 ~ r5     h4 r6
//! source  source    |  relay       |  end         nothing to do
//! rendezvous └──NIC──┘ shm   └──NIC─┘ shm
//! ```
//!
//! `CROSSMESH_FAULT_ROUNDS=20 cargo test -p crossmesh-cli --test faults -- --nocapture` does it over and over, and prints the times;
//! `CROSSMESH_FAULT_WIDE=1` takes 64 ranks on eight hosts instead, and `CROSSMESH_FAULT_WIDE=overloaded` as many whose NICs carry more
//! connections than they have room for.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Scratch, binary, ok};
use crossmesh_comm::rendezvous::Abort;
use crossmesh_testkit::machine::{
    alive, descendants, eventually, namespaces_of, needs_root, rank_of, sent_by_host, shared_segments,
    slowness,
};
use crossmesh_testkit::sockets::{Borrowed, connection, connection_to_port};
use serde_json::Value;

/// For namespaces and processes to be there; a busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(40);
const DEADLINE: Duration = Duration::from_secs(1);
/// Everybody names the culprit within this time of a death, or of the deadline. What ends after that is the machine's: removing
/// namespaces waits for every processor.
const PROMPT: Duration = Duration::from_secs(2);
const RENDEZVOUS_PORT: u16 = 29500;
/// Runs that are under way at once: they mostly wait.
const AT_ONCE: usize = 3;

/// What a rank is to the others: its number, whom it talks to, and what to call it.
struct Role {
    rank: u32,
    peer: u32,
    name: &'static str,
    /// Whether others are in the middle of something with it when the fault comes; else its turn has not come.
    busy: bool,
}

/// What runs where, and which ranks are worth a fault.
struct Setting {
    pairs: &'static str,
    strategy: &'static str,
    /// By rank.
    hosts: &'static [u32],
    nic: &'static str,
    /// How much the relay's host has sent when all have started; more where the ranks have as much to say to each other before.
    begun_bytes: u64,
    /// The host whose NIC shows that all have started.
    relay: u32,
    roles: &'static [Role],
    faults: &'static [Fault],
}

impl Setting {
    fn is_wide(&self) -> bool {
        self.hosts.len() > 32
    }
}

/// The picture above: one thing after the other, down a chain.
const CHAIN: Setting = Setting {
    pairs: "w: i32[16,1024,256]@A{x:2}=0-1(x,_,_) -> i32[16,1024,256]@B{h:2,g:2}=2-5(_,_,_)\n\
            still: u8[64]@C{x:1}=6(_) -> u8[64]@D{x:1}=6(_)\n",
    strategy: "broadcast:greedy",
    hosts: &[0, 1, 2, 2, 3, 3, 4],
    nic: "12Mbit",
    begun_bytes: 300_000,
    relay: 2,
    roles: &[
        Role { rank: 0, peer: 2, name: "rank 0, the rendezvous", busy: false },
        Role { rank: 1, peer: 2, name: "source only", busy: true },
        Role { rank: 2, peer: 3, name: "forwarder", busy: true },
        Role { rank: 3, peer: 2, name: "reader by shm", busy: true },
        Role { rank: 5, peer: 4, name: "end of the chain", busy: true },
        Role { rank: 6, peer: 0, name: IDLE, busy: false },
    ],
    faults: &[Fault::Kill, Fault::Stop, Fault::Cut, Fault::HalfClosed, Fault::Garbage],
};

/// Everybody at once: two sources on a host, four destinations on two, each of which forwards. Who is alive may wait for
/// its turn for longer than the deadline.
const GRID: Setting = Setting {
    pairs: "w: i32[16,1024,256]@A{h:1,g:2}(g,_,_) -> i32[16,1024,256]@B{h:2,g:2}(_,_,_)\n",
    strategy: "flow",
    hosts: &[0, 0, 1, 1, 2, 2],
    nic: "12Mbit",
    begun_bytes: 300_000,
    relay: 1,
    roles: &[
        Role { rank: 0, peer: 2, name: "grid: rank 0", busy: true },
        Role { rank: 1, peer: 3, name: "grid: source", busy: false },
        Role { rank: 3, peer: 5, name: "grid: relay", busy: true },
        Role { rank: 4, peer: 2, name: "grid: end", busy: true },
    ],
    faults: &[Fault::Kill, Fault::Stop],
};

/// As many as a machine of two cores still starts in time, in a tree of several levels; only where it is asked for. Every source has
/// two destinations, so that a NIC carries sixteen connections.
const WIDE: Setting = Setting {
    pairs: "w: i64[256,1024,128]@A{x:32}=0-31(x,_,_) -> i64[256,1024,128]@B{h:2,x:16}=32-63(x,_,_)\n",
    strategy: "sendrecv",
    hosts: EIGHT_HOSTS,
    nic: "100Mbit",
    begun_bytes: 3_000_000,
    relay: 0,
    roles: &[
        Role { rank: 0, peer: 32, name: "64 ranks: rank 0", busy: true },
        Role { rank: 17, peer: 40, name: "64 ranks: source", busy: true },
        Role { rank: 50, peer: 5, name: "64 ranks: end", busy: true },
    ],
    faults: &[Fault::Kill, Fault::Stop, Fault::Cut, Fault::HalfClosed, Fault::Garbage],
};

/// More than NICs of 12 Mbit/s have room for; only where it is asked for, and it does not pass: of 15 runs on a busy machine six named
/// somebody else, or could not tell.
///
/// Each of 32 ranks sends to each of 32: 256 connections on a NIC. The least window that a connection can have is 12 KiB
/// (`transport/tcp.rs`), so that up to 3 MiB may be under way, which is two seconds of such a NIC, in front of a queue of 20 ms, or 30 KB.
/// Of what hosts hand to their NICs 40 to 70 packets in 100 are dropped (`tc -s qdisc`), pings of the rendezvous among them, and what was
/// dropped is sent again later and later: ranks that are well are silent for longer than the deadline of a second, and sometimes hardly a
/// tensor moves in 40 s. A plan with fewer lanes, or a longer deadline, is the way out.
const OVERLOADED: Setting = Setting {
    pairs: "w: i32[256,1024,64]@A{x:32}=0-31(x,_,_) -> i32[256,1024,64]@B{x:32}=32-63(_,x,_)\n",
    strategy: "flow",
    nic: "12Mbit",
    ..WIDE
};

const EIGHT_HOSTS: &[u32] = &[
    0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, //
    4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7,
];

const IDLE: &str = "nothing to do";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
    Cut,
    HalfClosed,
    Garbage,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Fault::Kill => "kill -9",
            Fault::Stop => "SIGSTOP",
            Fault::Cut => "cut cable",
            Fault::HalfClosed => "half-closed socket",
            Fault::Garbage => "garbage",
        }
    }

    /// Silence is noticed by the deadline, the rest at once.
    fn limit(self) -> Duration {
        match self {
            Fault::Stop | Fault::Cut => DEADLINE + PROMPT,
            Fault::Kill | Fault::HalfClosed | Fault::Garbage => PROMPT,
        }
    }
}

/// A run on five emulated hosts that would take about ten seconds, under way.
struct LongRun {
    setting: &'static Setting,
    scratch: Scratch,
    launcher: Child,
    /// By rank.
    ranks: BTreeMap<u32, u32>,
    /// All that the launcher says, and when.
    stderr: JoinHandle<Vec<(Instant, String)>>,
}

impl LongRun {
    fn start(setting: &'static Setting) -> Self {
        let scratch = Scratch::new();
        let devices = setting.hosts.chunk_by(|a, b| a == b).map(<[u32]>::len);
        let host = |devices| format!("[[host]]\ndevices = {devices}\nnic = \"{}\"\n\n", setting.nic);
        let cluster = scratch.file("cluster.toml", devices.map(host).collect::<String>());
        let pairs = scratch.file("pairs.txt", setting.pairs);
        let mut command = binary();
        command.args(["run", "--strategy", setting.strategy, "--emulate", "cluster", "--deadline", "1s"]);
        command.arg("--pairs").arg(pairs).arg("--cluster").arg(cluster);
        command.args(["--flight", &scratch.at("flight.json")]);
        let mut launcher =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = follow(&mut launcher);
        let pid = launcher.id();
        let begun = || sent_by_host(pid, setting.relay) > setting.begun_bytes;
        assert!(eventually(PATIENCE, begun), "no bytes move");
        let ranks: BTreeMap<u32, u32> =
            descendants(pid).into_iter().filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
        assert_eq!(ranks.len(), setting.hosts.len());
        Self { setting, scratch, launcher, ranks, stderr }
    }

    fn signal(&self, rank: u32, signal: &str) {
        let killed = Command::new("kill").args([signal, &self.ranks[&rank].to_string()]).status().unwrap();
        assert!(killed.success());
    }

    /// The rank's end of a connection: of the data that it exchanges, or else to the rendezvous, or with whomever it has one.
    fn socket(&self, role: &Role) -> Borrowed {
        let (from, to) = (self.ranks[&role.rank], self.ranks[&role.peer]);
        let data = connection(from, to, RENDEZVOUS_PORT);
        let any = || self.ranks.values().find_map(|to| connection(from, *to, RENDEZVOUS_PORT));
        let found = data.or_else(|| connection_to_port(from, RENDEZVOUS_PORT)).or_else(any);
        found.expect("every rank has a connection")
    }

    fn inject(&self, fault: Fault, role: &Role) {
        match fault {
            Fault::Kill => self.signal(role.rank, "-KILL"),
            Fault::Stop => self.signal(role.rank, "-STOP"),
            Fault::Cut => {
                let all = namespaces_of(self.launcher.id());
                let switch = all.iter().find(|n| n.ends_with("-switch")).unwrap();
                let port = format!("p{}", self.setting.hosts[role.rank as usize]);
                let cut = Command::new("ip").args(["-n", switch, "link", "set", &port, "down"]).status();
                assert!(cut.unwrap().success());
            }
            Fault::HalfClosed => self.socket(role).close_writing(),
            Fault::Garbage => {
                let socket = self.socket(role);
                assert!(eventually(PATIENCE, || socket.say(&[0x5a; 200])), "the socket takes nothing");
            }
        }
    }
}

/// How a run ended. By then no process and no namespace of it is left.
struct Ended {
    case: Case,
    slowness: f64,
    /// From the fault to the end of the launcher.
    launcher: Duration,
    code: Option<i32>,
    /// When after the fault the launcher said what.
    stderr: Vec<(Duration, String)>,
    flight: Value,
    /// What `explain --flight` makes of it, for people and for programs.
    explained: String,
    replay: Value,
}

#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn end_of(mut run: LongRun, case: Case) -> Ended {
    let before = slowness();
    let Case { fault, role, .. } = case;
    let start = Instant::now();
    run.inject(fault, role);
    let mut code = None;
    let over = eventually(2 * fault.limit() + PATIENCE, || {
        code = run.launcher.try_wait().unwrap().map(|status| status.code());
        code.is_some()
    });
    assert!(over, "the launcher does not end");
    let launcher = start.elapsed();
    let pid = run.launcher.id();
    assert_eq!(namespaces_of(pid), Vec::<String>::new(), "namespaces are left");
    assert!(run.ranks.values().all(|pid| !alive(*pid)), "processes are left");
    let text = std::fs::read_to_string(run.scratch.path().join("flight.json")).unwrap();
    let stderr = run.stderr.join().unwrap();
    let stderr = stderr.into_iter().map(|(at, line)| (at.saturating_duration_since(start), line)).collect();
    let (code, flight) = (code.flatten(), serde_json::from_str(&text).unwrap());
    let path = run.scratch.at("flight.json");
    let explained = ok(&["explain", "--flight", &path]).stdout;
    let replay = ok(&["explain", "--flight", &path, "--format", "json"]).json();
    Ended { case, slowness: before.max(slowness()), launcher, code, stderr, flight, explained, replay }
}

impl Ended {
    /// Whom a rank named in the end. The launcher says it once for all of them; each one's word is in the flight record.
    fn named_by(&self, rank: u32) -> Option<String> {
        let process = &self.flight["processes"][rank as usize];
        assert_eq!(process["rank"], rank);
        let verdict = process.get("verdict")?.clone();
        Some(format!("error: {}", serde_json::from_value::<Abort>(verdict).unwrap()))
    }

    /// When the launcher had named somebody, which it does once all survivors have.
    fn named_after(&self) -> Duration {
        self.stderr.last().map(|(after, _)| *after).unwrap_or_default()
    }
}

/// What is wrong with how a run ended; nothing, if all is well.
fn complaints(ended: &Ended) -> Vec<String> {
    let Case { setting, fault, role } = ended.case;
    let mut wrong = vec![];
    let limit = fault.limit().mul_f64(ended.slowness);
    let (host, world) = (setting.hosts[role.rank as usize], setting.hosts.len() as u32);
    // Of a host that was cut off, any rank may stand for it.
    let culprits: Vec<u32> = match fault {
        Fault::Cut => (0..world).filter(|r| setting.hosts[*r as usize] == host).collect(),
        _ => vec![role.rank],
    };
    let names = |line: &str| culprits.iter().any(|r| line.contains(&format!("error: r{r} on h{host} ")));
    for rank in 0..world {
        let gone = rank == role.rank && matches!(fault, Fault::Kill | Fault::Stop);
        let status = ended.flight["processes"][rank as usize]["ended"].as_str().unwrap_or("none");
        if !gone && status != "exit status: 2" {
            wrong.push(format!("r{rank} ended with {status}"));
        }
        // All that it ever sees is the rendezvous, and no word of an op comes without it.
        let alone = role.name == IDLE && fault == Fault::Cut && rank == role.rank;
        // Among many, a fault may hit a connection that carries no tensors.
        let blind = alone || (rank == 6 && role.rank == 0) || setting.is_wide();
        match ended.named_by(rank) {
            None if gone => {}
            Some(line) if names(&line) || alone => wrong.extend(lacking(&line, role, blind)),
            said => wrong.push(format!("r{rank} says {said:?}")),
        }
    }
    let agreed = format!("error: r{} on ", ended.flight["verdict"]["culprit"]);
    let repeated = |(_, line): &&(Duration, String)| line.starts_with('[') && line.contains(&agreed);
    if let Some((_, line)) = ended.stderr.iter().find(repeated) {
        wrong.push(format!("what all agree on is said once a rank, too: {line}"));
    }
    if ended.code != Some(2) {
        wrong.push(format!("the launcher ended with {:?}", ended.code));
    }
    // Behind it there may be hints.
    match ended.stderr.iter().rfind(|(_, line)| !line.starts_with("hint: ")) {
        Some((after, line)) if *after <= limit && line.starts_with("error: ") && names(line) => {}
        last => wrong.push(format!("the last line is {last:?}")),
    }
    if !culprits.iter().any(|r| ended.flight["verdict"]["culprit"] == *r) {
        wrong.push(format!("the flight record's verdict is {}", ended.flight["verdict"]));
    }
    if wrong.is_empty() && !setting.is_wide() && !is_explained(ended) {
        wrong.push(format!("the flight record does not explain it: {}\n{}", ended.explained, ended.replay));
    }
    wrong
}

/// Whether the replay names the culprit, counts what hangs on it, and marks where the others are stuck.
fn is_explained(ended: &Ended) -> bool {
    let (replay, Case { setting, fault, role }) = (&ended.replay, ended.case);
    let culprit = replay["verdict"]["culprit"].as_u64().unwrap();
    let ranks = replay["ranks"].as_array().unwrap();
    let marked: Vec<u64> =
        ranks.iter().filter(|r| r["culprit"] == true).map(|r| r["rank"].as_u64().unwrap()).collect();
    let last = format!("because of r{culprit};");
    let told = ended.explained.lines().last().is_some_and(|line| line.contains(&last));
    // Of silence, the others are stuck at what was under way with the silent one.
    let silent = matches!(fault, Fault::Kill | Fault::Stop) && role.busy;
    let ops = replay["ops"].as_array().unwrap();
    let stuck = ops.iter().any(|op| op["stuck"] == true && op["rank"].as_u64() != Some(culprit));
    let moved = replay["moved_s"].as_f64().unwrap();
    ranks.len() == setting.hosts.len()
        && marked == [culprit]
        && told
        && (0.05..12.0).contains(&moved)
        && (role.name == IDLE || replay["held_up"].as_u64().unwrap() > 0)
        && (!silent || (stuck && ended.explained.contains("  >>  r")))
}

/// What a line about a culprit does not tell. About a rank that nobody waited for there is no op to tell of.
fn lacking(line: &str, role: &Role, blind: bool) -> Option<String> {
    let told = match role.name {
        _ if blind => true,
        IDLE => {
            let told = ["nothing was outstanding", "what no rank says", "closed at its own end"];
            told.iter().any(|text| line.contains(text))
        }
        _ => {
            ["send t", "receive t"].iter().any(|op| line.contains(op))
                && line.contains(" of tensor w, ")
                && line.contains(" B outstanding")
        }
    };
    (!told).then(|| format!("no op, tensor or bytes in: {line}"))
}

/// Everything on the launcher's stderr, line by line.
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn follow(launcher: &mut Child) -> JoinHandle<Vec<(Instant, String)>> {
    let pipe = launcher.stderr.take().unwrap();
    let lines = BufReader::new(pipe).lines().map_while(Result::ok);
    let read = move || lines.map(|line| (Instant::now(), line)).collect();
    std::thread::Builder::new().spawn(read).unwrap()
}

/// A case of the matrix.
#[derive(Clone, Copy)]
struct Case {
    setting: &'static Setting,
    fault: Fault,
    role: &'static Role,
}

/// All cases, as often as one likes; only some of them with `CROSSMESH_FAULT=SIGSTOP`.
#[expect(clippy::disallowed_methods, reason = "how often to test is no part of a plan")]
fn cases() -> Vec<Case> {
    let rounds: usize = std::env::var("CROSSMESH_FAULT_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let only = std::env::var("CROSSMESH_FAULT").unwrap_or_default();
    let of = |setting: &'static Setting| {
        let faults = setting.faults.iter();
        faults.flat_map(move |fault| {
            setting.roles.iter().map(move |role| Case { setting, fault: *fault, role })
        })
    };
    let settings: &[&Setting] = match wide() {
        None => &[&CHAIN, &GRID],
        Some(which) if which == "overloaded" => &[&OVERLOADED],
        Some(_) => &[&WIDE],
    };
    let all: Vec<Case> =
        settings.iter().copied().flat_map(of).filter(|c| c.fault.name().contains(&only)).collect();
    (0..rounds).flat_map(|_| all.clone()).collect()
}

#[expect(clippy::disallowed_methods, reason = "how often to test is no part of a plan")]
fn wide() -> Option<String> {
    std::env::var("CROSSMESH_FAULT_WIDE").ok()
}

#[test]
fn every_fault_in_every_role_is_named_in_time() {
    needs_root();
    let segments = shared_segments();
    let left = Mutex::new(cases().into_iter());
    let results = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..if wide().is_some() { 1 } else { AT_ONCE } {
            scope.spawn(|| {
                loop {
                    let Some(case) = left.lock().unwrap().next() else { return };
                    let ended = end_of(LongRun::start(case.setting), case);
                    results.lock().unwrap().push(ended);
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    print_times(&results);
    let wrong = results.iter().filter(|ended| !is_well(ended)).count();
    assert_eq!(wrong, 0, "of {} runs", results.len());
    assert_eq!(shared_segments(), segments);
}

fn is_well(ended: &Ended) -> bool {
    let complaints = complaints(ended);
    if complaints.is_empty() {
        return true;
    }
    eprintln!(
        "\n{} × {}: limit {:?}",
        ended.case.fault.name(),
        ended.case.role.name,
        ended.case.fault.limit().mul_f64(ended.slowness)
    );
    complaints.iter().for_each(|c| eprintln!("  - {c}"));
    ended.stderr.iter().for_each(|(after, line)| eprintln!("    {:.2} s {line}", after.as_secs_f64()));
    false
}

/// Seconds from the fault until the launcher has named somebody, and until all is gone: the worst over all rounds.
fn print_times(results: &[Ended]) {
    println!("| fault | role | runs | named | limit | gone |\n|---|---|---:|---:|---:|---:|");
    let mut table: BTreeMap<(usize, &str), Vec<&Ended>> = BTreeMap::new();
    for ended in results {
        let Case { setting, fault, role } = ended.case;
        let row = 100 * usize::from(setting.strategy == GRID.strategy)
            + 10 * setting.faults.iter().position(|f| *f == fault).unwrap()
            + setting.roles.iter().position(|r| r.name == role.name).unwrap();
        table.entry((row, fault.name())).or_default().push(ended);
    }
    for ((_, fault), runs) in table {
        let Case { role, fault: kind, .. } = runs[0].case;
        let worst = |of: &dyn Fn(&Ended) -> Duration| {
            runs.iter().map(|e| of(e)).max().unwrap_or_default().as_secs_f64()
        };
        println!(
            "| {fault} | {} | {} | {:.2} s | {:.1} s | {:.2} s |",
            role.name,
            runs.len(),
            worst(&|e| e.named_after()),
            kind.limit().as_secs_f64(),
            worst(&|e| e.launcher)
        );
    }
}
