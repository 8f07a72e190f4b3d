//! `crossmesh train`, from the config to the report: what it says, what it writes, what it refuses, and what it survives.

mod common;
mod tiny;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{binary, said};
use crossmesh_testkit::machine::{descendants, needs_root};
use serde_json::Value;
use tiny::{Run, TINY, trained};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_example_is_a_config() {
    for name in ["gpt-mini", "llama-mini", "llama-124m", "gpt-text", "u-transformer", "three-meshes"] {
        let path = format!("examples/{name}.toml");
        let said = said(binary().current_dir(root()).args(["train", &path, "--dry-run", "--json"]));
        assert_eq!((said.code, said.stderr.as_str()), (0, ""), "{name}: {}", said.stdout);
        let dry = said.json();
        assert_eq!(dry["schema"], "crossmesh.dry-run/1");
        assert!(dry["predicted_step_s"].as_f64().unwrap() > 0.0, "{name}");
        let ranks = dry["ranks"].as_array().unwrap();
        assert!(
            ranks.iter().all(|r| r["weights"].as_u64() > Some(0) && r["activations"].as_u64() > Some(0)),
            "{name}"
        );
        if name == "llama-124m" {
            assert_eq!(dry["parameters"], 124_668_672);
        }
        if name == "three-meshes" {
            let meshes: Vec<&str> =
                dry["stages"].as_array().unwrap().iter().map(|s| s["mesh"].as_str().unwrap()).collect();
            assert_eq!((ranks.len(), meshes), (11, vec!["dp 2 × tp 2", "dp 4", "tp 3"]));
            assert_eq!(dry["edges"].as_array().unwrap().len(), 2);
        }
    }
}

#[test]
fn a_dry_run_says_what_the_pieces_say() {
    let run = Run::new();
    let said = run.train(&["--dry-run"]);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""), "{}", said.stdout);
    assert!(said.stdout.starts_with("train tiny: GPT of 2 layers, width 16, context 8, "), "{}", said.stdout);
    assert!(
        said.stdout.contains("0 → 1") && said.stdout.contains("f64[16,16]@S0{dp:2}(dp,_) -> f64[16,16]@S1")
    );
    assert!(said.last_line().starts_with("predicted  a step takes "), "{}", said.stdout);
    assert!(!run.scratch.path().join("runs").exists(), "it writes nothing");
}

/// A model that no laptop holds can be looked at.
#[test]
fn a_dry_run_of_llama_3_8b_counts_its_parameters() {
    let run = Run::new();
    run.scratch.file(
        "8b.toml",
        "[model]\npreset = \"llama3-8b\"\n[data]\nkind = \"language\"\n[train]\ndtype = \"bf16\"\nbatch = 8\nmicrobatches = 4\n\
         [optimizer]\nzero = 1\n[[stage]]\nrepeat = 4\nmesh = \"dp 2, tp 8\"\n",
    );
    let said =
        said(binary().current_dir(run.scratch.path()).args(["train", "8b.toml", "--dry-run", "--json"]));
    assert_eq!((said.code, said.stderr.as_str()), (0, ""), "{}", said.stdout);
    let dry = said.json();
    assert_eq!(dry["parameters"], 8_030_261_248_u64);
    let (stages, ranks) = (dry["stages"].as_array().unwrap(), dry["ranks"].as_array().unwrap());
    let sum: u64 = stages.iter().map(|s| s["parameters"].as_u64().unwrap()).sum();
    assert_eq!((stages.len(), ranks.len(), sum), (4, 64, 8_030_261_248));
    // In bf16 on tp 8: two bytes of every weight, a norm's on every rank; and each twice, over dp.
    let weights: u64 = ranks.iter().map(|r| r["weights"].as_u64().unwrap()).sum();
    let norms = (2 * 32 + 1) * 4096;
    assert_eq!(weights, 2 * 2 * (8_030_261_248 - norms + 8 * norms));
}

#[test]
fn a_printed_config_is_the_config() {
    let run = Run::new();
    let first = run.train(&["--print-config", "--set", "train.steps=7"]);
    assert!(first.stdout.contains("steps = 7\n") && first.stdout.contains("vocab = 8\n"), "{}", first.stdout);
    run.scratch.file("tiny.toml", &first.stdout);
    assert_eq!(run.train(&["--print-config"]).stdout, first.stdout);
}

