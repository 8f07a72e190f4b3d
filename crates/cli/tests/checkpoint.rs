//! `crossmesh checkpoint`: show, verify, export and import, as a person calls them.

mod common;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Scratch, crossmesh, ok, refused};
use crossmesh_core::id::Rank;
use crossmesh_train::chain::{Chain, Setup};
use crossmesh_train::checkpoint::{Facts, Moments, OptimizerFacts, Snapshot, StageState, Store, hf};
use crossmesh_train::deal::Share;
use crossmesh_train::group::in_process;
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::{Gpt, GptConfig};
use crossmesh_train::parameter::initial;
use crossmesh_train::stage::Stage;
use crossmesh_train::stage_rank::StageRank;

/// A small GPT after 7 steps, saved by two ranks.
fn saved(folder: &Path) -> PathBuf {
    let config = GptConfig::new(11, 4, 6, 1, 3);
    let model = Gpt::new(config.clone()).unwrap();
    let store = Store::new(folder, NonZeroUsize::new(2).unwrap());
    let groups = in_process::<f32>(2);
    let report = |position: usize| {
        let place = StageRank::new("A{tp:2}".parse().unwrap(), position).unwrap();
        let setup = Setup { place: place.clone(), ..Setup::alone(1, 0) };
        let (cpu, group) = (Arc::new(Cpu::<f32>::new(1)), Arc::clone(&groups[position]));
        let chain = Chain::new(&model, 0..3, cpu, group, setup).unwrap();
        let values = &initial::<f32>(chain.parameters(), place.coord(), 1);
        let share = Share::whole(values.len());
        let moments = Moments { names: &["momentum"], values: vec![&values[..]], share };
        let state = StageState { moments, ..StageState::of_weights(chain.parameters(), &place, values) };
        store.write(Snapshot::take(7, Rank(position as u32), &[state]).unwrap()).report()
    };
    let optimizer = OptimizerFacts { kind: "sgd".into(), steps: 7, moments: vec!["momentum".into()] };
    let (model, run) = (hf::model_json(&config), serde_json::Value::Null);
    let facts = Facts { step: 7, samples: 56, seed: 1, model, run, optimizer: Some(optimizer) };
    store.commit(&facts, &[report(0), report(1)]).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn shows_what_is_there() {
    let scratch = Scratch::new();
    let path = saved(scratch.path());
    // The folder of checkpoints means its newest one.
    for asked in [scratch.path(), &path] {
        let said = ok(&["checkpoint", "show", text(asked)]).stdout;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[0], text(&path));
        assert_eq!(lines[1], "  step       7, 56 samples seen, seed 1");
        assert_eq!(lines[3], "  numbers    612 parameters in 16 tensors, f32");
        assert_eq!(lines[4], "  optimizer  sgd, 7 steps, momentum");
        assert_eq!(lines[5], "  saved on   A{tp:2}");
        assert!(lines[6].starts_with("  files      2, "), "{said}");
    }
    let said = ok(&["checkpoint", "show", text(&path), "--verify", "--tensors"]).stdout;
    assert!(said.contains("all of them as they were written"), "{said}");
    assert!(said.contains("f32[11,6]@A{tp:2}(tp,_)"), "{said}");
    let json = ok(&["checkpoint", "show", text(&path), "--verify", "--format", "json"]).json();
    assert_eq!(json["schema"], "crossmesh.checkpoint-summary/1");
    assert_eq!(json["parameters"], 612);
    assert_eq!(json["verified"], true);
    assert_eq!(json["meshes"][0], "A{tp:2}");
    assert_eq!(json["model"]["heads"], 3);
    assert_eq!(json["tensors"].as_array().unwrap().len(), 16);
}

#[test]
fn damage_is_the_answer_no() {
    let scratch = Scratch::new();
    let path = saved(scratch.path());
    let file = path.join("rank-001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    ok(&["checkpoint", "show", text(&path)]);
    let said = crossmesh(&["checkpoint", "show", text(&path), "--verify"]);
    assert_eq!(said.code, 1, "{}", said.stderr);
    assert!(said.stdout.contains("rank-001.safetensors: it is not what was written"), "{}", said.stdout);
    let said = crossmesh(&["checkpoint", "show", text(&path), "--verify", "--format", "json"]);
    assert_eq!((said.code, &said.json()["verified"]), (1, &serde_json::json!(false)));
    let out = scratch.path().join("out");
    let error = refused(&["checkpoint", "export", text(&path), "-o", text(&out)]);
    assert!(error.contains("rank-001.safetensors"), "{error}");
    assert!(!out.exists());
}

#[test]
fn goes_out_and_comes_back() {
    let scratch = Scratch::new();
    saved(&scratch.path().join("run"));
    let (run, out, back, again) = (
        scratch.path().join("run"),
        scratch.path().join("out"),
        scratch.path().join("back"),
        scratch.path().join("again"),
    );
    let said = ok(&["checkpoint", "export", text(&run), "-o", text(&out)]).stdout;
    assert!(said.starts_with("step 7: 16 tensors, "), "{said}");
    let file = out.join("model.safetensors");
    let said = ok(&["checkpoint", "import", text(&file), "-o", text(&back)]).stdout;
    assert!(said.ends_with("vocab 11, context 4, width 6, 1 layer, 3 heads, hidden 24, tied\n"), "{said}");
    let told = ok(&["checkpoint", "export", text(&back), "-o", text(&again), "--json"]).json();
    assert_eq!((&told["schema"], &told["as_imported"]), (&"crossmesh.export/1".into(), &true.into()));
    assert_eq!(told["model"].as_str(), again.join("model.safetensors").to_str());
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(again.join("model.safetensors")).unwrap());
    let error = refused(&["checkpoint", "import", text(&file), "-o", text(&back)]);
    assert!(error.contains("already\nhint: import into a new folder"), "{error}");
    std::fs::remove_file(out.join("config.json")).unwrap();
    let error = refused(&["checkpoint", "import", text(&file), "-o", text(&scratch.path().join("c"))]);
    assert!(error.contains("hint: give their number"), "{error}");
    let told = ok(&[
        "checkpoint",
        "import",
        text(&file),
        "--heads",
        "2",
        "--dtype",
        "f64",
        "-o",
        text(&scratch.path().join("c")),
        "--json",
    ]);
    let told = told.json();
    assert_eq!((&told["schema"], &told["config"]["heads"]), (&"crossmesh.import/1".into(), &2.into()));
}

