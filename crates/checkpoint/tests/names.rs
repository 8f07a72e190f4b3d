//! Maps of names: every family over any parallelism and back, and the places of fused tensors against plain formulas.

mod common;

use std::path::Path;

use common::*;
use crossmesh_checkpoint::{Element, Format, NameMap, Naming, Request, RunOptions, open};
use crossmesh_testkit::seed::Seed;

fn run(from: &Path, to: &Path, request: &Request) {
    let planned = request.plan(open(from).unwrap()).unwrap();
    let options = RunOptions { max_memory: 1 << 20, threads: 2, ..RunOptions::default() };
    planned.conversion.run(to, &options).unwrap();
}

fn cut(format: Format, seed: &mut Seed) -> Request {
    let mut request = Request::new(format);
    [request.tp, request.pp, request.ep] = [(); 3].map(|()| Some(1 + seed.below(4) as u32));
    request
}

#[test]
fn every_family_goes_to_any_parallelism_and_back() {
    for (i, family) in NameMap::families().enumerate() {
        for round in 0..crossmesh_testkit::sweep::count(5) as u64 {
            let mut seed = Seed(100 * i as u64 + round);
            let (config, model) = tiny(family, Element::BF16, &mut seed);
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            write_with_config(&config, &model, &at("start"));
            run(&at("start"), &at("a"), &cut(Format::Dcp, &mut seed));
            run(&at("a"), &at("b"), &cut(Format::TorchDist, &mut seed));
            run(&at("b"), &at("c"), &cut(Format::TorchDist, &mut seed));
            run(&at("c"), &at("end"), &Request::new(Format::Hf));
            // Megatron's layers without Transformer Engine: some families have other names for them, and all know the word.
            let local = Request { spelling: Some("local".into()), ..cut(Format::TorchDist, &mut seed) };
            run(&at("a"), &at("local"), &local);
            run(&at("local"), &at("end of local"), &Request::new(Format::Hf));
            assert_eq!(read_slowly(&open(&at("a")).unwrap()), model, "{family} {round}");
            assert_eq!(
                read_slowly(&open(&at("b")).unwrap()),
                read_slowly(&open(&at("c")).unwrap()),
                "{family} {round}"
            );
            let bytes = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
            assert!(bytes("end") == bytes("start"), "{family} {round}");
            assert!(bytes("end of local") == bytes("start"), "{family} {round}");
        }
    }
}

/// An element of a tensor.
fn element<'a>(model: &'a Model, name: &str, index: &[u64]) -> &'a [u8] {
    let held = &model[name];
    let flat = index.iter().zip(&held.shape).fold(0, |flat, (x, n)| flat * n + x) as usize;
    &held.bytes[2 * flat..2 * flat + 2]
}

#[test]
fn fused_tensors_are_where_megatron_has_them() {
    let mut seed = Seed(11);
    let (config, model) = tiny("qwen3_moe", Element::BF16, &mut seed);
    let number = |key: &str| config[key].as_u64().unwrap();
    let (g, d, h) = (number("num_key_value_heads"), number("head_dim"), number("hidden_size"));
    let q = number("num_attention_heads") / g;
    let (l, e, f) = (number("num_hidden_layers"), number("num_experts"), number("moe_intermediate_size"));
    let folder = tempfile::tempdir().unwrap();
    write_with_config(&config, &model, &folder.path().join("in"));
    let request = Request { tp: Some(2), pp: Some(2), ep: Some(2), ..Request::new(Format::TorchDist) };
    run(&folder.path().join("in"), &folder.path().join("out"), &request);
    let out = read_slowly(&open(&folder.path().join("out")).unwrap());
    let qkv = "decoder.layers.self_attention.linear_qkv.weight";
    assert_eq!(out[qkv].shape, [l, g * (q + 2) * d, h]);
    for (layer, group, head, at, col) in all_of_five(l, g, q + 2, d, h) {
        let fused = element(&out, qkv, &[layer, (group * (q + 2) + head) * d + at, col]);
        let (part, row) = match head {
            n if n < q => ("q", (group * q + n) * d + at),
            n if n == q => ("k", group * d + at),
            _ => ("v", group * d + at),
        };
        let name = format!("model.layers.{layer}.self_attn.{part}_proj.weight");
        assert_eq!(fused, element(&model, &name, &[row, col]));
    }
    let fc1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight";
    assert_eq!(out[fc1].shape, [l, e, 2 * f, h]);
    for (layer, expert, half, row, col) in all_of_five(l, e, 2, f, h) {
        let part = ["gate_proj", "up_proj"][half as usize];
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
        let fused = element(&out, fc1, &[layer, expert, half * f + row, col]);
        assert_eq!(fused, element(&model, &name, &[row, col]));
    }
}

