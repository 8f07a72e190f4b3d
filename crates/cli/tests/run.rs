//! `crossmesh run`: real bytes between real processes. What happens when one of them fails is in `faults.rs`.

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Scratch, binary, crossmesh, ok, refused};
use crossmesh_testkit::machine::{
    alive, descendants, eventually, inside, namespaces_of, needs_root, output_within,
};

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn loopback_moves_every_element() {
    for (src, dst) in [
        ("f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:3}(_,tp)"),
        ("bf16[10,7]@A{dp:3}(dp,_)", "bf16[10,7]@A{dp:3}(_,dp)"),
        ("i64[33]@A{dp:2,tp:2}(tp | sum dp)", "i64[33]@B{tp:2}(tp)"),
    ] {
        let report = ok(&["run", src, dst, "--repeat", "3", "--format", "json"]).json();
        assert_eq!(report["schema"], "crossmesh.run/1");
        assert_eq!(report["verified"], true, "{src} -> {dst}");
        assert_eq!(report["measured_s"].as_array().unwrap().len(), 3);
        assert!(report["predicted_s"].as_f64().unwrap() >= 0.0);
        assert!(report["lower_bound_s"].as_f64().unwrap() >= 0.0);
    }
}

#[test]
fn a_plan_file_runs_with_its_strategy() {
    let scratch = Scratch::new();
    let plan = scratch.at("plan.json");
    let (src, dst) = ("f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:3}(_,_)");
    ok(&["plan", src, dst, "--strategy", "broadcast:greedy", "-o", &plan]);
    let report = ok(&["run", &plan, "--format", "json"]).json();
    assert_eq!((&report["strategy"], &report["verified"]), (&"broadcast:greedy".into(), &true.into()));
    assert!(ok(&["run", &plan]).last_line().ends_with("; every element checked"));
    for flag in [["--strategy", "flow"], ["--seed", "3"], ["--chunk", "64KiB"]] {
        let said = refused(&["run", &plan, flag[0], flag[1]]);
        assert!(said.contains("is planned already\nhint: leave --"), "{said}");
    }
}

/// Small tensors beside a large one are put together by one receiver and passed on, between real processes too.
#[test]
fn small_tensors_arrive_in_few_messages() {
    let scratch = Scratch::new();
    let pairs = scratch.at("pairs.txt");
    let norm = "f32[33]@A{fsdp:4}(fsdp) -> f32[33]@B{dp:2,tp:2}(_)\n";
    let large = "w: f32[1024,512]@A{fsdp:4}(fsdp,_) -> f32[1024,512]@B{dp:2,tp:2}(_,tp)\n";
    std::fs::write(&pairs, format!("a: {norm}{large}b: {norm}c: {norm}")).unwrap();
    let plan = ok(&["explain", &pairs, "--format", "json"]).json();
    let of = |tensor: u64| {
        plan["transfers"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|t| t["tensor"].as_u64().unwrap_or(0) == tensor)
            .count()
    };
    assert_eq!([0, 2, 3].map(of), [4 + 3; 3]);
    let report = ok(&["run", &pairs, "--repeat", "3", "--format", "json"]).json();
    assert_eq!((&report["verified"], &report["wrong"]), (&true.into(), &serde_json::json!([])));
}

/// Small enough to be over in a moment, so the numbers mean little; that they are there and the file can be used does.
#[test]
fn calibrating_writes_a_cluster_file() {
    let scratch = Scratch::new();
    let file = scratch.at("here.toml");
    let args =
        ["bench", "calibrate", "--max-bytes", "16KiB", "--repeat", "1", "-o", &file, "--format", "json"];
    let report = ok(&args).json();
    assert_eq!(report["schema"], "crossmesh.calibration/1");
    let ways = report["ways"].as_array().unwrap();
    assert_eq!(ways.iter().map(|w| w["rows"].as_array().unwrap().len()).collect::<Vec<_>>(), [3, 3]);
    assert!(ways.iter().all(|way| way["bytes_per_s"].as_f64().unwrap() > 0.0), "{report}");
    assert!(ways.iter().all(|way| way["held_out"].as_array().unwrap().len() == 1), "{report}");
    assert!(
        std::fs::read_to_string(&file).unwrap().starts_with("# Measured by `crossmesh bench calibrate` on ")
    );
    let measured = format!("{}, {}", report["machine"].as_str().unwrap(), report["date"].as_str().unwrap());
    let (src, dst) = ("f32[64]@A{x:2}(x)", "f32[64]@B{x:2}(_)");
    let run = ok(&["run", src, dst, "--cluster", &file]).stdout;
    assert!(run.contains(&format!("predicted with the costs of {measured}\n")), "{run}");
    let plan = ok(&["explain", src, dst, "--cluster", &file, "--format", "json"]).json();
    assert!(plan["predicted_s"].as_f64().unwrap() >= plan["lower_bound_s"].as_f64().unwrap());
    let said = refused(&["bench", "calibrate", "--max-bytes", "10B"]);
    assert!(said.contains("--max-bytes 10: the smallest message has 1024 bytes"), "{said}");
}

