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
    let Model { name, dtype, weights: Weights::Decoder(decoder) } = small() else {
        unreachable!("a decoder")
    };
    Model { name, dtype, weights: Weights::Decoder(Decoder { experts: Some(4), qk_norm: true, ..decoder }) }
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

/// Where a device has every element, which are counted along `dim` from `first`.
fn places(layout: &Layout, coord: &[u32], dim: usize, first: u64) -> Vec<(u64, Vec<u64>)> {
    let mut places = vec![];
    for held in layout.held_at(coord) {
        for i in 0..held.region.volume() {
            let (mut rest, mut at, mut offset) = (i, vec![0; held.strides.len()], held.offset_elements);
            for (d, span) in held.region.spans().iter().enumerate().rev() {
                let step = rest % span.len();
                (rest, at[d], offset) =
                    (rest / span.len(), span.start + step, offset + step * held.strides[d]);
            }
            at[dim] += first;
            places.push((offset, at));
        }
    }
    places
}

/// Unfused tensors land where the fused parameter has them: the same memory of every device is filled with the same elements.
#[test]
fn unfused_tensors_land_inside_of_fused_ones() {
    for (model, src, dst) in [
        (small(), "fsdp 4", "dp 2, tp 2"),
        (small(), "pp 3, tp 2", "tp 4"),
        (small(), "tp 2", "pp 3, tp 2, fsdp 2"),
        (moe(), "fsdp 4", "ep 2, tp 2"),
        (moe(), "fsdp 4", "ep 2"),
    ] {
        let (src, dst): (Parallel, Parallel) = (src.parse().unwrap(), dst.parse().unwrap());
        let pairs = model.pairs_into_fused(&src, &dst).unwrap();
        let apart = model.tensors(false);
        assert!(pairs.iter().map(|(name, ..)| name).eq(apart.iter().map(|tensor| &tensor.name)));
        let mut next = pairs.iter();
        for fused in model.tensors(true) {
            let whole = dst.layout(&model, &fused, "I", src.num_ranks()).unwrap();
            let dim = fused.dim_of_parts();
            let mut landed: Vec<(u64, &Layout)> = vec![];
            let mut first = 0;
            while first < fused.shape[dim] {
                let (_, before, after) = next.next().unwrap();
                assert_eq!(before.shape(), after.shape());
                landed.push((first, after));
                first += after.shape()[dim];
            }
            for position in 0..whole.mesh().len() {
                let coord = whole.mesh().coord(position);
                let parts = landed.iter().flat_map(|(first, part)| places(part, &coord, dim, *first));
                let mut parts: Vec<_> = parts.collect();
                parts.sort_unstable();
                let mut all = places(&whole, &coord, dim, 0);
                all.sort_unstable();
                assert!(parts == all, "{} at {coord:?}", fused.name);
            }
        }
        assert!(next.next().is_none());
        let hosts = [src.num_ranks(), dst.num_ranks()].map(Host::with_devices);
        let problem = Problem::new(pairs, Hosts::Described(Cluster::of_hosts(hosts.into()))).unwrap();
        verify(&plan(&problem, &PlanOptions::default()).unwrap()).unwrap();
    }
    // Of 723 tensors those of q, k, v, gate and up have a place inside of another.
    let model = Model::preset("llama3-70b").unwrap();
    let pairs = model.pairs_into_fused(&"fsdp 64".parse().unwrap(), &"dp 4, tp 8".parse().unwrap()).unwrap();
    let inside = pairs.iter().filter(|(_, _, after)| after.by_boxes().is_some()).count();
    assert_eq!((pairs.len(), inside), (723, 80 * 5));
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

/// The table of a model that we know, cut by name, is cut as the model is.
#[test]
fn a_table_of_names_is_cut_as_the_model_is() {
    let table = |model: &Model, fused: bool| {
        let tensor = |t: ModelTensor| format!("\"{}\": {:?}", t.name, t.shape);
        let tensors: Vec<String> = model.tensors(fused).into_iter().map(tensor).collect();
        Model::from_table(&format!("{{\"dtype\": \"f32\", \"tensors\": {{{}}}}}", tensors.join(", ")))
            .unwrap()
    };
    for model in [small(), moe()] {
        for fused in [false, true] {
            let table = table(&model, fused);
            assert_eq!(table.parameters(), model.parameters());
            for parallel in ["fsdp 4", "tp 2, fsdp 2", "dp 2, tp 2", "pp 3, tp 2"] {
                let parallel: Parallel = parallel.parse().unwrap();
                let layouts = |model: &Model| model.pairs(&parallel, &parallel, fused).unwrap();
                assert_eq!(layouts(&table), layouts(&model), "{parallel}, fused: {fused}");
            }
        }
    }
    let parallel: Parallel = "ep 2, tp 2".parse().unwrap();
    let pairs = |model: &Model| model.pairs(&parallel, &parallel, true).unwrap();
    assert_eq!(pairs(&table(&moe(), true)), pairs(&moe()));
}

#[test]
fn roles_go_before_names_and_mistakes_are_named() {
    let model = Model::from_table(
        r#"{"tensors": {"h.0.attn.qkv_proj.weight": [8, 4], "h.0.attn.bias": [4], "h.1.mix": [4, 6, 2], "h.1.scale": []},
            "roles": {"qkv_proj": "column 4+2+2", "attn.bias": "column", "mix": "experts column 4+2"}}"#,
    )
    .unwrap();
    assert_eq!(shown(&model, "tp 2", "qkv"), "bf16[8,4]@T{tp:2}=0-1(tp of 4+2+2,_)");
    assert_eq!(shown(&model, "tp 2", "bias"), "bf16[4]@T{tp:2}=0-1(tp)");
    assert_eq!(shown(&model, "ep 2, tp 2", "mix"), "bf16[4,6,2]@T{ep:2,tp:2}=0-3(ep,tp of 4+2,_)");
    assert_eq!(shown(&model, "pp 2, fsdp 2", "scale"), "bf16[]@T1{fsdp:2}=2-3()");
    for (text, says) in [
        (r#"{"tensors": {"w": [4, 4]}, "roles": {"x": "row"}}"#, "`x` is the end of no tensor's name"),
        (
            r#"{"tensors": {"w": [4, 4]}, "roles": {"w": "columns"}}"#,
            "`w`, of shape [4, 4], cannot be `columns`",
        ),
        (r#"{"tensors": {"w": [4, 4]}, "roles": {"w": "column 3+2"}}"#, "cannot be `column 3+2`"),
        (r#"{"tensors": {"w": [4]}, "roles": {"w": "row"}}"#, "of shape [4], cannot be `row`"),
        (r#"{"tensors": {"w": [4]}, "roles": {"w": "experts row"}}"#, "cannot be `experts row`"),
        (r#"{"tensors": {"a.qkv_proj.weight": [4, 4]}}"#, "how its 4 rows are query, key and value"),
        (r#"{"tensors": {"w": [4], "w": [4]}}"#, "`w` is listed twice"),
        (r#"{"tensors": {"w": [4]}, "dtype": "f31"}"#, "`f31` is not known"),
        (r#"{"tensors": {"w": 4}}"#, "not a table of tensors"),
        (
            r#"{"tensors": {"w": [4294967296, 4294967296]}}"#,
            "`w` of shape [4294967296, 4294967296]: no model is so large",
        ),
        (r#"{"tensors": {}, "role": {}}"#, "unknown field `role`"),
        (r#"{"tensor": {}}"#, "not a model's config.json"),
    ] {
        let error = Model::from_json(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}