#[test]
fn mistakes_are_named_with_their_line_and_the_nearest_key() {
    let run = Run::new();
    let refused = |args: &[&str]| {
        let said = run.train(args);
        assert_eq!((said.code, said.stdout.as_str()), (2, ""), "{}", said.stderr);
        said.stderr
    };
    run.scratch.file("tiny.toml", TINY.replace("learning_rate", "learning_rat"));
    let key = refused(&[]);
    assert!(key.starts_with("error: tiny.toml:16: optimizer.learning_rat: there is no such key\nhint: did you mean `learning_rate`?"), "{key}");
    run.scratch.file("tiny.toml", TINY);
    let set = refused(&["--set", "train.stpes=3"]);
    assert!(
        set.starts_with(
            "error: --set train.stpes=3: train.stpes: there is no such key\nhint: did you mean `steps`?"
        ),
        "{set}"
    );
    assert!(refused(&["--set", "stage.0.mesh=dp 3", "--dry-run"]).contains("stage 0 splits the 2 samples"));
    let missing = refused(&["--set", "data.kind=text", "--set", "data.path=none.txt"]);
    assert!(
        missing.starts_with("error: tiny.toml:7: data.vocab: data of kind \"text\" has no such key"),
        "{missing}"
    );
    run.scratch.file("tiny.toml", "[data]\nkind = \"text\"\npath = \"none.txt\"\n");
    assert!(refused(&[]).contains("none.txt"));
    run.scratch.file("tiny.toml", TINY);
    let branching = refused(&["--set", "data.branching=99"]);
    assert!(branching.starts_with("error: --set data.branching=99: data.branching: 99: "), "{branching}");
    assert!(refused(&["--resume"]).contains("there is no checkpoint to go on from in runs/tiny/checkpoints"));
    assert!(refused(&["--resume=nowhere"]).contains("nowhere"));
    assert!(refused(&["--resume", "nowhere"]).contains("nowhere"), "without an `=` too");
}

