//! GPT-2's file: written as the reference implementation reads it, and read as others write it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crossmesh_core::id::Rank;
use crossmesh_core::mesh::Mesh;
use crossmesh_train::chain::{Chain, Model, Setup};
use crossmesh_train::checkpoint::{Checkpoint, Convert, Facts, Snapshot, StageState, StageTarget, hf};
use crossmesh_train::group::in_process;
use crossmesh_train::kernels::cpu::Cpu;
use crossmesh_train::models::gpt::rotary::{Llama3Scaling, RotaryConfig};
use crossmesh_train::models::gpt::{Family, Gpt, GptConfig};
use crossmesh_train::parameter::{Parameter, initial};
use crossmesh_train::stage::Stage;
use crossmesh_train::stage_rank::StageRank;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::world::store;

const SEED: u64 = 3;

fn config(tied: bool) -> GptConfig {
    GptConfig { tied, hidden: 31, dropout: 0.25, epsilon: 2e-5, ..GptConfig::new(13, 7, 20, 2, 5) }
}

/// The parameters of a model on a rank.
fn parameters(config: &GptConfig, place: &StageRank) -> Vec<Parameter> {
    let model = Gpt::new(config.clone()).unwrap();
    let setup = Setup { place: place.clone(), ..Setup::alone(1, 0) };
    let group = in_process::<f32>(place.tp().size).swap_remove(place.tp().rank);
    let cpu = std::sync::Arc::new(Cpu::<f32>::new(1));
    Chain::new(&model, 0..config.layers + 2, cpu, group, setup).unwrap().parameters().to_vec()
}

/// A model as it starts, saved on a mesh.
fn saved(config: &GptConfig, mesh: &str, folder: &Path) -> PathBuf {
    let model = Gpt::new(config.clone()).unwrap();
    let mesh: Mesh = Model::<Cpu<f32>>::mesh(&model, &mesh.parse().unwrap());
    let store = store(folder, 1);
    let report = |position: usize| {
        let place = StageRank::new(mesh.clone(), position).unwrap();
        let parameters = &parameters(config, &place);
        let values = &initial::<f32>(parameters, place.coord(), SEED);
        let state = StageState::of_weights(parameters, &place, values);
        let snapshot = Snapshot::take(9, Rank(position as u32), &[state]).unwrap();
        store.write(snapshot).report()
    };
    let reports: Vec<_> = (0..mesh.len()).map(report).collect();
    let (model, run) = (hf::model_json(config), serde_json::Value::Null);
    let facts = Facts { step: 9, samples: 1, seed: SEED, model, run, optimizer: None };
    store.commit(&facts, &reports).unwrap()
}

/// All parameters of a checkpoint, on one rank.
fn loaded(config: &GptConfig, path: &Path) -> Vec<f32> {
    let place = StageRank::alone();
    let parameters = parameters(config, &place);
    let mut values = vec![f32::NAN; parameters.last().unwrap().range.end];
    let target = StageTarget::of_weights(&parameters, &place, &mut values);
    let restored = Checkpoint::open(path).unwrap().load(&mut [target], Convert::No).unwrap();
    assert!(!restored.moments);
    values
}

fn start(config: &GptConfig) -> Vec<f32> {
    initial(&parameters(config, &StageRank::alone()), &[0, 0], SEED)
}

#[test]
fn there_and_back() {
    let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, old_context: 16.0 };
    let llama = |scaling| {
        let rotary = RotaryConfig { theta: 5e3, scaling };
        let family = Family::Llama { kv_heads: 3, rotary };
        GptConfig { family, epsilon: 2e-5, ..GptConfig::llama((13, 7), 24, 2, (6, 3), 31) }
    };
    for config in [config(true), config(false), llama(None), GptConfig { tied: true, ..llama(Some(scaling)) }]
    {
        let folder = tempfile::tempdir().unwrap();
        // Ranks that share heads of keys save them once.
        let shared = saved(&config, "A{dp:2,tp:6}", &folder.path().join("shared"));
        assert_eq!(loaded(&config, &shared), start(&config));
        let path = saved(&config, "A{dp:2,tp:3}", &folder.path().join("a"));
        let exported =
            hf::export(&Checkpoint::open(&path).unwrap(), &folder.path().join("out"), None).unwrap();
        assert_eq!(std::fs::metadata(&exported.model).unwrap().len(), exported.bytes);
        let back = hf::import::<f32>(&exported.model, None, &store(&folder.path().join("b"), 1)).unwrap();
        assert_eq!(back.config, config);
        assert_eq!(loaded(&config, &back.path), start(&config));
        assert_eq!(hf::decoder_config(&Checkpoint::open(&back.path).unwrap()).unwrap(), config);
        // Twice into one folder would put one of them aside.
        let again = hf::import::<f32>(&exported.model, None, &store(&folder.path().join("b"), 1));
        assert!(again.unwrap_err().to_string().contains("already"));
    }
}

