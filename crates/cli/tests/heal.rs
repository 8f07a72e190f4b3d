//! A cable that comes back: the job goes on within two seconds, however long it was away, tensors and barriers alike. Needs root.
//!
//! `CROSSMESH_SWEEP=1 cargo test -p crossmesh-cli --test heal -- --nocapture` also cuts for half a minute.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Scratch, binary};
use crossmesh_testkit::machine::{eventually, inside, namespaces_of, needs_root, slowness};

const PATIENCE: Duration = Duration::from_secs(60);
/// Half a megabyte each way at 20 Mbit/s, again and again, with a barrier before each.
const ROUND_BYTES: u64 = 1 << 19;
const PAIR: [&str; 2] = ["u8[2,524288]@A{x:2}=0-1(x,_)", "u8[2,524288]@B{x:2}=1,0(x,_)"];
/// The job goes on: so many rounds, each of which starts when all have met at a barrier.
const ROUNDS: u64 = 3;
const PROMPT: Duration = Duration::from_secs(2);

/// Bytes that have left an emulated host.
fn sent_by(launcher: u32, host: u32) -> u64 {
    let all = namespaces_of(launcher);
    let Some(namespace) = all.iter().find(|n| n.ends_with(&format!("-h{host}"))) else { return 0 };
    let counters = inside(namespace, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
    let nic = counters.lines().find(|l| l.trim_start().starts_with("nic:")).unwrap_or("");
    nic.split_whitespace().nth(9).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Two hosts, with a job that goes on until it has done so many rounds.
struct Running {
    launcher: Child,
    _scratch: Scratch,
}

impl Running {
    fn start(rounds: u64) -> Self {
        let scratch = Scratch::new();
        let host = "[[host]]\ndevices = 1\nnic = \"20Mbit\"\n\n";
        let cluster = scratch.file("cluster.toml", host.repeat(2));
        let mut command = binary();
        command.args(["run", PAIR[0], PAIR[1], "--emulate", "cluster", "--deadline", "60s"]);
        command.args(["--repeat", &rounds.to_string(), "--format", "json"]).arg("--cluster").arg(cluster);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { launcher: command.spawn().unwrap(), _scratch: scratch }
    }

    fn moves(&self, from: u64, rounds: u64, limit: Duration) -> bool {
        let pid = self.launcher.id();
        eventually(limit, || sent_by(pid, 0) >= from + rounds * ROUND_BYTES)
    }

    /// Ports of a switch that are isolated do not reach each other. Both hosts still have a link, as where the cut is somewhere between:
    /// of a link that is down the system knows, and goes on at once when it is back.
    fn cut(&self, isolated: &str) {
        let all = namespaces_of(self.launcher.id());
        let switch = all.iter().find(|n| n.ends_with("-switch")).unwrap();
        for port in ["p0", "p1"] {
            let args = ["-n", switch, "link", "set", "dev", port, "isolated", isolated];
            assert!(Command::new("bridge").args(args).status().unwrap().success());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Its ranks end with it, and its namespaces.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn cut_for(away: Duration) {
    let (slowness, mut run) = (slowness(), Running::start(60));
    assert!(run.moves(0, ROUNDS, PATIENCE), "nothing moves");
    run.cut("on");
    std::thread::sleep(away);
    let before = sent_by(run.launcher.id(), 0);
    run.cut("off");
    let healed = Instant::now();
    assert!(run.moves(before, ROUNDS, PATIENCE), "nothing moves after a cut of {away:?}");
    let (waited, least) = (healed.elapsed(), Duration::from_secs_f64(ROUNDS as f64 * 0.21));
    println!(
        "| cut for {away:?} | {ROUNDS} rounds {waited:.2?} after it | {least:.2?} of that is their time |"
    );
    // On a machine that is busy the rounds take longer, and what is waited for in vain does not.
    let limit = PROMPT + least.mul_f64(1.0 + slowness);
    assert!(waited <= limit, "after a cut of {away:?} it took {waited:.2?} to go on");
    let ended = eventually(PATIENCE, || run.launcher.try_wait().unwrap().is_some());
    assert!(ended && run.launcher.wait().unwrap().success(), "the job does not end well");
}

#[test]
fn a_job_goes_on_when_the_cable_is_back() {
    needs_root();
    let long = std::env::var_os("CROSSMESH_SWEEP").map(|_| 30);
    // The system waits 0.2 s, 0.4 s, and so on, and tries after 6.2 s and 12.6 s: a word that waits for the latter comes too late.
    [8].into_iter().chain(long).for_each(|seconds| cut_for(Duration::from_secs(seconds)));
}
