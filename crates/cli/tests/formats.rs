//! `crossmesh checkpoint convert`, `check`, `diff` and `show` on checkpoints of other systems, as a person calls them.

mod common;

use std::path::Path;

use common::{Scratch, crossmesh, ok, refused};
use serde_json::{Value, json};

/// A Llama of one layer with two heads that share one head of keys, in Hugging Face's files; f32, numbers 0, 1, 2, ..
fn llama(scratch: &Scratch, name: &str) -> String {
    let (v, h, f, d) = (6u64, 4u64, 6u64, 2u64);
    let layer = "model.layers.0.";
    let shapes = [
        ("lm_head.weight".to_string(), vec![v, h]),
        ("model.embed_tokens.weight".to_string(), vec![v, h]),
        (format!("{layer}input_layernorm.weight"), vec![h]),
        (format!("{layer}mlp.down_proj.weight"), vec![h, f]),
        (format!("{layer}mlp.gate_proj.weight"), vec![f, h]),
        (format!("{layer}mlp.up_proj.weight"), vec![f, h]),
        (format!("{layer}post_attention_layernorm.weight"), vec![h]),
        (format!("{layer}self_attn.k_proj.weight"), vec![d, h]),
        (format!("{layer}self_attn.o_proj.weight"), vec![h, 2 * d]),
        (format!("{layer}self_attn.q_proj.weight"), vec![2 * d, h]),
        (format!("{layer}self_attn.v_proj.weight"), vec![d, h]),
        ("model.norm.weight".to_string(), vec![h]),
    ];
    let folder = scratch.path().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    write(&folder.join("model.safetensors"), &shapes);
    let config = json!({
        "model_type": "llama", "vocab_size": v, "hidden_size": h, "intermediate_size": f, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": d, "max_position_embeddings": 16,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    folder.to_str().unwrap().to_string()
}

/// As the safetensors library lays a file out.
fn write(path: &Path, shapes: &[(String, Vec<u64>)]) {
    let (mut members, mut at) = (vec!["\"__metadata__\":{\"format\":\"pt\"}".to_string()], 0);
    let mut body = Vec::new();
    for (name, shape) in shapes {
        let len = shape.iter().product::<u64>();
        members.push(format!(
            "\"{name}\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[{at},{}]}}",
            at + 4 * len
        ));
        at += 4 * len;
        body.extend((0..len).flat_map(|i| (i as f32).to_le_bytes()));
    }
    let mut text = format!("{{{}}}", members.join(",")).replace(", ", ",");
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &body].concat();
    std::fs::write(path, bytes).unwrap();
}

fn read(folder: &str, name: &str) -> Vec<u8> {
    std::fs::read(Path::new(folder).join(name)).unwrap_or_else(|e| panic!("{folder}/{name}: {e}"))
}

#[test]
fn a_model_goes_through_every_format_and_is_the_same_file_again() {
    let scratch = Scratch::new();
    let start = llama(&scratch, "start");
    let way: [(&str, &[&str]); 5] = [
        ("dcp", &["--ranks", "3"]),
        ("torch_dist", &["--tp", "2", "--pp", "1"]),
        ("dcp-hf", &["--ranks", "2"]),
        ("crossmesh", &["--ranks", "2"]),
        ("hf", &[]),
    ];
    let mut from = start.clone();
    for (format, more) in way {
        let out = scratch.at(format);
        let said = ok(&[&["checkpoint", "convert", &from, "--to", format, "-o", &out], more].concat()).stdout;
        assert!(said.contains(&format!("tensors as {format}, ")), "{said}");
        let said = ok(&["checkpoint", "check", &out]).stdout;
        assert!(said.ends_with("every element is there, once\n"), "{said}");
        let json = ok(&["checkpoint", "check", &out, "--format", "json"]).json();
        assert_eq!(
            (json["kind"].as_str(), &json["good"], &json["problems"]),
            (Some(format), &json!(true), &json!([]))
        );
        // Names differ, numbers do not.
        let said = ok(&["checkpoint", "diff", &start, &out, "--names", "llama"]).stdout;
        assert_eq!(said, "the same: 12 tensors, 720 B\n");
        for name in ["config.json", "tokenizer.json"] {
            assert_eq!(read(&out, name), read(&start, name), "{format} {name}");
        }
        if format != "crossmesh" {
            let said = ok(&["checkpoint", "show", &out, "--tensors"]).stdout;
            assert!(
                said.contains(&format!("format   {format}\n")) && said.contains("model    llama\n"),
                "{said}"
            );
        }
        from = out;
    }
    assert_eq!(read(&from, "model.safetensors"), read(&start, "model.safetensors"));
    let json = ok(&["checkpoint", "show", &scratch.at("torch_dist"), "--format", "json"]).json();
    assert_eq!((json["kind"].as_str(), json["bytes"].as_u64()), (Some("torch_dist"), Some(720)));
    let qkv = "decoder.layers.self_attention.linear_qkv.weight";
    let tensors = json["tensors"].as_array().unwrap();
    let found = tensors.iter().find(|t| t["name"] == qkv).unwrap();
    assert_eq!((&found["shape"], found["dtype"].as_str()), (&json!([1, 8, 4]), Some("f32")));
}

#[test]
fn a_config_that_is_given_goes_along() {
    let scratch = Scratch::new();
    let start = llama(&scratch, "start");
    let megatron = scratch.at("megatron");
    ok(&["checkpoint", "convert", &start, "--to", "torch_dist", "-o", &megatron]);
    for name in ["config.json", "tokenizer.json"] {
        std::fs::remove_file(Path::new(&megatron).join(name)).unwrap();
    }
    let out = scratch.at("out");
    let error = refused(&["checkpoint", "convert", &megatron, "--to", "hf", "-o", &out]);
    assert!(error.contains("nothing tells what model this is\nhint: give a map, one of llama, "), "{error}");
    let error = refused(&["checkpoint", "convert", &megatron, "--to", "hf", "-o", &out, "--names", "llama"]);
    assert!(
        error.contains("nothing tells how long the axis `")
            && error.contains("hint: give the model's config.json"),
        "{error}"
    );
    let config = format!("{start}/config.json");
    ok(&["checkpoint", "convert", &megatron, "--to", "hf", "--config", &config, "-o", &out]);
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        assert_eq!(read(&out, name), read(&start, name), "{name}");
    }
}

