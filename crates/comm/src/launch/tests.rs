use std::sync::{Arc, Mutex, MutexGuard};

use crossmesh_testkit::machine::{alive, eventually};

use super::*;

/// Signals belong to the whole process: tests that look at them take turns.
fn signals() -> (Signals, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    (Signals::watch().unwrap(), turn)
}

const PROMPT: Grace =
    Grace { after_failure: Duration::from_millis(100), after_term: Duration::from_secs(1), to_finish: None };

fn shell(rank: u32, script: &str) -> Process {
    let args = vec!["-c".into(), script.into()];
    Process {
        rank: Rank(rank),
        program: "sh".into(),
        args,
        env: BTreeMap::new(),
        namespace: None,
        stdin: None,
    }
}

/// A sink for lines, and what came.
fn lines() -> (OnLine, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    (
        Arc::new(move |line: Line<'_>| sink.lock().unwrap().push(format!("[{}] {}", line.rank.0, line.text))),
        lines,
    )
}

fn soon() -> Option<Deadline> {
    Some(Deadline::after(Duration::from_secs(10)))
}

/// Killed grandchildren are reaped by init, in its own time.
fn gone(pid: u32) -> bool {
    eventually(Duration::from_secs(5), || !alive(pid))
}

#[test]
fn output_comes_line_by_line_and_all_of_it() {
    let (signals, _turn) = signals();
    let (sink, seen) = lines();
    let processes = (0..3).map(|r| shell(r, "echo out; echo err >&2; printf no-newline")).collect();
    let outcome = Job::start(processes, sink, PROMPT).unwrap().wait(&signals, soon());
    assert_eq!(outcome, Outcome::Done);
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    let expected: Vec<String> =
        (0..3).flat_map(|r| ["err", "no-newline", "out"].map(|text| format!("[{r}] {text}"))).collect();
    assert_eq!(seen, expected);
}

/// A reader that is slower than any drain: everything arrives all the same.
#[test]
fn a_slow_reader_loses_no_line() {
    let (signals, _turn) = signals();
    let count = Arc::new(Mutex::new(0));
    let sink = count.clone();
    let slow: OnLine = Arc::new(move |_: Line<'_>| {
        let mut count = sink.lock().unwrap();
        *count += 1;
        if *count == 1 {
            std::thread::sleep(Duration::from_millis(1500));
        }
    });
    let outcome = Job::start(vec![shell(0, "seq 1 18000")], slow, PROMPT).unwrap().wait(&signals, soon());
    assert_eq!((outcome, *count.lock().unwrap()), (Outcome::Done, 18_000));
}

