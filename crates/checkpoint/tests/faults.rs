//! Whatever happens while a conversion runs: its target is whole or not there, and its source untouched.
//!
//! A test that needs another process starts itself again, with the name of a part of this file; parts with a disk of their
//! own run in a mount namespace, which needs root or user namespaces.

mod common;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, Progress, RunOptions, Spec, open};
use crossmesh_testkit::seed::Seed;

/// Said for every slab that is written; no letter of what else is said.
const MARK: u8 = 1;
const FOLDER: &str = "CROSSMESH_TEST_FOLDER";
const FORMAT: &str = "CROSSMESH_TEST_FORMAT";

/// Where a part of this file works, if it was started as one.
#[expect(clippy::disallowed_methods, reason = "how a test tells itself what to do")]
fn folder_of_part() -> Option<PathBuf> {
    std::env::var(FOLDER).ok().map(PathBuf::from)
}

/// What that part writes.
#[expect(clippy::disallowed_methods, reason = "how a test tells itself what to do")]
fn format_of_part() -> Format {
    std::env::var(FORMAT).map_or(Format::Dcp, |name| name.parse().unwrap())
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
        (format!("w.{i}"), Held { element: Element::F32, shape: vec![rows as u64, 256], bytes })
    };
    let model: Model = (0..4).map(tensor).collect();
    write_hf(&model, folder);
    model
}

fn conversion(from: &Path) -> Conversion {
    conversion_to(Format::Dcp, from)
}

fn conversion_to(format: Format, from: &Path) -> Conversion {
    // Hugging Face's files hold whole tensors, one in each here.
    let cut = if format == Format::Hf { Cut::Whole } else { Cut::Rows(3) };
    Conversion::plan(open(from).unwrap(), Spec { cut, shard_bytes: 1, ..Spec::new(format) }).unwrap()
}

/// Small buffers make many slabs.
fn slow() -> RunOptions<'static> {
    RunOptions { max_memory: 400 << 10, threads: 2, ..RunOptions::default() }
}

#[test]
#[ignore = "a part of another test"]
fn converts_in_a_process_of_its_own() {
    let Some(folder) = folder_of_part() else { return };
    // A mark for every slab, so that whoever wants to come in the middle can.
    let tell = |_: Progress| {
        let mut out = std::io::stdout();
        out.write_all(&[MARK]).and_then(|()| out.flush()).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    };
    let options = RunOptions { progress: Some(&tell), ..slow() };
    conversion_to(format_of_part(), &folder.join("in")).run(&folder.join("out"), &options).unwrap();
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
    let rounds = crossmesh_testkit::sweep::count(12);
    let formats = [Format::Dcp, Format::Hf, Format::Crossmesh];
    for (i, format) in formats.into_iter().enumerate() {
        killed(format, (rounds + i) / formats.len(), &mut Seed(4 + i as u64));
    }
}