#[test]
fn differences_are_the_answer_no() {
    let scratch = Scratch::new();
    let (one, two) = (llama(&scratch, "one"), llama(&scratch, "two"));
    assert_eq!(ok(&["checkpoint", "diff", &one, &two]).stdout, "the same: 12 tensors, 720 B\n");
    let mut bytes = read(&two, "model.safetensors");
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(Path::new(&two).join("model.safetensors"), bytes).unwrap();
    let said = crossmesh(&["checkpoint", "diff", &one, &two]);
    assert_eq!(said.code, 1, "{}", said.stderr);
    assert_eq!(
        said.stdout,
        "model.norm.weight: 1 elements differ, the first at [3]\n1 of 12 tensors differ\n"
    );
    let said = crossmesh(&["checkpoint", "diff", &one, &two, "--format", "json"]);
    assert_eq!((said.code, &said.json()["same"]), (1, &json!(false)));
    let narrow = scratch.at("narrow");
    ok(&[
        "checkpoint",
        "convert",
        &one,
        "--to",
        "hf",
        "--dtype",
        "bf16",
        "--leave-out",
        "model.norm*",
        "-o",
        &narrow,
    ]);
    let said = crossmesh(&["checkpoint", "diff", &one, &narrow]);
    assert!(said.stdout.contains("model.norm.weight: only in the first\n"), "{}", said.stdout);
    assert!(
        said.stdout.contains("lm_head.weight: f32[6, 4] in the first, bf16[6, 4] in the second\n"),
        "{}",
        said.stdout
    );
    assert!(said.stdout.ends_with("12 of 12 tensors differ\n"), "{}", said.stdout);
}