#[test]
fn a_run_learns_and_writes_what_it_promises() {
    let run = Run::new();
    let html = run.scratch.at("r.html");
    let said = run.train(&["--json", "--html", &html, "--set", "train.steps=60"]);
    trained(&said);
    let summary = said.json();
    assert_eq!((&summary["schema"], &summary["steps"]), (&"crossmesh.train-summary/1".into(), &60.into()));
    let spread = ["median_s", "p95_s", "longest_s"].map(|k| summary["steps_s"][k].as_f64().unwrap());
    assert!(spread[0] > 0.0 && spread.is_sorted(), "{spread:?}");
    let metrics = run.metrics();
    assert_eq!(
        metrics.iter().map(|m| m["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        (1..=60).collect::<Vec<u64>>()
    );
    let losses = run.losses();
    let reachable = summary["reachable_loss"].as_f64().unwrap();
    assert!(losses[59] < 0.7 * losses[0] && losses[59] > 0.8 * reachable, "{losses:?} towards {reachable}");
    let last = &metrics[59];
    let parts = ["compute_s", "exposed_comm_s", "bubble_s", "optimizer_s"].map(|k| last[k].as_f64().unwrap());
    assert!(parts.iter().sum::<f64>() <= 1.01 * last["step_s"].as_f64().unwrap(), "{last}");
    let dry = run.train(&["--dry-run", "--json"]).json();
    let held = dry["ranks"].as_array().unwrap().iter().map(|r| r["activations"].as_u64().unwrap()).max();
    assert_eq!(last["activation_bytes"].as_u64(), held, "what the dry run said");
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("best possible") && page.contains("Step 60, pass by pass"));
    assert!(page.contains("r0 measured") && page.contains("d0 predicted"));
    assert!(said.stderr.contains("step 10  loss "), "{}", said.stderr);
}

/// Hundreds of gradients in flight, and few descriptors: memory for them comes in a few segments.
#[test]
fn small_buckets_do_not_take_a_descriptor_each() {
    let run = Run::new();
    let settings = ["model.width=96", "model.layers=4", "train.steps=2", "optimizer.bucket=4KiB"];
    let sets: Vec<String> = settings.iter().map(|set| format!("--set {set}")).collect();
    let script = format!("ulimit -n 256; exec \"$0\" train tiny.toml {}", sets.join(" "));
    let mut limited = Command::new("sh");
    limited.args(["-c", &script]).arg(binary().get_program()).current_dir(run.scratch.path());
    trained(&said(&mut limited));
    assert_eq!(run.metrics().len(), 2);
}

#[test]
fn what_stands_behind_resume_may_be_a_checkpoint_or_the_config() {
    let run = Run::new();
    let plain = |args: &[&str]| {
        let said = said(binary().current_dir(run.scratch.path()).arg("train").args(args));
        assert_eq!(said.code, 2, "{}", said.stdout);
        said.stderr
    };
    assert!(plain(&["--resume", "tiny.toml"]).contains("no checkpoint to go on from in runs/tiny"));
    assert!(plain(&["--resume", "."]).contains("a config is missing: . says where to go on"));
    // A folder behind the config is what to go on from, on whichever side of the flag it stands.
    let [behind, before] =
        [["tiny.toml", "--resume", "."], ["--resume", "tiny.toml", "."]].map(|args| plain(&args));
    assert!(behind == before && !behind.contains("a config is missing"), "{behind}{before}");
    assert!(plain(&[]).contains("CONFIG"));
}

#[test]
fn a_folder_takes_one_run_at_a_time() {
    let run = Run::new();
    let folder = run.scratch.path().join("runs/tiny");
    std::fs::create_dir_all(&folder).unwrap();
    let held = std::fs::File::open(&folder).unwrap();
    held.try_lock().unwrap();
    let second = run.train(&[]);
    assert_eq!(second.code, 2, "{}", second.stdout);
    assert!(
        second.stderr.starts_with("error: another run is writing into runs/tiny\nhint: "),
        "{}",
        second.stderr
    );
    assert!(!folder.join("metrics.jsonl").exists(), "nothing was touched");
    drop(held);
    let figure = run.scratch.at("loss.svg");
    trained(&run.train(&["--svg", &figure]));
    let svg = std::fs::read_to_string(figure).unwrap();
    assert!(svg.contains("<polyline") && svg.contains("width=\"85mm\""));
}

/// Two runs with folders of their own, and one for the checkpoints of both: the second would mix what the first one saves.
#[test]
fn a_folder_of_checkpoints_takes_one_run_at_a_time() {
    let run = Run::new();
    let store = run.scratch.path().join("both");
    std::fs::create_dir(&store).unwrap();
    let held = std::fs::File::open(&store).unwrap();
    held.try_lock().unwrap();
    let second = run.train(&["--set", "checkpoint.folder=both"]);
    assert_eq!(second.code, 2, "{}", second.stdout);
    assert!(
        second.stderr.starts_with("error: another run is writing into both\nhint: "),
        "{}",
        second.stderr
    );
    assert!(second.stderr.contains("--set checkpoint.folder="), "{}", second.stderr);
    // Who saves nothing is in nobody's way; nor is a run in its own, whatever its two folders are.
    trained(&run.train(&["--set", "checkpoint.folder=both", "--set", "checkpoint.last=false"]));
    drop(held);
    trained(&run.train(&["--set", "log.folder=one", "--set", "checkpoint.folder=./one"]));
}

#[test]
fn a_resumed_run_has_the_losses_of_one_that_never_stopped() {
    let whole = Run::new();
    trained(&whole.train(&[]));
    let run = Run::new();
    // The rate's schedule ends where the whole run's does.
    let half = ["--set", "checkpoint.every=4", "--set", "optimizer.schedule=constant"];
    trained(&run.train(&[&half[..], &["--set", "train.steps=8"]].concat()));
    let again = run.train(&half);
    assert!(
        again.code == 2 && again.stderr.contains("has checkpoints of an earlier run, up to step 8"),
        "{}",
        again.stderr
    );
    let resumed = run.train(&[&half[..], &["--resume", "--json"]].concat());
    trained(&resumed);
    assert_eq!(resumed.json()["resumed_at"], 8);
    let whole = Run::new();
    trained(&whole.train(&["--set", "optimizer.schedule=constant"]));
    assert_eq!(run.losses(), whole.losses(), "bit for bit");
    // The same checkpoint on other meshes.
    let folder = run.scratch.at("runs/tiny/checkpoints/step-00000008");
    let other = Run::new();
    let meshes =
        ["--set", "stage.0.mesh=tp 2", "--set", "stage.1.mesh=dp 2", "--set", "optimizer.schedule=constant"];
    trained(&other.train(&[&meshes[..], &[&format!("--resume={folder}")]].concat()));
    let pairs = other.losses().into_iter().zip(whole.losses().into_iter().skip(8));
    for (a, b) in pairs {
        assert!((a - b).abs() <= 1e-10 * b, "{a} and {b}");
    }
}

/// Weights in bf16 are made again from the f32 that they were rounded from; that and the moments are what a checkpoint holds. Whoever goes on ends with every
/// bit of who never stopped, whether a rank has all of it or its share.
#[test]
fn a_bf16_run_goes_on_bit_for_bit() {
    let llama = ["model.kind=llama", "model.kv_heads=1", "optimizer.zero=3"];
    let cases: [&[&str]; 3] = [&["optimizer.zero=0"], &["optimizer.zero=3"], &llama];
    for case in cases {
        let common =
            ["train.dtype=bf16", "model.dropout=0.1", "optimizer.schedule=constant", "checkpoint.keep=9"];
        let sets = |more: &[&'static str]| -> Vec<String> {
            let all = common.iter().chain(case).chain(more);
            all.flat_map(|set| ["--set".to_string(), set.to_string()]).collect()
        };
        let train = |run: &Run, args: &[String], more: &[&str]| {
            let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
            trained(&run.train(&args));
        };
        let (whole, run) = (Run::new(), Run::new());
        train(&whole, &sets(&[]), &[]);
        train(&run, &sets(&["train.steps=7"]), &[]);
        train(&run, &sets(&[]), &["--resume"]);
        assert_eq!(run.losses(), whole.losses(), "{case:?}");
        let norms = |run: &Run| -> Vec<f64> {
            run.metrics().iter().map(|m| m["grad_norm"].as_f64().unwrap()).collect()
        };
        assert_eq!(norms(&run), norms(&whole), "{case:?}");
        let saved = |run: &Run| -> Vec<(String, Vec<u8>)> {
            let folder = run.scratch.path().join("runs/tiny/checkpoints/step-00000012");
            let mut files: Vec<PathBuf> =
                std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
            files.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
            files.sort();
            let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
            files.iter().map(|path| (name(path), std::fs::read(path).unwrap())).collect()
        };
        let (once, twice) = (saved(&whole), saved(&run));
        // Weights, masters and moments of all stages: twelve bytes of some six thousand.
        let bytes: usize = once.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(once.len() >= 2 && bytes > 60_000, "{case:?}: {bytes} B in {} files", once.len());
        assert!(once == twice, "{case:?}: weights, masters and moments");
    }
}

#[test]
fn ranks_that_somebody_else_started_train_too() {
    let run = Run::new();
    let program = env!("CARGO_BIN_EXE_crossmesh");
    let mut command = binary();
    command.current_dir(run.scratch.path());
    command.args(["launch", "-n", "3", "--", program, "train", "tiny.toml", "--json"]);
    let joined = said(&mut command);
    trained(&joined);
    // The launcher puts a rank's number before its lines.
    let text: String = joined.stdout.lines().map(|l| l.strip_prefix("[0] ").unwrap_or(l)).collect();
    let summary: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {}", joined.stdout));
    assert_eq!(summary["steps"], 12);
    let here = Run::new();
    trained(&here.train(&[]));
    assert_eq!(run.losses(), here.losses(), "bit for bit");
}

#[test]
fn a_killed_rank_is_named_and_the_job_starts_again_from_its_checkpoint() {
    let run = Run::new();
    let args = ["--set", "checkpoint.every=10", "--set", "train.steps=400", "--set", "log.every=5"];
    let mut command = run.command(&[&args[..], &["--restarts", "2", "--json"]].concat());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut heard = vec![];
    for line in lines.by_ref() {
        let line = line.unwrap();
        heard.push(line.clone());
        if line.starts_with("step  40 ") {
            break;
        }
    }
    let ranks = descendants(child.id());
    let victim = ranks.into_iter().find(|pid| environment(*pid).contains("\0RANK=1\0")).expect("r1 runs");
    assert!(Command::new("kill").args(["-KILL", &victim.to_string()]).status().unwrap().success());
    heard.extend(lines.map(|line| line.unwrap()));
    let out = child.wait_with_output().unwrap();
    let heard = heard.join("\n");
    assert!(out.status.success(), "{heard}");
    assert!(heard.contains("r1"), "{heard}");
    assert!(heard.contains("restart 1 of 2"), "{heard}");
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&summary["restarts"], &summary["steps"]), (&1.into(), &400.into()));
    let steps: Vec<u64> = run.metrics().iter().map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=400).collect::<Vec<u64>>(), "no step is told twice");
    let whole = Run::new();
    trained(&whole.train(&["--set", "train.steps=400"]));
    assert_eq!(run.losses(), whole.losses(), "bit for bit");
}

