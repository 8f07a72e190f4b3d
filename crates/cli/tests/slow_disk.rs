//! A disk that stands still for longer than any rank may be silent: training waits for it, nobody is blamed, and nothing is lost.
//! Mounting and freezing a disk needs root.

mod common;
mod tiny;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Scratch, ok};
use crossmesh_testkit::machine::{eventually, needs_root};
use tiny::Run;

const PATIENCE: Duration = Duration::from_secs(60);
/// A rank may be silent for a second; the disk is for three.
const DEADLINE: &str = "1s";
const FROZEN: Duration = Duration::from_secs(3);
const STEPS: usize = 60;

fn tool(name: &str, args: &[&str]) -> bool {
    Command::new(name).args(args).status().is_ok_and(|status| status.success())
}

/// A disk of its own, in a file, mounted as long as this value lives. It is never left frozen: whoever waits for it could not be ended.
struct Disk {
    at: PathBuf,
    scratch: Scratch,
}

impl Disk {
    fn new() -> Self {
        needs_root();
        let scratch = Scratch::new();
        let image = scratch.at("image");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let disk = Self { at: scratch.path().join("disk"), scratch };
        std::fs::create_dir(&disk.at).unwrap();
        assert!(tool("mkfs.ext4", &["-q", "-F", &image]), "no file system could be made");
        assert!(
            tool("mount", &["-o", "loop", &image, disk.name()]),
            "{} is not mounted",
            disk.scratch.at("disk")
        );
        disk
    }

    fn path(&self) -> &Path {
        &self.at
    }

    fn name(&self) -> &str {
        self.at.to_str().unwrap()
    }

    fn freeze(&self) {
        assert!(tool("fsfreeze", &["-f", self.name()]), "it does not freeze");
    }

    fn thaw(&self) -> bool {
        tool("fsfreeze", &["-u", self.name()])
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Most often it is thawed already, which the tool calls an error.
        let _thawed = Command::new("fsfreeze").args(["-u", self.name()]).stderr(Stdio::null()).status();
        assert!(eventually(PATIENCE, || tool("umount", &[self.name()])), "{} stays mounted", self.name());
    }
}

/// The names of all that was saved.
fn saved(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    names
}

#[test]
fn training_outlasts_a_disk_that_stands_still() {
    let (disk, run) = (Disk::new(), Run::new());
    let folder = disk.path().join("checkpoints");
    let sets = [
        format!("checkpoint.folder={}", folder.display()),
        "checkpoint.every=1".into(),
        "checkpoint.keep=1000".into(),
        format!("train.steps={STEPS}"),
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> = ["--deadline", DEADLINE].into_iter().chain(sets).collect();
    let mut command = run.command(&args);
    let mut training =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = eventually(PATIENCE, || saved(&folder).len() >= 3 || training.try_wait().unwrap().is_some());
    assert!(begun, "nothing is saved");
    disk.freeze();
    let then = saved(&folder);
    std::thread::sleep(FROZEN);
    let (now, runs) = (saved(&folder), training.try_wait().unwrap().is_none());
    assert!(disk.thaw(), "it does not thaw");
    assert_eq!(then, now, "it was not frozen");
    assert!(now.len() < STEPS, "it was over before: more steps are needed");
    let ended = eventually(PATIENCE, || training.try_wait().unwrap().is_some());
    if !ended {
        training.kill().unwrap();
    }
    let said = training.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&said.stderr);
    assert!(runs && ended && said.status.success(), "ran: {runs}, ended: {ended}: {stderr}");
    assert_eq!(run.metrics().len(), STEPS, "{stderr}");
    let last = folder.join(format!("step-{STEPS:08}"));
    assert_eq!(saved(&folder).last().map(String::as_str), last.file_name().and_then(|name| name.to_str()));
    ok(&["checkpoint", "check", last.to_str().unwrap()]);
}
