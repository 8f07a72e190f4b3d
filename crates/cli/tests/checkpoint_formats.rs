//! `crossmesh checkpoint` of other systems' formats: show, check, diff and convert, as a person calls them, and interrupts them.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Scratch, binary, crossmesh, ok, refused};
use serde_json::{Value, json};

/// A safetensors file of f32, by hand: every tensor counts up from its place.
fn write_safetensors(path: &Path, shapes: &[(String, Vec<u64>)]) {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes {
        let end = at + 4 * shape.iter().product::<u64>();
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [at, end]});
        header.insert(name.clone(), entry);
        at = end;
    }
    let text = Value::Object(header).to_string();
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let numbers = (0..at / 4).flat_map(|i| (i as f32).to_le_bytes());
    file.write_all(&numbers.collect::<Vec<u8>>()).unwrap();
}

/// Tensors of the small Llama.
const TENSORS: usize = 12;

/// A small Llama in every format of other systems, in folders of their names.
fn foreign(scratch: &Scratch) -> [&'static str; 4] {
    let hf = scratch.path().join("hf");
    std::fs::create_dir(&hf).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("lm_head.weight".to_string(), vec![6, 4]),
        ("model.embed_tokens.weight".into(), vec![6, 4]),
        (layer("input_layernorm"), vec![4]),
        (layer("mlp.down_proj"), vec![4, 8]),
        (layer("mlp.gate_proj"), vec![8, 4]),
        (layer("mlp.up_proj"), vec![8, 4]),
        (layer("post_attention_layernorm"), vec![4]),
        (layer("self_attn.k_proj"), vec![4, 4]),
        (layer("self_attn.o_proj"), vec![4, 8]),
        (layer("self_attn.q_proj"), vec![8, 4]),
        (layer("self_attn.v_proj"), vec![4, 4]),
        ("model.norm.weight".into(), vec![4]),
    ];
    assert_eq!(shapes.len(), TENSORS);
    write_safetensors(&hf.join("model.safetensors"), &shapes);
    let config = json!({
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 6, "hidden_size": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 8,
    });
    std::fs::write(hf.join("config.json"), config.to_string()).unwrap();
    for (to, cut) in [("dcp", "--ranks"), ("dcp-hf", "--ranks"), ("torch_dist", "--tp")] {
        let from = scratch.at("hf");
        ok(&["checkpoint", "convert", &from, "--to", to, cut, "2", "-o", &scratch.at(to)]);
    }
    ["hf", "dcp", "dcp-hf", "torch_dist"]
}

#[test]
fn other_systems_checkpoints_are_shown_checked_and_compared() {
    let scratch = Scratch::new();
    for format in foreign(&scratch) {
        let path = scratch.at(format);
        let said = ok(&["checkpoint", "show", &path, "--tensors"]).stdout;
        assert!(said.starts_with(&format!("{path}\n  format   {format}\n")), "{said}");
        assert!(said.contains("\n  model    llama\n") && said.contains(" box"), "{said}");
        let shown = ok(&["checkpoint", "show", &path, "--format", "json"]).json();
        assert_eq!(shown["schema"], "crossmesh.checkpoint-catalog/1");
        assert_eq!((&shown["kind"], &shown["path"]), (&format.into(), &path.as_str().into()));
        let tensors = shown["tensors"].as_array().unwrap();
        assert!(tensors.iter().all(|t| t["dtype"] == "f32" && t["boxes"].as_u64() >= Some(1)), "{shown}");
        let said = ok(&["checkpoint", "check", &path]).stdout;
        assert!(said.ends_with(": every element is there, once\n"), "{said}");
        let checked = ok(&["checkpoint", "check", &path, "--format", "json"]).json();
        assert_eq!(checked["schema"], "crossmesh.checkpoint-check/1");
        assert_eq!((&checked["kind"], &checked["good"]), (&format.into(), &true.into()));
        assert_eq!((&checked["tensors"], &checked["problems"]), (&tensors.len().into(), &json!([])));
        assert_eq!(checked["bytes"], shown["bytes"]);
        // Under one system's names all of them are the same.
        let said = ok(&["checkpoint", "diff", &scratch.at("hf"), &path, "--names", "llama"]).stdout;
        assert!(said.starts_with(&format!("the same: {TENSORS} tensors, ")), "{said}");
    }
}

#[test]
fn a_difference_is_the_answer_no() {
    let scratch = Scratch::new();
    foreign(&scratch);
    let (hf, dcp) = (scratch.at("hf"), scratch.at("dcp"));
    let same = ok(&["checkpoint", "diff", &hf, &dcp, "--format", "json"]).json();
    assert_eq!(same["schema"], "crossmesh.checkpoint-diff/1");
    assert_eq!((&same["same"], &same["differences"]), (&true.into(), &json!([])));
    let path = Path::new(&hf).join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let said = crossmesh(&["checkpoint", "diff", &hf, &dcp]);
    assert_eq!((said.code, said.stderr.as_str()), (1, ""));
    assert_eq!(said.last_line(), format!("1 of {TENSORS} tensors differ"), "{}", said.stdout);
    assert!(said.stdout.contains(": 1 elements differ, the first at ["), "{}", said.stdout);
    let said = crossmesh(&["checkpoint", "diff", &hf, &dcp, "--format", "json"]);
    assert_eq!((said.code, &said.json()["same"]), (1, &false.into()));
    assert_eq!(said.json()["differences"].as_array().unwrap().len(), 1);
}

