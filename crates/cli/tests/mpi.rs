//! `mpirun crossmesh run`: ranks, rendezvous and bytes from MPI. With the feature `mpi`; needs OpenMPI.
#![cfg(feature = "mpi")]

mod common;

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Said, Scratch, crossmesh};
use crossmesh_testkit::machine::{alive, descendants, eventually, mpirun, output_within};

const PATIENCE: Duration = Duration::from_secs(60);
const SIX: [&str; 2] = ["f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:4}(_,tp)"];

fn under_mpirun(ranks: u32, args: &[&str]) -> Said {
    said(mpirun(ranks).arg(env!("CARGO_BIN_EXE_crossmesh")).args(args))
}

fn said(command: &mut Command) -> Said {
    let out = output_within(command, PATIENCE);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: out.status.code().unwrap_or(-1), stdout: text(out.stdout), stderr: text(out.stderr) }
}

#[test]
fn six_ranks_give_the_same_verified_result() {
    let args = ["run", SIX[0], SIX[1], "--repeat", "3", "--format", "json"];
    let ours = crossmesh(&args).json();
    let said = under_mpirun(6, &args);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let theirs = said.json();
    assert_eq!((&theirs["launcher"], &theirs["transport"]), (&"OpenMPI".into(), &"MPI".into()));
    for same in ["schema", "strategy", "ranks", "bytes", "predicted_s", "lower_bound_s", "verified", "wrong"]
    {
        assert_eq!(ours[same], theirs[same], "{same}");
    }
    assert_eq!((&theirs["verified"], &theirs["hosts"]), (&true.into(), &1.into()));
    assert_eq!(theirs["measured_s"].as_array().unwrap().len(), 3);
}

#[test]
fn every_strategy_moves_megabytes() {
    let (src, dst) = ("bf16[1024,1500]@A{dp:2,tp:2}(tp,_)", "bf16[1024,1500]@B{tp:4}(_,tp)");
    for strategy in ["flow", "sendrecv", "allgather", "broadcast:greedy"] {
        let said = under_mpirun(8, &["run", src, dst, "--strategy", strategy]);
        assert_eq!(said.code, 0, "{strategy}: {}", said.stderr);
        assert!(
            said.stdout.contains("8 processes on 1 host, started by OpenMPI, over MPI"),
            "{}",
            said.stdout
        );
        assert!(said.last_line().ends_with("; every element checked"), "{strategy}: {}", said.stdout);
    }
}

#[test]
fn a_bench_has_ranks_to_spare() {
    let args = ["bench", "reshard", "--case", "1-to-m 1x", "--tensor-bytes", "256KiB", "--repeat", "2"];
    let said = under_mpirun(5, &args);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    assert!(said.stdout.lines().filter(|line| line.ends_with("right")).count() >= 3, "{}", said.stdout);
}

#[test]
fn a_world_that_does_not_fit_is_refused_with_both_numbers() {
    let said = under_mpirun(4, &["run", SIX[0], SIX[1]]);
    assert_eq!((said.code, said.stdout.as_str()), (2, ""));
    let why = "error: the plan is for 6 ranks, the job that OpenMPI started has 4\n";
    assert!(said.stderr.contains(why), "{}", said.stderr);
}

#[test]
fn sockets_carry_the_bytes_where_they_are_asked_to() {
    let mut command = mpirun(6);
    command.env("CROSSMESH_TRANSPORT", "sockets").arg(env!("CARGO_BIN_EXE_crossmesh"));
    let said = said(command.args(["run", SIX[0], SIX[1]]));
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    assert!(said.stdout.contains("started by OpenMPI, over sockets and shared memory"), "{}", said.stdout);
}