fn all_of_five(a: u64, b: u64, c: u64, d: u64, e: u64) -> Vec<(u64, u64, u64, u64, u64)> {
    let all = indexes(&crossmesh_core::region::Region::whole(&[a, b, c, d, e]));
    all.into_iter().map(|i| (i[0], i[1], i[2], i[3], i[4])).collect()
}

#[test]
fn a_name_too_many_or_too_few_is_refused() {
    let mut seed = Seed(1);
    let (config, model) = tiny("llama", Element::BF16, &mut seed);
    let naming = Naming { to: "megatron".into(), ..Naming::default() };
    let map = NameMap::built_in("llama").unwrap();
    let refused = |model: &Model| {
        let folder = tempfile::tempdir().unwrap();
        write_with_config(&config, model, folder.path());
        map.apply(&open(folder.path()).unwrap(), &naming).unwrap_err().to_string()
    };
    let mut more = model.clone();
    more.insert("model.layers.0.mlp.extra.weight".into(), model["model.norm.weight"].clone());
    assert!(refused(&more).contains("does not name `model.layers.0.mlp.extra.weight`"), "{}", refused(&more));
    let mut less = model.clone();
    less.remove("model.layers.0.self_attn.k_proj.weight");
    let error = refused(&less);
    assert!(
        error.contains("it names `model.layers.0.self_attn.k_proj.weight`, which is not there"),
        "{error}"
    );
    let mut twice = model.clone();
    twice.insert("module.model.norm.weight".into(), model["model.norm.weight"].clone());
    assert!(refused(&twice).contains("under another name too"), "{}", refused(&twice));
    let mut other = model.clone();
    other.get_mut("model.layers.0.mlp.up_proj.weight").unwrap().element = Element::F16;
    assert!(refused(&other).contains("is to be made of"), "{}", refused(&other));
}

#[test]
fn padding_of_a_vocabulary_is_cut_off_and_states_go_along() {
    let mut seed = Seed(2);
    let (config, model) = tiny("llama", Element::BF16, &mut seed);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // With moments, as FSDP's DCP has them.
    let mut with_states = model.clone();
    for (name, held) in &model {
        let moment = Held { element: Element::F32, shape: held.shape.clone(), bytes: held.bytes.repeat(2) };
        with_states.insert(format!("optimizer.state.{name}.exp_avg"), moment);
    }
    write_with_config(&config, &with_states, &at("hf"));
    run(&at("hf"), &at("dcp"), &Request { tp: Some(2), ..Request::new(Format::Dcp) });
    run(&at("dcp"), &at("megatron"), &cut(Format::TorchDist, &mut seed));
    let megatron = open(&at("megatron")).unwrap();
    let moment = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight";
    assert_eq!(megatron.tensors[moment].element, Element::F32);
    run(
        &at("megatron"),
        &at("back"),
        &Request { names: Some("llama".into()), pp: Some(2), ..Request::new(Format::Dcp) },
    );
    assert_eq!(read_slowly(&open(&at("back")).unwrap()), with_states);
    // Hugging Face's files have no place for them.
    let planned = Request::new(Format::Hf).plan(open(&at("megatron")).unwrap()).unwrap();
    assert!(planned.left_out.iter().any(|name| name == moment));
    let mut padded = read_slowly(&megatron);
    let table = padded.get_mut("embedding.word_embeddings.weight").unwrap();
    table.shape[0] += 5;
    table.bytes.extend(vec![9; 5 * table.shape[1] as usize * 2]);
    padded.retain(|name, _| !name.starts_with("optimizer"));
    write_with_config(&config, &padded, &at("padded"));
    let request = Request { names: Some("llama".into()), ..Request::new(Format::Hf) };
    run(&at("padded"), &at("cut"), &request);
    assert_eq!(read_slowly(&open(&at("cut")).unwrap()), model);
}

