//! Strangers at a job's doors, and processes that have hardly anything: the job goes on, or says why not.

mod common;

use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossmesh_testkit::machine::{descendants, eventually, rank_of};
use crossmesh_testkit::sockets::free_port;

const PATIENCE: Duration = Duration::from_secs(60);
/// A rank that does nothing but beat would take minutes for so many; one whose rounds go on takes a second or so.
const TURNS: u64 = 1_000;
const STRANGERS: u64 = 10_000;
/// Strangers that are connected at once; the rest of the 10,000 come as these go.
const AT_ONCE: usize = 1_000;

/// Connects again and again, says nothing or promises 4 GiB, until it is told to stop.
fn crowd(port: u16, came: &AtomicU64, over: &AtomicBool) {
    let mut crowd = VecDeque::new();
    while !over.load(Ordering::SeqCst) {
        let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else { continue };
        if came.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            let _ = stranger.write_all(&[0xff; 4096]);
        }
        crowd.push_back(stranger);
        if crowd.len() > AT_ONCE {
            crowd.pop_front();
        }
    }
}

/// How often a process's first thread, which drives its engine, has waited for something and gone on.
fn turns_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap_or("0");
    line.trim().parse().unwrap_or(0)
}

/// The most memory that a process had, in bytes.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0");
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

#[test]
fn ten_thousand_strangers_neither_stop_a_job_nor_fill_its_memory() {
    let port = free_port();
    let (came, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let program = env!("CARGO_BIN_EXE_crossmesh");
    // The job starts among them, and goes on until all have come.
    let plan =
        ["run", "u8[4194304]@A{x:1}(_)", "u8[4194304]@B{x:2}(_)", "--repeat", "100000", "--arrive", "120s"];
    std::thread::scope(|scope| {
        scope.spawn(|| crowd(port, &came, &over));
        let mut command = Command::new(program);
        command.args(["launch", "-n", "3", "--master-port", &port.to_string(), "--", program]).args(plan);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut launcher = command.spawn().unwrap();
        let all = eventually(PATIENCE, || came.load(Ordering::SeqCst) >= STRANGERS);
        // More of them come, and the least busy of the ranks goes on.
        let ranks: Vec<u32> =
            descendants(launcher.id()).into_iter().filter(|p| rank_of(*p).is_some()).collect();
        let turns = || ranks.iter().map(|pid| turns_of(*pid)).collect::<Vec<u64>>();
        let before = turns();
        let all_go_on = || turns().iter().zip(&before).all(|(now, before)| *now > before + TURNS);
        let goes_on = ranks.len() == 3 && eventually(PATIENCE, all_go_on);
        let peak = descendants(launcher.id()).into_iter().map(peak_bytes).max().unwrap_or(0);
        let runs = launcher.try_wait().unwrap().is_none();
        over.store(true, Ordering::SeqCst);
        let _ = Command::new("kill").args(["-INT", &launcher.id().to_string()]).status();
        let said = launcher.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&said.stderr);
        assert!(all && runs && goes_on, "{} came: {stderr}", came.load(Ordering::SeqCst));
        assert!(peak <= 64 << 20, "{peak} B");
        let lines = stderr.lines().filter(|line| line.contains("turned away")).count();
        assert!(lines <= 3 * 24, "{lines} lines: {stderr}");
    });
}

/// Where no thread can be started, the program says so: no panic, no backtrace.
#[test]
fn too_little_memory_is_an_error() {
    let program = env!("CARGO_BIN_EXE_crossmesh");
    for kib in [30_000, 40_000, 60_000] {
        let line =
            format!("ulimit -v {kib}; exec {program} run 'u8[65536]@A{{x:1}}(_)' 'u8[65536]@B{{x:2}}(_)'");
        let said = Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&said.stderr);
        assert!(!stderr.contains("panicked") && !stderr.contains("stack backtrace"), "{stderr}");
        match said.status.code() {
            Some(0) => {}
            Some(2) => assert!(stderr.lines().any(|line| line.starts_with("error: ")), "{kib} KiB: {stderr}"),
            code => panic!("{kib} KiB: {code:?}, {stderr}"),
        }
    }
}