/// A run that went back starts again from where it went back to, not from what it left behind.
#[test]
fn a_run_that_went_back_does_not_start_again_from_later_checkpoints() {
    let run = Run::new();
    trained(&run.train(&["--set", "checkpoint.every=4", "--set", "checkpoint.keep=9"]));
    let back = "runs/tiny/checkpoints/step-00000004";
    let args = ["--resume", back, "--restarts", "1", "--set", "train.steps=300", "--set", "log.every=1"];
    let mut command = run.command(&[&args[..], &["--set", "optimizer.learning_rate=1e-3"]].concat());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step   6 ")), "it does not come to step 6");
    let ranks = descendants(child.id());
    let victim = ranks.into_iter().find(|pid| environment(*pid).contains("\0RANK=1\0")).expect("r1 runs");
    assert!(Command::new("kill").args(["-KILL", &victim.to_string()]).status().unwrap().success());
    let heard = lines.collect::<Vec<_>>().join("\n");
    assert!(child.wait().unwrap().success(), "{heard}");
    assert!(heard.contains("starting again from step 4, restart 1 of 1"), "{heard}");
    let steps: Vec<u64> = run.metrics().iter().map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=300).collect::<Vec<u64>>(), "no step is left out");
}

/// Who is asked to end saves and ends well, and the run goes on from there as if nothing had been.
#[test]
fn a_run_that_is_asked_to_end_saves_first() {
    let run = Run::new();
    let args = ["--set", "checkpoint.every=100000", "--set", "log.every=5"];
    let endless =
        [&args[..], &["--set", "train.steps=1000000", "--set", "optimizer.schedule=constant"]].concat();
    let mut command = run.command(&[&endless[..], &["--json"]].concat());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step      40 ")), "it does not come to step 40");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{rest:?}");
    let summary: Value = serde_json::from_slice(&out.stdout).unwrap();
    let steps = summary["steps"].as_u64().unwrap();
    assert!((40..1_000_000).contains(&steps), "{summary}");
    let saved = run.scratch.path().join(format!("runs/tiny/checkpoints/step-{steps:08}/manifest.json"));
    assert!(saved.is_file(), "step {steps} was not saved");
    let more = format!("train.steps={}", steps + 2);
    trained(
        &run.train(
            &[&args[..], &["--set", "optimizer.schedule=constant", "--set", &more, "--resume"]].concat(),
        ),
    );
    let told: Vec<u64> = run.metrics().iter().map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(told, (1..=steps + 2).collect::<Vec<u64>>());
}

