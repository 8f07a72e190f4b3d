//! Models that are known by name.

use super::{Decoder, Model, Weights};
use crate::dtype::DType;

/// hidden, layers, heads, KV heads, head's columns, feed-forward, vocabulary, experts
type Sizes = (u64, u64, u64, u64, u64, u64, u64, Option<u64>);

const LLAMA: &[(&str, Sizes)] = &[
    ("llama3-8b", (4096, 32, 32, 8, 128, 14336, 128_256, None)),
    ("llama3-70b", (8192, 80, 64, 8, 128, 28672, 128_256, None)),
    ("llama3-405b", (16384, 126, 128, 8, 128, 53248, 128_256, None)),
];
const QWEN3: &[(&str, Sizes)] = &[
    ("qwen3-8b", (4096, 36, 32, 8, 128, 12288, 151_936, None)),
    ("qwen3-30b-a3b", (2048, 48, 32, 4, 128, 768, 151_936, Some(128))),
    ("qwen3-235b-a22b", (4096, 94, 64, 4, 128, 1536, 151_936, Some(128))),
];
const MIXTRAL: &[(&str, Sizes)] = &[("mixtral-8x7b", (4096, 32, 32, 8, 128, 14336, 32_000, Some(8)))];

pub fn names() -> impl Iterator<Item = &'static str> {
    [LLAMA, QWEN3, MIXTRAL].into_iter().flatten().map(|(name, _)| *name)
}

pub fn preset(name: &str) -> Option<Model> {
    let name = name.to_ascii_lowercase();
    let find = |table: &'static [(&str, Sizes)]| table.iter().find(|(known, _)| *known == name);
    let (of, qk_norm, expert_block) =
        [(LLAMA, false, "mlp"), (QWEN3, true, "mlp"), (MIXTRAL, false, "block_sparse_moe")]
            .into_iter()
            .find_map(|(table, qk_norm, block)| find(table).map(|found| (found, qk_norm, block)))?;
    let (name, (hidden, layers, heads, kv_heads, head_dim, ffn, vocab, experts)) = *of;
    let decoder = Decoder {
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        tied: false,
        qk_norm,
        experts,
        expert_block,
    };
    Some(Model { name: name.into(), dtype: DType::Bf16, weights: Weights::Decoder(decoder) })
}