/// That NICs are not shaped, or bytes not really sent, would show in a run faster than the bound. How close to it runs
/// come is for the benches: a busy machine takes longer, and should not fail a test.
fn assert_not_faster_than_the_nics(report: &serde_json::Value) {
    let measured = report["measured_s"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap());
    let over = measured.fold(f64::INFINITY, f64::min) / report["lower_bound_s"].as_f64().unwrap();
    assert!(over >= 0.9, "{over} × the bound: {report}");
}

#[test]
fn emulated_hosts_move_no_faster_than_their_nics() {
    needs_root();
    // 2 MiB over a NIC of 100 Mbit/s, through a chain of two hosts.
    let (src, dst) = ("i32[1024,512]@A{h:1,g:2}(g,_)", "i32[1024,512]@B{h:2,g:2}(_,_)");
    let args = ["run", src, dst, "--emulate", "100Mbit", "--repeat", "3", "--format", "json"];
    let report = ok(&args).json();
    assert_eq!(report["verified"], true);
    assert_not_faster_than_the_nics(&report);
}

#[test]
fn a_slow_host_is_emulated() {
    needs_root();
    let scratch = Scratch::new();
    let hosts = "[[host]]\ndevices = 2\nnic = \"200Mbit\"\n\n[[host]]\ndevices = 2\nnic = \"50Mbit\"\n";
    let cluster = scratch.file("cluster.toml", hosts);
    let (src, dst) = ("i32[512,512]@A{g:2}(g,_)", "i32[512,512]@B{g:2}(_,_)");
    let args =
        ["run", src, dst, "--emulate", "cluster", "--cluster", cluster.to_str().unwrap(), "--format", "json"];
    let from_file = ok(&args).json();
    let from_flag = ok(&["run", src, dst, "--emulate", "200Mbit,h1=50Mbit", "--format", "json"]).json();
    for report in [from_file, from_flag] {
        assert!((report["lower_bound_s"].as_f64().unwrap() - (1 << 20) as f64 / 6.25e6).abs() < 1e-6);
        assert_not_faster_than_the_nics(&report);
    }
}

#[test]
fn without_root_the_error_says_what_is_needed() {
    needs_root();
    let nobody = ["-u", "65534", "-g", "65534", "--clear-groups", "--"];
    let scratch = Scratch::new();
    let program = scratch.at("crossmesh");
    std::fs::copy(env!("CARGO_BIN_EXE_crossmesh"), &program).unwrap();
    for path in [scratch.path(), std::path::Path::new(&program)] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", nobody[1], "--regid", nobody[3], nobody[4], nobody[5], &program]);
    command.args(["run", "f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)", "--emulate", "1Gbit"]);
    let out = output_within(&mut command, PATIENCE);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("error: emulating hosts needs root"), "{stderr}");
}

/// Two sources on a host, four destinations on two.
const GRID: [&str; 2] = ["i32[16,1024,256]@A{h:1,g:2}(g,_,_)", "i32[16,1024,256]@B{h:2,g:2}(_,_,_)"];
/// A run on three emulated hosts that would take about ten seconds, under way.
struct LongRun {
    launcher: Child,
    /// By rank.
    ranks: Vec<u32>,
}

impl LongRun {
    fn start() -> Self {
        needs_root();
        let mut command = binary();
        command.arg("run").args(GRID).args(["--emulate", "12Mbit"]);
        let launcher =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let moving = || {
            let counter =
                |ns: &String| inside(ns, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
            let sent = |text: String| {
                let line =
                    text.lines().find(|l| l.trim_start().starts_with("nic:")).unwrap_or("").to_string();
                line.split_whitespace().nth(9).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
            };
            let first = namespaces_of(launcher.id()).into_iter().find(|n| n.ends_with("-h0"));
            first.is_some_and(|ns| sent(counter(&ns)) > 300_000)
        };
        assert!(eventually(PATIENCE, moving), "no bytes move");
        let mut ranks: Vec<(u32, u32)> =
            descendants(launcher.id()).into_iter().filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
        ranks.sort_unstable();
        assert_eq!(ranks.len(), 6);
        Self { launcher, ranks: ranks.into_iter().map(|(_, pid)| pid).collect() }
    }

    fn signal(&self, rank: usize, signal: &str) {
        assert!(
            Command::new("kill").args([signal, &self.ranks[rank].to_string()]).status().unwrap().success()
        );
    }

    /// Waits for the end of it all, and returns its stderr. Nothing may be left.
    fn ends_within(self, limit: Duration) -> String {
        let pid = self.launcher.id();
        let waiting = std::thread::Builder::new().spawn(move || self.launcher.wait_with_output()).unwrap();
        assert!(eventually(limit, || waiting.is_finished()), "still there after {limit:?}");
        let out = waiting.join().unwrap().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert_eq!(namespaces_of(pid), Vec::<String>::new());
        assert!(self.ranks.iter().all(|pid| !alive(*pid)));
        stderr
    }
}

/// The rank of a process, by its environment.
fn rank_of(pid: u32) -> Option<u32> {
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).ok()?;
    environment.split('\0').find_map(|v| v.strip_prefix("RANK="))?.parse().ok()
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let run = LongRun::start();
    let launcher = run.launcher.id().to_string();
    assert!(Command::new("kill").args(["-INT", &launcher]).status().unwrap().success());
    run.ends_within(PATIENCE);
}

