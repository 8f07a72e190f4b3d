//! Training steps as documents: written, proven and predicted.

mod common;

use common::{Scratch, crossmesh, ok};

/// Writes the steps of one case, and returns the one of eager-1F1B as text.
fn written(scratch: &Scratch) -> String {
    let folder = scratch.at("steps");
    let case = ["--case", "GPT 1.3B", "--series", "eager-1f1b,broadcast"];
    ok(&[&["bench", "pipeline", "--predict", "--steps", &folder][..], &case].concat());
    let broadcast = scratch.at("steps/gpt-1.3b-1-2-2-broadcast.json");
    assert!(ok(&["verify", &broadcast]).stdout.contains("16 passes on 4 ranks"));
    std::fs::read_to_string(scratch.at("steps/gpt-1.3b-1-2-2-eager-1f1b.json")).unwrap()
}

#[test]
fn a_step_is_proven_and_predicted_alike_in_fine_and_in_broad_strokes() {
    let scratch = Scratch::new();
    written(&scratch);
    let path = scratch.at("steps/gpt-1.3b-1-2-2-eager-1f1b.json");
    let verdict = ok(&["verify", &path, "--format", "json"]).json();
    assert_eq!(verdict["ok"], true);
    let fine = ok(&["simulate", &path, "--format", "json"]).json();
    let coarse = ok(&["simulate", &path, "--coarse", "--format", "json"]).json();
    let seconds = |answer: &serde_json::Value| answer["predicted_s"].as_f64().unwrap();
    assert!((seconds(&coarse) / seconds(&fine) - 1.0).abs() < 0.02, "{fine} {coarse}");
    assert_eq!((fine["coarse"].as_bool(), coarse["coarse"].as_bool()), (Some(false), Some(true)));
    for device in fine["devices"].as_array().unwrap() {
        let sum = device["busy_s"].as_f64().unwrap() + device["idle_s"].as_f64().unwrap();
        assert!((sum / seconds(&fine) - 1.0).abs() < 1e-9, "{device}");
    }
    let faster = ok(&["simulate", &path, "--nic", "100Gbit", "--format", "json"]).json();
    assert!(seconds(&faster) < seconds(&fine));
}

#[test]
fn a_step_that_lacks_a_pass_or_swaps_two_is_refused() {
    let scratch = Scratch::new();
    let text = written(&scratch);
    let says = |what: &str, text: &str| {
        let path = scratch.file(what, text);
        crossmesh(&["verify".as_ref(), path.as_os_str()])
    };
    let swapped =
        text.replace("\"1F0\"", "\"1BW0!\"").replace("\"1BW0\"", "\"1F0\"").replace("1BW0!", "1BW0");
    for (what, text, law) in [
        ("dropped", text.replacen("\"0F0\",", "", 1), "completeness: 0F0 is missing"),
        ("swapped", swapped, "dependencies: device 1 runs 1BW0 before 1F0"),
    ] {
        let said = says(what, &text);
        assert_eq!(said.code, 1, "{what}: {}", said.stderr);
        assert!(said.stdout.contains(law), "{what}: {}", said.stdout);
    }
    for (what, text, why) in [
        ("no pass", text.replacen("\"1F0\"", "\"x\"", 1), "x"),
        ("cut", text[..text.len() / 2].to_string(), "not a step"),
        ("newer", text.replace("crossmesh.step/1", "crossmesh.step/9"), "crossmesh.step/9"),
    ] {
        let said = says(what, &text);
        assert_eq!(said.code, 2, "{what}: {}", said.stdout);
        assert!(said.stderr.contains(why), "{what}: {}", said.stderr);
    }
}

#[test]
fn broad_strokes_are_for_steps() {
    let scratch = Scratch::new();
    let plan = scratch.at("plan.json");
    ok(&["plan", "f32[8]@A{tp:2}(tp)", "f32[8]@B{tp:2}(_)", "-o", &plan]);
    let said = crossmesh(&["simulate", &plan, "--coarse"]);
    assert_eq!(said.code, 2);
    assert!(said.stderr.contains("is not a training step"), "{}", said.stderr);
}

/// Tensors that are made and needed in the middle of passes, by ranks that begin together: words stand between the parts of a pass.
#[test]
fn steps_with_skips_are_proven_in_every_series() {
    let answer =
        ok(&["bench", "pipeline", "--predict", "--case", "U-Transformer 1B", "--format", "json"]).json();
    let series = answer["cases"][0]["series"].as_array().unwrap();
    assert_eq!(series.len(), 7);
    assert!(series.iter().all(|s| s["predicted_s"].as_f64().unwrap() > 0.0));
}
