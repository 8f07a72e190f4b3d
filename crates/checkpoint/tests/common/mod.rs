//! For tests: checkpoints made up, read an element at a time, and cut at random.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossmesh_checkpoint::{Catalog, Conversion, Cut, Element, Format, RunOptions, Spec, open};
use crossmesh_core::region::{Region, Span};
use crossmesh_testkit::seed::Seed;
use serde_json::{Value, json};

/// A tensor in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub element: Element,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

pub type Model = BTreeMap<String, Held>;

/// Tensors of all kinds: scalars, empty ones, wide and narrow elements; now and then of one type, as ours are.
pub fn random_model(seed: &mut Seed, tensors: usize) -> Model {
    let one = [Element::F32];
    let all = [
        Element::F32,
        Element::BF16,
        Element::F16,
        Element::I64,
        Element::U8,
        Element::F8E4M3,
        Element::BOOL,
    ];
    let elements = if seed.one_in(3) { &one[..] } else { &all[..] };
    let tensor = |seed: &mut Seed| {
        let element = seed.pick(elements);
        let dims = seed.below(4);
        let mut shape: Vec<u64> = (0..dims).map(|_| 1 + seed.below(9) as u64).collect();
        if dims > 0 && seed.one_in(20) {
            shape[0] = 0;
        }
        let bytes = shape.iter().product::<u64>() * element.bytes();
        Held { element, shape, bytes: (0..bytes).map(|_| seed.draw() as u8).collect() }
    };
    (0..tensors).map(|i| (format!("layers.{i}.weight"), tensor(seed))).collect()
}

/// Writes a model as the safetensors crate does.
pub fn write_hf(model: &Model, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let dtype = |e: Element| match e {
        Element::F32 => safetensors::Dtype::F32,
        Element::BF16 => safetensors::Dtype::BF16,
        Element::F16 => safetensors::Dtype::F16,
        Element::I64 => safetensors::Dtype::I64,
        Element::U8 => safetensors::Dtype::U8,
        Element::F8E4M3 => safetensors::Dtype::F8_E4M3,
        Element::BOOL => safetensors::Dtype::BOOL,
        other => panic!("{other}"),
    };
    let views = model.iter().map(|(name, t)| {
        let shape = t.shape.iter().map(|n| *n as usize).collect();
        (name.clone(), safetensors::tensor::TensorView::new(dtype(t.element), shape, &t.bytes).unwrap())
    });
    let metadata = Some([("format".to_string(), "pt".to_string())].into_iter().collect());
    safetensors::serialize_to_file(views, metadata, &folder.join("model.safetensors")).unwrap();
}

/// Reads a checkpoint an element at a time: slow, and without any of the code that copies.
pub fn read_slowly(catalog: &Catalog) -> Model {
    let mut model = Model::new();
    for (name, tensor) in &catalog.tensors {
        let width = tensor.element.bytes();
        let mut bytes = vec![0u8; (tensor.shape.iter().product::<u64>() * width) as usize];
        let mut seen = vec![0u8; tensor.shape.iter().product::<u64>() as usize];
        for stored in &tensor.boxes {
            let file = std::fs::File::open(catalog.path(stored.file)).unwrap();
            for index in indexes(&stored.region) {
                let starts = stored.region.spans().iter().map(|s| s.start);
                let steps = index.iter().zip(starts).zip(&stored.strides);
                let at = stored.offset + steps.map(|((x, start), stride)| (x - start) * stride).sum::<u64>();
                let flat = index.iter().zip(&tensor.shape).fold(0, |flat, (x, n)| flat * n + x) as usize;
                let width = width as usize;
                file.read_exact_at(&mut bytes[flat * width..(flat + 1) * width], at).unwrap();
                seen[flat] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n == 1), "`{name}`: every element once");
        let held = Held { element: tensor.element, shape: tensor.shape.clone(), bytes };
        model.insert(name.clone(), held);
    }
    model
}

/// All indexes of a box, row-major.
pub fn indexes(region: &Region) -> Vec<Vec<u64>> {
    let mut all = vec![vec![]];
    for span in region.spans() {
        let with = |index: &Vec<u64>| {
            (span.start..span.end).map(|x| [&index[..], &[x]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

/// Boxes that are all of a shape, each element once, anywhere.
pub fn random_boxes(seed: &mut Seed, shape: &[u64], cuts: usize, ranks: usize) -> Vec<(u32, Region)> {
    let mut boxes = vec![Region::whole(shape)];
    for _ in 0..cuts {
        let at = seed.below(boxes.len());
        let dim = seed.below(shape.len());
        let Some(span) = boxes[at].spans().get(dim).copied().filter(|s| s.len() > 1) else { continue };
        let middle = span.start + 1 + seed.below(span.len() as usize - 1) as u64;
        let right = boxes[at].with_span(dim, Span::new(middle, span.end));
        boxes[at] = boxes[at].with_span(dim, Span::new(span.start, middle));
        boxes.push(right);
    }
    boxes.into_iter().map(|region| (seed.below(ranks) as u32, region)).collect()
}

pub fn random_spec(seed: &mut Seed, model: &Model) -> Spec {
    // Ours are of one type.
    let ours = model.values().all(|t| t.element == Element::F32);
    let format = match ours && seed.one_in(2) {
        true => Format::Crossmesh,
        false => seed.pick(&[Format::Hf, Format::Dcp, Format::DcpHf, Format::TorchDist]),
    };
    let cut = match seed.below(3) {
        0 => Cut::Whole,
        1 => Cut::Rows(1 + seed.below(5) as u32),
        _ => Cut::Boxes(
            model.iter().map(|(name, t)| (name.clone(), random_boxes(seed, &t.shape, 5, 4))).collect(),
        ),
    };
    let shard_bytes = if seed.one_in(2) { 200 } else { 1 << 30 };
    Spec { format, cut, element: None, shard_bytes }
}

pub fn convert(from: &Path, to: &Path, spec: Spec) -> crossmesh_checkpoint::Report {
    let conversion = Conversion::plan(open(from).unwrap(), spec).unwrap();
    conversion.run(to, &options(2)).unwrap()
}

pub fn options(threads: usize) -> RunOptions<'static> {
    RunOptions { max_memory: 1 << 20, threads, ..RunOptions::default() }
}

/// A tiny model of a family: its config.json, and its tensors by Hugging Face's names.
pub fn tiny(family: &str, element: Element, seed: &mut Seed) -> (Value, Model) {
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
        return (config, filled(shapes, element, seed));
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
    (config, filled(shapes, element, seed))
}

pub fn filled(shapes: Vec<(String, Vec<u64>)>, element: Element, seed: &mut Seed) -> Model {
    let tensor = |(name, shape): (String, Vec<u64>)| {
        let bytes = (0..shape.iter().product::<u64>() * element.bytes()).map(|_| seed.draw() as u8).collect();
        (name, Held { element, shape, bytes })
    };
    shapes.into_iter().map(tensor).collect()
}

pub fn write_with_config(config: &Value, model: &Model, folder: &Path) {
    write_hf(model, folder);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}