/// A rank that loads its stages does not notice what none of them asks for; somebody has to.
#[test]
fn tensors_that_a_model_has_no_use_for_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(&config(false), "A{dp:1}", folder.path());
    let checkpoint = Checkpoint::open(&path).unwrap();
    let check = |config: &GptConfig| checkpoint.check_model(&parameters(config, &StageRank::alone()));
    check(&config(false)).unwrap();
    let fewer = check(&GptConfig { layers: 1, ..config(false) }).unwrap_err().to_string();
    assert!(fewer.contains("the model has no use for 12 of its tensors, such as `h.1."), "{fewer}");
    let tied = check(&config(true)).unwrap_err().to_string();
    assert!(tied.contains("no use for 1 of its tensors, such as `lm_head.weight`"), "{tied}");
    let more = check(&GptConfig { layers: 3, ..config(false) }).unwrap_err().to_string();
    assert!(more.contains("it has no tensor `h.2."), "{more}");
    let wider = check(&GptConfig { hidden: 32, ..config(false) }).unwrap_err().to_string();
    assert!(wider.contains("`h.0.mlp.c_fc.weight` has the shape [20, 31], the model [20, 32]"), "{wider}");
}

#[test]
fn the_file_has_the_names_and_shapes_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for tied in [true, false] {
        let path = saved(&config(tied), "A{tp:2}", &folder.path().join(format!("{tied}")));
        let exported =
            hf::export(&Checkpoint::open(&path).unwrap(), &folder.path().join("out"), None).unwrap();
        let bytes = std::fs::read(&exported.model).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let shapes: BTreeMap<String, Vec<usize>> =
            tensors.iter().map(|(name, t)| (name.to_string(), t.shape().to_vec())).collect();
        assert_eq!(shapes["transformer.wte.weight"], [13, 20]);
        assert_eq!(shapes["transformer.wpe.weight"], [7, 20]);
        assert_eq!(shapes["transformer.h.0.attn.c_attn.weight"], [20, 60]);
        assert_eq!(shapes["transformer.h.0.attn.c_attn.bias"], [60]);
        assert_eq!(shapes["transformer.h.1.attn.c_proj.weight"], [20, 20]);
        assert_eq!(shapes["transformer.h.1.mlp.c_fc.weight"], [20, 31]);
        assert_eq!(shapes["transformer.h.1.mlp.c_proj.weight"], [31, 20]);
        assert_eq!(shapes.contains_key("lm_head.weight"), !tied);
        assert_eq!(shapes.len(), 2 + 2 * 12 + 2 + usize::from(!tied));
        let config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&exported.config).unwrap()).unwrap();
        assert_eq!(config["n_head"], 5);
        assert_eq!(config["n_inner"], 31);
        assert_eq!(config["layer_norm_epsilon"], 2e-5);
        assert_eq!(config["tie_word_embeddings"], tied);
    }
}

/// A file as the reference implementation writes it, from tensors by name.
fn write(path: &Path, tensors: &BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>) {
    let views = tensors
        .iter()
        .map(|(n, (dtype, shape, data))| (n.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(path, serialize(views, None).unwrap()).unwrap();
}

/// An exported model's tensors under the names of the first GPT-2 files, in another type.
fn older(folder: &Path, dtype: Dtype) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let path = saved(&config(true), "A{dp:1}", &folder.join("older"));
    let exported = hf::export(&Checkpoint::open(&path).unwrap(), &folder.join("exported"), Some(12)).unwrap();
    let bytes = std::fs::read(exported.model).unwrap();
    let number = |b: &[u8; 4]| match dtype {
        Dtype::BF16 => half::bf16::from_f32(f32::from_le_bytes(*b)).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(f32::from_le_bytes(*b)).to_le_bytes().to_vec(),
        _ => b.to_vec(),
    };
    let mut tensors: BTreeMap<_, _> = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, t)| {
            let data = t.data().as_chunks().0.iter().flat_map(number).collect();
            (name.trim_start_matches("transformer.").to_string(), (dtype, t.shape().to_vec(), data))
        })
        .collect();
    tensors.insert("h.0.attn.bias".into(), (Dtype::BOOL, vec![1, 1, 7, 7], vec![1; 49]));
    tensors
}