#[test]
fn experts_that_are_one_tensor_in_memory() {
    for family in ["qwen3_moe", "mixtral"] {
        let (config, model) = tiny(family, Element::BF16, &mut Seed(21));
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write_with_config(&config, &model, &at("start"));
        let to_fused = Request { to_names: Some("fused".into()), ..cut(Format::Dcp, &mut Seed(2)) };
        run(&at("start"), &at("fused"), &to_fused);
        let fused = read_slowly(&open(&at("fused")).unwrap());
        let number = |key: &str| config[key].as_u64().unwrap();
        let (e, f, h) = (number("num_experts"), number("moe_intermediate_size"), number("hidden_size"));
        let both = &fused["model.layers.0.mlp.experts.gate_up_proj"];
        assert_eq!(both.shape, [e, 2 * f, h]);
        let (at_0, names) = match family {
            "mixtral" => ("block_sparse_moe", ["w1", "w3"]),
            _ => ("mlp", ["gate_proj", "up_proj"]),
        };
        let parts = names.map(|n| &model[&format!("model.layers.0.{at_0}.experts.1.{n}.weight")].bytes[..]);
        assert_eq!(both.bytes[(2 * 2 * f * h) as usize..][..(2 * 2 * f * h) as usize], parts.concat());
        assert!(fused.contains_key("model.layers.0.mlp.gate.weight"));
        // Nobody has to say which side it is.
        run(&at("fused"), &at("megatron"), &cut(Format::TorchDist, &mut Seed(3)));
        run(&at("megatron"), &at("back"), &Request::new(Format::Hf));
        run(&at("fused"), &at("hf"), &Request { names: Some(family.into()), ..Request::new(Format::Hf) });
        run(&at("fused"), &at("by config.json"), &Request::new(Format::Hf));
        for back in ["back", "hf", "by config.json"] {
            assert_eq!(read_slowly(&open(&at(back)).unwrap()), model, "{family}");
        }
    }
}

/// A model as `{"model": ..., "optim": ...}` of somebody's own has it, in a DCP of two ranks; what it was is in `start`.
fn with_prefix(family: &str, folder: &Path, prefix: &str, more: &[&str]) -> Model {
    let (config, model) = tiny(family, Element::BF16, &mut Seed(31));
    write_with_config(&config, &model, &folder.join("start"));
    let mut saved = Model::new();
    for (name, held) in &model {
        saved.insert(format!("{prefix}{name}"), held.clone());
        saved.insert(format!("optim.state.{prefix}{name}.exp_avg"), held.clone());
    }
    let one = model.values().next().unwrap();
    saved.extend(more.iter().map(|name| (name.to_string(), one.clone())));
    write_hf(&saved, &folder.join("saved"));
    run(&folder.join("saved"), &folder.join("dcp"), &Request { ranks: Some(2), ..Request::new(Format::Dcp) });
    model
}

