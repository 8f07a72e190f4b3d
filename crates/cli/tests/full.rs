//! A disk that is full, and shared memory that does not suffice: an error that says so, exit 2, and nothing left behind.
//! Mounting a small disk needs root.

mod common;
mod tiny;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use common::{Scratch, binary, ok};
use crossmesh_testkit::machine::{eventually, needs_root, output_within};
use tiny::{Run, trained};

const PATIENCE: Duration = Duration::from_secs(20);
const PAIR: [&str; 2] = ["f32[256,256]@A{tp:2}(tp,_)", "f32[256,256]@B{tp:3}(_,tp)"];
const FULL: &str = "No space left on device";
const HINT: &str = "\nhint: make room there, or write elsewhere";

/// A disk with hardly any room, mounted as long as this value lives.
struct SmallDisk {
    scratch: Scratch,
}

impl SmallDisk {
    fn new() -> Self {
        Self::with("size=64k,nr_inodes=64")
    }

    fn with(size: &str) -> Self {
        needs_root();
        let disk = Self { scratch: Scratch::new() };
        let options = ["-t", "tmpfs", "-o", size, "crossmesh-test"];
        assert!(Command::new("mount").args(options).arg(disk.path()).status().unwrap().success());
        disk
    }

    fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// Leaves room for nothing.
    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.path().join("ballast")).unwrap();
        while file.write_all(&[0; 512]).is_ok() {}
    }

    /// Everything there but the ballast.
    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path()).unwrap().map(|e| e.unwrap().path());
        let mut files: Vec<PathBuf> = entries.filter(|p| !p.ends_with("ballast")).collect();
        files.sort();
        files
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A process that is about to end may have a file open there.
        let unmounted =
            || Command::new("umount").arg(self.path()).status().is_ok_and(|status| status.success());
        assert!(eventually(Duration::from_secs(5), unmounted), "{} stays mounted", self.path().display());
    }
}

/// Must fail with exit 2 and an error, not with a signal or a panic. Returns stderr.
fn fails(command: &mut Command) -> String {
    let Output { status, stderr, .. } = output_within(command, PATIENCE);
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2), "{command:?}: {status}: {stderr}");
    assert!(stderr.contains("error: ") && !stderr.contains("panicked"), "{stderr}");
    stderr
}

#[test]
fn what_is_written_to_a_full_disk_fails_and_leaves_nothing() {
    let (disk, scratch) = (SmallDisk::new(), Scratch::new());
    let plan = scratch.at("plan.json");
    ok(&["plan", PAIR[0], PAIR[1], "-o", &plan]);
    disk.fill();
    let target = disk.path().join("x").display().to_string();
    let cases: [&[&str]; 7] = [
        &["plan", PAIR[0], PAIR[1], "-o", &target],
        &["explain", PAIR[0], PAIR[1], "--html", &target],
        &["simulate", &plan, "--trace", &target],
        &["bench", "reshard", "--predict", "--html", &target],
        &["run", PAIR[0], PAIR[1], "--trace", &target],
        &["run", PAIR[0], PAIR[1], "--flight", &target],
        &["run", &plan, "--flight", &target, "--trace", &scratch.at("trace.json")],
    ];
    for args in cases {
        let stderr = fails(binary().args(args));
        assert!(stderr.contains(&format!("cannot write {target}: {FULL}")), "{args:?}: {stderr}");
        assert!(stderr.contains(HINT), "{stderr}");
        assert_eq!(disk.files(), Vec::<PathBuf>::new(), "{args:?}");
    }
}

#[test]
fn what_was_there_before_stays() {
    let disk = SmallDisk::new();
    let plan = disk.path().join("plan.json");
    ok(&["plan", "f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)", "-o", plan.to_str().unwrap()]);
    let before = std::fs::read(&plan).unwrap();
    disk.fill();
    fails(binary().args(["plan", PAIR[0], PAIR[1], "-o"]).arg(&plan));
    assert_eq!(std::fs::read(&plan).unwrap(), before);
    assert_eq!(disk.files(), [plan]);
}

