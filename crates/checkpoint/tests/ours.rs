//! Our own format: written from others' and read back, bit for bit, with the states of an optimizer and without.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::*;
use crossmesh_checkpoint::diff::diff;
use crossmesh_checkpoint::manifest::{Facts, Manifest, OptimizerFacts};
use crossmesh_checkpoint::{Element, Format, ProblemKind, Request, open};
use crossmesh_core::layout::Layout;
use crossmesh_testkit::seed::Seed;
use serde_json::{Value, json};

fn run(from: &Path, to: &Path, request: &Request) -> Vec<String> {
    let planned = request.plan(open(from).unwrap()).unwrap();
    planned.conversion.run(to, &options(2)).unwrap();
    planned.left_out
}

fn refused(from: &Path, request: &Request) -> String {
    request.plan(open(from).unwrap()).unwrap_err().to_string()
}

fn manifest(folder: &Path) -> Manifest {
    let path = folder.join("manifest.json");
    Manifest::parse(&std::fs::read_to_string(&path).unwrap(), &path).unwrap()
}

/// All files of a folder, by name.
fn bytes_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// Cut in some way, or not at all.
fn ours(seed: &mut Seed) -> Request {
    let mut request = Request::new(Format::Crossmesh);
    match seed.below(3) {
        0 => {}
        1 => request.ranks = Some(1 + seed.below(4) as u32),
        _ => [request.tp, request.pp] = [(); 2].map(|()| Some(1 + seed.below(3) as u32)),
    }
    request
}

