//! Many ranks on one machine: they meet in time, and each of them needs little.
//!
//! `CROSSMESH_SWEEP=1024 cargo test --release -p crossmesh-cli --test scale -- --nocapture` does it with 1,024 and prints what
//! it took.

#![allow(clippy::print_stdout)] // the numbers are part of what this shows

mod common;

use std::fs::File;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Scratch, binary};
use crossmesh_testkit::machine::{descendants, eventually, slowness};

const PATIENCE: Duration = Duration::from_secs(120);
/// Beside those that its program needs.
const DESCRIPTORS: usize = 32;
const RESIDENT_BYTES: u64 = 12 << 20;
/// For 1,024 to meet on two cores that do nothing else; fewer, unoptimized and beside other tests, get as long.
const MEETING_S: f64 = 15.0;

/// While they meet, all may knock at the first rank at once, beside strangers.
const STRANGERS: usize = 128;

/// The most descriptors and memory of its own that any rank had. The first one, where all come, counts apart: its most while
/// they meet, and the fewest since, which is what it keeps.
#[derive(Debug, Default)]
struct Most {
    first: Option<u32>,
    descriptors: usize,
    first_descriptors: usize,
    first_keeps: usize,
    resident_bytes: u64,
}

impl Most {
    fn look(&mut self, launcher: u32) {
        for pid in descendants(launcher) {
            // The janitor is none of them.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if !String::from_utf8_lossy(&line).contains("\0rank\0") {
                continue;
            }
            match is_first(pid) {
                true => self.first = Some(pid),
                false => self.descriptors = self.descriptors.max(descriptors_of(pid)),
            }
            self.resident_bytes = self.resident_bytes.max(own_bytes(pid));
        }
    }

    fn look_at_first(&mut self) {
        let descriptors = self.first.map_or(0, descriptors_of);
        if descriptors >= self.first_descriptors {
            (self.first_descriptors, self.first_keeps) = (descriptors, descriptors);
        } else if descriptors > 0 {
            self.first_keeps = self.first_keeps.min(descriptors);
        }
    }
}

fn descriptors_of(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

fn is_first(pid: u32) -> bool {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == b"RANK=0")
}

/// Resident memory beside the files that are mapped, of which the program is one.
fn own_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    (kib("RssAnon:") + kib("RssShmem:")) << 10
}

#[expect(clippy::disallowed_methods, reason = "a test of real time, as often as one likes")]
#[test]
fn many_ranks_meet_and_need_little() {
    let ranks: u32 = std::env::var("CROSSMESH_SWEEP").map_or(96, |n| n.parse().unwrap());
    let half = ranks / 2;
    let (from, to) = (
        format!("f32[{},256]@A{{x:{half}}}(x,_)", 4 * half),
        format!("f32[{},256]@B{{x:{half}}}(x,_)", 4 * half),
    );
    let (begun, slowness) = (Instant::now(), slowness());
    let mut command = binary();
    command.args(["run", &from, &to, "--arrive", "60s", "--deadline", "20s", "--format", "json"]);
    // Of a thousand ranks there is more to say than a pipe holds that nobody reads meanwhile.
    let scratch = Scratch::new();
    let report = scratch.path().join("report.json");
    command.stdin(Stdio::null()).stdout(File::create(&report).unwrap()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let (mut most, mut next) = (Most::default(), begun);
    let over = eventually(PATIENCE, || {
        // A look at a thousand processes takes a good part of a second of a processor that they need, too.
        let looked = Instant::now();
        if looked >= next {
            most.look(launcher.id());
            next = Instant::now() + 4 * looked.elapsed();
        }
        most.look_at_first();
        launcher.try_wait().unwrap().is_some()
    });
    let took = begun.elapsed();
    if !over {
        let _ = launcher.kill();
        let _ = launcher.wait();
        panic!("it does not end");
    }
    let said = launcher.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.success(), "{stderr}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!((&report["verified"], &report["ranks"]), (&true.into(), &ranks.into()));
    let met_s = report["met_s"].as_f64().expect("the launcher says when it started");
    println!("{ranks} ranks: met in {met_s:.1} s, {took:.1?} from start to end, at most {most:?}");
    assert!(met_s > 0.0 && met_s <= MEETING_S * slowness, "they met in {met_s:.1} s");
    // Everybody exchanges with one other. While all knock, the first one has two for each: one that proves itself, and one of a rank
    // that was told whom to hang under and has not closed it yet.
    assert!(most.descriptors <= DESCRIPTORS + 1 && most.first_keeps <= DESCRIPTORS + 1, "{most:?}");
    assert!(most.first_descriptors <= DESCRIPTORS + STRANGERS + 2 * ranks as usize, "{most:?}");
    assert!(most.resident_bytes <= RESIDENT_BYTES, "{most:?}");
}