/// Activations that wait in a file on a full disk: the run ends, says where, and goes on from its checkpoint without the file.
#[test]
fn activations_that_find_no_room_are_named_and_nothing_is_lost() {
    let (disk, run) = (SmallDisk::new(), Run::new());
    trained(&run.train(&["--set", "train.steps=4"]));
    let checkpoint = run.scratch.path().join("runs/tiny/checkpoints/step-00000004");
    let manifest = std::fs::read(checkpoint.join("manifest.json")).unwrap();
    disk.fill();
    let offload = format!("train.offload={}", disk.path().display());
    let stderr = fails(&mut run.command(&["--resume", "--set", "train.steps=6", "--set", &offload]));
    let wanted = format!("of activations could not be written to {}: {FULL}", disk.path().display());
    assert!(stderr.contains(&wanted), "{stderr}");
    assert_eq!(disk.files(), Vec::<PathBuf>::new());
    assert_eq!(std::fs::read(checkpoint.join("manifest.json")).unwrap(), manifest);
    trained(&run.train(&["--resume", "--set", "train.steps=6"]));
    assert_eq!(run.metrics().len(), 6);
}

#[test]
fn an_answer_that_does_not_fit_is_an_error() {
    let disk = SmallDisk::new();
    disk.fill();
    let out = std::fs::File::create("/dev/full").unwrap();
    let mut child = binary().args(["explain", PAIR[0], PAIR[1]]).stdout(out).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
    // The plan that is handed to the ranks lies in TMPDIR.
    let stderr = fails(binary().args(["run", PAIR[0], PAIR[1]]).env("TMPDIR", disk.path()));
    let where_to = format!("no folder for the plan in {} (TMPDIR says where): ", disk.path().display());
    assert!(stderr.contains(&where_to) && stderr.contains(FULL), "{stderr}");
    assert_eq!(disk.files(), Vec::<PathBuf>::new());
}

/// What the ranks note down goes to TMPDIR too. There is room for itself, the folder and what the five ranks are handed, and
/// for no other file.
#[test]
fn a_record_that_a_rank_cannot_write_is_missed() {
    let (disk, scratch) = (SmallDisk::with("size=1m,nr_inodes=7"), Scratch::new());
    let mut command = binary();
    command.args(["run", PAIR[0], PAIR[1], "--trace", &scratch.at("trace.json")]);
    let stderr = fails(command.env("TMPDIR", disk.path()));
    assert!(stderr.contains("] cannot write ") && stderr.contains(FULL), "{stderr}");
    assert!(!scratch.path().join("trace.json").exists());
    assert_eq!(disk.files(), Vec::<PathBuf>::new());
}

/// A segment has the limits of a file (`ulimit -f`), and is taken as a whole at the start.
#[test]
fn shared_memory_that_does_not_suffice_is_named() {
    let pair = ["f32[2048,512]@A{tp:2}(tp,_)", "f32[2048,512]@B{tp:2}(_,_)"];
    let mut command = Command::new("bash");
    // 2 MiB; sources need two, destinations four.
    command.args(["-c", "ulimit -f 2048; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_crossmesh")]);
    let stderr = fails(command.arg("run").args(pair));
    let last = stderr.lines().rfind(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(
        ["error: r2 on h1 failed: ", "error: r3 on h1 failed: "].iter().any(|s| last.starts_with(s)),
        "{stderr}"
    );
    assert!(
        last.contains("cannot allocate its shards: no 4.00 MiB of shared memory: File too large"),
        "{stderr}"
    );
}

#[test]
fn more_memory_than_the_machine_has_is_refused_with_numbers() {
    // 1 TiB; nobody touches it.
    let pair = ["f32[262144,1048576]@A{tp:1}(_,_)", "f32[262144,1048576]@B{tp:1}(_,_)"];
    let stderr = fails(binary().arg("run").args(pair));
    assert!(stderr.contains("no 1.00 TiB of shared memory: 1.00 TiB are needed, and "), "{stderr}");
}