#[test]
fn a_state_dict_of_ones_own_becomes_files_that_transformers_knows() {
    for family in NameMap::families() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let model = with_prefix(family, folder.path(), "model.", &[]);
        let to_hf = Request { config: Some(at("start/config.json")), ..Request::new(Format::Hf) };
        let planned = to_hf.plan(open(&at("dcp")).unwrap()).unwrap();
        assert_eq!(planned.map.as_deref(), Some(family));
        assert!(planned.left_out.iter().all(|name| name.starts_with("optim.")));
        assert_eq!(planned.left_out.len(), model.len());
        run(&at("dcp"), &at("end"), &to_hf);
        assert_eq!(read_slowly(&open(&at("end")).unwrap()), model, "{family}");
        // As safetensors with boxes, too; and between formats that keep states, names are nobody's business.
        run(&at("dcp"), &at("boxes"), &Request { ranks: Some(3), ..Request::new(Format::DcpHf) });
        run(&at("boxes"), &at("of boxes"), &to_hf);
        assert_eq!(read_slowly(&open(&at("of boxes")).unwrap()), model, "{family}");
        assert!(
            open(&at("boxes")).unwrap().tensors.keys().any(|name| name.starts_with("optim.state.model."))
        );
    }
}

#[test]
fn names_that_are_right_stay_and_those_that_nobody_knows_are_said() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // Right already, beside one that Llama does not have.
    let mut model = with_prefix("llama", folder.path(), "", &["model.gain.weight"]);
    let to_hf = Request { config: Some(at("start/config.json")), ..Request::new(Format::Hf) };
    let planned = to_hf.plan(open(&at("dcp")).unwrap()).unwrap();
    assert_eq!(planned.map, None);
    let gain = model.values().next().unwrap().clone();
    model.insert("model.gain.weight".into(), gain);
    assert!(planned.conversion.catalog().tensors.keys().eq(model.keys()));
    // With something in front, what the map does not know cannot be brought to Hugging Face's names.
    for (prefix, more, says) in [
        ("model.", &["model.model.gain.weight"][..], "it does not know `model.model.gain.weight`"),
        ("net.", &[], "it does not know `net."),
    ] {
        let folder = tempfile::tempdir().unwrap();
        with_prefix("llama", folder.path(), prefix, more);
        let config = Some(folder.path().join("start/config.json"));
        let dcp = || open(&folder.path().join("dcp")).unwrap();
        let request = Request { config, ..Request::new(Format::Hf) };
        let error = request.plan(dcp()).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("hint: leave it out"), "{error}");
        if !more.is_empty() {
            let leave_out = vec![more[0].to_string()];
            let planned = Request { leave_out, ..request }.plan(dcp()).unwrap();
            assert_eq!(planned.map.as_deref(), Some("llama"));
        }
        // Without config.json nothing tells what they should be.
        assert_eq!(Request::new(Format::Hf).plan(dcp()).unwrap().map, None);
    }
}

#[test]
fn a_spelling_that_no_map_has_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (config, model) = tiny("llama", Element::BF16, &mut Seed(5));
    write_with_config(&config, &model, folder.path());
    let error = |spelling: &str, format, tp| {
        let request = Request { spelling: Some(spelling.into()), tp, ..Request::new(format) };
        request.plan(open(folder.path()).unwrap()).unwrap_err().to_string()
    };
    let said = error("locale", Format::TorchDist, Some(2));
    assert!(said.ends_with("it has no spelling `locale`\nhint: one of local, unfused"), "{said}");
    // Where no name changes, there is none to spell.
    let said = error("local", Format::Dcp, None);
    assert!(said.contains("names do not change, and `local` is a spelling of none"), "{said}");
}

