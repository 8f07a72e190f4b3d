//! The tensors of a model, named as Hugging Face names them; experts are stacked, as transformers holds them.

use super::Decoder;

/// A weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensor {
    pub name: String,
    pub shape: Vec<u64>,
    pub role: Role,
    /// The layer it belongs to; of the embeddings 0, of what comes behind the layers the last.
    pub layer: u64,
}

/// How tensor parallelism cuts a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// By rows: every device computes some outputs. Several parts where tensors are fused, each cut on its own.
    Column { parts: Vec<u64> },
    /// Query, key and value in one, or key or value alone: as above, in whole heads.
    Heads { parts: Vec<HeadPart> },
    /// By columns: every device adds up some inputs.
    Row,
    /// Whole everywhere.
    Whole,
    /// Of all experts: the first dim counts them. By rows or columns inside of an expert.
    Experts { row: bool, parts: Vec<u64> },
}

/// Rows of some heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadPart {
    pub heads: u64,
    pub rows: u64,
}

impl Decoder {
    /// All of them, in the order of the model.
    pub fn tensors(&self, fused: bool) -> Vec<ModelTensor> {
        let (h, last) = (self.hidden, self.layers.saturating_sub(1));
        let tensor = |name: String, shape: Vec<u64>, role, layer| ModelTensor { name, shape, role, layer };
        let vocab = || Role::Column { parts: vec![self.vocab] };
        let mut all = vec![tensor("model.embed_tokens.weight".into(), vec![self.vocab, h], vocab(), 0)];
        for layer in 0..self.layers {
            let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
            self.attention(fused, &mut |rest, shape, role| all.push(tensor(name(rest), shape, role, layer)));
            self.feed_forward(fused, &mut |rest, shape, role| {
                all.push(tensor(name(rest), shape, role, layer))
            });
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                all.push(tensor(name(norm), vec![h], Role::Whole, layer));
            }
        }
        all.push(tensor("model.norm.weight".into(), vec![h], Role::Whole, last));
        if !self.tied {
            all.push(tensor("lm_head.weight".into(), vec![self.vocab, h], vocab(), last));
        }
        all
    }

    fn attention(&self, fused: bool, add: &mut impl FnMut(&str, Vec<u64>, Role)) {
        let part = |heads: u64| HeadPart { heads, rows: heads * self.head_dim };
        let (q, kv) = (part(self.heads), part(self.kv_heads));
        let heads = |parts: Vec<HeadPart>| (parts.iter().map(|p| p.rows).sum::<u64>(), Role::Heads { parts });
        let projections: Vec<(&str, Vec<HeadPart>)> = match fused {
            true => vec![("self_attn.qkv_proj", vec![q, kv, kv])],
            false => vec![
                ("self_attn.q_proj", vec![q]),
                ("self_attn.k_proj", vec![kv]),
                ("self_attn.v_proj", vec![kv]),
            ],
        };
        for (name, parts) in projections {
            let (rows, role) = heads(parts);
            add(name, vec![rows, self.hidden], role);
        }
        add("self_attn.o_proj", vec![self.hidden, q.rows], Role::Row);
        for norm in ["self_attn.q_norm", "self_attn.k_norm"].iter().filter(|_| self.qk_norm) {
            add(norm, vec![self.head_dim], Role::Whole);
        }
    }

    fn feed_forward(&self, fused: bool, add: &mut impl FnMut(&str, Vec<u64>, Role)) {
        let (h, f) = (self.hidden, self.ffn);
        let Some(experts) = self.experts else {
            match fused {
                true => add("mlp.gate_up_proj", vec![2 * f, h], Role::Column { parts: vec![f, f] }),
                false => ["mlp.gate_proj", "mlp.up_proj"]
                    .iter()
                    .for_each(|name| add(name, vec![f, h], Role::Column { parts: vec![f] })),
            }
            return add("mlp.down_proj", vec![h, f], Role::Row);
        };
        let name = |rest: &str| format!("{}.{rest}", self.expert_block);
        add(&name("gate"), vec![experts, h], Role::Whole);
        match fused {
            true => add(
                &name("experts.gate_up_proj"),
                vec![experts, 2 * f, h],
                Role::Experts { row: true, parts: vec![f, f] },
            ),
            false => ["experts.gate_proj", "experts.up_proj"].iter().for_each(|rest| {
                add(&name(rest), vec![experts, f, h], Role::Experts { row: true, parts: vec![f] });
            }),
        }
        add(&name("experts.down_proj"), vec![experts, h, f], Role::Experts { row: false, parts: vec![f] });
    }
}
