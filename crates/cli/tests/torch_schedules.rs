//! torch's schedules are read, and ours are written just as torch has accepted them. tests/torch_schedules.py writes the files.

mod common;

use std::path::{Path, PathBuf};

use common::ok;
use crossmesh_core::schedule::{Costs, Name, Schedule, Spec, check, generate, time, torch_csv};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/schedules")
}

/// A golden file: `torch_zbv_p4v2m8.csv`.
struct File {
    path: PathBuf,
    schedule: String,
    devices: u32,
    chunks: u32,
    microbatches: u32,
    comms: bool,
}

fn files(of: &str) -> Vec<File> {
    let mut files: Vec<File> =
        std::fs::read_dir(folder()).unwrap().filter_map(|e| file(&e.unwrap().path(), of)).collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn file(path: &Path, of: &str) -> Option<File> {
    let name = path.file_name()?.to_str()?.strip_prefix(of)?.strip_prefix('_')?.strip_suffix(".csv")?;
    let (name, comms) = name.strip_suffix(".comms").map_or((name, false), |name| (name, true));
    let (schedule, size) = name.rsplit_once('_')?;
    let (devices, rest) = size.strip_prefix('p')?.split_once('v')?;
    let (chunks, microbatches) = rest.split_once('m')?;
    Some(File {
        path: path.into(),
        schedule: schedule.into(),
        devices: devices.parse().ok()?,
        chunks: chunks.parse().ok()?,
        microbatches: microbatches.parse().ok()?,
        comms,
    })
}

impl File {
    fn read(&self) -> Schedule {
        let text = std::fs::read_to_string(&self.path).unwrap();
        torch_csv::read(&self.schedule, &text).unwrap_or_else(|e| panic!("{}: {e}", self.path.display()))
    }

    fn spec(&self) -> Spec {
        Spec { chunks: Some(self.chunks), ..Spec::even(self.devices, self.microbatches) }
    }
}

fn makespan(schedule: &Schedule) -> f64 {
    let costs = Costs::shared(schedule.placement(), 1.0, 1.0, 1.0, 0.0).unwrap();
    time(schedule, &costs).unwrap().makespan
}

#[test]
fn torchs_schedules_are_read_and_can_be_run() {
    let files = files("torch");
    assert!(files.len() >= 20);
    for file in files {
        let schedule = file.read();
        check(&schedule).unwrap_or_else(|e| panic!("{}: {e}", file.path.display()));
        assert_eq!(schedule.placement().num_devices() as u32, file.devices);
        assert_eq!(schedule.placement().num_chunks() as u32, file.chunks);
        assert_eq!(schedule.num_microbatches(), file.microbatches);
    }
}

#[test]
fn both_of_torchs_formats_say_the_same() {
    let (with, without): (Vec<File>, Vec<File>) = files("torch").into_iter().partition(|f| f.comms);
    for (with, without) in with.iter().zip(&without) {
        assert_eq!(with.path.with_extension("").with_extension("csv"), without.path);
        assert_eq!(with.read(), without.read(), "{}", with.path.display());
    }
}

#[test]
fn named_alike_our_schedules_are_torchs() {
    let mut same = 0;
    for file in files("torch").iter().filter(|f| !f.comms) {
        let Ok(name) = file.schedule.parse::<Name>() else { continue };
        let (ours, torchs) = (generate(name, &file.spec()).unwrap(), file.read());
        match name {
            // Torch's order is one of those that ours is chosen from.
            Name::Zbv => assert!(makespan(&ours) <= makespan(&torchs), "{}", file.path.display()),
            _ => assert_eq!(ours, torchs, "{}", file.path.display()),
        }
        same += 1;
    }
    assert_eq!(same, 8);
}

#[test]
fn ours_are_the_files_that_torch_accepted() {
    let files = files("ours");
    assert!(files.len() >= 28);
    for file in files {
        let [stages, chunks, microbatches] =
            [file.devices, file.chunks, file.microbatches].map(|n| n.to_string());
        let format = if file.comms { "csv-comms" } else { "csv" };
        let said = ok(&[
            "schedule",
            &file.schedule,
            "--stages",
            &stages,
            "--chunks",
            &chunks,
            "--microbatches",
            &microbatches,
            "--format",
            format,
        ]);
        assert_eq!(
            said.stdout,
            std::fs::read_to_string(&file.path).unwrap(),
            "{} is not what torch has accepted\nhint: run tests/torch_schedules.py",
            file.path.display()
        );
    }
}