/// Kills conversions to a format so often, and brings the last of them to its end.
fn killed(format: Format, rounds: usize, seed: &mut Seed) {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&folder.path().join("in"), 4 << 20);
    let source = hash(&folder.path().join("in"));
    conversion_to(format, &folder.path().join("in")).run(&folder.path().join("whole"), &slow()).unwrap();
    let whole = hash(&folder.path().join("whole"));
    let out = folder.path().join("out");
    let mut in_the_middle = 0;
    for round in 0..rounds {
        let mut child = part("converts_in_a_process_of_its_own", folder.path())
            .env(FORMAT, format.name())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // While slabs are written, and at any other moment: what has to hold holds at all of them.
        let slabs = if round % 4 == 0 { 0 } else { 1 + seed.below(30) };
        await_marks(child.stdout.as_mut().unwrap(), slabs);
        let most = if slabs == 0 { 60_000 } else { 2000 };
        std::thread::sleep(Duration::from_micros(seed.below(most) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(hash(&folder.path().join("in")) == source, "{format} {round}: the source is as it was");
        if out.exists() {
            assert!(hash(&out) == whole, "{format} {round}: whole");
            std::fs::remove_dir_all(&out).unwrap();
        } else {
            let journal = folder.path().join(".out.partial/journal").metadata();
            in_the_middle += usize::from(journal.is_ok_and(|meta| meta.len() > 100));
        }
    }
    eprintln!("{format}: {in_the_middle} of {rounds} kills came while slabs were written");
    assert!(4 * in_the_middle >= rounds, "{format}: {in_the_middle} of {rounds} kills");
    let report = conversion_to(format, &folder.path().join("in")).run(&out, &slow()).unwrap();
    assert!(hash(&out) == whole, "{format}");
    assert!(report.bytes_kept <= report.bytes_written);
    assert!(!folder.path().join(".out.partial").exists());
    assert_eq!(read_slowly(&open(&out).unwrap()), model, "{format}");
}

/// Reads until so many slabs were written, or all.
fn await_marks(out: &mut impl Read, count: usize) {
    let (mut marks, mut bytes) = (0, [0; 64]);
    while marks < count {
        match out.read(&mut bytes).unwrap() {
            0 => return,
            n => marks += bytes[..n].iter().filter(|byte| **byte == MARK).count(),
        }
    }
}

#[test]
fn of_several_at_once_one_is_whole_and_the_others_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_model(&at("in"), 256 << 10);
    let other = || Conversion::plan(open(&at("in")).unwrap(), Spec::new(Format::DcpHf)).unwrap();
    conversion(&at("in")).run(&at("one"), &slow()).unwrap();
    other().run(&at("two"), &slow()).unwrap();
    let wholes = [hash(&at("one")), hash(&at("two"))];
    for round in 0..crossmesh_testkit::sweep::count(4) {
        let out = at("out");
        let run = |i: usize| {
            let conversion = if i.is_multiple_of(2) { conversion(&at("in")) } else { other() };
            conversion.run(&out, &slow()).map_err(|error| error.to_string())
        };
        let results: Vec<Result<_, String>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|i| scope.spawn(move || run(i))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let done = results.iter().filter(|r| r.is_ok()).count();
        assert!(done <= 1, "round {round}: {results:?}");
        let whole = out.exists() && wholes.contains(&hash(&out));
        assert_eq!(whole, done == 1, "round {round}: {results:?}");
        let _ = std::fs::remove_dir_all(&out);
        // Whoever comes then goes on, or begins anew.
        run(round).unwrap();
        assert!(wholes.contains(&hash(&out)));
        std::fs::remove_dir_all(&out).unwrap();
        assert!(!at(".out.partial").exists());
    }
}

#[test]
fn a_link_is_not_written_through() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 64 << 10);
    std::fs::create_dir(folder.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", folder.path().join("out")).unwrap();
    let error = conversion(&folder.path().join("in")).run(&folder.path().join("out"), &slow()).unwrap_err();
    assert!(error.to_string().contains("out: it is there already"), "{error}");
    assert!(std::fs::read_dir(folder.path().join("elsewhere")).unwrap().next().is_none());
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
fn what_lies_beside_the_tensors_is_what_was_there_when_it_began() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    let path = folder.path().join("in/tokenizer.json");
    std::fs::write(&path, "{}").unwrap();
    let planned = conversion(&folder.path().join("in"));
    let change = |_: Progress| std::fs::write(&path, "{\"other\": 1}").unwrap();
    let options = RunOptions { progress: Some(&change), ..slow() };
    let error = planned.run(&folder.path().join("out"), &options).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: it changed while it was read"), "{error}");
    nothing_stays(folder.path());
}

#[test]
fn progress_ends_when_all_is_written() {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    std::fs::write(folder.path().join("in/tokenizer.json"), vec![b' '; 5000]).unwrap();
    for format in Format::ALL {
        let told = std::sync::Mutex::new(Vec::new());
        let tell = |p: Progress| told.lock().unwrap().push(p);
        let options = RunOptions { progress: Some(&tell), ..slow() };
        let out = folder.path().join(format.name());
        let report = conversion_to(format, &folder.path().join("in")).run(&out, &options).unwrap();
        let told = told.into_inner().unwrap();
        let (last, before) = told.split_last().unwrap();
        assert_eq!((last.bytes_done, last.bytes), (report.bytes_written, report.bytes_written), "{format}");
        assert!(before.iter().all(|p| p.bytes_done < p.bytes && p.bytes == last.bytes), "{format}");
        let on_disk: u64 =
            std::fs::read_dir(out).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(last.bytes, on_disk, "{format}");
    }
}

