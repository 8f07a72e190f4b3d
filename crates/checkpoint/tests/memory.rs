//! Memory stays under what was allowed, whatever the size of the model: 512 MiB go through 32.

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crossmesh_checkpoint::{Conversion, Cut, Format, RunOptions, Spec, open, open_within};
use serde_json::json;

const FOLDER: &str = "CROSSMESH_TEST_FOLDER";
const BYTES: u64 = 512 << 20;
const MAX_MEMORY: u64 = 32 << 20;
/// Of the program itself, its test harness, and headers.
const BESIDE_BUFFERS: u64 = 24 << 20;

/// A file that is all holes: tensors of 64 MiB, each larger than all buffers.
fn write_sparse(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let count = 8;
    let tensor = |i: u64| {
        let each = BYTES / count;
        let entry = json!({"dtype": "BF16", "shape": [each / 8192, 4096], "data_offsets": [i * each, (i + 1) * each]});
        (format!("layers.{i}.weight"), entry)
    };
    let header: serde_json::Map<_, _> = (0..count).map(tensor).collect();
    let text = serde_json::to_vec(&header).unwrap();
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&[&(text.len() as u64).to_le_bytes()[..], &text].concat()).unwrap();
    file.set_len(8 + text.len() as u64 + BYTES).unwrap();
}

/// The most memory that this process had since it last forgot.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// A part of this file in a process of its own; the most memory that it had.
fn peak_of(part: &str, folder: &Path) -> u64 {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", part, "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said.split("peak ").nth(1).and_then(|s| s.split(' ').next()).unwrap().parse().unwrap()
}

#[expect(clippy::disallowed_methods, reason = "how a test tells itself what to do")]
fn folder_of_part() -> Option<PathBuf> {
    std::env::var(FOLDER).ok().map(PathBuf::from)
}

#[test]
fn more_goes_through_than_memory_has_room_for() {
    // Where there is one, in memory: what is written is no memory of the process.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    write_sparse(&folder.path().join("in"));
    let peak = peak_of("converts_in_a_process_of_its_own", folder.path());
    eprintln!("512 MiB with max_memory 32 MiB: peak {} MiB", peak >> 20);
    assert!(peak <= MAX_MEMORY + BESIDE_BUFFERS, "{peak} bytes");
    // And the buffers are used: it was no other process that was measured.
    assert!(peak > MAX_MEMORY / 2, "{peak} bytes");
}

#[test]
#[ignore = "a part of another test"]
#[expect(clippy::print_stdout, reason = "how a test is told")]
fn converts_in_a_process_of_its_own() {
    let Some(folder) = folder_of_part() else { return };
    let options = RunOptions { max_memory: MAX_MEMORY, threads: 2, ..RunOptions::default() };
    for (from, to, format) in [("in", "dcp", Format::Dcp), ("dcp", "out", Format::Hf)] {
        let spec =
            Spec { cut: if format == Format::Dcp { Cut::Rows(4) } else { Cut::Whole }, ..Spec::new(format) };
        let conversion = Conversion::plan(open(&folder.join(from)).unwrap(), spec).unwrap();
        let report = conversion.run(&folder.join(to), &options).unwrap();
        assert_eq!(report.bytes_read, BYTES);
    }
    println!("peak {} bytes", peak_bytes());
}

/// What reading headers may take beside `max_memory`.
const HEADERS: u64 = 256 << 20;
const HOSTILE_BYTES: usize = 64 << 20;

/// Pickles of 64 MiB that are made to become large: a byte for a node, a mark, a place of the stack, an entry of the memo, or a dict of
/// entries that are all one.
fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    let repeated = |start: &[u8], word: &[u8]| {
        let mut bytes = start.to_vec();
        while bytes.len() < HOSTILE_BYTES {
            bytes.extend_from_slice(word);
        }
        bytes
    };
    vec![
        ("nones", repeated(b"\x80\x04", b"N")),
        ("lists", repeated(b"\x80\x04", b"]")),
        ("marks", repeated(b"\x80\x04", b"(")),
        ("places", repeated(b"\x80\x04N", b"2")),
        ("memo", repeated(b"\x80\x04N", b"\x94")),
        ("small lists", repeated(b"\x80\x04", b"]Na")),
        ("entries", repeated(b"\x80\x04Nq\x00}(", b"h\x00h\x00")),
    ]
}

#[test]
fn a_hostile_pickle_takes_no_more_memory_than_there_may_be() {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for (name, bytes) in hostile() {
        std::fs::write(folder.path().join(".metadata"), bytes).unwrap();
        let peak = peak_of("opens_what_is_hostile", folder.path());
        eprintln!("{name}: peak {} MiB", peak >> 20);
        assert!(peak <= MAX_MEMORY + HEADERS + BESIDE_BUFFERS, "{name}: {peak} bytes");
        // It was looked at, and not refused for its length.
        assert!(peak > HOSTILE_BYTES as u64 + (32 << 20), "{name}: {peak} bytes");
    }
}

#[test]
#[ignore = "a part of another test"]
#[expect(clippy::print_stdout, reason = "how a test is told")]
fn opens_what_is_hostile() {
    let Some(folder) = folder_of_part() else { return };
    let error = open_within(&folder, MAX_MEMORY).unwrap_err().to_string();
    let wanted = format!("it takes more than the {} bytes of memory that there may be", MAX_MEMORY + HEADERS);
    assert!(error.contains(&wanted) && error.contains("hint: allow more"), "{error}");
    println!("peak {} bytes", peak_bytes());
}
