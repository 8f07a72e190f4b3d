//! The sizes of a model, as our manifests have them and as a config.json has them.
//!
//! Of the decoders that `crossmesh train` trains; of others nothing is known here but their names (maps/*.toml).

use serde_json::{Map, Value, json};

use crate::element::Element;

/// The config.json of a model whose sizes a manifest has; None of a model that transformers does not have. `end` is the token that ends a
/// document, where that is known.
pub fn config_of(model: &Value, element: Element, end: Option<u32>) -> Option<Value> {
    let of = |key: &str| model.get(key).cloned().unwrap_or(Value::Null);
    let number = |key: &str| model.get(key).and_then(Value::as_u64);
    let dtype = element.torch();
    let mut config = match model.get("kind").and_then(Value::as_str)? {
        "gpt" => json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": of("context"),
            "n_ctx": of("context"),
            "n_embd": of("width"),
            "n_layer": of("layers"),
            "n_head": of("heads"),
            "n_inner": of("hidden"),
            "activation_function": "gelu_new",
            "embd_pdrop": of("dropout"),
            "attn_pdrop": of("dropout"),
            "resid_pdrop": of("dropout"),
            "layer_norm_epsilon": of("epsilon"),
            "scale_attn_weights": true,
            // As GPT-2 has it, what ends a document also starts one. Its own would be outside of a smaller vocabulary.
            "bos_token_id": end,
        }),
        "llama" => {
            let rope = rope_of(model);
            let scaled = model.get("rope_scaling").is_some();
            json!({
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "max_position_embeddings": of("context"),
                "hidden_size": of("width"),
                "num_hidden_layers": of("layers"),
                "num_attention_heads": of("heads"),
                "num_key_value_heads": of("kv_heads"),
                "head_dim": number("width")?.checked_div(number("heads")?)?,
                "intermediate_size": of("hidden"),
                "hidden_act": "silu",
                "attention_bias": false,
                "mlp_bias": false,
                "attention_dropout": of("dropout"),
                "rms_norm_eps": of("epsilon"),
                // Where transformers looks since version 5, and where it looked before.
                "rope_parameters": rope,
                "rope_theta": of("rope_theta"),
                "rope_scaling": if scaled { rope.clone() } else { Value::Null },
                "bos_token_id": null,
            })
        }
        _ => return None,
    };
    let members = config.as_object_mut()?;
    members.insert("vocab_size".into(), of("vocab"));
    members.insert("tie_word_embeddings".into(), of("tied"));
    members.insert("eos_token_id".into(), json!(end));
    members.insert("dtype".into(), json!(dtype));
    members.insert("torch_dtype".into(), json!(dtype));
    Some(config)
}

/// Keys of Llama 3.1's scaling, in the order of our own list.
const SCALING: [&str; 4] =
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

fn rope_of(model: &Value) -> Value {
    let mut rope = json!({ "rope_type": "default", "rope_theta": model.get("rope_theta") });
    let scaling = model.get("rope_scaling").and_then(Value::as_array);
    if let Some([factor, low, high, old_context]) = scaling.map(|list| &list[..]) {
        rope["rope_type"] = json!("llama3");
        let old_context = json!(old_context.as_f64().unwrap_or_default() as u64);
        for (key, value) in SCALING.iter().zip([factor, low, high, &old_context]) {
            rope[*key] = value.clone();
        }
    }
    rope
}

/// The sizes that a config.json says, as our manifests have them; null of a model that we do not train. What it does not say is not there.
/// An error names what looks like ours and computes something else.
pub fn model_of(config: &Value) -> Result<Value, String> {
    let kind = match config.get("model_type").and_then(Value::as_str) {
        Some("gpt2") => "gpt",
        Some("llama") => "llama",
        _ => return Ok(Value::Null),
    };
    computes_as_ours(config, kind)?;
    let mut model = Map::from_iter([("kind".to_string(), json!(kind))]);
    let keys: &[(&str, &str)] = match kind {
        "gpt" => &[
            ("context", "n_positions"),
            ("width", "n_embd"),
            ("layers", "n_layer"),
            ("heads", "n_head"),
            ("hidden", "n_inner"),
            ("dropout", "resid_pdrop"),
            ("epsilon", "layer_norm_epsilon"),
        ],
        _ => &[
            ("context", "max_position_embeddings"),
            ("width", "hidden_size"),
            ("layers", "num_hidden_layers"),
            ("heads", "num_attention_heads"),
            ("kv_heads", "num_key_value_heads"),
            ("hidden", "intermediate_size"),
            ("dropout", "attention_dropout"),
            ("epsilon", "rms_norm_eps"),
        ],
    };
    for (ours, theirs) in keys.iter().chain(&[("vocab", "vocab_size"), ("tied", "tie_word_embeddings")]) {
        if let Some(value) = config.get(theirs).filter(|v| !v.is_null()) {
            // Ours is a real number, however it was written.
            let real = ["dropout", "epsilon"].contains(ours).then(|| value.as_f64()).flatten();
            model.insert(ours.to_string(), real.map_or_else(|| value.clone(), Value::from));
        }
    }
    if kind == "llama" {
        let (theta, scaling) = rotary_of(config)?;
        model.extend(theta.map(|theta| ("rope_theta".to_string(), json!(theta))));
        model.extend(scaling.map(|scaling| ("rope_scaling".to_string(), json!(scaling))));
    }
    Ok(Value::Object(model))
}

