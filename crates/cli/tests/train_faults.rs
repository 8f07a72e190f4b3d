//! A rank that is killed while weights are on their way to it and from it: whoever is left names it at once, and ends.
//!
//! With `optimizer.zero = 3` a rank has its share of every weight, and gathers a unit's before each of its passes. On hosts with slow NICs and a row to
//! compute with, nearly all of a step is gathers and, at its end, gradients dealt out:
//!
//! ```text
//! r0  | gather | gather | gather .. F | gather | gather .. B, W | deal out | step 3's line | gather | ga
//! r1  | gather | gather | gather .. F | gather | gather .. B, W | deal out |               | gather ✗ kill -9
//! ```

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Scratch, binary};
use crossmesh_testkit::machine::{
    alive, descendants, eventually, namespaces_of, needs_root, rank_of, sent_by_host, shared_segments,
    slowness,
};

const PROMPT: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(40);
/// Steps before the fault.
const STEPS: &str = "step   3 ";

/// Some 200,000 weights, a row a rank, a host a rank.
fn config(ranks: u32) -> String {
    format!(
        "[model]\ncontext = 2\nwidth = 64\nlayers = 4\nheads = 2\n[data]\nvocab = 8\ngroups = 1\nbranching = 2\n\
         [train]\nsteps = 400\nbatch = {ranks}\nmicrobatches = 1\n[optimizer]\nzero = 3\n[log]\nevery = 1\n\
         [evaluate]\nevery = 0\n[cluster]\ndevices_per_host = 1\n[[stage]]\nmesh = \"dp {ranks}\"\n"
    )
}

/// Kills a rank of a job in the middle of a gather; what is wrong with how that ended.
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn killed(ranks: u32, victim: u32) -> Vec<String> {
    let scratch = Scratch::new();
    scratch.file("gather.toml", config(ranks));
    let mut command = binary();
    command.current_dir(scratch.path()).args(["train", "gather.toml", "--emulate", "6Mbit"]);
    let mut launcher =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = launcher.id();
    let mut lines = BufReader::new(launcher.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut heard = vec![];
    for line in lines.by_ref() {
        heard.push(line);
        if heard.last().is_some_and(|line| line.starts_with(STEPS)) {
            break;
        }
    }
    assert!(heard.last().is_some_and(|l| l.starts_with(STEPS)), "dp {ranks}: {}", heard.join("\n"));
    let processes: BTreeMap<u32, u32> =
        descendants(pid).into_iter().filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
    assert_eq!(processes.len(), ranks as usize);
    // A step's F gathers all weights: each rank sends its share to every other. A fifth of that is on its way.
    let share = 200_000 * 4 / u64::from(ranks) * u64::from(ranks - 1);
    let before = sent_by_host(pid, victim);
    let begun = eventually(PATIENCE, || sent_by_host(pid, victim) > before + share / 5);
    assert!(begun, "dp {ranks}: r{victim} sends nothing");
    let (start, load) = (Instant::now(), slowness());
    let kill = Command::new("kill").args(["-KILL", &processes[&victim].to_string()]).status();
    assert!(kill.unwrap().success());
    let rest: Vec<(Duration, String)> = lines.map(|line| (start.elapsed(), line)).collect();
    let status = launcher.wait().unwrap();
    let mut wrong = vec![];
    if status.code() != Some(2) {
        wrong.push(format!("the launcher ended with {status}"));
    }
    let name = format!("error: r{victim} on h{victim} ");
    let limit = PROMPT.mul_f64(load.max(slowness()));
    match rest.iter().rfind(|(_, line)| line.starts_with("error: ")) {
        Some((after, line)) if line.starts_with(&name) && *after <= limit => {
            // Between two units' gathers there is a moment in which nobody waits for it.
            let gather = ["tensor all-gather", " B outstanding"].iter().all(|word| line.contains(word));
            let idle = ["nothing was outstanding with it", "during nothing in particular"];
            if !gather && !idle.iter().any(|words| line.contains(words)) {
                wrong.push(format!("it does not say what was under way: {line}"));
            }
        }
        other => wrong.push(format!("within {limit:?} nobody says that it was r{victim}: {other:?}")),
    }
    if processes.values().any(|pid| alive(*pid)) || !namespaces_of(pid).is_empty() {
        wrong.push("processes or namespaces are left".into());
    }
    if !wrong.is_empty() {
        wrong.push(rest.iter().map(|(after, line)| format!("\n    {after:.2?} {line}")).collect());
    }
    wrong.into_iter().map(|what| format!("dp {ranks}, r{victim}: {what}")).collect()
}

#[test]
fn a_rank_killed_during_a_gather_is_named_within_two_seconds() {
    needs_root();
    let segments = shared_segments();
    let cases = [(2, 1), (3, 0), (4, 2)];
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let runs: Vec<_> = cases.map(|(ranks, victim)| scope.spawn(move || killed(ranks, victim))).into();
        runs.into_iter().flat_map(|run| run.join().expect("a case")).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(shared_segments(), segments);
}