/// An old checkpoint that cannot be removed is worth a line, and not a run. Needs root, for a mount that nobody else sees.
#[test]
fn old_checkpoints_that_cannot_be_removed_are_a_warning() {
    needs_root();
    let run = Run::new();
    let args = ["--set", "checkpoint.every=4", "--set", "checkpoint.keep=1"];
    trained(&run.train(&[&args[..], &["--set", "train.steps=4"]].concat()));
    let old = run.scratch.at("runs/tiny/checkpoints/step-00000004");
    let script =
        format!("mount --bind {old} {old} && exec \"$0\" train tiny.toml {} --resume", args.join(" "));
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &script]).arg(binary().get_program()).current_dir(run.scratch.path());
    let said = said(&mut command);
    trained(&said);
    assert!(said.stderr.contains("warning: old checkpoints could not be removed: "), "{}", said.stderr);
    assert!(Path::new(&old).is_dir());
    assert!(run.scratch.path().join("runs/tiny/checkpoints/step-00000012/manifest.json").is_file());
}

/// Ranks that were started one by one may have been told different things.
#[test]
fn a_rank_with_another_config_is_named() {
    let run = Run::new();
    let program = env!("CARGO_BIN_EXE_crossmesh");
    let script = format!("exec {program} train tiny.toml --set optimizer.learning_rate=1e-$((2 + RANK / 2))");
    let mut command = binary();
    command.current_dir(run.scratch.path()).args(["launch", "-n", "3", "--", "sh", "-c", &script]);
    let said = said(&mut command);
    assert_eq!(said.code, 2, "{}{}", said.stdout, said.stderr);
    let why = "is at fault: it was started to do something else than the others: config ";
    let named = said.stderr.lines().filter(|l| l.contains("error: r2 on ") && l.contains(why)).count();
    assert!(named >= 2, "{}", said.stderr);
}

fn environment(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    format!("\0{}", String::from_utf8_lossy(&bytes))
}