#[test]
fn wrong_words_are_named_with_a_way_out() {
    let scratch = Scratch::new();
    let start = llama(&scratch, "start");
    let out = scratch.at("out");
    let convert = |more: &[&str]| {
        let error = refused(&[&["checkpoint", "convert"], more].concat());
        assert!(!Path::new(&out).exists() && !scratch.path().join(".out.partial").exists(), "{error}");
        error
    };
    let missing = scratch.at("no such");
    for command in ["check", "show"] {
        let error = refused(&["checkpoint", command, &missing]);
        assert!(error.contains("no such") && error.contains("No such file"), "{error}");
    }
    let error = convert(&[&missing, "--to", "hf", "-o", &out]);
    assert!(error.contains("no such") && error.contains("No such file"), "{error}");
    let error = convert(&[&start, "--to", "pickle", "-o", &out]);
    assert!(
        error.contains("no format is called `pickle`\nhint: one of hf, dcp, dcp-hf, torch_dist, crossmesh"),
        "{error}"
    );
    let error = convert(&[&start, "--to", "dcp"]);
    assert!(error.contains("--output <OUT>"), "{error}");
    let error = refused(&["checkpoint", "convert", &start, "--to", "dcp", "-o", &start]);
    assert!(error.contains("start: it is there already\nhint: remove it, or name another"), "{error}");
    let error = convert(&[&start, "--to", "dcp", "-o", &scratch.at("no/parent")]);
    assert!(error.contains("no/.parent.partial") && error.contains("No such file"), "{error}");
    let error = convert(&[&start, "--to", "hf", "--tp", "2", "-o", &out]);
    assert!(
        error.contains("whole tensors: tp, pp and ep mean nothing to them\nhint: leave them away"),
        "{error}"
    );
    let error = convert(&[&start, "--to", "dcp", "--tp", "2", "--ranks", "2", "-o", &out]);
    assert!(error.contains("cut by tp, pp and ep, or over ranks, not by both"), "{error}");
    let error = convert(&[&start, "--to", "dcp", "--ranks", "0", "-o", &out]);
    assert!(error.contains("no ranks are to write it\nhint: 1 or more"), "{error}");
    let error = convert(&[&start, "--to", "dcp", "--dtype", "int3", "-o", &out]);
    assert!(error.contains("no type of numbers; f64, f32, bf16 or f16"), "{error}");
    let error = convert(&[&start, "--to", "dcp", "--dtype", "i64", "-o", &out]);
    assert!(error.contains("cannot be rounded to i64\nhint: f64, f32, bf16 and f16"), "{error}");
    let error = convert(&[&start, "--to", "dcp", "--max-memory", "1KiB", "-o", &out]);
    assert!(error.contains("needs 196608 bytes of memory at least, and may have 1024"), "{error}");
    // A folder without a checkpoint.
    std::fs::create_dir(&missing).unwrap();
    let error = convert(&[&missing, "--to", "dcp", "-o", &out]);
    assert!(error.contains("no checkpoint that is known\nhint: a folder with *.safetensors"), "{error}");
}

#[test]
fn a_map_with_a_mistake_is_refused_with_the_place() {
    let scratch = Scratch::new();
    let start = llama(&scratch, "start");
    let out = scratch.at("out");
    let convert = |map: &str| {
        let error =
            refused(&["checkpoint", "convert", &start, "--to", "torch_dist", "--names", map, "-o", &out]);
        assert!(!Path::new(&out).exists(), "{error}");
        error
    };
    let error = convert("bert");
    assert!(
        error.contains("name map `bert`: no map of this name comes along\nhint: one of llama, qwen3"),
        "{error}"
    );
    let error = convert(&scratch.at("missing.toml"));
    assert!(error.contains("missing.toml") && error.contains("No such file"), "{error}");
    let head = "schema = \"crossmesh.names/1\"\nfamily = \"mine\"\n[axes]\nv = [\"vocab_size\"]\nh = [\"hidden_size\"]\n[sides.hf]\n[sides.megatron]\n";
    let rule = "[[tensor]]\nhf = [\"lm_head.weight [v, h]\"]\nmegatron = [\"head [v, h]\"]\n";
    for (text, says) in [
        ("schema = ", "mine.toml"),
        (
            "schema = \"crossmesh.names/9\"\nfamily = \"x\"\naxes = {}\nsides = {}\ntensor = []\n",
            "its schema is `crossmesh.names/9`",
        ),
        (&format!("{head}{rule}{rule}"), "is named twice"),
        (
            &format!("{head}{}", rule.replace("head [v, h]", "head [h]")),
            "the axis `v` is of hf or of megatron alone",
        ),
        (
            &format!("{head}{rule}"),
            "it does not name `model.embed_tokens.weight` [6, 4], which is there\nhint: leave it out",
        ),
    ] {
        let map = scratch.file("mine.toml", text);
        let error = convert(map.to_str().unwrap());
        assert!(error.contains(says), "{error}");
    }
    // The same map, and what it does not name left behind.
    let map = scratch.at("mine.toml");
    let args = [
        "checkpoint",
        "convert",
        &start,
        "--to",
        "torch_dist",
        "--names",
        &map,
        "--leave-out",
        "model.*",
        "-o",
        &out,
    ];
    let said = ok(&args).stdout;
    assert!(
        said.contains("left out") && said.contains("and 7 more") && said.contains("1 tensor as torch_dist"),
        "{said}"
    );
}

#[test]
fn a_lost_file_makes_few_lines_unless_all_are_asked_for() {
    let scratch = Scratch::new();
    let (start, out) = (llama(&scratch, "start"), scratch.at("dcp"));
    ok(&["checkpoint", "convert", &start, "--to", "dcp", "-o", &out]);
    std::fs::remove_file(Path::new(&out).join("__0_0.distcp")).unwrap();
    let holes = |said: &str| said.lines().filter(|line| line.starts_with("hole: `")).count();
    let said = crossmesh(&["checkpoint", "check", &out]).stdout;
    assert!(said.starts_with("missing-file: "), "{said}");
    assert!(holes(&said) == 10 && said.contains("hole: 2 more; --all names them\n"), "{said}");
    let said = crossmesh(&["checkpoint", "check", &out, "--all"]).stdout;
    assert!(holes(&said) == 12 && !said.contains(" more; "), "{said}");
    let json = crossmesh(&["checkpoint", "check", &out, "--format", "json"]).json();
    assert_eq!(json["problems"].as_array().map(Vec::len), Some(13));
}

