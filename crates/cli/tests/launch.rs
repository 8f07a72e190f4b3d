//! `crossmesh launch`: environment, output, exit status, and an end for every process.

mod common;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Scratch, binary, crossmesh};
use crossmesh_testkit::machine::{alive, descendants, eventually, namespaces_of, needs_root};

const PATIENCE: Duration = Duration::from_secs(10);

fn sorted_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_knows_its_place() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR ${#CROSSMESH_SECRET}";
    let said = crossmesh(&["launch", "-n", "3", "--master-port", "4242", "--", "sh", "-c", script]);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let expected = ["[0] 0 3 0 3 127.0.0.1 64", "[1] 1 3 1 3 127.0.0.1 64", "[2] 2 3 2 3 127.0.0.1 64"];
    assert_eq!(sorted_lines(&said.stdout), expected);
}

#[test]
fn how_a_job_ended_is_a_document_too() {
    let fine = crossmesh(&["launch", "-n", "2", "--json", "--", "sh", "-c", "echo $RANK"]);
    assert_eq!(sorted_lines(&fine.stderr), ["[0] 0", "[1] 1"], "stdout is for the document");
    let end = fine.json();
    assert_eq!((&end["schema"], &end["outcome"]), (&"crossmesh.launch/1".into(), &"done".into()));
    assert_eq!((&end["ranks"], &end["hosts"], &end["exit_code"]), (&2.into(), &1.into(), &0.into()));
    let failed = "test $RANK = 1 && exit 9; sleep 60";
    let failed = crossmesh(&["launch", "-n", "2", "--format", "json", "--", "sh", "-c", failed]);
    assert_eq!((failed.code, &failed.json()["outcome"]), (9, &"failed".into()));
    assert_eq!((&failed.json()["failed_rank"], &failed.json()["exit_code"]), (&1.into(), &9.into()));
}

/// A reader that takes its time gets every line.
#[test]
fn a_slow_reader_gets_all_of_the_output() {
    let pipe = format!(
        "({} launch -n 1 -- sh -c 'seq 1 18000') | (sleep 2; wc -l)",
        env!("CARGO_BIN_EXE_crossmesh")
    );
    let out = Command::new("sh").args(["-c", &pipe]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "18000");
}

#[test]
fn a_host_that_would_be_an_option_is_refused() {
    let args = ["launch", "-n", "1", "--hosts=-oProxyCommand=true", "--", "true"];
    let said = crossmesh(&args);
    assert_eq!(said.code, 2);
    assert!(said.stderr.starts_with("error: `-oProxyCommand=true` is no name of a host"), "{}", said.stderr);
}

#[test]
fn the_first_failure_is_named_and_its_status_ours() {
    let script = "test $RANK = 1 && exit 9; sleep 60";
    let said = crossmesh(&["launch", "-n", "3", "--", "sh", "-c", script]);
    assert_eq!(said.code, 9);
    assert_eq!(said.stderr, "launch: r1 failed (exit status: 9); the others were ended\n");
}

#[test]
fn hosts_are_reached_by_a_command_of_choice() {
    let scratch = Scratch::new();
    // Instead of ssh: tells the host's name and runs the rest here.
    let rsh = scratch.file("rsh", "h=$1; shift; echo to $h; exec sh -c \"$*\"\n");
    let rsh = format!("sh {}", rsh.display());
    let args = ["launch", "-n", "3", "--hosts", "a,b", "--rsh", &rsh, "--master-port", "1", "--", "sh", "-c"];
    let said = crossmesh(&[&args[..], &["echo \"$RANK $LOCAL_RANK\" $MASTER_ADDR:$MASTER_PORT"]].concat());
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let expected = ["[0] 0 0 a:1", "[0] to a", "[1] 1 1 a:1", "[1] to a", "[2] 2 0 a:1", "[2] to b"];
    assert_eq!(sorted_lines(&said.stdout), expected);
}

#[test]
fn emulated_hosts_have_addresses_and_go_away() {
    needs_root();
    let args = ["launch", "-n", "3", "--per-host", "2", "--emulate", "100Mbit", "--", "sh", "-c"];
    let script = "echo $CROSSMESH_HOST $MASTER_ADDR $(ip -4 -br addr show nic | tr -s ' ' | cut -d' ' -f3)";
    let said = crossmesh(&[&args[..], &[script]].concat());
    assert_eq!((said.code, said.stderr.as_str()), (0, ""));
    let expected =
        ["[0] h0 10.77.0.1 10.77.0.1/24", "[1] h0 10.77.0.1 10.77.0.1/24", "[2] h1 10.77.0.1 10.77.0.2/24"];
    assert_eq!(sorted_lines(&said.stdout), expected);
}

/// A launcher with two processes on emulated hosts that would run for a minute.
fn a_long_job() -> (Child, Vec<u32>) {
    let args =
        ["launch", "-n", "2", "--per-host", "1", "--emulate", "100Mbit", "--", "sh", "-c", "sleep 60 & wait"];
    let child =
        binary().args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Two ranks, what each of them started, and the janitor.
    assert!(eventually(PATIENCE, || descendants(child.id()).len() == 5), "{:?}", descendants(child.id()));
    let pids = descendants(child.id());
    (child, pids)
}

#[test]
fn an_interrupted_launcher_leaves_nothing() {
    needs_root();
    let (mut launcher, pids) = a_long_job();
    assert_eq!(namespaces_of(launcher.id()).len(), 3);
    Command::new("kill").args(["-INT", &launcher.id().to_string()]).status().unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(130));
    assert_eq!(namespaces_of(launcher.id()), Vec::<String>::new());
    assert!(eventually(PATIENCE, || pids.iter().all(|pid| !alive(*pid))));
}

/// Whatever it started, and whatever they did: kill -9 leaves neither processes nor namespaces.
#[test]
fn a_killed_launcher_takes_everything_along() {
    needs_root();
    let (mut launcher, pids) = a_long_job();
    assert_eq!(namespaces_of(launcher.id()).len(), 3);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert!(eventually(PATIENCE, || pids.iter().all(|pid| !alive(*pid))), "processes are left");
    assert!(eventually(PATIENCE, || namespaces_of(launcher.id()).is_empty()), "namespaces are left");
}

/// The same for `run`, which has a folder too.
#[test]
fn a_killed_run_takes_its_folder_along() {
    let scratch = Scratch::new();
    let mut command = binary();
    command.args(["run", "u8[4194304]@A{x:1}(_)", "u8[4194304]@B{x:2}(_)", "--repeat", "100000"]);
    command.env("TMPDIR", scratch.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut launcher = command.spawn().unwrap();
    let folders = || std::fs::read_dir(scratch.path()).unwrap().count();
    // Three ranks and the janitor.
    assert!(eventually(PATIENCE, || folders() == 1 && descendants(launcher.id()).len() == 4));
    let pids = descendants(launcher.id());
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert!(eventually(PATIENCE, || pids.iter().all(|pid| !alive(*pid))), "processes are left");
    assert!(eventually(PATIENCE, || folders() == 0), "its folder is left");
}