/// Also where MPI's own way is slow and takes in all that comes: TCP inside the host.
#[test]
fn memory_beside_the_tensors_is_bounded() {
    let scratch = Scratch::new();
    let pair = |i: usize| format!("t{i}: f32[32,32]@A{{x:2}}(x,_) -> f32[32,32]@B{{x:2}}(_,x)\n");
    let small = scratch.file("small.txt", (0..10_000).map(pair).collect::<String>());
    let cases: [(u32, &[&str]); 4] = [
        (4, &["--pairs", small.to_str().unwrap()]),
        (3, &["u8[33554432]@A{x:1}(_)", "u8[33554432]@B{x:2}(_)"]),
        (8, &["f32[2048,1024]@A{dp:3,tp:2}(tp,_ | sum dp)", "f32[2048,1024]@B{x:2}(_,x)"]),
        (16, &["f32[131072,8]@A{x:8}(x,_)", "f32[131072,8]@B{x:8}(_,x)"]),
    ];
    for (ranks, pair) in cases {
        for way in ["vader,self", "tcp,self"] {
            let mut command = mpirun(ranks);
            command.env("OMPI_MCA_btl", way).arg(env!("CARGO_BIN_EXE_crossmesh")).arg("run").args(pair);
            let said = said(command.args(["--format", "json"]));
            assert_eq!(said.code, 0, "{}", said.stderr);
            let report = said.json();
            let memory = report["memory"].as_array().unwrap();
            assert_eq!((memory.len() as u32, &report["verified"]), (ranks, &true.into()));
            for rank in memory {
                let number = |name: &str| rank[name].as_u64().unwrap();
                let (measured, proven) = (number("extra_bytes_measured"), number("extra_bytes_proven"));
                assert!((proven..=proven + (16 << 20)).contains(&measured), "{way}, {pair:?}: {rank}");
            }
        }
    }
}

/// The rank of a process, by its environment.
fn rank_of(pid: u32) -> Option<u32> {
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).ok()?;
    environment.split('\0').find_map(|v| v.strip_prefix("OMPI_COMM_WORLD_RANK="))?.parse().ok()
}

/// Whether it has its tensors.
fn is_at_work(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = anonymous.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.is_some_and(|kib| kib > 6 << 10)
}

/// Three ranks under mpirun, at work for as long as they are left alone; their processes by rank.
fn long_run(args: &[&str]) -> (std::process::Child, BTreeMap<u32, u32>) {
    let mut command = mpirun(3);
    command.arg(env!("CARGO_BIN_EXE_crossmesh"));
    command.args(["run", "u8[4194304]@A{x:1}(_)", "u8[4194304]@B{x:2}(_)", "--repeat", "100000"]).args(args);
    let piped = || Stdio::piped();
    let child = command.stdin(Stdio::null()).stdout(piped()).stderr(piped()).spawn().unwrap();
    let at_work = |pid: u32| Some((rank_of(pid)?, pid)).filter(|_| is_at_work(pid));
    let ranks =
        || -> BTreeMap<u32, u32> { descendants(child.id()).into_iter().filter_map(at_work).collect() };
    assert!(eventually(PATIENCE, || ranks().len() == 3), "the run does not begin");
    let ranks = ranks();
    (child, ranks)
}

fn signal(pid: u32, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// Ends within `limit`, with an error; what was said.
fn failed_within(child: std::process::Child, ranks: &BTreeMap<u32, u32>, limit: Duration) -> String {
    let waiting = std::thread::Builder::new().spawn(move || child.wait_with_output()).unwrap();
    assert!(eventually(limit, || waiting.is_finished()), "mpirun is still there");
    let out = waiting.join().unwrap().unwrap();
    assert!(!out.status.success());
    assert!(eventually(Duration::from_secs(10), || ranks.values().all(|pid| !alive(*pid))));
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn a_killed_rank_ends_the_job() {
    let (child, ranks) = long_run(&[]);
    signal(ranks[&1], "-KILL");
    // OpenMPI sees its own processes die, and is quicker than any of ours.
    let stderr = failed_within(child, &ranks, Duration::from_secs(30));
    assert!(stderr.contains("rank 1") || stderr.contains("error: r1 on "), "{stderr}");
}

/// Wherever it is: mostly at one of MPI's barriers, which would wait for minutes.
#[test]
fn a_stopped_rank_is_named_by_the_deadline() {
    for rank in [0, 1, 2] {
        let (child, ranks) = long_run(&["--deadline", "1s"]);
        signal(ranks[&rank], "-STOP");
        let stderr = failed_within(child, &ranks, Duration::from_secs(30));
        assert!(stderr.contains(&format!("error: r{rank} on ")), "r{rank} was stopped: {stderr}");
    }
}
