//! docs/training-guide.md: its commands, one behind the other, as a reader would type them; and what must be true of them in the end.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use common::{Scratch, said, shell, shell_blocks};
use serde_json::Value;

fn scripts() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/training-guide.md");
    shell_blocks(&std::fs::read_to_string(page).unwrap())
}

fn manifest(folder: &Path, step: u64) -> Value {
    let path = folder.join(format!("runs/story/checkpoints/step-{step:08}/manifest.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    // Its last line is its hash.
    serde_json::Deserializer::from_str(&text).into_iter::<Value>().next().unwrap().unwrap()
}

#[test]
fn the_guide_leads_to_a_model_that_talks() {
    let scratch = Scratch::new();
    let mut heard = String::new();
    for script in scripts() {
        let out = said(&mut shell(&script, scratch.path()));
        assert_eq!(out.code, 0, "{script}\n{}{}", out.stdout, out.stderr);
        heard += &out.stdout;
        heard += &out.stderr;
    }
    // Every sample once: 150 steps of 8, then 50 of 16.
    assert_eq!(manifest(scratch.path(), 150)["samples"], 150 * 8);
    assert_eq!(manifest(scratch.path(), 200)["samples"], 150 * 8 + 50 * 16);
    assert!(
        heard.contains("it goes on behind step 150 of runs/story/checkpoints/step-00000150, at sample 1200"),
        "{heard}"
    );
    assert!(heard.contains("  validation "), "{heard}");
    assert!(heard.contains("the cat sat on the mat"), "{heard}");
    let talk = |how: &str| {
        let script = format!("crossmesh generate runs/story --prompt 'the cat ' --tokens 40 {how}");
        said(&mut shell(&script, scratch.path())).stdout
    };
    assert_eq!(talk("--tp 2 --stages 2"), talk(""), "four processes say what one says");
    for file in ["story-gpt2/model.safetensors", "story-gpt2/config.json", "runs/story/report.html"] {
        assert!(scratch.path().join(file).is_file(), "{file}");
    }
    let events = std::fs::read_dir(scratch.path().join("runs/story")).unwrap();
    let events = events.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("tfevents"));
    assert_eq!(events.count(), 2, "one for every start");
}

/// Killed without a word, gone on elsewhere: the samples behind the last checkpoint are the next ones.
#[test]
fn a_killed_run_goes_on_elsewhere_with_every_sample_once() {
    let scratch = Scratch::new();
    for script in scripts().iter().filter(|s| s.starts_with("mkdir") || s.starts_with("cat >")) {
        assert_eq!(said(&mut shell(script, scratch.path())).code, 0);
    }
    let endless = "exec crossmesh train story.toml --set train.steps=100000 --set checkpoint.every=10 --set log.every=5";
    let mut child = shell(endless, scratch.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step     25 ")), "it does not come to step 25");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(lines);
    let folder = scratch.path().join("runs/story/checkpoints");
    let steps = std::fs::read_dir(folder).unwrap().filter_map(|e| {
        e.unwrap().file_name().to_str().and_then(|name| name.strip_prefix("step-")?.parse::<u64>().ok())
    });
    let saved = steps.max().unwrap();
    assert!(saved >= 10 && saved.is_multiple_of(10), "{saved}");
    assert_eq!(manifest(scratch.path(), saved)["samples"], saved * 8);
    let more = format!(
        "crossmesh train story.toml --resume --set train.steps={} --set train.batch=12 --set stage.0.mesh=1 --set checkpoint.every=10",
        saved + 3
    );
    let out = said(&mut shell(&more, scratch.path()));
    assert_eq!(out.code, 0, "{}{}", out.stdout, out.stderr);
    assert_eq!(manifest(scratch.path(), saved + 3)["samples"], saved * 8 + 3 * 12);
    let script = "crossmesh checkpoint export runs/story -o out && crossmesh generate runs/story --prompt 'the ' --tokens 5";
    let out = said(&mut shell(script, scratch.path()));
    assert_eq!(out.code, 0, "{}{}", out.stdout, out.stderr);
    let metrics = std::fs::read_to_string(scratch.path().join("runs/story/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count() as u64, saved + 3, "no step is told twice");
}
