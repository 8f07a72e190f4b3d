//! How long a conversion takes beside a plain copy of the same bytes, and how much memory it holds.
//!
//! `cargo run --release -p crossmesh-checkpoint --example convert_speed -- FOLDER [GIB] [MAX_MEMORY_MIB] [ROUNDS]` makes a checkpoint of
//! so many GiB in FOLDER, saved by four ranks as torch does, and writes it as Hugging Face's files, in turn with `cp` and fsync. No rounds leave
//! FOLDER/dcp there, for bench/python/convert.py.

#![allow(clippy::print_stdout, clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crossmesh_checkpoint::safetensors::header_bytes;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, RunOptions, Spec, open};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let folder = Path::new(args.first().expect("a folder to work in"));
    let number = |i: usize, usual: u64| args.get(i).map_or(usual, |n| n.parse().expect("a number"));
    let (gib, max_memory, rounds) = (number(1, 4), number(2, 256) << 20, number(3, 5));
    let [hf, dcp, copy, out] = ["hf", "dcp", "copy", "out"].map(|name| folder.join(name));
    std::fs::create_dir_all(&hf).expect("a folder");
    write(&hf.join("model.safetensors"), gib << 30);
    convert(&hf, &dcp, Spec { cut: Cut::Rows(4), ..Spec::new(Format::Dcp) }, max_memory);
    std::fs::remove_dir_all(&hf).expect("it was made");
    if rounds == 0 {
        return println!("{}", dcp.display());
    }
    let (mut copied, mut converted) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let time = copy_all(&dcp, &copy);
        std::fs::remove_dir_all(&copy).expect("it was made");
        forget_peak();
        let before = peak_bytes();
        let took = convert(&dcp, &out, Spec::new(Format::Hf), max_memory);
        println!(
            "{round}: cp and fsync {time:.2?}, convert {took:.2?}, peak {} MiB, {} MiB before it began",
            peak_bytes() >> 20,
            before >> 20
        );
        std::fs::remove_dir_all(&out).expect("it was made");
        copied.push(time);
        converted.push(took);
    }
    std::fs::remove_dir_all(&dcp).expect("it was made");
    let (copied, converted) = (median(copied), median(converted));
    println!(
        "{gib} GiB of DCP to Hugging Face: {converted:.2?} in the median, {:.2} x cp and fsync",
        converted.as_secs_f64() / copied.as_secs_f64()
    );
}

/// bf16 tensors as a model of a few billion parameters has them, and no two bytes of it alike for long.
fn write(path: &Path, bytes: u64) {
    let (rows, columns) = (8192u64, 4096u64);
    let count = bytes.div_ceil(rows * columns * 2);
    let name = |i: u64| format!("model.layers.{i}.weight");
    let header =
        header_bytes(&BTreeMap::new(), (0..count).map(|i| (name(i), Element::BF16, vec![rows, columns])));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).expect("a file"));
    file.write_all(&header).expect("room");
    let mut state = 1u64;
    for _ in 0..count * rows * columns * 2 / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.write_all(&state.to_le_bytes()).expect("room");
    }
    file.into_inner().expect("room").sync_all().expect("room");
}

fn convert(from: &Path, to: &Path, spec: Spec, max_memory: u64) -> Duration {
    let start = Instant::now();
    let conversion = Conversion::plan(open(from).expect("a checkpoint"), spec).expect("a plan");
    conversion.run(to, &RunOptions { max_memory, ..RunOptions::default() }).expect("room");
    start.elapsed()
}

fn copy_all(from: &Path, to: &Path) -> Duration {
    let start = Instant::now();
    let status = Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp");
    assert!(status.success());
    for entry in std::fs::read_dir(to).expect("it was made") {
        File::open(entry.expect("an entry").path()).and_then(|f| f.sync_all()).expect("fsync");
    }
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// The most memory that was resident.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("Linux");
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux");
}