#[test]
fn a_model_becomes_ours_and_is_the_same_file_again() {
    for round in 0..crossmesh_testkit::sweep::count(8) as u64 {
        let mut seed = Seed(round);
        let family = seed.pick(&["llama", "gpt2"]);
        let (config, model) = tiny(family, Element::F32, &mut seed);
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_with_config(&config, &model, &at("start"));
        std::fs::write(at("start").join("tokenizer.json"), "{}").unwrap();
        run(&at("start"), &at("ours"), &ours(&mut seed));
        let opened = open(&at("ours")).unwrap();
        assert_eq!(opened.format, Format::Crossmesh);
        assert_eq!(opened.check(), []);
        // Ours keeps heads apart, in the same order: only dims differ.
        let bytes = |model: &Model| {
            let short = |name: &String| name.strip_prefix("transformer.").unwrap_or(name).to_string();
            model.iter().map(|(name, t)| (short(name), t.bytes.clone())).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(bytes(&read_slowly(&opened)), bytes(&model), "{family} {round}");
        if family == "llama" {
            let q = &opened.tensors["model.layers.0.self_attn.q_proj.weight"].shape;
            let number = |key: &str| config[key].as_u64().unwrap();
            let (g, d) = (number("num_key_value_heads"), number("head_dim"));
            assert_eq!(q, &[g, number("num_attention_heads") / g, d, number("hidden_size")]);
        }
        // Hashes and layouts of the manifest are true.
        for file in &manifest(&at("ours")).files {
            let hash = blake3::hash(&std::fs::read(at("ours").join(&file.name)).unwrap());
            assert_eq!(file.blake3, hash.to_hex().as_str());
        }
        for tensor in &manifest(&at("ours")).tensors {
            let layout: Layout = tensor.layout.parse().unwrap_or_else(|e| panic!("{}: {e}", tensor.layout));
            assert_eq!(layout.shape(), tensor.shape);
        }
        run(&at("ours"), &at("end"), &Request::new(Format::Hf));
        assert_eq!(bytes_of(&at("end")), bytes_of(&at("start")), "{family} {round}");
    }
}

/// The tensors of a torch optimizer, by the names of DCP.
fn with_states(model: &Model, steps: f32, seed: &mut Seed) -> Model {
    let mut all = model.clone();
    for (name, held) in model {
        for state in ["exp_avg", "exp_avg_sq"] {
            let bytes = held.bytes.iter().map(|_| seed.draw() as u8).collect();
            all.insert(format!("optimizer.state.{name}.{state}"), Held { bytes, ..held.clone() });
        }
        let bytes = steps.to_le_bytes().to_vec();
        let step = Held { element: Element::F32, shape: vec![], bytes };
        all.insert(format!("optimizer.state.{name}.step"), step);
    }
    all
}

#[test]
fn an_optimizer_becomes_ours_and_is_torchs_again() {
    for round in 0..crossmesh_testkit::sweep::count(6) as u64 {
        let mut seed = Seed(50 + round);
        let family = seed.pick(&["llama", "gpt2"]);
        let (config, model) = tiny(family, Element::F32, &mut seed);
        let model = with_states(&model, 7.0, &mut seed);
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_with_config(&config, &model, &at("start"));
        let dcp = |ranks| Request { ranks: Some(ranks), ..Request::new(Format::Dcp) };
        run(&at("start"), &at("torch"), &dcp(2));
        // Hugging Face has no place for states, whether names change or not.
        for (name, source) in [("of torch", "torch"), ("of start", "start")] {
            let left_out = run(&at(source), &at(name), &Request::new(Format::Hf));
            let kept = read_slowly(&open(&at(name)).unwrap());
            match source {
                "torch" => {
                    assert!(left_out.iter().all(|n| n.starts_with("optimizer.state.")));
                    assert_eq!((kept.len(), left_out.len()), (model.len() / 4, model.len() / 4 * 3));
                }
                // What lies in its files already stays there.
                _ => assert_eq!(kept, model),
            }
        }
        let left_out = run(&at("torch"), &at("ours"), &ours(&mut seed));
        assert_eq!(left_out, [""; 0], "{family} {round}");
        let facts = manifest(&at("ours")).facts;
        let moments = vec!["exp_avg".to_string(), "exp_avg_sq".to_string()];
        assert_eq!(facts.optimizer, Some(OptimizerFacts { kind: "adamw".into(), steps: 7, moments }));
        assert_eq!(
            (facts.step, facts.model["kind"].as_str()),
            (7, Some(if family == "gpt2" { "gpt" } else { "llama" }))
        );
        run(&at("ours"), &at("back"), &dcp(3));
        assert_eq!(read_slowly(&open(&at("back")).unwrap()), model, "{family} {round}");
        // By way of Megatron, which has no such count: what is beside the tensors keeps it.
        let megatron = Request { tp: Some(2), pp: Some(1), ..Request::new(Format::TorchDist) };
        run(&at("ours"), &at("megatron"), &megatron);
        run(&at("megatron"), &at("again"), &Request::new(Format::Crossmesh));
        run(&at("again"), &at("end"), &dcp(2));
        assert_eq!(read_slowly(&open(&at("end")).unwrap()), model, "{family} {round}");
        // Written in the same way, ours is the same files: what it says goes through other formats unchanged.
        run(&at("end"), &at("once more"), &Request::new(Format::Crossmesh));
        assert_eq!(bytes_of(&at("once more")), bytes_of(&at("again")), "{family} {round}");
    }
}

#[test]
fn what_megatron_rounds_its_weights_from_is_what_ours_trains() {
    let mut seed = Seed(8);
    let (config, narrow) = tiny("llama", Element::BF16, &mut seed);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut all = narrow.clone();
    for (name, held) in &narrow {
        for state in ["exp_avg", "exp_avg_sq", "fp32_param"] {
            let bytes = (0..2 * held.bytes.len()).map(|_| seed.draw() as u8).collect();
            let held = Held { element: Element::F32, shape: held.shape.clone(), bytes };
            all.insert(format!("optimizer.state.{name}.{state}"), held);
        }
    }
    write_with_config(&config, &all, &at("start"));
    run(&at("start"), &at("dcp"), &Request::new(Format::Dcp));
    run(&at("dcp"), &at("megatron"), &Request { tp: Some(2), ..Request::new(Format::TorchDist) });
    let master = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight";
    assert_eq!(open(&at("megatron")).unwrap().tensors[master].element, Element::F32);
    // Without rounding anything: the narrow weights are not needed.
    assert_eq!(run(&at("megatron"), &at("ours"), &Request::new(Format::Crossmesh)), [""; 0]);
    let optimizer = manifest(&at("ours")).facts.optimizer.unwrap();
    assert_eq!((optimizer.kind.as_str(), optimizer.moments.len()), ("adamw", 2));
    let ours = read_slowly(&open(&at("ours")).unwrap());
    assert_eq!(ours.len(), 3 * narrow.len());
    for name in narrow.keys() {
        assert_eq!(ours[name].bytes, all[&format!("optimizer.state.{name}.fp32_param")].bytes, "{name}");
    }
}

#[test]
fn an_optimizer_is_called_by_what_it_remembers() {
    let mut seed = Seed(9);
    let (config, model) = tiny("gpt2", Element::F32, &mut seed);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (states, known) in [
        (&["momentum_buffer"][..], Some(("sgd", vec!["momentum"]))),
        (&["exp_avg", "exp_avg_sq"], Some(("adamw", vec!["exp_avg", "exp_avg_sq"]))),
        (&["exp_avg"], None),
        (&["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], None),
    ] {
        let mut all = model.clone();
        for (name, held) in &model {
            all.extend(states.iter().map(|s| (format!("optimizer.state.{name}.{s}"), held.clone())));
        }
        write_with_config(&config, &all, &at("start"));
        run(&at("start"), &at("dcp"), &Request::new(Format::Dcp));
        match known {
            Some((kind, moments)) => {
                run(&at("dcp"), &at("ours"), &Request::new(Format::Crossmesh));
                let found = manifest(&at("ours")).facts.optimizer.unwrap();
                assert_eq!(
                    (found.kind.as_str(), found.moments),
                    (kind, moments.into_iter().map(String::from).collect())
                );
                std::fs::remove_dir_all(at("ours")).unwrap();
            }
            None => {
                let error = refused(&at("dcp"), &Request::new(Format::Crossmesh));
                let says = format!("states `{}` are none that ours has", states.join("`, `"));
                assert!(error.contains(&says) && error.contains("--leave-out"), "{error}");
            }
        }
        std::fs::remove_dir_all(at("start")).unwrap();
        std::fs::remove_dir_all(at("dcp")).unwrap();
    }
}

#[test]
fn steps_that_differ_are_named() {
    let mut seed = Seed(3);
    let (config, model) = tiny("llama", Element::F32, &mut seed);
    let mut model = with_states(&model, 7.0, &mut seed);
    let name = "optimizer.state.model.norm.weight.step";
    model.get_mut(name).unwrap().bytes = 8f32.to_le_bytes().to_vec();
    let folder = tempfile::tempdir().unwrap();
    write_with_config(&config, &model, &folder.path().join("a"));
    run(&folder.path().join("a"), &folder.path().join("b"), &Request::new(Format::Dcp));
    let error = refused(&folder.path().join("b"), &Request::new(Format::Crossmesh));
    assert!(error.contains(name) && error.contains("is 8, and"), "{error}");
    let mut without = Request::new(Format::Crossmesh);
    without.leave_out = vec!["optimizer*".into()];
    assert!(run(&folder.path().join("b"), &folder.path().join("c"), &without).contains(&name.to_string()));
    assert_eq!(manifest(&folder.path().join("c")).facts.optimizer, None);
}

#[test]
fn what_ours_cannot_hold_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut seed = Seed(1);
    let (config, model) = tiny("gpt2", Element::BF16, &mut seed);
    write_with_config(&config, &model, &at("narrow"));
    let error = refused(&at("narrow"), &Request::new(Format::Crossmesh));
    assert!(error.contains("it is bf16, and ours are f32 or f64\nhint: `--dtype f32`"), "{error}");
    let wide = Request { element: Some(Element::F32), ..Request::new(Format::Crossmesh) };
    run(&at("narrow"), &at("ours"), &wide);
    // Widened and narrowed again, bf16 is what it was, but for which NaN it is.
    let narrow = Request { element: Some(Element::BF16), ..Request::new(Format::Hf) };
    run(&at("ours"), &at("back"), &narrow);
    let back = read_slowly(&open(&at("back")).unwrap());
    for (name, held) in &model {
        let pairs = held.bytes.as_chunks::<2>().0.iter().zip(back[name].bytes.as_chunks::<2>().0);
        let nan = |bytes: &[u8; 2]| half::bf16::from_le_bytes(*bytes).is_nan();
        assert!(pairs.into_iter().all(|(a, b)| a == b || (nan(a) && nan(b))), "{name}");
    }
    // A family that we do not train.
    let (config, model) = tiny("qwen3", Element::F32, &mut seed);
    write_with_config(&config, &model, &at("qwen"));
    let error = refused(&at("qwen"), &Request::new(Format::Crossmesh));
    assert!(error.contains("no side `crossmesh`"), "{error}");
    // A config.json that says something else than we compute.
    let (mut config, model) = tiny("llama", Element::F32, &mut seed);
    config["hidden_act"] = json!("gelu");
    write_with_config(&config, &model, &at("gelu"));
    let error = refused(&at("gelu"), &Request::new(Format::Crossmesh));
    assert!(error.contains("hidden_act is \"gelu\", and ours has \"silu\""), "{error}");
    // States of some parameters only.
    let (config, model) = tiny("llama", Element::F32, &mut seed);
    let mut some = with_states(&model, 1.0, &mut seed);
    some.retain(|name, _| !name.starts_with("optimizer") || !name.contains("model.norm"));
    write_with_config(&config, &some, &at("some hf"));
    run(&at("some hf"), &at("some"), &Request::new(Format::Dcp));
    let error = refused(&at("some"), &Request::new(Format::Crossmesh));
    assert!(error.contains("`model.norm.weight`: its `exp_avg`, `exp_avg_sq` is not there"), "{error}");
}

/// A model of our own kind, which no other program names, with its moments.
fn own(folder: &Path) -> Model {
    let mut seed = Seed(9);
    let shapes = ["a.weight", "b.bias"].map(|name| (name.to_string(), vec![5, 3]));
    let mut model = filled(shapes.to_vec(), Element::F64, &mut seed);
    let moment = model["a.weight"].clone();
    ["a.weight/momentum", "b.bias/momentum"]
        .iter()
        .for_each(|n| drop(model.insert(n.to_string(), moment.clone())));
    write_hf_f64(&model, &folder.join("hf"));
    let optimizer = Some(OptimizerFacts { kind: "sgd".into(), steps: 4, moments: vec!["momentum".into()] });
    let model_facts = json!({"kind": "u-transformer", "image": 8});
    let facts =
        Facts { step: 5, samples: 40, seed: 3, model: model_facts, run: json!({"name": "x"}), optimizer };
    std::fs::write(folder.join("hf/crossmesh.json"), facts.to_text()).unwrap();
    run(
        &folder.join("hf"),
        &folder.join("ours"),
        &Request { ranks: Some(2), ..Request::new(Format::Crossmesh) },
    );
    assert_eq!(manifest(&folder.join("ours")).facts, facts);
    model
}

fn write_hf_f64(model: &Model, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let views = model.iter().map(|(name, t)| {
        let shape = t.shape.iter().map(|n| *n as usize).collect();
        (
            name.clone(),
            safetensors::tensor::TensorView::new(safetensors::Dtype::F64, shape, &t.bytes).unwrap(),
        )
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

#[test]
fn a_model_of_our_own_keeps_its_names_and_its_past() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let model = own(folder.path());
    let opened = open(&at("ours")).unwrap();
    assert_eq!((read_slowly(&opened), opened.check()), (model.clone(), vec![]));
    for (i, format) in [Format::Dcp, Format::DcpHf, Format::TorchDist].into_iter().enumerate() {
        let (there, back) = (at(&format!("there {i}")), at(&format!("back {i}")));
        run(&at("ours"), &there, &Request::new(format));
        assert_eq!(read_slowly(&open(&there).unwrap()), model, "{format}");
        run(&there, &back, &Request { ranks: Some(2), ..Request::new(Format::Crossmesh) });
        assert_eq!(bytes_of(&back), bytes_of(&at("ours")), "{format}");
    }
}

#[test]
fn the_reader_of_ours_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    own(folder.path());
    let good = folder.path().join("ours");
    let whole = bytes_of(&good);
    let restore = || whole.iter().for_each(|(name, bytes)| std::fs::write(good.join(name), bytes).unwrap());
    let kinds = || open(&good).unwrap().check().iter().map(|p| p.kind).collect::<Vec<_>>();
    assert_eq!(kinds(), []);
    let file = good.join("rank-001.safetensors");
    std::fs::remove_file(&file).unwrap();
    let found = kinds();
    assert!(found.contains(&ProblemKind::MissingFile) && found.contains(&ProblemKind::Hole), "{found:?}");
    restore();
    std::fs::write(&file, &whole["rank-001.safetensors"][..whole["rank-001.safetensors"].len() - 8]).unwrap();
    assert!(kinds().contains(&ProblemKind::ShortFile), "{:?}", kinds());
    // Another file of the right length, with other keys.
    let text = String::from_utf8_lossy(&whole["rank-001.safetensors"]).into_owned();
    assert!(text.contains("b.bias/momentum"));
    let mut other = whole["rank-001.safetensors"].clone();
    let at = other.windows(6).position(|w| w == b"b.bias").unwrap();
    other[at] = b'c';
    std::fs::write(&file, other).unwrap();
    assert!(kinds().contains(&ProblemKind::MissingTensor), "{:?}", kinds());
    restore();
    // A bit of a number: nobody reads any of them.
    let mut other = whole["rank-001.safetensors"].clone();
    *other.last_mut().unwrap() ^= 1;
    std::fs::write(&file, other).unwrap();
    assert_eq!(kinds(), []);
    let planned = Request::new(Format::Dcp).plan(open(&good).unwrap()).unwrap();
    let error = planned.conversion.run(&folder.path().join("out"), &options(1)).unwrap_err().to_string();
    assert!(error.contains("rank-001.safetensors: it is not what was written"), "{error}");
    assert!(!folder.path().join("out").exists() && !folder.path().join(".out.partial").exists());
    let error = diff(&open(&good).unwrap(), &open(&good).unwrap(), 1 << 20, 1).unwrap_err().to_string();
    assert!(error.contains("rank-001.safetensors: it is not what was written"), "{error}");
    restore();
    // Not even a digit of the manifest changes unnoticed.
    let text = String::from_utf8(whole["manifest.json"].clone()).unwrap();
    std::fs::write(good.join("manifest.json"), text.replace("\"step\": 5", "\"step\": 6")).unwrap();
    let error = open(&good).unwrap_err().to_string();
    assert!(error.contains("manifest.json: it is not what was written"), "{error}");
    // One that is sealed and makes no sense.
    let mut wrong = manifest_of(&text);
    wrong["tensors"][0]["boxes"][0]["box"][0] = json!([0, 9]);
    std::fs::write(good.join("manifest.json"), sealed(&wrong)).unwrap();
    let error = open(&good).unwrap_err().to_string();
    assert!(error.contains("is no box of [5, 3]"), "{error}");
    let mut wrong = manifest_of(&text);
    wrong["tensors"][0]["boxes"][0]["at"] = json!(1000);
    std::fs::write(good.join("manifest.json"), sealed(&wrong)).unwrap();
    assert!(kinds().contains(&ProblemKind::Outside), "{:?}", kinds());
}

#[test]
fn a_manifest_of_many_boxes_is_checked_in_time() {
    let folder = tempfile::tempdir().unwrap();
    own(folder.path());
    let text = String::from_utf8(bytes_of(&folder.path().join("ours"))["manifest.json"].clone()).unwrap();
    let mut many = manifest_of(&text);
    // 50,000 columns side by side, all from the first row on: no two of them are compared.
    let n = 50_000u64;
    many["tensors"][0]["shape"] = json!([1u64 << 10, n]);
    let column =
        |i: u64| json!({"file": 0, "key": "a.weight", "at": 0, "box": [[0, 1u64 << 10], [i, i + 1]]});
    many["tensors"][0]["boxes"] = (0..n).map(column).collect();
    let manifest: Manifest = serde_json::from_value(many.clone()).unwrap();
    manifest.check().unwrap();
    many["tensors"][0]["boxes"][7]["box"][1] = json!([8, 9]);
    let manifest: Manifest = serde_json::from_value(many).unwrap();
    let error = manifest.check().unwrap_err();
    assert!(error.contains("[0:1024, 8:9] and [0:1024, 8:9] overlap"), "{error}");
}

fn manifest_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// A document with the hash that belongs to it.
fn sealed(document: &Value) -> String {
    let manifest: Manifest = serde_json::from_value(document.clone()).unwrap();
    manifest.to_text()
}

#[test]
fn a_config_that_is_given_goes_along_with_what_is_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (config, model) = tiny("llama", Element::F32, &mut Seed(4));
    write_with_config(&config, &model, &at("hf"));
    std::fs::write(at("hf").join("tokenizer.json"), "{\"words\": 1}").unwrap();
    std::fs::write(at("hf").join("notes.txt"), "mine").unwrap();
    let plan = Request { tp: Some(2), ..Request::new(Format::TorchDist) };
    run(&at("hf"), &at("megatron"), &plan);
    for name in ["config.json", "tokenizer.json", "notes.txt", "crossmesh.json"] {
        let _ = std::fs::remove_file(at("megatron").join(name));
    }
    let with = Request { config: Some(at("hf").join("config.json")), ..Request::new(Format::Hf) };
    run(&at("megatron"), &at("back"), &with);
    let names: Vec<String> = bytes_of(&at("back")).into_keys().collect();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    for name in names {
        assert_eq!(bytes_of(&at("back"))[&name], bytes_of(&at("hf"))[&name], "{name}");
    }
}