#[test]
fn a_lost_shard_is_the_answer_no() {
    let scratch = Scratch::new();
    foreign(&scratch);
    for (format, lost, kind) in [
        ("dcp", "__1_0.distcp", "missing-file"),
        ("torch_dist", "__1_0.distcp", "missing-file"),
        ("dcp-hf", "shard-00002-model-00001-of-00001.safetensors", "hole"),
    ] {
        let path = scratch.at(format);
        std::fs::remove_file(Path::new(&path).join(lost)).unwrap();
        let said = crossmesh(&["checkpoint", "check", &path]);
        assert_eq!((said.code, said.stderr.as_str()), (1, ""), "{format}");
        assert!(said.stdout.lines().any(|line| line.starts_with(&format!("{kind}: "))), "{}", said.stdout);
        assert!(said.stdout.ends_with(": it cannot be used as it is\n"), "{}", said.stdout);
        let said = crossmesh(&["checkpoint", "check", &path, "--format", "json"]);
        let checked = said.json();
        assert_eq!((said.code, &checked["good"]), (1, &false.into()));
        let problems = checked["problems"].as_array().unwrap();
        assert!(problems.iter().any(|p| p["kind"] == kind && p["warning"] == false), "{checked}");
        ok(&["checkpoint", "show", &path]);
        let out = scratch.at("out");
        let error = refused(&["checkpoint", "convert", &path, "--to", "hf", "-o", &out]);
        assert!(error.contains(kind), "{error}");
        assert!(!Path::new(&out).exists());
    }
}

#[test]
fn what_a_pickle_would_run_is_named_and_not_run() {
    let scratch = Scratch::new();
    foreign(&scratch);
    let (dcp, it_ran) = (scratch.at("dcp"), scratch.at("it-ran"));
    // As Python pickles an object whose __reduce__ returns `os.system, ("touch ...",)`.
    let command = format!("touch {it_ran}");
    let mut pickle = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94X".to_vec();
    pickle.extend((command.len() as u32).to_le_bytes());
    pickle.extend(command.as_bytes());
    pickle.extend(b"\x94\x85\x94R\x94.");
    std::fs::write(Path::new(&dcp).join(".metadata"), pickle).unwrap();
    let (hf, out) = (scratch.at("hf"), scratch.at("out"));
    for command in [
        &["checkpoint", "check", &dcp][..],
        &["checkpoint", "show", &dcp],
        &["checkpoint", "diff", &hf, &dcp],
        &["checkpoint", "convert", &dcp, "--to", "hf", "-o", &out],
    ] {
        let error = refused(command);
        assert!(error.contains("its pickle names `posix.system`"), "{error}");
        assert!(error.contains("hint: nothing of it was run"), "{error}");
    }
    assert!(!Path::new(&it_ran).exists());
    // One that would take more memory than there may be is refused, too.
    std::fs::write(Path::new(&dcp).join(".metadata"), [&b"\x80\x04"[..], &vec![b'N'; 8 << 20]].concat())
        .unwrap();
    let error = refused(&["checkpoint", "check", &dcp, "--max-memory", "1MiB"]);
    assert!(error.contains("bytes of memory that there may be\nhint: allow more"), "{error}");
}

/// A checkpoint of 64 MiB, and a conversion of it in very small pieces.
fn long_conversion(scratch: &Scratch) -> Vec<String> {
    let folder = scratch.path().join("in");
    std::fs::create_dir(&folder).unwrap();
    write_safetensors(&folder.join("model.safetensors"), &[("w".into(), vec![4096, 4096])]);
    let (from, to) = (scratch.at("in"), scratch.at("out"));
    let words = ["checkpoint", "convert", &from, "--to", "dcp", "--max-memory", "200KiB", "--format", "json"];
    words.into_iter().chain(["-o", &to]).map(String::from).collect()
}

/// Starts it, and sends a signal once it has written something.
fn interrupted(scratch: &Scratch, args: &[String], signal: &str) -> Child {
    let mut child = binary().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let journal = scratch.path().join(".out.partial/journal");
    while !journal.metadata().is_ok_and(|meta| meta.len() > 200) && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(200));
    }
    let pid = child.id().to_string();
    // That it has ended already is seen by what it left.
    Command::new("kill").args([signal, &pid]).stderr(Stdio::null()).status().unwrap();
    child
}

#[test]
fn killed_or_interrupted_the_same_command_goes_on() {
    let scratch = Scratch::new();
    let args = long_conversion(&scratch);
    let (out, partial) = (scratch.path().join("out"), scratch.path().join(".out.partial"));
    for signal in ["-KILL", "-INT", "-TERM"] {
        let mut kept = 0;
        // It may be over before the signal comes.
        for _ in 0..20 {
            let ended = interrupted(&scratch, &args, signal).wait_with_output().unwrap();
            let was_there = out.exists();
            if !was_there && signal != "-KILL" {
                assert_eq!(ended.status.code(), Some(2));
                let said = String::from_utf8(ended.stderr).unwrap();
                assert!(
                    said.starts_with("error: stopped: ") && said.contains(".out.partial keeps"),
                    "{said}"
                );
                assert!(said.contains("the same command goes on from there; remove that folder"), "{said}");
            }
            if !was_there {
                assert!(partial.exists(), "{signal}");
                kept = ok(&args).json()["bytes_kept"].as_u64().unwrap();
            }
            assert!(!partial.exists());
            ok(&["checkpoint", "diff", &scratch.at("in"), &scratch.at("out")]);
            std::fs::remove_dir_all(&out).unwrap();
            if kept > 0 {
                break;
            }
        }
        assert!(kept > 0, "{signal} never came in the middle");
    }
}
