//! Headers and pickles with some bytes changed: an error, never a crash or a hang, and memory stays bounded.
//!
//! `CROSSMESH_SWEEP` makes it long.

mod common;

use std::path::Path;

use common::*;
use crossmesh_checkpoint::{Conversion, Cut, Format, Spec, open};
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
    let model = random_model(&mut Seed(9), 4);
    write_hf(&model, &at("start"));
    let mut victims = Vec::new();
    for format in [Format::Hf, Format::Dcp, Format::DcpHf, Format::TorchDist] {
        let spec = Spec { cut: Cut::Rows(2), shard_bytes: 100, ..Spec::new(format) };
        convert(&at("start"), &at(format.name()), spec);
        for entry in std::fs::read_dir(at(format.name())).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let ends = [".safetensors", ".distcp", ".metadata", ".index.json"];
            if ends.iter().any(|end| name.ends_with(end)) {
                victims.push((at(format.name()), path.clone(), std::fs::read(&path).unwrap()));
            }
        }
    }
    let before = peak_bytes();
    let mut refused = 0;
    let rounds = crossmesh_testkit::sweep::count(2000);
    for round in 0..rounds {
        let mut seed = Seed(50_000 + round as u64);
        let (folder, path, whole) = &victims[seed.below(victims.len())];
        let mut bytes = whole.clone();
        mutate(&mut seed, &mut bytes);
        std::fs::write(path, &bytes).unwrap();
        refused += usize::from(!look(folder, &at("out"), round % 16 == 0));
        std::fs::write(path, whole).unwrap();
    }
    assert!(refused * 4 > rounds, "only {refused} of {rounds} were noticed: the changes change nothing");
    let more = peak_bytes() - before;
    assert!(more < MORE_MEMORY_BYTES, "{more} bytes more memory");
}
