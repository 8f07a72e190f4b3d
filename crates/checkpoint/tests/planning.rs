//! Planning looks at headers alone: a model of a trillion parameters, in files that are all holes.
//!
//! `CROSSMESH_SWEEP=100000` makes so many tensors, or items of DCP, and says how long it took.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use crossmesh_checkpoint::{Conversion, Cut, Element, Format, Request, Spec, open};
use crossmesh_testkit::seed::Seed;
use serde_json::json;

/// What axes of a Qwen3-MoE count.
struct Sizes {
    h: u64,
    f: u64,
    d: u64,
    g: u64,
    q: u64,
    v: u64,
}

/// A Qwen3-MoE of about so many tensors, with weights that take no room.
fn write_qwen3_moe(folder: &Path, tensors: usize, sizes: Sizes) -> usize {
    let experts = 384.min(tensors / 6).max(2) as u64;
    let layers = (tensors as u64).div_ceil(3 * experts + 9).max(1);
    let Sizes { h, f, d, g, q, v } = sizes;
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![v, h]),
        ("model.norm.weight".to_string(), vec![h]),
        ("lm_head.weight".to_string(), vec![v, h]),
    ];
    for l in 0..layers {
        let at = format!("model.layers.{l}.");
        let mut add = |name: &str, shape: Vec<u64>| shapes.push((format!("{at}{name}.weight"), shape));
        add("input_layernorm", vec![h]);
        add("post_attention_layernorm", vec![h]);
        add("self_attn.q_proj", vec![g * q * d, h]);
        add("self_attn.k_proj", vec![g * d, h]);
        add("self_attn.v_proj", vec![g * d, h]);
        add("self_attn.o_proj", vec![h, g * q * d]);
        add("self_attn.q_norm", vec![d]);
        add("self_attn.k_norm", vec![d]);
        add("mlp.gate", vec![experts, h]);
        for e in 0..experts {
            add(&format!("mlp.experts.{e}.gate_proj"), vec![f, h]);
            add(&format!("mlp.experts.{e}.up_proj"), vec![f, h]);
            add(&format!("mlp.experts.{e}.down_proj"), vec![h, f]);
        }
    }
    let per_file = shapes.len().div_ceil(shapes.len().div_ceil(1000).min(500));
    let count = shapes.len().div_ceil(per_file);
    let mut weight_map = BTreeMap::new();
    for (i, tensors) in shapes.chunks(per_file).enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        let (mut header, mut at) = (serde_json::Map::new(), 0);
        for (tensor, shape) in tensors {
            let bytes = shape.iter().product::<u64>() * 2;
            header.insert(
                tensor.clone(),
                json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes]}),
            );
            weight_map.insert(tensor.clone(), name.clone());
            at += bytes;
        }
        let text = serde_json::to_vec(&header).unwrap();
        let mut file = std::fs::File::create(folder.join(name)).unwrap();
        file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&text).unwrap();
        file.set_len(8 + text.len() as u64 + at).unwrap();
    }
    std::fs::write(
        folder.join("model.safetensors.index.json"),
        json!({"weight_map": weight_map}).to_string(),
    )
    .unwrap();
    let config = json!({
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "vocab_size": v, "hidden_size": h, "num_attention_heads": g * q,
        "num_key_value_heads": g, "head_dim": d, "moe_intermediate_size": f, "num_experts": experts,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    shapes.len()
}

/// Of the processor, for all that there is: a busy machine changes nothing.
const CPU_TIME: Duration = Duration::from_secs(10);

/// What this thread has computed for.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Since when something has been going on: of the processor, and by the clock.
struct Since(Duration, Instant);

impl Since {
    #[expect(clippy::disallowed_methods, reason = "what is measured is time")]
    fn now() -> Self {
        Self(cpu_time(), Instant::now())
    }

    fn cpu(&self) -> Duration {
        cpu_time() - self.0
    }
}

impl std::fmt::Display for Since {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2?} of the processor, {:.2?} by the clock", self.cpu(), self.1.elapsed())
    }
}