/// Refuses what looks like GPT-2 or Llama and computes something else.
pub fn computes_as_ours(config: &Value, kind: &str) -> Result<(), String> {
    let llama = [
        ("model_type", vec![json!("llama")]),
        ("hidden_act", vec![json!("silu")]),
        ("attention_bias", vec![json!(false)]),
        ("mlp_bias", vec![json!(false)]),
    ];
    let gpt2 = [
        ("model_type", vec![json!("gpt2")]),
        ("activation_function", vec![json!("gelu_new"), json!("gelu_pytorch_tanh")]),
        ("scale_attn_weights", vec![json!(true)]),
        ("scale_attn_by_inverse_layer_idx", vec![json!(false)]),
        ("add_cross_attention", vec![json!(false)]),
    ];
    let allowed = if kind == "llama" { &llama[..] } else { &gpt2[..] };
    let other = |(key, values): &(&str, Vec<Value>)| {
        let found = config.get(key).filter(|v| !values.contains(v))?;
        Some(format!("{key} is {found}, and ours has {}", values[0]))
    };
    allowed.iter().find_map(other).map_or(Ok(()), Err)
}

/// The base of a Llama's rotary positions, and the four numbers of Llama 3.1's scaling: its factor, the low and the high frequency's, and
/// the context that it was trained on. Since version 5 transformers keeps all of it under `rope_parameters`.
pub fn rotary_of(config: &Value) -> Result<(Option<f64>, Option<[f64; 4]>), String> {
    let of = |key: &str| config.get(key).filter(|v| !v.is_null());
    let place = if of("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let rope = of(place);
    let number = |key: &str| rope.and_then(|r| r.get(key)).and_then(Value::as_f64);
    let theta = number("rope_theta").or(of("rope_theta").and_then(Value::as_f64));
    let kind = rope.and_then(|r| r.get("rope_type").or(r.get("type"))).and_then(Value::as_str);
    match kind.unwrap_or("default") {
        "default" => Ok((theta, None)),
        "llama3" => match SCALING.map(number) {
            [Some(factor), Some(low), Some(high), Some(context)] => {
                Ok((theta, Some([factor, low, high, context])))
            }
            _ => Err(format!("{place}: the rotary scaling `llama3` lacks one of {}", SCALING.join(", "))),
        },
        other => Err(format!(
            "{place}.rope_type: the rotary scaling `{other}` is unknown\nhint: `default` and `llama3` are known"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_to_a_config_and_come_back() {
        let gpt = json!({
            "kind": "gpt", "vocab": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12, "hidden": 3072, "tied": true,
            "dropout": 0.1, "epsilon": 1e-5,
        });
        let mut llama = gpt.clone();
        llama["kind"] = json!("llama");
        llama["kv_heads"] = json!(4);
        llama["rope_theta"] = json!(500_000.0);
        let mut scaled = llama.clone();
        scaled["rope_scaling"] = json!([8.0, 1.0, 4.0, 8192.0]);
        for model in [gpt, llama, scaled] {
            let config = config_of(&model, Element::BF16, Some(7)).unwrap();
            assert_eq!(config["torch_dtype"], "bfloat16");
            assert_eq!(model_of(&config).unwrap(), model);
        }
        assert_eq!(config_of(&json!({"kind": "u-transformer"}), Element::F32, None), None);
        assert_eq!(model_of(&json!({"model_type": "qwen3"})).unwrap(), Value::Null);
        let error = model_of(&json!({"model_type": "llama", "hidden_act": "gelu"})).unwrap_err();
        assert_eq!(error, "hidden_act is \"gelu\", and ours has \"silu\"");
    }

    /// Angles that are scaled otherwise give other numbers from the same weights: refused wherever transformers writes it down, by either of its names.
    #[test]
    fn rotary_scaling_that_is_unknown_is_refused() {
        for (place, word) in
            [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
        {
            for other in ["yarn", "linear", "dynamic", "longrope", "Llama3", ""] {
                let config = json!({"model_type": "llama", place: {word: other, "factor": 8.0}});
                let wanted = format!(
                    "{place}.rope_type: the rotary scaling `{other}` is unknown\nhint: `default` and `llama3` are known"
                );
                assert_eq!(model_of(&config).unwrap_err(), wanted);
            }
            let known = json!({"model_type": "llama", place: {word: "default", "rope_theta": 7.0}});
            assert_eq!(rotary_of(&known).unwrap(), (Some(7.0), None));
        }
        let whole = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        });
        for lost in SCALING {
            let mut rope = whole.clone();
            rope.as_object_mut().unwrap().remove(lost);
            let error = rotary_of(&json!({"rope_parameters": rope})).unwrap_err();
            assert!(
                error.starts_with("rope_parameters: the rotary scaling `llama3` lacks one of factor, "),
                "{error}"
            );
        }
        assert_eq!(rotary_of(&json!({"rope_scaling": whole})).unwrap().1, Some([8.0, 1.0, 4.0, 64.0]));
    }
}