#[test]
fn garbage_at_the_rendezvous_is_turned_away_and_the_run_goes_on() {
    needs_root();
    let (src, dst) = ("i32[512,1024]@A{h:1,g:2}(g,_)", "i32[512,1024]@B{h:1,g:2}(_,_)");
    let mut command = binary();
    command.args(["run", src, dst, "--emulate", "20Mbit", "--format", "json"]);
    let run = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let host = || namespaces_of(run.id()).into_iter().find(|n| n.ends_with("-h1"));
    assert!(eventually(PATIENCE, || host().is_some()));
    let namespace = host().unwrap();
    let knock = || {
        let addr = "10.77.0.1:29500".parse().unwrap();
        let stream = TcpStream::connect_timeout(&addr, Duration::from_millis(100));
        stream.is_ok_and(|mut s| s.write_all(&[0xff; 4096]).is_ok())
    };
    assert!(eventually(PATIENCE, || inside(&namespace, knock)));
    let out = run.wait_with_output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("r0: turned away 10.77.0.2:"), "{stderr}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["verified"], true);
}

#[test]
fn impostors_are_turned_away_and_the_run_goes_on() {
    let scratch = Scratch::new();
    let plan = scratch.at("plan.json");
    ok(&["plan", GRID[0], GRID[1], "-o", &plan]);
    let mut run = LongRun::start();
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", run.ranks[3])).unwrap();
    let secret =
        environment.split('\0').find_map(|v| v.strip_prefix("CROSSMESH_SECRET=")).unwrap().to_string();
    let namespace = namespaces_of(run.launcher.id()).into_iter().find(|n| n.ends_with("-h1")).unwrap();
    let pretend = |rank: &str, secret: &str| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &namespace, env!("CARGO_BIN_EXE_crossmesh"), "rank", "--plan", &plan]);
        command.args(["--deadline-ms", "1000", "--arrive-ms", "3000"]).envs([
            ("RANK", rank),
            ("WORLD_SIZE", "6"),
            ("MASTER_ADDR", "10.77.0.1"),
            ("CROSSMESH_SECRET", secret),
        ]);
        let out = output_within(&mut command, PATIENCE);
        assert_eq!(out.status.code(), Some(2));
        String::from_utf8(out.stderr).unwrap()
    };
    assert!(pretend("3", "some other job's secret").contains("turned away: wrong secret"));
    assert!(pretend("3", &secret).contains("turned away: this rank is here already"));
    assert!(run.launcher.try_wait().unwrap().is_none(), "the run ended");
    run.signal(4, "-KILL");
    let stderr = run.ends_within(PATIENCE);
    assert!(!stderr.contains(&secret));
    for why in ["r3: turned away: wrong secret", "r3: turned away: this rank is here already"] {
        let line = stderr.lines().find(|l| l.contains(why)).unwrap_or_else(|| panic!("{why}: {stderr}"));
        assert!(line.starts_with("[0] r0: turned away 10.77.0.2:"), "{line}");
    }
}

#[test]
fn nonsense_is_refused() {
    let pair = ["f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)"];
    for (option, value, why) in [
        ("--emulate", "fast", "not a rate"),
        ("--deadline", "soon", "not a time"),
        ("--deadline", "0s", "no time to wait"),
        ("--repeat", "0", "0"),
    ] {
        let said = crossmesh(&["run", pair[0], pair[1], option, value]);
        assert_eq!(said.code, 2, "{option} {value}: {}", said.stderr);
        assert!(said.stderr.contains(why), "{option} {value}: {}", said.stderr);
    }
    let both = crossmesh(&["run", pair[0], pair[1], "--emulate", "1Gbit", "--nic", "2Gbit"]);
    assert!(both.stderr.contains("leave --nic out"), "{}", both.stderr);
}
