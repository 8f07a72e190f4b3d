//! Models that are known by name: what keys of `[model]` are without anything said, where `model.preset` names one.

/// All of them.
pub const NAMES: &[&str] =
    &["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b"];

/// Of GPT-2: width, layers, heads.
const GPT2: &[(&str, [u64; 3])] = &[
    ("gpt2", [768, 12, 12]),
    ("gpt2-medium", [1024, 24, 16]),
    ("gpt2-large", [1280, 36, 20]),
    ("gpt2-xl", [1600, 48, 25]),
];

/// Of Llama 3: width, layers, heads, heads of keys and values, hidden columns.
const LLAMA3: &[(&str, [u64; 5])] = &[
    ("llama3-8b", [4096, 32, 32, 8, 14336]),
    ("llama3-70b", [8192, 80, 64, 8, 28672]),
    ("llama3-405b", [16384, 126, 128, 8, 53248]),
];

/// A key of `[model]` as a preset has it, in TOML; nothing where it has what every model has.
pub(super) fn default(preset: &str, key: &str) -> Option<String> {
    let number = match (GPT2.iter().find(|of| of.0 == preset), LLAMA3.iter().find(|of| of.0 == preset)) {
        (Some((_, [width, layers, heads])), _) => match key {
            "kind" => return Some("\"gpt\"".into()),
            "vocab" => 50_257,
            "context" => 1024,
            "width" => *width,
            "layers" => *layers,
            "heads" => *heads,
            _ => return None,
        },
        (_, Some((_, [width, layers, heads, kv_heads, hidden]))) => match key {
            "kind" => return Some("\"llama\"".into()),
            "rope_theta" => return Some("5e5".into()),
            "vocab" => 128_256,
            "context" => 8192,
            "width" => *width,
            "layers" => *layers,
            "heads" => *heads,
            "kv_heads" => *kv_heads,
            "hidden" => *hidden,
            _ => return None,
        },
        _ => return None,
    };
    Some(number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::keys_of;

    #[test]
    fn presets_are_values_of_their_keys() {
        for name in NAMES {
            assert!(default(name, "kind").is_some(), "{name}");
            for key in keys_of("model") {
                if let Some(text) = default(name, key.name) {
                    let value = key.kind.read_set(&text).unwrap_or_else(|e| panic!("{name}: {e:?}"));
                    assert_eq!(value.to_string(), text, "{name}, {}", key.name);
                }
            }
        }
    }
}
