//! Scalars for TensorBoard: an event file beside metrics.jsonl.
//!
//! The file is a row of records, `length u64 | masked crc32c of it | bytes | masked crc32c of them`, as TFRecord has it. The bytes are an `Event` of
//! TensorFlow's event.proto, of which these fields are enough:
//!
//! ```text
//! Event    1 wall_time: double    2 step: varint    3 file_version: text    5 summary: Summary
//! Summary  1 value: Value, several
//! Value    1 tag: text            2 simple_value: float
//! ```

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::metrics::StepMetrics;
use crate::files;

/// What the first record of a file says.
const VERSION: &str = "brain.Event:2";

/// See the module.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// A new file in a folder; TensorBoard reads all files of a folder as one run.
    pub fn create(folder: &Path, now_s: f64) -> Result<Self> {
        let name = format!("events.out.tfevents.{:.3}.crossmesh.{}", now_s, std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut events = Self { path, file };
        let mut event = wall_time(now_s);
        text(&mut event, 3, VERSION);
        events.write(&event)?;
        Ok(events)
    }

    /// The scalars of a step.
    pub fn add(&mut self, metrics: &StepMetrics, now_s: f64) -> Result<()> {
        let named = [
            ("loss/training", metrics.loss),
            ("loss/validation", metrics.validation_loss),
            ("gradient_norm", metrics.grad_norm),
            ("learning_rate", Some(metrics.learning_rate)),
            ("speed/tokens_per_s", metrics.tokens_per_s),
            ("speed/samples_per_s", Some(metrics.samples_per_s)),
            ("speed/mfu", Some(metrics.mfu)),
            ("speed/exposed_comm_s", Some(metrics.exposed_comm_s)),
        ];
        let mut summary = vec![];
        for (tag, value) in named.into_iter().filter_map(|(tag, value)| Some((tag, value?))) {
            let mut scalar = vec![];
            text(&mut scalar, 1, tag);
            scalar.push(2 << 3 | 5);
            scalar.extend_from_slice(&(value as f32).to_le_bytes());
            bytes(&mut summary, 1, &scalar);
        }
        let mut event = wall_time(now_s);
        event.push(2 << 3);
        varint(&mut event, metrics.step);
        bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        let written = self.file.write_all(&record(event)).map_err(files::with_hint);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), bytes, &masked(bytes)].concat()
}

/// A checksum that is not that of itself: records may hold records.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn wall_time(now_s: f64) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend_from_slice(&now_s.to_le_bytes());
    event
}

fn text(message: &mut Vec<u8>, field: u8, text: &str) {
    bytes(message, field, text.as_bytes());
}

fn bytes(message: &mut Vec<u8>, field: u8, value: &[u8]) {
    message.push(field << 3 | 2);
    varint(message, value.len() as u64);
    message.extend_from_slice(value);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::metrics;
    use super::*;

    /// The first record of every file that TensorFlow writes, at wall time 0: taken from one.
    #[test]
    fn a_record_is_what_tensorflow_writes() {
        let mut event = wall_time(0.0);
        text(&mut event, 3, VERSION);
        let wanted = b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\t\0\0\0\0\0\0\0\0\x1a\rbrain.Event:2";
        let bytes = record(&event);
        assert_eq!(bytes[..wanted.len()], wanted[..]);
        assert_eq!(bytes.len(), wanted.len() + 4);
    }

    /// Read back by the rules of the format, not by what wrote it.
    #[test]
    fn scalars_can_be_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path(), 1.5).unwrap();
        let mut step = metrics(300);
        step.validation_loss = Some(0.25);
        events.add(&step, 2.5).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let mut records = vec![];
        let mut at = 0;
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            assert_eq!(bytes[at + 8..at + 12], masked(&bytes[at..at + 8]));
            let body = &bytes[at + 12..at + 12 + length];
            assert_eq!(bytes[at + 12 + length..at + 16 + length], masked(body));
            records.push(body.to_vec());
            at += 16 + length;
        }
        assert_eq!(records.len(), 2);
        let body = &records[1];
        assert_eq!((body[0], &body[1..9]), (0x09, &2.5f64.to_le_bytes()[..]));
        assert_eq!(body[9..12], [0x10, 0xac, 0x02], "step 300 as a varint");
        let tag = b"loss/validation";
        let found = body.windows(tag.len()).position(|w| w == tag).unwrap() + tag.len();
        assert_eq!((body[found], &body[found + 1..found + 5]), (0x15, &0.25f32.to_le_bytes()[..]));
    }
}