#[test]
fn a_trillion_parameters_are_planned_by_their_headers() {
    let folder = tempfile::tempdir().unwrap();
    let large = Sizes { h: 7168, f: 2048, d: 128, g: 8, q: 8, v: 163_840 };
    let tensors = write_qwen3_moe(folder.path(), crossmesh_testkit::sweep::count(3000), large);
    for (to, request) in [
        ("dcp", Request { ranks: Some(2), ..Request::new(Format::Dcp) }),
        ("torch_dist", Request { tp: Some(2), pp: Some(8), ep: Some(32), ..Request::new(Format::TorchDist) }),
    ] {
        let since = Since::now();
        let catalog = open(folder.path()).unwrap();
        let opened = since.to_string();
        assert_eq!(catalog.tensors.len(), tensors);
        let bytes = catalog.bytes();
        let planned = request.plan(catalog).unwrap();
        assert!(planned.conversion.bytes() > bytes);
        eprintln!("{tensors} tensors, {bytes} B to {to}: opened in {opened}; planned in {since}");
        assert!(since.cpu() < CPU_TIME, "{tensors} tensors to {to}: {since}");
    }
}

#[test]
fn many_items_of_dcp_are_opened() {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let at = |name: &str| folder.path().join(name);
    // A hundred ranks, each with a row of every tensor.
    let tensors = crossmesh_testkit::sweep::count(2000).div_ceil(100);
    let shapes = (0..tensors).map(|i| (format!("layers.{i}.weight"), vec![100, 2])).collect();
    write_hf(&filled(shapes, Element::BF16, &mut Seed(1)), &at("hf"));
    convert(&at("hf"), &at("dcp"), Spec { cut: Cut::Rows(100), ..Spec::new(Format::Dcp) });
    let since = Since::now();
    let catalog = open(&at("dcp")).unwrap();
    let opened = since.to_string();
    let items: usize = catalog.tensors.values().map(|t| t.boxes.len()).sum();
    assert_eq!((items, catalog.files.len()), (tensors * 100, 100));
    let conversion = Conversion::plan(catalog, Spec::new(Format::Hf)).unwrap();
    assert_eq!(conversion.catalog().tensors.len(), tensors);
    eprintln!("{items} items of {tensors} tensors: opened in {opened}; planned in {since}");
    assert!(since.cpu() < CPU_TIME, "{items} items: {since}");
}

#[test]
fn many_tensors_are_planned_back_to_hugging_face() {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("hf")).unwrap();
    // As many tensors and boxes as a large model has, and almost no numbers: they are written.
    let tiny = Sizes { h: 2, f: 2, d: 1, g: 2, q: 1, v: 4 };
    let tensors = write_qwen3_moe(&at("hf"), crossmesh_testkit::sweep::count(3000), tiny);
    for (from, there) in [
        ("torch_dist", Request { tp: Some(2), pp: Some(8), ep: Some(32), ..Request::new(Format::TorchDist) }),
        ("dcp", Request { ranks: Some(2), ..Request::new(Format::Dcp) }),
    ] {
        let planned = there.plan(open(&at("hf")).unwrap()).unwrap();
        planned.conversion.run(&at(from), &options(2)).unwrap();
        let since = Since::now();
        let catalog = open(&at(from)).unwrap();
        let opened = since.to_string();
        let boxes: usize = catalog.tensors.values().map(|t| t.boxes.len()).sum();
        let planned = Request::new(Format::Hf).plan(catalog).unwrap();
        assert_eq!(planned.conversion.catalog().tensors.len(), tensors);
        eprintln!("{boxes} boxes of {from} to {tensors} tensors: opened in {opened}; planned in {since}");
        assert!(since.cpu() < CPU_TIME, "{tensors} tensors from {from}: {since}");
    }
}
