//! `crossmesh run` as a rank of a job that others started: torchrun, Slurm, mpirun, `crossmesh launch`.

mod common;

use std::process::{Child, Stdio};
use std::time::Duration;

use common::{binary, crossmesh};
use crossmesh_testkit::machine::{eventually, needs_root};

const PATIENCE: Duration = Duration::from_secs(20);
/// Six ranks: two hold it by rows, four want it by columns.
const SIX: [&str; 2] = ["f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:4}(_,tp)"];

/// A port that nobody listens at now.
fn free_port() -> String {
    crossmesh_testkit::sockets::free_port().to_string()
}

/// What a rank said: its exit code, stdout, stderr.
type Said = (i32, String, String);

fn start(args: &[&str], variables: Vec<(&str, String)>) -> Child {
    let mut command = binary();
    command.args(args).envs(variables).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn finish(rank: Child) -> Said {
    let waiting = std::thread::Builder::new().spawn(move || rank.wait_with_output()).unwrap();
    assert!(eventually(PATIENCE, || waiting.is_finished()), "a rank does not end");
    let out = waiting.join().unwrap().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap_or(-1), text(out.stdout), text(out.stderr))
}

/// Starts every rank with variables of its own, as a launcher would.
fn job(n: u32, args: &[&str], variables: impl Fn(u32) -> Vec<(&'static str, String)>) -> Vec<Said> {
    let ranks: Vec<Child> = (0..n).map(|rank| start(args, variables(rank))).collect();
    ranks.into_iter().map(finish).collect()
}

fn torchrun(rank: u32, world: u32, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", world.to_string()),
        ("GROUP_RANK", "0".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.into()),
        ("TORCHELASTIC_RUN_ID", "none".into()),
    ]
}

/// One report, printed by the first rank alone.
fn assert_one_report(said: &[Said], launcher: &str) {
    for (rank, (code, stdout, stderr)) in said.iter().enumerate() {
        assert_eq!(*code, 0, "r{rank}: {stderr}");
        assert!(rank == 0 || (stdout.is_empty() && stderr.is_empty()), "r{rank}: {stdout}{stderr}");
    }
    let report: serde_json::Value = serde_json::from_str(&said[0].1).unwrap();
    assert_eq!((&report["verified"], &report["ranks"]), (&true.into(), &6.into()));
    assert_eq!((&report["launcher"], &report["hosts"]), (&launcher.into(), &1.into()));
    assert_eq!(report["measured_s"].as_array().unwrap().len(), 2);
}

const RUN: [&str; 7] = ["run", SIX[0], SIX[1], "--repeat", "2", "--format", "json"];

#[test]
fn as_ranks_of_our_own_launcher() {
    let program = env!("CARGO_BIN_EXE_crossmesh");
    let said = crossmesh(&[&["launch", "-n", "6", "--", program][..], &RUN].concat());
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let stdout: String = said.stdout.lines().map(|line| line.strip_prefix("[0] ").unwrap()).collect();
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&report["verified"], &report["launcher"]), (&true.into(), &"crossmesh launch".into()));
}

#[test]
fn across_hosts_that_our_launcher_emulates() {
    needs_root();
    let hosts = ["launch", "-n", "6", "--per-host", "2", "--emulate", "1Gbit", "--"];
    let said = crossmesh(&[&hosts[..], &[env!("CARGO_BIN_EXE_crossmesh")], &RUN].concat());
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let stdout: String = said.stdout.lines().map(|line| line.strip_prefix("[0] ").unwrap()).collect();
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&report["verified"], &report["hosts"]), (&true.into(), &3.into()));
}

#[test]
fn as_ranks_of_torchrun() {
    let port = free_port();
    let said = job(6, &RUN, |rank| torchrun(rank, 6, &port));
    assert_one_report(&said, "torchrun");
    let note =
        "note: no CROSSMESH_SECRET was given; ranks know each other by TORCHELASTIC_RUN_ID and MASTER_PORT";
    assert!(said[0].2.starts_with(note), "{}", said[0].2);
}

/// Beyond this host a name that others can guess is no secret.
#[test]
fn without_a_secret_nobody_meets_beyond_loopback() {
    let mut variables = torchrun(0, 6, "29500");
    variables
        .iter_mut()
        .filter(|(name, _)| *name == "MASTER_ADDR")
        .for_each(|(_, addr)| *addr = "10.255.0.1".into());
    let said = finish(start(&RUN, variables));
    assert_eq!((said.0, said.1.as_str()), (2, ""));
    let why = "error: the job that torchrun started has no secret, and its ranks meet at 10.255.0.1";
    assert!(said.2.starts_with(why) && said.2.contains("hint: set CROSSMESH_SECRET"), "{}", said.2);
}

