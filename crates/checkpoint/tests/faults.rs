//! Whatever happens while a conversion runs: its target is whole or not there, and its source untouched.
//!
//! A test that needs another process starts itself again, with the name of a part of this file; parts with a disk of their
//! own run in a mount namespace, which needs root or user namespaces.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, Progress, RunOptions, Spec, open};
use crossmesh_testkit::seed::Seed;

const FOLDER: &str = "CROSSMESH_TEST_FOLDER";

/// Where a part of this file works, if it was started as one.
#[expect(clippy::disallowed_methods, reason = "how a test tells itself what to do")]
fn folder_of_part() -> Option<PathBuf> {
    std::env::var(FOLDER).ok().map(PathBuf::from)
}

/// This program, as one of its own parts.
fn part(name: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env(FOLDER, folder);
    command
}

/// A model of a few MiB, so that a conversion takes a while.
fn write_model(folder: &Path, bytes: usize) -> Model {
    let mut seed = Seed(77);
    let tensor = |i: usize| {
        let rows = bytes / 4 / 1024;
        let bytes = (0..rows * 1024).map(|_| seed.draw() as u8).collect();
        (format!("w.{i}"), Held { element: Element::U8, shape: vec![rows as u64, 1024], bytes })
    };
    let model: Model = (0..4).map(tensor).collect();
    write_hf(&model, folder);
    model
}

fn conversion(from: &Path) -> Conversion {
    Conversion::plan(open(from).unwrap(), Spec { cut: Cut::Rows(3), ..Spec::new(Format::Dcp) }).unwrap()
}

/// Small buffers make many slabs.
fn slow() -> RunOptions<'static> {
    RunOptions { max_memory: 400 << 10, threads: 2, ..RunOptions::default() }
}

#[test]
#[ignore = "a part of another test"]
fn converts_in_a_process_of_its_own() {
    let Some(folder) = folder_of_part() else { return };
    conversion(&folder.join("in")).run(&folder.join("out"), &slow()).unwrap();
}

fn hash(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn killed_at_any_moment_it_is_absent_or_whole_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&folder.path().join("in"), 4 << 20);
    let source = hash(&folder.path().join("in"));
    conversion(&folder.path().join("in")).run(&folder.path().join("whole"), &slow()).unwrap();
    let whole = hash(&folder.path().join("whole"));
    let out = folder.path().join("out");
    let mut seed = Seed(4);
    let mut left = 0;
    for round in 0..crossmesh_testkit::sweep::count(10) {
        let mut child = part("converts_in_a_process_of_its_own", folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Any moment will do: what has to hold holds at all of them.
        std::thread::sleep(Duration::from_micros(seed.below(60_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(hash(&folder.path().join("in")) == source, "round {round}: the source is as it was");
        if out.exists() {
            assert!(hash(&out) == whole, "round {round}: whole");
            std::fs::remove_dir_all(&out).unwrap();
        } else {
            left += usize::from(folder.path().join(".out.partial").exists());
        }
    }
    eprintln!("{left} kills left something to go on from");
    let report = conversion(&folder.path().join("in")).run(&out, &slow()).unwrap();
    assert!(hash(&out) == whole);
    assert!(report.bytes_kept <= report.bytes_written);
    assert!(!folder.path().join(".out.partial").exists());
    assert_eq!(read_slowly(&open(&out).unwrap()), model);
}

#[test]
fn a_second_start_keeps_what_the_first_has_written() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    let status = part("ends_itself_in_the_middle", folder.path()).stdout(Stdio::null()).status().unwrap();
    assert!(!status.success());
    let report = conversion(&folder.path().join("in")).run(&folder.path().join("out"), &slow()).unwrap();
    assert!(report.bytes_kept >= 4 * (64 << 10), "{report:?}");
    assert_eq!(report.bytes_kept + report.bytes_read, 1 << 20);
    conversion(&folder.path().join("in")).run(&folder.path().join("whole"), &slow()).unwrap();
    assert!(hash(&folder.path().join("out")) == hash(&folder.path().join("whole")));
}

#[test]
#[ignore = "a part of another test"]
fn ends_itself_in_the_middle() {
    let Some(folder) = folder_of_part() else { return };
    let slabs = AtomicUsize::new(0);
    let die = |_: Progress| {
        if slabs.fetch_add(1, Ordering::Relaxed) == 5 {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    };
    let options = RunOptions { progress: Some(&die), ..slow() };
    let _ = conversion(&folder.join("in")).run(&folder.join("out"), &options);
}

#[test]
fn what_another_conversion_left_is_not_gone_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&folder.path().join("in"), 1 << 20);
    part("ends_itself_in_the_middle", folder.path()).stdout(Stdio::null()).status().unwrap();
    // Other boxes: nothing of what is there is right.
    let plan = |cut| {
        Conversion::plan(open(&folder.path().join("in")).unwrap(), Spec { cut, ..Spec::new(Format::Dcp) })
    };
    let report = plan(Cut::Rows(5)).unwrap().run(&folder.path().join("out"), &slow()).unwrap();
    assert_eq!(report.bytes_kept, 0);
    assert_eq!(read_slowly(&open(&folder.path().join("out")).unwrap()), model);
    let again = plan(Cut::Rows(5)).unwrap().run(&folder.path().join("out"), &slow()).unwrap_err();
    assert!(again.to_string().contains("it is there already"), "{again}");
}

/// Does something to the source after the first slab, and says what came of it.
fn disturbed(disturb: impl Fn(&Path) + Sync) -> (String, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    let path = folder.path().join("in/model.safetensors");
    let slabs = AtomicUsize::new(0);
    let once = |_: Progress| {
        if slabs.fetch_add(1, Ordering::Relaxed) == 0 {
            disturb(&path);
        }
    };
    let options = RunOptions { progress: Some(&once), threads: 1, ..slow() };
    let error = conversion(&folder.path().join("in")).run(&folder.path().join("out"), &options).unwrap_err();
    (error.to_string(), folder)
}

fn nothing_stays(folder: &Path) {
    let names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, ["in"]);
}

