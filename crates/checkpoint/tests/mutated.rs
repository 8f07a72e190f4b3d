//! Headers and pickles with some bytes changed: an error, never a crash or a hang, and memory stays bounded.
//!
//! `CROSSMESH_SWEEP` makes it long. Time is that of the processor: a busy machine changes nothing.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use crossmesh_checkpoint::manifest::Manifest;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, Spec, open};
use crossmesh_testkit::seed::Seed;

/// Beyond what was there before.
const MORE_MEMORY_BYTES: u64 = 256 << 20;

/// Numbers that programs stumble over.
const NUMBERS: [u64; 9] =
    [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];

fn mutate(seed: &mut Seed, bytes: &mut Vec<u8>) {
    for _ in 0..1 + seed.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = seed.below(bytes.len());
        match seed.below(7) {
            0 => bytes[at] = seed.draw() as u8,
            1 => bytes[at] ^= 1 << seed.below(8),
            2 => bytes.truncate(at),
            3 => bytes.insert(at, seed.draw() as u8),
            4 => {
                // A number of some width, over what is there.
                let number = seed.pick(&NUMBERS).to_le_bytes();
                let width = seed.pick(&[1usize, 2, 4, 8]);
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
            5 => {
                // Digits of a text.
                let digits = seed.pick(&NUMBERS).to_string();
                let end = (at + seed.below(4)).min(bytes.len());
                bytes.splice(at..end, digits.bytes());
            }
            _ => {
                // A piece of itself, elsewhere.
                let (from, len) = (seed.below(bytes.len()), seed.below(40));
                let piece = bytes[from..(from + len).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
        }
    }
}

/// The most memory that this process had.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Of a case at most.
const CPU_TIME: Duration = Duration::from_secs(5);

/// What a thread has computed for, by the folder that the kernel has for it.
fn cpu_time(thread: &Path) -> Duration {
    let text = std::fs::read_to_string(thread.join("schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Ends the process, and names the case, where one does not come to an end.
#[expect(clippy::disallowed_methods, reason = "a watch beside what it watches, for as long as the process")]
fn watch(thread: std::path::PathBuf, case: Arc<(AtomicUsize, AtomicBool)>) {
    std::thread::spawn(move || {
        let (mut at, mut since) = (usize::MAX, Duration::ZERO);
        while !case.1.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
            let (now, time) = (case.0.load(Ordering::Relaxed), cpu_time(&thread));
            if now != at {
                (at, since) = (now, time);
            }
            if time - since > CPU_TIME {
                eprintln!("case {at} does not come to an end");
                std::process::abort();
            }
        }
    });
}

/// A manifest that says something else and has the right hash of it: without that, nothing behind the hash would be looked at.
fn sealed_again(seed: &mut Seed, name: &str, bytes: Vec<u8>) -> Vec<u8> {
    match serde_json::from_slice::<Manifest>(&bytes) {
        Ok(manifest) if name == "manifest.json" && !seed.one_in(8) => manifest.to_text().into_bytes(),
        _ => bytes,
    }
}

fn look(folder: &Path, out: &Path, convert_too: bool) -> bool {
    let Ok(catalog) = open(folder) else { return false };
    let good = catalog.check().iter().all(|p| p.kind.is_warning());
    let Ok(conversion) = Conversion::plan(catalog, Spec::new(Format::Dcp)) else {
        return good;
    };
    // What is still whole is still convertible, or refused.
    if convert_too && conversion.bytes() < 1 << 20 && conversion.run(out, &options(1)).is_ok() {
        std::fs::remove_dir_all(out).unwrap();
    }
    good
}

#[test]
fn changed_bytes_are_errors_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_hf(&random_model(&mut Seed(9), 4), &at("start"));
    // Ours are of one type.
    let shapes = ["a", "a/exp_avg", "a/exp_avg_sq"].map(|name| (name.to_string(), vec![5, 3]));
    write_hf(&filled(shapes.to_vec(), Element::F32, &mut Seed(10)), &at("one type"));
    let mut victims = Vec::new();
    for format in Format::ALL {
        let spec = Spec { cut: Cut::Rows(2), shard_bytes: 100, ..Spec::new(format) };
        let from = if format == Format::Crossmesh { "one type" } else { "start" };
        convert(&at(from), &at(format.name()), spec);
        for entry in std::fs::read_dir(at(format.name())).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let ends = [".safetensors", ".distcp", ".metadata", ".index.json", "manifest.json"];
            if ends.iter().any(|end| name.ends_with(end)) {
                victims.push((at(format.name()), path.clone(), std::fs::read(&path).unwrap()));
            }
        }
    }
    let manifests = victims.iter().filter(|(_, path, _)| path.ends_with("manifest.json")).count();
    assert_eq!(manifests, 1);
    let before = peak_bytes();
    let case = Arc::new((AtomicUsize::new(0), AtomicBool::new(false)));
    let thread = Path::new("/proc").join(std::fs::read_link("/proc/thread-self").unwrap());
    watch(thread.clone(), case.clone());
    let (mut refused, mut sealed, mut longest) = (0, 0, (Duration::ZERO, 0));
    let rounds = crossmesh_testkit::sweep::count(2000);
    for round in 0..rounds {
        let mut seed = Seed(50_000 + round as u64);
        let (folder, path, whole) = &victims[seed.below(victims.len())];
        let mut bytes = whole.clone();
        mutate(&mut seed, &mut bytes);
        let again = sealed_again(&mut seed, &path.file_name().unwrap().to_string_lossy(), bytes.clone());
        sealed += usize::from(again != bytes);
        std::fs::write(path, &again).unwrap();
        case.0.store(round, Ordering::Relaxed);
        let start = cpu_time(&thread);
        refused += usize::from(!look(folder, &at("out"), round % 16 == 0));
        longest = longest.max((cpu_time(&thread) - start, round));
        assert!(longest.0 < CPU_TIME, "case {round} took {:?}", longest.0);
        std::fs::write(path, whole).unwrap();
    }
    case.1.store(true, Ordering::Relaxed);
    assert!(sealed > 0, "no manifest was changed and sealed again");
    assert!(refused * 4 > rounds, "only {refused} of {rounds} were noticed: the changes change nothing");
    let more = peak_bytes() - before;
    assert!(more < MORE_MEMORY_BYTES, "{more} bytes more memory");
    eprintln!(
        "{rounds} cases, {refused} refused, {sealed} manifests sealed again; the longest, {}, took {:?}; {more} bytes more memory",
        longest.1, longest.0
    );
}