#[test]
fn what_is_not_there_is_named() {
    let scratch = Scratch::new();
    let missing = scratch.path().join("no such");
    let error = refused(&["checkpoint", "show", text(&missing)]);
    assert!(error.contains("no such"), "{error}");
    let error = refused(&["checkpoint", "show", text(scratch.path())]);
    assert!(error.contains("there is no complete checkpoint here\nhint: "), "{error}");
    let error = refused(&["checkpoint", "import", text(&missing), "-o", text(scratch.path())]);
    assert!(error.contains("cannot open"), "{error}");
    let error = refused(&["checkpoint", "import", text(scratch.path()), "-o", text(scratch.path())]);
    assert!(error.contains("it is no file"), "{error}");
}

#[test]
fn explains_a_conversion_for_people_and_for_programs() {
    let scratch = Scratch::new();
    saved(&scratch.path().join("run"));
    let (run, out) = (scratch.path().join("run"), scratch.path().join("out"));
    let convert = ["checkpoint", "convert", text(&run), "--to", "torch_dist", "--tp", "2"];
    let with = |more: &[&str]| ok(&[&convert[..], more].concat());
    let said = with(&["--explain"]).stdout;
    for says in [
        "\nnames    by the map gpt2\nreads    ",
        " to compare hashes ",
        "\nwrites   ",
        " from crossmesh to torch_dist: reads ",
    ] {
        assert!(said.contains(says), "{says}\n{said}");
    }
    let document = with(&["--explain", "--format", "json"]).json();
    assert_eq!(document["schema"], "crossmesh.checkpoint-explain/1");
    let part = &document["files"][0]["parts"][0];
    assert!(part["tensor"].is_string() && part["from"][0]["file"].is_string(), "{part}");
    assert!(!scratch.path().join("out").exists());
    // What it is going to read and write is what it has read and written then.
    let done = with(&["-o", text(&out), "--format", "json"]).json();
    assert_eq!(done["bytes_read"], document["reads"]["bytes"]);
    assert_eq!(done["bytes_written"], document["writes"]["bytes"]);
    // Hugging Face has no place for an optimizer's states.
    let said = ok(&["checkpoint", "convert", text(&run), "--to", "hf", "--explain"]).stdout;
    assert!(said.contains("/momentum") && said.contains(", for hf has no place for them\n"), "{said}");
}

#[test]
fn maps_that_come_along_are_listed_and_printed() {
    let said = ok(&["checkpoint", "maps"]).stdout;
    assert!(said.lines().any(|line| line.starts_with("qwen3_moe  fused, hf, megatron")), "{said}");
    let listed = ok(&["checkpoint", "maps", "--format", "json"]).json();
    assert_eq!(listed["maps"].as_array().unwrap().len(), 5);
    let scratch = Scratch::new();
    let mine = scratch.path().join("mine.toml");
    let map = ok(&["checkpoint", "maps", "gpt2"]).stdout;
    assert!(map.contains("family = \"gpt2\""), "{map}");
    // What is printed is a map: the same as the one that comes along.
    std::fs::write(&mine, map).unwrap();
    saved(&scratch.path().join("run"));
    let run = scratch.path().join("run");
    let explained = |names: &str| {
        let args = ["checkpoint", "convert", text(&run), "--to", "torch_dist", "--names", names, "--explain"];
        ok(&args).stdout
    };
    assert_eq!(explained("gpt2"), explained(text(&mine)));
    assert_eq!(ok(&["checkpoint", "maps", "gpt2", "--format", "json"]).json()["family"], "gpt2");
    let error = refused(&["checkpoint", "maps", "bert"]);
    assert!(error.contains("no map called `bert` comes along\nhint: one of llama, "), "{error}");
}
