//! Planning looks at headers alone: a model of a trillion parameters, in files that are all holes.
//!
//! `CROSSMESH_SWEEP=100000` makes so many tensors, and says how long it took.

mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use crossmesh_checkpoint::{Format, Request, open};
use serde_json::json;

/// A Qwen3-MoE of about so many tensors, with weights that take no room.
fn write_sparse(folder: &Path, tensors: usize) -> usize {
    let experts = 384.min(tensors / 6).max(2) as u64;
    let layers = (tensors as u64).div_ceil(3 * experts + 9).max(1);
    let (h, f, d, g, q, v) = (7168u64, 2048u64, 128u64, 8u64, 8u64, 163_840u64);
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

#[test]
#[expect(clippy::disallowed_methods, reason = "it says how long it took, and decides nothing by it")]
fn a_trillion_parameters_are_planned_by_their_headers() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = write_sparse(folder.path(), crossmesh_testkit::sweep::count(3000));
    for (to, request) in [
        ("dcp", Request { ranks: Some(2), ..Request::new(Format::Dcp) }),
        ("torch_dist", Request { tp: Some(2), pp: Some(8), ep: Some(32), ..Request::new(Format::TorchDist) }),
    ] {
        let start = std::time::Instant::now();
        let catalog = open(folder.path()).unwrap();
        let opened = start.elapsed();
        assert_eq!(catalog.tensors.len(), tensors);
        let bytes = catalog.bytes();
        let planned = request.plan(catalog).unwrap();
        let all = start.elapsed();
        assert!(planned.conversion.bytes() > bytes);
        eprintln!("{tensors} tensors, {bytes} B to {to}: opened in {opened:?}, planned in {all:?}");
    }
}
