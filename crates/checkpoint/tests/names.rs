//! Maps of names: every family over any parallelism and back, and the places of fused tensors against plain formulas.

mod common;

use std::path::Path;

use common::*;
use crossmesh_checkpoint::{Element, Format, NameMap, Naming, Request, RunOptions, open};
use crossmesh_testkit::seed::Seed;
use serde_json::{Value, json};

/// A tiny model of a family: its config.json, and its tensors by Hugging Face's names.
fn tiny(family: &str, seed: &mut Seed) -> (Value, Model) {
    let pick = |seed: &mut Seed, from: &[u64]| seed.pick(from);
    let (l, g, q, d) =
        (pick(seed, &[1, 2, 3]), pick(seed, &[2, 4]), pick(seed, &[1, 2]), pick(seed, &[2, 3]));
    let (h, f, v, e) =
        (pick(seed, &[4, 6]), pick(seed, &[4, 5, 8]), pick(seed, &[7, 8]), pick(seed, &[2, 4]));
    let mut shapes: Vec<(String, Vec<u64>)> = Vec::new();
    let mut add = |name: String, shape: Vec<u64>| shapes.push((name, shape));
    if family == "gpt2" {
        let (n, h) = (g, g * d);
        add("transformer.wte.weight".into(), vec![v, h]);
        add("transformer.wpe.weight".into(), vec![5, h]);
        for x in ["weight", "bias"] {
            add(format!("transformer.ln_f.{x}"), vec![h]);
        }
        for i in 0..l {
            let at = format!("transformer.h.{i}.");
            for (name, ins, outs) in
                [("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, f), ("mlp.c_proj", f, h)]
            {
                add(format!("{at}{name}.weight"), vec![ins, outs]);
                add(format!("{at}{name}.bias"), vec![outs]);
            }
            for x in ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"] {
                add(format!("{at}{x}"), vec![h]);
            }
        }
        let config = json!({"model_type": "gpt2", "n_layer": l, "n_embd": h, "n_head": n, "vocab_size": v, "n_positions": 5, "n_inner": f});
        return (config, filled(shapes, seed));
    }
    add("model.embed_tokens.weight".into(), vec![v, h]);
    add("model.norm.weight".into(), vec![h]);
    if seed.one_in(2) {
        add("lm_head.weight".into(), vec![v, h]);
    }
    for i in 0..l {
        let at = format!("model.layers.{i}.");
        add(format!("{at}input_layernorm.weight"), vec![h]);
        add(format!("{at}post_attention_layernorm.weight"), vec![h]);
        for (part, heads) in [("q", g * q), ("k", g), ("v", g)] {
            add(format!("{at}self_attn.{part}_proj.weight"), vec![heads * d, h]);
        }
        add(format!("{at}self_attn.o_proj.weight"), vec![h, g * q * d]);
        if family.starts_with("qwen3") {
            add(format!("{at}self_attn.q_norm.weight"), vec![d]);
            add(format!("{at}self_attn.k_norm.weight"), vec![d]);
        }
        let mut mlp = |at: String, names: [&str; 3]| {
            add(format!("{at}{}.weight", names[0]), vec![f, h]);
            add(format!("{at}{}.weight", names[1]), vec![f, h]);
            add(format!("{at}{}.weight", names[2]), vec![h, f]);
        };
        match family {
            "mixtral" => {
                (0..e).for_each(|x| mlp(format!("{at}block_sparse_moe.experts.{x}."), ["w1", "w3", "w2"]))
            }
            "qwen3_moe" => (0..e)
                .for_each(|x| mlp(format!("{at}mlp.experts.{x}."), ["gate_proj", "up_proj", "down_proj"])),
            _ => mlp(format!("{at}mlp."), ["gate_proj", "up_proj", "down_proj"]),
        }
        match family {
            "mixtral" => add(format!("{at}block_sparse_moe.gate.weight"), vec![e, h]),
            "qwen3_moe" => add(format!("{at}mlp.gate.weight"), vec![e, h]),
            _ => {}
        }
    }
    let config = json!({
        "model_type": family, "num_hidden_layers": l, "vocab_size": v, "hidden_size": h, "num_attention_heads": g * q,
        "num_key_value_heads": g, "head_dim": d, "intermediate_size": f, "moe_intermediate_size": f, "num_experts": e, "num_local_experts": e,
    });
    (config, filled(shapes, seed))
}

fn filled(shapes: Vec<(String, Vec<u64>)>, seed: &mut Seed) -> Model {
    let tensor = |(name, shape): (String, Vec<u64>)| {
        let bytes = (0..shape.iter().product::<u64>() * 2).map(|_| seed.draw() as u8).collect();
        (name, Held { element: Element::Bf16, shape, bytes })
    };
    shapes.into_iter().map(tensor).collect()
}

fn write(config: &Value, model: &Model, folder: &Path) {
    write_hf(model, folder);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

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
            let (config, model) = tiny(family, &mut seed);
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            write(&config, &model, &at("start"));
            run(&at("start"), &at("a"), &cut(Format::Dcp, &mut seed));
            run(&at("a"), &at("b"), &cut(Format::TorchDist, &mut seed));
            run(&at("b"), &at("c"), &cut(Format::TorchDist, &mut seed));
            run(&at("c"), &at("end"), &Request::new(Format::Hf));
            assert_eq!(read_slowly(&open(&at("a")).unwrap()), model, "{family} {round}");
            assert_eq!(
                read_slowly(&open(&at("b")).unwrap()),
                read_slowly(&open(&at("c")).unwrap()),
                "{family} {round}"
            );
            let bytes = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
            assert!(bytes("end") == bytes("start"), "{family} {round}");
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
    let (config, model) = tiny("qwen3_moe", &mut seed);
    let number = |key: &str| config[key].as_u64().unwrap();
    let (g, d, h) = (number("num_key_value_heads"), number("head_dim"), number("hidden_size"));
    let q = number("num_attention_heads") / g;
    let (l, e, f) = (number("num_hidden_layers"), number("num_experts"), number("moe_intermediate_size"));
    let folder = tempfile::tempdir().unwrap();
    write(&config, &model, &folder.path().join("in"));
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
    let (config, model) = tiny("llama", &mut seed);
    let naming = Naming { to: "megatron".into(), ..Naming::default() };
    let map = NameMap::built_in("llama").unwrap();
    let refused = |model: &Model| {
        let folder = tempfile::tempdir().unwrap();
        write(&config, model, folder.path());
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
    let (config, model) = tiny("llama", &mut seed);
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // With moments, as FSDP's DCP has them.
    let mut with_states = model.clone();
    for (name, held) in &model {
        let moment = Held { element: Element::F32, shape: held.shape.clone(), bytes: held.bytes.repeat(2) };
        with_states.insert(format!("optimizer.state.{name}.exp_avg"), moment);
    }
    write(&config, &with_states, &at("hf"));
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
    write(&config, &padded, &at("padded"));
    let request = Request { names: Some("llama".into()), ..Request::new(Format::Hf) };
    run(&at("padded"), &at("cut"), &request);
    assert_eq!(read_slowly(&open(&at("cut")).unwrap()), model);
}

#[test]
fn nothing_tells_the_heads() {
    let mut seed = Seed(3);
    let (config, model) = tiny("llama", &mut seed);
    let folder = tempfile::tempdir().unwrap();
    write(&config, &model, &folder.path().join("in"));
    run(&folder.path().join("in"), &folder.path().join("out"), &cut(Format::TorchDist, &mut seed));
    std::fs::remove_file(folder.path().join("out/config.json")).unwrap();
    let catalog = open(&folder.path().join("out")).unwrap();
    let error = Request::new(Format::Hf).plan(catalog.clone()).unwrap_err().to_string();
    assert!(error.contains("nothing tells what model this is"), "{error}");
    let request = Request { names: Some("llama".into()), ..Request::new(Format::Hf) };
    let error = request.plan(catalog).unwrap_err().to_string();
    assert!(error.contains("nothing tells how long the axis") && error.contains("config.json"), "{error}");
}