#[test]
fn older_files_are_read() {
    for (dtype, step) in [(Dtype::F32, 0.0), (Dtype::F64, 0.0), (Dtype::BF16, 1.0 / 256.0)] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pytorch.safetensors");
        write(&file, &older(folder.path(), dtype));
        let store = store(&folder.path().join("b"), 1);
        let error = hf::import::<f32>(&file, None, &store).unwrap_err().to_string();
        assert!(error.contains("nobody knows its heads"), "{error}");
        let imported = hf::import::<f32>(&file, Some(5), &store).unwrap();
        assert!(imported.config.tied);
        let values = loaded(&imported.config, &imported.path);
        for (a, b) in values.iter().zip(start(&config(true))) {
            assert!((a - b).abs() <= b.abs() * step, "{a} {b}");
        }
    }
}

/// Header, order, types, metadata and a tied head's copy: what went in comes out, byte by byte.
#[test]
fn what_was_imported_is_exported_as_it_was() {
    let again = |bytes: &[u8], config: Option<&Path>| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, bytes).unwrap();
        config.into_iter().for_each(|from| {
            std::fs::copy(from, folder.path().join("config.json")).unwrap();
        });
        let heads = config.is_none().then_some(5);
        let imported = hf::import::<f32>(&file, heads, &store(&folder.path().join("b"), 1)).unwrap();
        let checkpoint = Checkpoint::open(&imported.path).unwrap();
        let exported = hf::export(&checkpoint, &folder.path().join("out"), None).unwrap();
        let written = std::fs::read(exported.model).unwrap();
        assert_eq!(exported.bytes, written.len() as u64);
        (written == bytes, exported.as_imported.unwrap())
    };
    let folder = tempfile::tempdir().unwrap();
    for dtype in [Dtype::F32, Dtype::BF16] {
        let mut tensors = older(folder.path(), dtype);
        let views = |tensors: &BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>| {
            let metadata = std::collections::HashMap::from([("format".to_string(), "np".to_string())]);
            let view = |(n, (dtype, shape, data)): (&String, &(Dtype, Vec<usize>, Vec<u8>))| {
                (n.clone(), TensorView::new(*dtype, shape.clone(), data.clone().leak()).unwrap())
            };
            serialize(tensors.iter().map(view), Some(metadata)).unwrap()
        };
        let (same, told) = again(&views(&tensors), None);
        assert_eq!((same, told), (false, Err("`h.0.attn.bias` is no weight and was not kept".to_string())));
        tensors.remove("h.0.attn.bias");
        assert_eq!(again(&views(&tensors), None), (true, Ok(())));
    }
    let (same, told) = again(&std::fs::read(write_wide(folder.path())).unwrap(), None);
    assert!(!same && told.unwrap_err().contains("was f64, and is kept as f32"));
    // A Llama, its tensors in another order than ours, its header in yet another, and its table twice.
    let llama = GptConfig { tied: true, ..GptConfig::llama((13, 7), 24, 2, (6, 3), 31) };
    let path = saved(&llama, "A{dp:1}", &folder.path().join("llama"));
    let out = hf::export(&Checkpoint::open(&path).unwrap(), &folder.path().join("llama-out"), None).unwrap();
    assert_eq!(out.as_imported, None);
    let bytes = std::fs::read(&out.model).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_by_key(|name| name.bytes().rev().map(u64::from).fold(7, |a, b| a * 31 % 1009 + b));
    let mut all: Vec<(&str, &str)> = names.iter().map(|name| (*name, *name)).collect();
    all.insert(3, ("lm_head.weight", "model.embed_tokens.weight"));
    let (mut members, mut data) = (vec![r#""__metadata__": {"format":"pt"}"#.to_string()], vec![]);
    for (name, of) in &all {
        let tensor = tensors.tensor(of).unwrap();
        let (start, shape) = (data.len(), tensor.shape());
        data.extend_from_slice(tensor.data());
        let end = data.len();
        members.push(format!(
            r#""{name}": {{"shape": {shape:?}, "dtype": "F32", "data_offsets": [{start}, {end}]}}"#
        ));
    }
    members.reverse();
    let header = format!("{{{}}}   ", members.join(", "));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    assert_ne!(file, bytes);
    assert_eq!(again(&file, Some(&out.config)), (true, Ok(())));
}

/// A file of wider numbers than it will be kept in.
fn write_wide(folder: &Path) -> PathBuf {
    let mut tensors = older(folder, Dtype::F64);
    tensors.remove("h.0.attn.bias");
    let file = folder.join("wide.safetensors");
    write(&file, &tensors);
    file
}

/// The same weights turned by other angles are another model.
#[test]
fn a_llama_with_unknown_rotary_scaling_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let llama = GptConfig::llama((13, 7), 24, 1, (6, 3), 31);
    let path = saved(&llama, "A{dp:1}", &folder.path().join("llama"));
    let out = hf::export(&Checkpoint::open(&path).unwrap(), &folder.path().join("out"), None).unwrap();
    let text = std::fs::read_to_string(&out.config).unwrap();
    for (i, word) in ["yarn", "linear"].into_iter().enumerate() {
        let other = text.replace("\"rope_type\": \"default\"", &format!("\"rope_type\": \"{word}\""));
        assert_ne!(other, text, "{text}");
        std::fs::write(&out.config, other).unwrap();
        let empty = store(&folder.path().join(format!("b{i}")), 1);
        let error = hf::import::<f32>(&out.model, None, &empty).unwrap_err().to_string();
        let wanted =
            format!("config.json: rope_parameters.rope_type: the rotary scaling `{word}` is unknown\nhint: ");
        assert!(error.contains(&wanted), "{error}");
        assert_eq!(empty.steps().unwrap(), Vec::<u64>::new());
    }
}

