//! What ranks need beside their tensors, measured from the system: what was proven, and 16 MiB.

mod common;

use std::fmt::Write as _;

use common::{Scratch, ok};
use serde_json::Value;

const ALLOWED: u64 = 16 << 20;
const KIB: u64 = 1 << 10;

/// Every rank keeps to the bound. Returns the most that was measured, and the most that was proven.
fn assert_bounded(what: &str, report: &Value) -> (u64, u64) {
    assert_eq!(report["verified"], true, "{what}");
    let ranks = report["memory"].as_array().unwrap();
    assert_eq!(ranks.len() as u64, report["ranks"].as_u64().unwrap(), "{what}");
    let number = |rank: &Value, name: &str| rank[name].as_u64().unwrap();
    for rank in ranks {
        let (measured, proven) = (number(rank, "extra_bytes_measured"), number(rank, "extra_bytes_proven"));
        assert!(measured <= proven + ALLOWED, "{what}: {rank}");
        // Staging buffers are seen, where there are any; what a thread of the meeting frees late may hide a little of them.
        assert!(measured + 256 * KIB >= proven, "{what}: {rank}");
    }
    let most = |name| ranks.iter().map(|rank| number(rank, name)).max().unwrap();
    let worst = (most("extra_bytes_measured"), most("extra_bytes_proven"));
    assert!(most("socket_bytes") > 0, "{what}");
    // A program and its bookkeeping are never nothing; but where a thread of the meeting ends late, what it frees may hide those of one rank.
    assert!(worst.0 > 16 * KIB, "{what}: {ranks:?}");
    eprintln!("{what}: {} KiB measured, {} KiB proven", worst.0 / KIB, worst.1 / KIB);
    worst
}

/// On hosts as the plan has them, with a host for every rank, and all of them on one.
fn everywhere(what: &str, args: &[&str]) -> u64 {
    let json = [&["run"], args, &["--format", "json"]].concat();
    let report = ok(&json).json();
    let (_, proven) = assert_bounded(what, &report);
    let apart = ok(&[&json[..], &["--devices-per-host", "1"]].concat()).json();
    assert_bounded(&format!("{what}, over TCP"), &apart);
    let ranks = report["ranks"].to_string();
    let launch = ["launch", "-n", &ranks, "--", env!("CARGO_BIN_EXE_crossmesh")];
    let said = ok(&[&launch[..], &json].concat()).stdout;
    let text: String = said.lines().map(|line| line.strip_prefix("[0] ").unwrap()).collect();
    assert_bounded(&format!("{what}, in shared memory"), &serde_json::from_str(&text).unwrap());
    proven
}

#[test]
fn cases_of_the_paper() {
    // 16 MiB each: the last dim is shorter.
    everywhere("1-to-m 3x2", &["i32[4194304]@A{host:1,gpu:1}(_)", "i32[4194304]@B{host:3,gpu:2}(_)"]);
    for (name, src, dst) in [
        (
            "n-to-m 3",
            "i32[1024,1024,4]@A{host:2,gpu:4}(_,host,_)",
            "i32[1024,1024,4]@B{host:2,gpu:4}(host,_,_)",
        ),
        ("n-to-m 7", "i32[1024,1024,4]@A{host:1,gpu:4}(gpu,_,_)", "i32[1024,1024,4]@B{host:2,gpu:4}(_,_,_)"),
        (
            "n-to-m 9",
            "i32[1024,1024,4]@A{host:2,gpu:4}(_,host,_)",
            "i32[1024,1024,4]@B{host:2,gpu:4}(_,_,host)",
        ),
    ] {
        everywhere(name, &[src, dst]);
    }
}

#[test]
fn staging_buffers() {
    let sums = ["f32[2048,1024]@A{dp:3,tp:2}(tp,_ | sum dp)", "f32[2048,1024]@B{x:2}(_,x)"];
    assert_eq!(everywhere("partial sums", &sums), 4 << 20);
    let gathered = ["f32[2047,1024]@A{x:3}(x,_)", "f32[2047,1024]@B{h:2,g:4}(_,g)", "--nics", "4"];
    assert!(everywhere("gathered inside a host", &gathered) > 1 << 20);
}

#[test]
fn many_peers_and_short_runs() {
    // Everybody with everybody, in rows of 4 B: nothing can be sent from where it lies.
    everywhere("12 x 12", &["f32[131072,12]@A{x:12}(x,_)", "f32[131072,12]@B{x:12}(_,x)"]);
}

#[test]
fn ten_thousand_small_tensors() {
    let mut pairs = String::new();
    for i in 0..10_000 {
        let _ = writeln!(pairs, "t{i}: f32[32,32]@A{{x:2}}(x,_) -> f32[32,32]@B{{x:2}}(_,x)");
    }
    let scratch = Scratch::new();
    let pairs = scratch.file("pairs.txt", pairs);
    everywhere("10,000 tensors of 4 KiB", &["--pairs", pairs.to_str().unwrap()]);
}

#[test]
fn the_worst_rank_has_a_line() {
    let said = ok(&["run", "f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:3}(_,tp)"]);
    let line = said.stdout.lines().find(|line| line.starts_with("extra memory ")).unwrap();
    assert!(line.contains(" on r") && line.contains(" of it proven"), "{line}");
}