#[test]
fn stopped_from_outside_it_says_so_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_model(&folder.path().join("in"), 1 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let now = |_: Progress| stop.store(true, Ordering::Relaxed);
    let options = RunOptions { progress: Some(&now), stop: Some(&stop), ..slow() };
    let out = folder.path().join("out");
    let error = conversion(&folder.path().join("in")).run(&out, &options).unwrap_err().to_string();
    assert!(
        error.starts_with("stopped: ") && error.contains(".out.partial keeps what was written"),
        "{error}"
    );
    assert!(error.contains("hint: the same command goes on from there; remove that folder"), "{error}");
    assert!(!out.exists());
    let report = conversion(&folder.path().join("in")).run(&out, &slow()).unwrap();
    assert!(report.bytes_kept > 0, "{report:?}");
    assert_eq!(read_slowly(&open(&out).unwrap()), model);
    assert!(!folder.path().join(".out.partial").exists());
}

/// A part that has a file system of its own in the folder `disk`, made by these words of a shell.
fn on_a_disk(name: &str, mount: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_model(&folder.path().join("in"), 1 << 20);
    std::fs::write(folder.path().join("in/tokenizer.json"), vec![b' '; 300 << 10]).unwrap();
    std::fs::create_dir(folder.path().join("disk")).unwrap();
    let script = format!("cd \"${FOLDER}\" && {mount} && exec \"$0\" \"$@\"");
    let run = part(name, folder.path());
    let output = Command::new("unshare")
        .args(if is_root() { &["--mount"][..] } else { &["--mount", "--user", "--map-root-user"] })
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

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_disk_that_becomes_full_while_slabs_are_written() {
    if !is_root() {
        eprintln!("SKIPPED: a file system of its own on a loop device needs root");
        return;
    }
    // ext2 takes no room beforehand: a full disk is noticed by the write that it is full for.
    let mount = "truncate -s 4M image && mkfs.ext2 -q -F -m 0 image && mount -t ext2 -o loop image disk";
    on_a_disk("writes_to_a_disk_that_becomes_full", mount);
}

#[test]
#[ignore = "a part of another test"]
fn writes_to_a_disk_that_becomes_full() {
    let Some(folder) = folder_of_part() else { return };
    let disk = folder.join("disk");
    let slabs = AtomicUsize::new(0);
    let fill = |_: Progress| {
        if slabs.fetch_add(1, Ordering::Relaxed) != 2 {
            return;
        }
        // Somebody else writes until nothing is left, down to the last block.
        let mut other = std::fs::File::create(disk.join("other")).unwrap();
        for len in [64 << 10, 1 << 10] {
            while other.write_all(&vec![7; len]).is_ok() {}
        }
    };
    let options = RunOptions { progress: Some(&fill), threads: 1, ..slow() };
    let error = conversion(&folder.join("in")).run(&disk.join("out"), &options).unwrap_err().to_string();
    assert!(error.contains("cannot write ") && error.contains("disk/.out.partial/files/__"), "{error}");
    assert!(error.contains("No space left") && error.contains("hint: make room there"), "{error}");
    assert!(slabs.into_inner() >= 3, "some slabs were written");
    let mut names: Vec<_> = std::fs::read_dir(&disk).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["lost+found", "other"], "nothing of it stays");
    // With room again the same goes through.
    std::fs::remove_file(disk.join("other")).unwrap();
    conversion(&folder.join("in")).run(&disk.join("out"), &slow()).unwrap();
}

#[test]
fn a_full_disk_is_named_and_nothing_stays() {
    on_a_disk("writes_to_a_full_disk", "mount -t tmpfs -o size=512k tmpfs disk");
    on_a_disk("writes_to_a_full_disk", "mount -t tmpfs -o size=1200k tmpfs disk");
}

#[test]
#[ignore = "a part of another test"]
fn writes_to_a_full_disk() {
    let Some(folder) = folder_of_part() else { return };
    let error =
        conversion(&folder.join("in")).run(&folder.join("disk/out"), &slow()).unwrap_err().to_string();
    // Known before the first byte, with what lies beside the tensors.
    assert!(error.contains("disk/out") && error.contains("the disk has room for"), "{error}");
    assert_eq!(std::fs::read_dir(folder.join("disk")).unwrap().count(), 0, "nothing stays");
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    on_a_disk("writes_to_a_folder_that_cannot_be_written", "mount -t tmpfs -o size=8m,ro tmpfs disk");
}

#[test]
#[ignore = "a part of another test"]
fn writes_to_a_folder_that_cannot_be_written() {
    let Some(folder) = folder_of_part() else { return };
    let error =
        conversion(&folder.join("in")).run(&folder.join("disk/out"), &slow()).unwrap_err().to_string();
    assert!(error.contains("cannot make the folder") && error.contains("disk/.out.partial"), "{error}");
}