#[test]
fn what_is_no_gpt2_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let good = older(folder.path(), Dtype::F32);
    let refused = |tensors: &BTreeMap<_, _>, config: Option<&str>, word: &str| {
        write(&file, tensors);
        let beside = folder.path().join("config.json");
        let _ = std::fs::remove_file(&beside);
        config.into_iter().for_each(|text| std::fs::write(&beside, text).unwrap());
        let error = hf::import::<f32>(&file, Some(5), &store(&folder.path().join("b"), 1)).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    };
    let without =
        |name: &str| good.iter().filter(|t| t.0 != name).map(|(n, t)| (n.clone(), t.clone())).collect();
    refused(&without("wpe.weight"), None, "it has no `wpe.weight`");
    refused(&without("h.1.mlp.c_fc.bias"), None, "it has no `h.1.mlp.c_fc.bias`");
    let mut other = good.clone();
    other.insert("h.0.attn.rotary".into(), (Dtype::F32, vec![1], vec![0; 4]));
    refused(&other, None, "`h.0.attn.rotary` is no tensor of a GPT-2");
    let mut other = good.clone();
    other.insert("ln_f.bias".into(), (Dtype::I32, vec![20], vec![0; 80]));
    refused(&other, None, "`ln_f.bias` is i32");
    other.insert("ln_f.bias".into(), (Dtype::F32, vec![4, 5], vec![0; 80]));
    refused(&other, None, "`ln_f.bias` has the shape [4, 5], not [20]");
    refused(&good, Some(r#"{"activation_function": "relu"}"#), "activation_function is \"relu\"");
    refused(&good, Some("{"), "config.json: it is no JSON");
    // The last layers are missing, which only the config tells.
    let short =
        good.iter().filter(|t| !t.0.starts_with("h.1.")).map(|(n, t)| (n.clone(), t.clone())).collect();
    refused(
        &short,
        Some(r#"{"n_layer": 2}"#),
        "its tensors have n_layer 1, and the config.json beside it says 2",
    );
    refused(&good, Some(r#"{"n_embd": 24}"#), "n_embd 20, and the config.json beside it says 24");
    refused(&good, Some(r#"{"vocab_size": 14}"#), "vocab_size 13, and the config.json");
    let mut other = good.clone();
    other.insert("transformer.ln_f.bias".into(), (Dtype::F32, vec![20], vec![0; 80]));
    refused(&other, None, "`transformer.ln_f.bias` and `ln_f.bias` are two tensors of one name");
    let refused = |bytes: &[u8], word: &str| {
        std::fs::write(&file, bytes).unwrap();
        let error = hf::import::<f32>(&file, Some(5), &store(&folder.path().join("b"), 1)).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(br#"{"metadata": {"total_size": 1}, "weight_map": {}}"#, "the index of a model in several files");
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    let twice = format!(r#"{{"wte.weight":{entry},"wte.weight":{entry}}}"#);
    let bytes = [&(twice.len() as u64).to_le_bytes()[..], twice.as_bytes(), &[0; 4]].concat();
    refused(&bytes, "two tensors are called `wte.weight`");
    std::fs::write(&file, b"\x80\x02}q\x00.....").unwrap();
    let error = hf::import::<f32>(&file, Some(5), &store(&folder.path().join("b"), 1)).unwrap_err();
    assert!(error.to_string().contains("no safetensors file"), "{error}");
}
