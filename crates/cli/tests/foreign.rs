//! Training that goes on from checkpoints of every format: the losses are those of the run that was never stopped.

mod common;
mod tiny;

use std::path::Path;

use common::{crossmesh, ok};
use serde_json::Value;
use tiny::{Run, trained};

/// Heads that share keys and values.
const LLAMA: [&str; 8] = [
    "--set",
    "model.kind=llama",
    "--set",
    "model.heads=4",
    "--set",
    "model.kv_heads=2",
    "--set",
    "model.hidden=24",
];

fn losses(run: &Run, name: &str) -> Vec<f64> {
    let path = run.scratch.path().join("runs").join(name).join("metrics.jsonl");
    let lines = std::fs::read_to_string(path).unwrap();
    lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

/// Converts, and says where it is.
fn convert(run: &Run, from: &str, to: &str, name: &str, more: &[&str]) -> String {
    let (from, out) = (run.scratch.at(from), run.scratch.at(name));
    let args = ["checkpoint", "convert", from.as_str(), "--to", to, "-o", out.as_str()];
    ok(&[&args[..], more].concat());
    out
}

fn go_on(run: &Run, flag: &str, path: &str, name: &str, more: &[&str]) -> Vec<f64> {
    let folder = format!("log.folder=runs/{name}");
    let said = run.train(&[&[flag, path, "--set", folder.as_str()], more].concat());
    trained(&said);
    losses(run, name)
}

/// Trains 12 steps with a checkpoint in the middle; what it was told, and where that is.
fn started(model: &[&str]) -> (Run, Vec<f64>, &'static str) {
    let run = Run::new();
    trained(&run.train(&[&["--set", "checkpoint.every=6", "--set", "checkpoint.keep=2"], model].concat()));
    let all = run.losses();
    assert_eq!(all.len(), 12);
    (run, all, "runs/tiny/checkpoints/step-00000006")
}

#[test]
fn a_run_goes_on_from_every_format_as_if_it_had_not_stopped() {
    for (family, model) in [("gpt2", &[][..]), ("llama", &LLAMA[..])] {
        let (run, all, saved) = started(model);
        let formats: [(&str, &[&str]); 4] = [
            ("dcp", &["--ranks", "3"]),
            ("dcp-hf", &["--ranks", "2"]),
            ("torch_dist", &["--tp", "2", "--pp", "2"]),
            ("crossmesh", &["--ranks", "2"]),
        ];
        for (format, cut) in formats {
            let path = convert(&run, saved, format, &format!("as-{format}"), cut);
            let went_on = go_on(&run, "--resume", &path, &format!("from-{format}"), model);
            assert_eq!(went_on, all[6..], "{family} {format}");
        }
        // By way of all of them, and on other ranks: sums are added in another order.
        convert(&run, "as-dcp", "torch_dist", "second", &["--pp", "2"]);
        let path = convert(&run, "second", "dcp-hf", "third", &["--tp", "2"]);
        let other =
            [model, &["--set", "stage.0.mesh=1", "--set", "stage.1.mesh=dp 2", "--set", "optimizer.zero=1"]]
                .concat();
        let went_on = go_on(&run, "--resume", &path, "elsewhere", &other);
        let near = went_on.iter().zip(&all[6..]).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(near && went_on.len() == 6, "{went_on:?} {all:?}");
    }
}

#[test]
fn weights_alone_start_a_run_of_their_own() {
    let (run, _, saved) = started(&LLAMA);
    let hf = convert(&run, saved, "hf", "as-hf", &[]);
    // What lies there is a whole model for others.
    for name in ["config.json", "model.safetensors", "crossmesh.json"] {
        assert!(Path::new(&hf).join(name).is_file(), "{name}");
    }
    let ours = go_on(&run, "--from", saved, "of-ours", &LLAMA);
    for (name, path) in [("folder", hf.clone()), ("file", format!("{hf}/model.safetensors"))] {
        assert_eq!(go_on(&run, "--from", &path, name, &LLAMA), ours, "{name}");
    }
    let megatron = convert(&run, "as-hf", "torch_dist", "as-megatron", &["--tp", "2"]);
    assert_eq!(go_on(&run, "--from", &megatron, "of-megatron", &LLAMA), ours);
    // The same with all that an optimizer has left beside it.
    let whole = convert(&run, saved, "dcp", "as-dcp", &[]);
    assert_eq!(go_on(&run, "--from", &whole, "of-dcp", &LLAMA), ours);
    // In several files.
    let cut = convert(&run, saved, "hf", "in-parts", &["--shard-size", "4KiB"]);
    assert!(Path::new(&cut).join("model.safetensors.index.json").is_file());
    assert_eq!(go_on(&run, "--from", &cut, "of-parts", &LLAMA), ours);
}

#[test]
fn what_a_checkpoint_lacks_is_said() {
    let (run, _, saved) = started(&[]);
    let refused = |args: &[&str]| {
        let said = run.train(&[args, &["--set", "log.folder=runs/another"]].concat());
        assert_eq!((said.code, said.stdout.as_str()), (2, ""), "{}", said.stderr);
        assert!(!said.stderr.contains("panicked") && !run.scratch.path().join("runs/another").exists());
        said.stderr
    };
    let hf = convert(&run, saved, "hf", "as-hf", &[]);
    let error = refused(&["--resume", &hf]);
    let says = format!(
        "weights alone, for Hugging Face's files have no place for an optimizer's states\nhint: `--from {hf}`"
    );
    assert!(error.contains(&says), "{error}");
    // The same as ours.
    let weights = convert(&run, "as-hf", "crossmesh", "weights", &[]);
    let error = refused(&["--resume", &weights]);
    assert!(error.contains("it holds weights alone: no states of an optimizer\nhint: `--from "), "{error}");
    // What torch writes of an optimizer: its states, and no word of a run of ours.
    let dcp = convert(&run, saved, "dcp", "as-dcp", &[]);
    std::fs::remove_file(Path::new(&dcp).join("crossmesh.json")).unwrap();
    let error = refused(&["--resume", &dcp]);
    assert!(
        error.contains(
            "exp_avg and exp_avg_sq, behind 6 of its steps, and nothing says at which step and sample"
        ),
        "{error}"
    );
    assert!(error.contains(&format!("hint: `--from {dcp}`")), "{error}");
    // Another model, in its sizes and in its kind.
    let error = refused(&["--from", &hf, "--set", "model.width=32"]);
    assert!(
        error.contains("model.width is 32 and not 16") && error.contains("--set model.width=16"),
        "{error}"
    );
    let error = refused(&["--from", &hf, "--set", "model.kind=llama"]);
    assert!(error.contains("it is a `gpt2`, and a `llama` is to be trained"), "{error}");
    // Fewer digits than it has are not taken unasked.
    let error = refused(&["--from", &hf, "--set", "train.dtype=f32"]);
    assert!(error.contains("is f64, and f32 is trained\nhint: train in f64, or round it first"), "{error}");
    // A tensor too few.
    let index = convert(&run, saved, "hf", "in-parts", &["--shard-size", "4KiB"]);
    let files = std::fs::read_dir(&index).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let part = files.filter(|name| name.ends_with(".safetensors")).min().unwrap();
    std::fs::remove_file(Path::new(&index).join(&part)).unwrap();
    let error = refused(&["--from", &index]);
    assert!(error.contains("missing-file") && error.contains(&part), "{error}");
    let said = crossmesh(&["checkpoint", "check", &index]);
    assert_eq!(said.code, 1, "{}", said.stdout);
}
