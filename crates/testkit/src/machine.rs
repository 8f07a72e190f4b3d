//! Tests that use the machine: processes with a deadline, network namespaces, and what was left behind.
//!
//! Tests that need root say so by [`needs_root`]: on CI they run; nowhere do they quietly step aside.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::{Builder, sleep};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const LOOK: Duration = Duration::from_millis(5);
const ENTER: Duration = Duration::from_secs(2);

/// By how much more may everything take on this machine, now? Times are promised for one that is not overloaded: one that
/// wants to run for every core. Names have to be right on any.
pub fn slowness() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = text.split(' ').next().and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (load / cores as f64).clamp(1.0, 4.0)
}

/// Fails a test that cannot mean anything without root.
pub fn needs_root() {
    assert!(rustix::process::geteuid().is_root(), "this test makes network namespaces: run it as root");
}

/// Runs `work` on a thread inside a network namespace.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = Builder::new().name(namespace.into()).spawn_scoped(scope, || {
            // The name is there a moment before the namespace is.
            assert!(eventually(ENTER, || enter(namespace)), "{namespace} cannot be entered");
            work()
        });
        thread.expect("a thread can be started").join().expect("the work does not panic")
    })
}

/// Moves this thread into a network namespace.
fn enter(namespace: &str) -> bool {
    let file = File::open(Path::new("/run/netns").join(namespace));
    file.is_ok_and(|file| {
        let fd = std::os::fd::AsFd::as_fd(&file);
        move_into_link_name_space(fd, Some(LinkNameSpaceType::Network)).is_ok()
    })
}

/// A process's output; it is killed, and the test fails, if it takes longer than `limit`.
pub fn output_within(command: &mut Command, limit: Duration) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    let pid = Pid::from_child(&child);
    let waiting = Builder::new().spawn(move || child.wait_with_output()).expect("a thread can be started");
    if !eventually(limit, || waiting.is_finished()) {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} takes longer than {limit:?}");
    }
    waiting.join().expect("waiting does not panic").expect("its output can be read")
}

/// mpirun for `ranks` processes on this machine, however few cores it has and whoever we are.
pub fn mpirun(ranks: u32) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "-n", &ranks.to_string()]);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    // Containers may forbid to read another process's memory, of which OpenMPI does not know before it tries.
    command.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    command
}

/// Waits until something is so, or `limit` has passed.
pub fn eventually(limit: Duration, mut so: impl FnMut() -> bool) -> bool {
    for _ in 0..=limit.as_millis() / LOOK.as_millis() {
        if so() {
            return true;
        }
        sleep(LOOK);
    }
    so()
}

/// Whether a process runs; one that has ended and waits for its parent to notice does not.
pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state is behind the name, which may hold anything, in parentheses.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

/// The processes that `pid` started, and those that they did.
pub fn descendants(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = texts
        .flat_map(|text| text.split_whitespace().filter_map(|w| w.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.iter().flat_map(|child| [vec![*child], descendants(*child)].concat()).collect()
}

/// The network namespaces that a process made for its emulated hosts.
pub fn namespaces_of(pid: u32) -> Vec<String> {
    let prefix = format!("xm{pid}.");
    names_in("/run/netns").into_iter().filter(|name| name.starts_with(&prefix)).collect()
}

/// Shared memory of ours that has a name, and would outlive its processes. (What has none cannot.)
pub fn shared_segments() -> Vec<String> {
    names_in("/dev/shm").into_iter().filter(|name| name.contains("crossmesh")).collect()
}

/// Bytes that left an emulated host by its NIC so far.
pub fn sent_by_host(launcher: u32, host: u32) -> u64 {
    let all = namespaces_of(launcher);
    let Some(namespace) = all.iter().find(|n| n.ends_with(&format!("-h{host}"))) else { return 0 };
    let counters =
        inside(namespace, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default());
    let nic = counters.lines().find(|l| l.trim_start().starts_with("nic:")).unwrap_or("");
    nic.split_whitespace().nth(9).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The rank of a process, by its environment.
pub fn rank_of(pid: u32) -> Option<u32> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let environment = String::from_utf8_lossy(&bytes);
    environment.split('\0').find_map(|v| v.strip_prefix("RANK="))?.parse().ok()
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