#[test]
fn a_file_that_shrinks_while_it_is_read() {
    let (error, folder) = disturbed(|path| {
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100_000).unwrap();
    });
    assert!(error.contains("model.safetensors: it became shorter while it was read"), "{error}");
    nothing_stays(folder.path());
}

#[test]
fn a_file_that_changes_while_it_is_read() {
    let (error, folder) = disturbed(|path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, bytes).unwrap();
    });
    assert!(error.contains("model.safetensors: it changed while it was read"), "{error}");
    nothing_stays(folder.path());
}

#[test]
fn stopped_from_outside_it_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let now = |_: Progress| stop.store(true, Ordering::Relaxed);
    let options = RunOptions { progress: Some(&now), stop: Some(&stop), ..slow() };
    let error = conversion(&folder.path().join("in")).run(&folder.path().join("out"), &options).unwrap_err();
    assert!(error.to_string().contains("was stopped"), "{error}");
    nothing_stays(folder.path());
}

/// A part that has a file system of its own, made by these words of mount.
fn on_a_disk(name: &str, mount: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    std::fs::write(folder.path().join("in/tokenizer.json"), vec![b' '; 300 << 10]).unwrap();
    std::fs::create_dir(folder.path().join("disk")).unwrap();
    let script = format!("mount -t tmpfs -o {mount} tmpfs \"${FOLDER}/disk\" && exec \"$0\" \"$@\"");
    let root = rustix::process::geteuid().is_root();
    let run = part(name, folder.path());
    let output = Command::new("unshare")
        .args(if root { &["--mount"][..] } else { &["--mount", "--user", "--map-root-user"] })
        .args(["sh", "-c", &script])
        .arg(run.get_program())
        .args(run.get_args())
        .env(FOLDER, folder.path())
        .output()
        .expect("unshare and mount are there: util-linux");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_full_disk_is_named_and_nothing_stays() {
    on_a_disk("writes_to_a_full_disk", "size=512k");
    on_a_disk("writes_to_a_full_disk", "size=1200k");
}

#[test]
#[ignore = "a part of another test"]
fn writes_to_a_full_disk() {
    let Some(folder) = folder_of_part() else { return };
    let error =
        conversion(&folder.join("in")).run(&folder.join("disk/out"), &slow()).unwrap_err().to_string();
    // Known before the first byte, or when what lies beside the tensors is copied.
    assert!(error.contains("the disk has room for") || error.contains("No space left"), "{error}");
    assert!(error.contains("disk/out") || error.contains("tokenizer.json"), "{error}");
    assert_eq!(std::fs::read_dir(folder.join("disk")).unwrap().count(), 0, "nothing stays");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    on_a_disk("writes_to_a_folder_that_cannot_be_written", "size=8m,ro");
}

#[test]
#[ignore = "a part of another test"]
fn writes_to_a_folder_that_cannot_be_written() {
    let Some(folder) = folder_of_part() else { return };
    let error =
        conversion(&folder.join("in")).run(&folder.join("disk/out"), &slow()).unwrap_err().to_string();
    assert!(error.contains("cannot make the folder") && error.contains("disk/.out.partial"), "{error}");
}
