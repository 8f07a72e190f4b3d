use super::*;
use crate::cluster::{Cluster, Host};
use crate::reshard::problem::Hosts;
use crate::reshard::{PlanOptions, Problem, plan};
use crate::verify::verify;

#[test]
fn parameters_are_the_published_ones() {
    for (name, parameters) in [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ] {
        let model = Model::preset(name).unwrap();
        assert_eq!(model.parameters(), parameters, "{name}");
        let fused: u64 = model.tensors(true).iter().map(|t| t.shape.iter().product::<u64>()).sum();
        assert_eq!(fused, parameters, "{name}, fused");
    }
}

fn small() -> Model {
    Model::from_config(
        r#"{"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 40, "vocab_size": 50, "torch_dtype": "float32"}"#,
    )
    .unwrap()
}

fn moe() -> Model {
    Model { experts: Some(4), qk_norm: true, ..small() }
}

fn shown(model: &Model, parallel: &str, name: &str) -> String {
    let parallel: Parallel = parallel.parse().unwrap();
    let tensor = model.tensors(true).into_iter().find(|t| t.name.contains(name)).unwrap();
    parallel.layout(model, &tensor, "T", 0).unwrap().to_string()
}

#[test]
fn layouts_are_the_usual_ones() {
    let model = small();
    assert_eq!(shown(&model, "fsdp 4", "qkv"), "f32[48,24]@T{fsdp:4}=0-3(fsdp of 24+12+12,_)");
    assert_eq!(shown(&model, "dp 2, tp 2", "gate_up"), "f32[80,24]@T{dp:2,tp:2}=0-3(tp of 40+40,_)");
    assert_eq!(shown(&model, "tp 2, fsdp 2", "o_proj"), "f32[24,24]@T{tp:2,fsdp:2}=0-3(fsdp,tp)");
    assert_eq!(shown(&model, "dp 2, tp 2", "norm"), "f32[24]@T{dp:2,tp:2}=0-3(_)");
    assert_eq!(shown(&model, "tp 2, pp 3", "layers.2.mlp.down"), "f32[24,40]@T2{tp:2}=4-5(_,tp)");
    assert_eq!(
        shown(&moe(), "ep 2, tp 2", "experts.gate_up"),
        "f32[4,80,24]@T{ep:2,tp:2}=0-3(ep,tp of 40+40,_)"
    );
    // Four ranks and two KV heads: pairs of ranks hold the same one.
    assert_eq!(
        shown(&model, "tp 4", "qkv"),
        "f32[48,24]@T{tp:4}=0-3{0: [0:6, 0:24] [24:30, 0:24] [36:42, 0:24]; 1: [6:12, 0:24] [24:30, 0:24] [36:42, 0:24]; \
         2: [12:18, 0:24] [30:36, 0:24] [42:48, 0:24]; 3: [18:24, 0:24] [30:36, 0:24] [42:48, 0:24]}"
    );
}

#[test]
fn whole_models_are_planned_and_proven() {
    for (model, src, dst) in [
        (small(), "fsdp 4", "dp 2, tp 2"),
        (small(), "pp 3, tp 2", "tp 4"),
        (small(), "tp 4", "fsdp 3"),
        (moe(), "fsdp 4", "ep 2, tp 2"),
        (moe(), "ep 4", "pp 2, ep 2"),
    ] {
        for fused in [false, true] {
            let (src, dst): (Parallel, Parallel) = (src.parse().unwrap(), dst.parse().unwrap());
            let pairs = model.pairs(&src, &dst, fused).unwrap();
            let hosts = [src.num_ranks(), dst.num_ranks()].map(Host::with_devices);
            let problem = Problem::new(pairs, Hosts::Described(Cluster::of_hosts(hosts.into()))).unwrap();
            let plan = plan(&problem, &PlanOptions::default()).unwrap();
            verify(&plan).unwrap_or_else(|e| panic!("{src} to {dst}: {e}"));
        }
    }
}

#[test]
fn what_cannot_be_cut_is_named() {
    let refused = |model: &Model, parallel: &str| {
        let parallel = parallel.parse::<Parallel>()?;
        model.pairs(&parallel, &parallel, true).map(|_| ())
    };
    for (parallel, says) in [
        ("tp", "is no parallelism"),
        ("tp 0", "is no parallelism"),
        ("xp 2", "is no parallelism"),
        ("tp 2, tp 2", "given twice"),
        ("dp 4294967295, tp 4294967295", "ranks"),
        ("tp 3", "part of a head"),
        ("tp 4, fsdp 2", "replicates heads"),
        ("ep 2", "no experts"),
        ("pp 4", "3 layers"),
    ] {
        let error = refused(&small(), parallel).unwrap_err().to_string();
        assert!(error.contains(says), "{parallel}: {error}");
    }
    for (config, says) in [
        ("{}", "not a model's config.json"),
        (
            r#"{"model_type": "bert", "hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1, "vocab_size": 1}"#,
            "`bert` is not known",
        ),
        (
            r#"{"model_type": "llama", "hidden_size": 0, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1, "vocab_size": 1}"#,
            "`hidden_size` is 0",
        ),
    ] {
        let error = Model::from_config(config).unwrap_err().to_string();
        assert!(error.contains(says), "{config}: {error}");
    }
}