#[test]
fn damage_is_named_and_nothing_is_written() {
    let scratch = Scratch::new();
    let damaged = |name: &str, change: &dyn Fn(&Path)| {
        let folder = llama(&scratch, name);
        change(&Path::new(&folder).join("model.safetensors"));
        let out = scratch.at("out");
        let error = refused(&["checkpoint", "convert", &folder, "--to", "dcp", "-o", &out]);
        assert!(!Path::new(&out).exists() && !scratch.path().join(".out.partial").exists());
        (crossmesh(&["checkpoint", "check", &folder]), error)
    };
    let cut = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 3]).unwrap();
    };
    let (said, error) = damaged("short", &cut);
    assert_eq!(said.code, 1, "{}", said.stderr);
    assert!(
        said.stdout.contains("short-file: `model.norm.weight`: box [0:4] ends at byte"),
        "{}",
        said.stdout
    );
    assert!(said.stdout.ends_with("it cannot be used as it is\n"), "{}", said.stdout);
    assert!(error.contains("1 problem found\n  short-file"), "{error}");
    let nothing = |path: &Path| std::fs::write(path, b"").unwrap();
    let (said, error) = damaged("empty", &nothing);
    assert_eq!(said.code, 2);
    assert!(error.contains("it is 0 bytes long, too short for a safetensors file"), "{error}");
    let huge = |path: &Path| std::fs::write(path, [u64::MAX.to_le_bytes(), [0; 8]].concat()).unwrap();
    let (_, error) = damaged("huge", &huge);
    assert!(error.contains("its header would be 18446744073709551615 bytes long"), "{error}");
    let nowhere = |path: &Path| {
        std::fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink("nowhere", path).unwrap();
    };
    let (said, error) = damaged("link", &nowhere);
    assert_eq!(said.code, 1, "{}", said.stderr);
    assert!(
        error.contains("missing-file: ") && error.contains("model.safetensors: it is not there"),
        "{error}"
    );
    let document = |path: &Path| std::fs::write(path, "{\"weight_map\": {}}").unwrap();
    let (_, error) = damaged("index", &document);
    assert!(error.contains("it is a JSON document, as the index of a model in several files is"), "{error}");
}

#[test]
fn explaining_writes_nothing() {
    let scratch = Scratch::new();
    let start = llama(&scratch, "start");
    let args = ["checkpoint", "convert", &start, "--to", "torch_dist", "--tp", "2", "--explain"];
    let said = ok(&args).stdout;
    assert!(said.contains("  decoder.final_layernorm.weight [0:4]  16 B at "), "{said}");
    // 720 B of numbers, and what lies beside them.
    let beside = |name: &str| std::fs::metadata(Path::new(&start).join(name)).unwrap().len();
    let least = 720 + beside("config.json") + beside("tokenizer.json");
    assert!(said.contains(&format!(" B, {least} B at least: tensors ")), "{said}");
    let left: Vec<String> = std::fs::read_dir(scratch.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(left, ["start"]);
    // What a conversion did, for programs.
    let out = scratch.at("out");
    let json: Value =
        ok(&["checkpoint", "convert", &start, "--to", "dcp", "-o", &out, "--format", "json"]).json();
    assert_eq!((json["tensors"].as_u64(), json["bytes_kept"].as_u64()), (Some(12), Some(0)));
    assert_eq!((json["output"].as_str(), &json["left_out"]), (Some(out.as_str()), &json!([])));
}

#[test]
fn names_of_tensors_do_not_reach_into_the_terminal() {
    let scratch = Scratch::new();
    let folder = |name: &str, len: u64| {
        let folder = scratch.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        write(&folder.join("model.safetensors"), &[(r"a\u001b[2J\u202eb".to_string(), vec![len])]);
        folder.to_str().unwrap().to_string()
    };
    let (one, two, out) = (folder("one", 4), folder("two", 5), scratch.at("out"));
    let said = [
        ok(&["checkpoint", "show", &one, "--tensors"]).stdout,
        crossmesh(&["checkpoint", "diff", &one, &two]).stdout,
        ok(&["checkpoint", "convert", &one, "--to", "dcp", "-o", &out, "--explain"]).stdout,
    ];
    for text in said {
        assert!(text.contains(r"a\u{1b}[2J\u{202e}b"), "{text}");
        assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
    }
}