/// A process outside the group holds the pipe: nobody waits for it.
#[test]
fn a_pipe_that_somebody_else_holds_delays_nothing() {
    let (signals, _turn) = signals();
    let (sink, seen) = lines();
    let job = Job::start(vec![shell(0, "setsid sleep 20 & echo $!")], sink, PROMPT).unwrap();
    let outcome = job.wait(&signals, soon());
    assert_eq!(outcome, Outcome::Done, "the deadline is shorter than the sleep");
    let pid: i32 = seen.lock().unwrap()[0].split(' ').nth(1).unwrap().parse().unwrap();
    let _ = rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

#[test]
fn the_first_failure_ends_all_with_its_code() {
    let (signals, _turn) = signals();
    let (sink, seen) = lines();
    // A grandchild in the background, and one that will not listen; the failure waits for both to have said who they are.
    let folder = tempfile::tempdir().unwrap();
    let mark = |name: &str| folder.path().join(name).display().to_string();
    let (a, b) = (mark("a"), mark("b"));
    let processes = vec![
        shell(0, &format!("sleep 60 & echo $!; touch {a}; wait")),
        shell(1, &format!("trap '' TERM; echo $$; touch {b}; while :; do sleep 1; done")),
        shell(2, &format!("until [ -e {a} ] && [ -e {b} ]; do sleep 0.02; done; exit 7")),
    ];
    let job = Job::start(processes, sink, PROMPT).unwrap();
    let pids = job.pids();
    let outcome = job.wait(&signals, soon());
    assert!(matches!(outcome, Outcome::Failed { rank: Rank(2), .. }), "{outcome:?}");
    assert_eq!(outcome.exit_code(), 7);
    let printed: Vec<u32> =
        seen.lock().unwrap().iter().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert_eq!(printed.len(), 2);
    assert!(pids.into_values().chain(printed).all(gone));
}

#[test]
fn a_killed_process_counts_as_failed() {
    let (signals, _turn) = signals();
    let processes = vec![shell(0, "sleep 60"), shell(1, "kill -9 $$")];
    let outcome = Job::start(processes, lines().0, PROMPT).unwrap().wait(&signals, soon());
    assert_eq!(outcome.exit_code(), 137);
}

#[test]
fn a_signal_to_the_launcher_reaches_everybody() {
    let (signals, _turn) = signals();
    let (sink, seen) = lines();
    let job = Job::start(
        vec![shell(0, "trap 'echo bye; exit' INT; echo hi; while :; do sleep 0.05; done")],
        sink,
        PROMPT,
    );
    let job = job.unwrap();
    let deadline = Deadline::after(Duration::from_secs(5));
    while seen.lock().unwrap().is_empty() && !deadline.passed() {
        std::thread::sleep(LOOK);
    }
    signal_hook::low_level::raise(signal_hook::consts::SIGINT).unwrap();
    assert_eq!(job.wait(&signals, soon()), Outcome::Signalled(2));
    assert_eq!(*seen.lock().unwrap(), ["[0] hi", "[0] bye"]);
}

#[test]
fn what_takes_too_long_is_ended() {
    let (signals, _turn) = signals();
    let job = Job::start(vec![shell(0, "sleep 60")], lines().0, PROMPT).unwrap();
    let pids = job.pids();
    let outcome = job.wait(&signals, Some(Deadline::after(Duration::from_millis(100))));
    assert_eq!(outcome, Outcome::TimedOut);
    assert!(pids.into_values().all(gone));
}

#[test]
fn a_program_that_is_not_there_is_named_and_nothing_stays() {
    let missing = Process { program: "/no/such/program".into(), ..shell(1, "") };
    let error = Job::start(vec![shell(0, "sleep 60"), missing], lines().0, PROMPT).err().unwrap();
    assert!(error.to_string().starts_with("cannot start `/no/such/program` as r1: "), "{error}");
}

#[test]
fn a_remote_process_gets_its_environment_and_ends_with_its_input() {
    let (signals, _turn) = signals();
    // Instead of ssh: a shell that ignores the host and runs the line.
    let rsh = ["sh".to_string(), "-c".into(), "exec sh -c \"$1\"".into()];
    let env = [("RANK", "4"), (crate::auth::SECRET_VARIABLE, "quite secret")];
    let env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let command = ["sh", "-c", "echo $RANK $CROSSMESH_SECRET; exit 5"].map(String::from);
    let (sink, seen) = lines();
    let process = remote_command(Rank(4), &rsh, "node7", &env, &command).unwrap();
    let outcome = Job::start(vec![process], sink, PROMPT).unwrap().wait(&signals, soon());
    assert_eq!((outcome.exit_code(), seen.lock().unwrap().join("|").as_str()), (5, "[4] 4 quite secret"));
}

#[test]
fn a_remote_process_ends_when_its_launcher_is_gone() {
    let (sink, seen) = lines();
    let rsh = ["sh".to_string(), "-c".into(), "exec sh -c \"$1\"".into()];
    let command = ["sh", "-c", "echo $$; sleep 60"].map(String::from);
    let process = remote_command(Rank(0), &rsh, "node7", &BTreeMap::new(), &command).unwrap();
    let mut child = spawn(process).unwrap();
    let mut pumps = output::Pumps::new(sink);
    pumps.follow(Rank(0), &mut child).unwrap();
    pumps.start().unwrap();
    let deadline = Deadline::after(Duration::from_secs(5));
    while seen.lock().unwrap().is_empty() && !deadline.passed() {
        std::thread::sleep(LOOK);
    }
    let pid: u32 = seen.lock().unwrap()[0].split(' ').nth(1).unwrap().parse().unwrap();
    assert!(alive(pid));
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(gone(pid));
}