#[test]
fn a_map_of_ones_own_says_what_is_different() {
    let (config, mut model) = tiny("llama", Element::BF16, &mut Seed(22));
    let shape = model["model.norm.weight"].shape.clone();
    // A model as Llama, with another name for one tensor, and one that Llama does not have.
    let norm = model.remove("model.norm.weight").unwrap();
    model.insert("model.scale.weight".into(), norm.clone());
    model.insert("model.layers.0.gain.weight".into(), Held { bytes: norm.bytes.clone(), ..norm });
    for layer in 1..config["num_hidden_layers"].as_u64().unwrap() {
        let gain = model["model.layers.0.gain.weight"].clone();
        model.insert(format!("model.layers.{layer}.gain.weight"), gain);
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_with_config(&config, &model, &at("start"));
    let text = r#"
extends = "llama"
family = "scaled"
[[tensor]]
hf = ["model.scale.weight [h]"]
megatron = ["decoder.final_layernorm.weight [h]"]
crossmesh = ["model.norm.weight [h]"]
stage = "last"
[[tensor]]
hf = ["model.layers.{l}.gain.weight [h]"]
megatron = ["decoder.layers.gain.weight [l, h]"]
crossmesh = ["model.layers.{l}.gain.weight [h]"]
"#;
    std::fs::write(at("scaled.toml"), text).unwrap();
    let names = Some(at("scaled.toml").to_str().unwrap().to_string());
    let there = Request { names: names.clone(), ..cut(Format::TorchDist, &mut Seed(4)) };
    run(&at("start"), &at("megatron"), &there);
    let gains = &open(&at("megatron")).unwrap().tensors["decoder.layers.gain.weight"].shape;
    assert_eq!(gains[1..], shape[..]);
    run(&at("megatron"), &at("back"), &Request { names, ..Request::new(Format::Hf) });
    assert_eq!(read_slowly(&open(&at("back")).unwrap()), model);
    let error = Request { names: Some("llama".into()), ..cut(Format::TorchDist, &mut Seed(4)) }
        .plan(open(&at("start")).unwrap())
        .unwrap_err();
    assert!(error.to_string().contains("it does not name `model.layers.0.gain.weight`"), "{error}");
}

#[test]
fn nothing_tells_the_heads() {
    let mut seed = Seed(3);
    let (config, model) = tiny("llama", Element::BF16, &mut seed);
    let folder = tempfile::tempdir().unwrap();
    write_with_config(&config, &model, &folder.path().join("in"));
    run(&folder.path().join("in"), &folder.path().join("out"), &cut(Format::TorchDist, &mut seed));
    std::fs::remove_file(folder.path().join("out/config.json")).unwrap();
    let catalog = open(&folder.path().join("out")).unwrap();
    let error = Request::new(Format::Hf).plan(catalog.clone()).unwrap_err().to_string();
    assert!(error.contains("nothing tells what model this is"), "{error}");
    let request = Request { names: Some("llama".into()), ..Request::new(Format::Hf) };
    let error = request.plan(catalog).unwrap_err().to_string();
    assert!(error.contains("nothing tells how long the axis") && error.contains("config.json"), "{error}");
}

#[test]
fn more_ranks_than_there_is_to_cut_cost_nothing() {
    let (config, model) = tiny("qwen3_moe", Element::BF16, &mut Seed(3));
    let folder = tempfile::tempdir().unwrap();
    write_with_config(&config, &model, folder.path());
    let cut = |tp, pp, ep| {
        let request = Request { tp: Some(tp), pp: Some(pp), ep: Some(ep), ..Request::new(Format::TorchDist) };
        request.plan(open(folder.path()).unwrap())
    };
    for (tp, pp, ep) in [(u32::MAX, 1, 1), (1, u32::MAX, 1), (1, 1, u32::MAX), (65_535, 256, 256)] {
        assert!(cut(tp, pp, ep).unwrap().conversion.num_files() < 1000, "tp {tp}, pp {pp}, ep {ep}");
    }
    let error = cut(65_536, 256, 256).unwrap_err().to_string();
    assert!(error.contains("tp 65536 x pp 256 x ep 256 are more than 4294967295 ranks"), "{error}");
}

#[test]
fn a_map_that_is_a_pipe_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("map.toml");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = NameMap::find(pipe.to_str().unwrap()).unwrap_err().to_string();
    assert!(error.ends_with("map.toml: it is no regular file"), "{error}");
}