#[test]
fn as_ranks_of_slurm() {
    // Two jobs of these tests at a time should not share a number.
    let number = std::process::id().to_string();
    let said = job(6, &RUN, |rank| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", "6".into()),
            ("SLURM_LOCALID", rank.to_string()),
            ("SLURM_NODEID", "0".into()),
            ("SLURM_JOB_NUM_NODES", "1".into()),
            ("SLURM_JOB_NODELIST", "a-name-that-only-slurm-knows".into()),
            ("SLURM_JOB_ID", number.clone()),
            ("CROSSMESH_SECRET", "sixteen letters at least".into()),
        ]
    });
    assert_one_report(&said, "Slurm");
    assert_eq!(said[0].2, "");
}

#[test]
fn as_ranks_of_openmpi_at_a_place_of_ours() {
    let master = format!("127.0.0.1:{}", free_port());
    let said = job(6, &RUN, |rank| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", "6".into()),
            ("OMPI_MCA_orte_precondition_transports", "86154f6ac897253a-70a91866e5cbe81e".into()),
            ("CROSSMESH_MASTER", master.clone()),
            ("CROSSMESH_TRANSPORT", "sockets".into()),
        ]
    });
    assert_one_report(&said, "OpenMPI");
    assert_eq!(said[0].2, "");
}

#[test]
fn a_world_that_does_not_fit_is_refused_with_both_numbers() {
    for world in [5, 7] {
        let said = finish(start(&RUN, torchrun(0, world, "1")));
        assert_eq!((said.0, said.1.as_str()), (2, ""));
        let why = format!("error: the plan is for 6 ranks, the job that torchrun started has {world}\n");
        assert!(said.2.starts_with(&why), "{}", said.2);
    }
}

#[test]
fn standalone_starts_processes_anyway() {
    let said = finish(start(&[&RUN[..], &["--standalone"]].concat(), torchrun(1, 2, "1")));
    assert_eq!(said.0, 0, "{}", said.2);
    let report: serde_json::Value = serde_json::from_str(&said.1).unwrap();
    assert_eq!((&report["verified"], &report["launcher"]), (&true.into(), &serde_json::Value::Null));
}

#[test]
fn hosts_are_not_emulated_in_somebody_elses_job() {
    let said = finish(start(&[&RUN[..], &["--emulate", "1Gbit"]].concat(), torchrun(0, 6, "1")));
    assert!(
        said.2.starts_with("error: hosts cannot be emulated in a job that torchrun started"),
        "{}",
        said.2
    );
}

#[test]
fn a_bench_runs_all_its_cases_in_one_job_with_ranks_to_spare() {
    let port = free_port();
    let args = ["bench", "reshard", "--case", "1-to-m 1x", "--tensor-bytes", "256KiB", "--repeat", "2"];
    let said = job(6, &args, |rank| torchrun(rank, 6, &port));
    assert!(said.iter().all(|(code, ..)| *code == 0), "{said:?}");
    assert!(said[1..].iter().all(|(_, stdout, _)| stdout.is_empty()), "{said:?}");
    assert!(said[0].1.lines().filter(|line| line.ends_with("right")).count() >= 3, "{}", said[0].1);
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let port = free_port();
    let args = [&RUN[..], &["--arrive", "5s"]].concat();
    let said = job(5, &args, |rank| torchrun(rank, 6, &port));
    for (code, _, stderr) in said {
        assert_eq!(code, 2);
        assert!(stderr.contains("rank 5 did not within 5.0 s"), "{stderr}");
    }
}

#[test]
fn a_rank_that_dies_is_named_by_the_others() {
    let port = free_port();
    // Large enough, and often enough, to be under way for a while.
    let args = ["run", "u8[4194304]@A{x:1}(_)", "u8[4194304]@B{x:2}(_)", "--repeat", "100000"];
    let mut ranks: Vec<Child> = (0..3).map(|rank| start(&args, torchrun(rank, 3, &port))).collect();
    let mut victim = ranks.remove(1);
    let fills = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", victim.id())).unwrap_or_default();
        let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:"));
        let kib = shared.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kib.is_some_and(|kib| kib >= 4096)
    };
    assert!(eventually(PATIENCE, fills), "the run does not begin");
    victim.kill().unwrap();
    victim.wait().unwrap();
    for (code, stdout, stderr) in ranks.into_iter().map(finish) {
        assert_eq!((code, stdout.as_str()), (2, ""));
        let line = stderr.lines().last().unwrap();
        assert!(line.starts_with("error: r1 on ") && line.contains(" is gone: "), "{stderr}");
        assert_eq!(stderr.matches("error: ").count(), 1, "{stderr}");
    }
}
