//! A training job that is small enough for a test.

#![allow(dead_code)] // every test file uses a part of this

use std::process::Command;

use super::common::{Said, Scratch, binary, said};
use serde_json::Value;

/// Two stages on three ranks, small enough for a test.
pub const TINY: &str = "[model]\ncontext = 8\nwidth = 16\nlayers = 2\nheads = 2\n[data]\nvocab = 8\ngroups = 1\nbranching = 2\n\
    [train]\nsteps = 12\nbatch = 8\nmicrobatches = 4\ndtype = \"f64\"\n[optimizer]\nlearning_rate = 1e-2\n\
    [pipeline]\nschedule = \"eager-1f1b\"\n[[stage]]\nmesh = \"dp 2\"\n[[stage]]\nmesh = \"1\"\n";

pub struct Run {
    pub scratch: Scratch,
}

impl Run {
    pub fn new() -> Self {
        let scratch = Scratch::new();
        scratch.file("tiny.toml", TINY);
        Self { scratch }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = binary();
        command.current_dir(self.scratch.path()).args(["train", "tiny.toml"]).args(args);
        command
    }

    pub fn train(&self, args: &[&str]) -> Said {
        said(&mut self.command(args))
    }

    pub fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.scratch.path().join("runs/tiny/metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn losses(&self) -> Vec<f64> {
        self.metrics().iter().map(|m| m["loss"].as_f64().unwrap()).collect()
    }
}

pub fn trained(said: &Said) {
    assert_eq!(said.code, 0, "{}{}", said.stdout, said.stderr);
}
