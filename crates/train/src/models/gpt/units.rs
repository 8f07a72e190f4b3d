//! The units of a decoder: embedding, blocks, head.

use super::{DEVIATION, Family, Gpt, GptConfig, Residual};
use crate::chain::Setup;
use crate::graph::ops::attention::AttentionSpec;
use crate::graph::ops::linear::{LinearSpec, Parallel, TableSpec};
use crate::graph::ops::norm::NormSpec;
use crate::graph::ops::rotary::Turns;
use crate::graph::{Axis, Builder, Lie, Site, Spread, Val};
use crate::kernels::{Activation, Kernels};
use crate::models::branch::{Attend, FeedForward, G, KV, TP, attend, feed_forward};
use crate::parameter::Init;

/// The residual stream inside a unit, and the branch that has not landed on it, with the place where that is dropped.
struct Stream {
    x: Val,
    late: Option<(Val, Site)>,
}

/// What all units know.
pub(super) struct Units<'a, 's, 'p, K: Kernels> {
    pub config: &'a GptConfig,
    pub b: Builder<'s, 'p, K>,
    /// Rows of this rank's samples, and how they lie between branches.
    pub rows: usize,
    pub trunk: Lie,
    /// Rows of a sample that are looked at together: all of them, unless it is read a piece at a time.
    pub queries: usize,
    turns: Option<&'a Turns>,
}

impl<'a, 's, 'p, K: Kernels> Units<'a, 's, 'p, K> {
    pub fn new(gpt: &'a Gpt, setup: &Setup, b: Builder<'s, 'p, K>) -> Self {
        let Gpt { config, turns } = gpt;
        let rows = setup.own_samples().len() * config.context;
        let whole = b.team.whole();
        let trunk = if setup.sequence_parallel { whole.along(TP, Spread::Rows) } else { whole };
        Self { config, b, rows, trunk, queries: config.context, turns: turns.as_ref() }
    }

    /// To read so many rows of one sample, behind others or not.
    pub fn reading(gpt: &'a Gpt, rows: usize, b: Builder<'s, 'p, K>) -> Self {
        let Gpt { config, turns } = gpt;
        let trunk = b.team.whole();
        Self { config, b, rows, trunk, queries: rows, turns: turns.as_ref() }
    }

    /// Tokens and positions, looked up. The table of tokens is split over the vocabulary.
    pub fn embed(mut self) -> Builder<'s, 'p, K> {
        let ids = self.b.ids("tokens", self.rows);
        let table = table(self.config, self.names().table);
        let mut x = self.b.embed(ids, &table);
        if self.config.family == Family::Gpt2 {
            x = self.b.positions(x, "wpe.weight", self.config.context, NORMAL);
        }
        let x = self.b.want(x, &self.trunk);
        let x = self.b.dropout(x, self.site(0));
        self.b.give("h", x);
        self.b
    }

    /// A block: attention and a feed-forward map, one behind the other.
    pub fn block(self, layer: usize) -> Builder<'s, 'p, K> {
        match self.config.family {
            Family::Gpt2 => self.gpt2_block(layer),
            Family::Llama { kv_heads, .. } => self.llama_block(layer, kv_heads),
        }
    }

    fn llama_block(mut self, layer: usize, kv_heads: usize) -> Builder<'s, 'p, K> {
        let prefix = prefix(&self.config.family, layer);
        let name = |rest: &str| format!("{prefix}{rest}");
        let config = self.config;
        let width = [config.width];
        let (group, head_dim) = (config.heads / kv_heads, config.width / config.heads);
        // Heads of keys and values are shared out, each with the heads that ask it; where there are more ranks, these are shared out among
        // ranks with the same keys and values.
        let (asks, asked) = ([kv_heads, group, head_dim], [kv_heads, head_dim]);
        let stream = self.enter(layer);
        let normed = self.norm_for_branch(stream.x, &name("input_layernorm"));
        let entered = self.b.typed(normed).lie.entering(TP);
        let normed = self.b.want(normed, &entered);
        let normed = self.b.seen_along(normed, &[TP], &[KV, G]);
        let of_keys = Parallel::Columns(&[(KV, 0)]);
        let q = self.map(normed, &name("self_attn.q_proj"), &width, &asks, Parallel::Columns(HEADS), true);
        let k = self.map(normed, &name("self_attn.k_proj"), &width, &asked, of_keys, true);
        let v = self.map(normed, &name("self_attn.v_proj"), &width, &asked, of_keys, true);
        let turns = self.turns.as_ref().expect("a Llama turns its heads");
        let (q, k) = (self.b.rotate(q, turns), self.b.rotate(k, turns));
        let attention = AttentionSpec {
            axis: KV,
            group_axis: Some(G),
            layer,
            heads: config.heads,
            kv_heads,
            head_dim,
            queries: self.queries,
            keys: self.queries,
            causal: true,
            dropout: (of_layer(layer), config.dropout),
        };
        let heads = self.b.grouped_attention(q, k, v, attention);
        let summands = Parallel::Summands(HEADS);
        let attended = self.map(heads, &name("self_attn.o_proj"), &asks, &width, summands, false);
        let attended = self.b.seen_along(attended, &[KV, G], &[TP]);
        let stream = self.add(stream, attended, of_layer(layer) + 1);
        let normed = self.norm_for_branch(stream.x, &name("post_attention_layernorm"));
        let hidden = [config.hidden];
        let gate = self.map(normed, &name("mlp.gate_proj"), &width, &hidden, COLUMNS, false);
        let up = self.map(normed, &name("mlp.up_proj"), &width, &hidden, COLUMNS, false);
        let gated = self.b.gate(gate, up, Activation::Silu);
        let mapped = self.map(gated, &name("mlp.down_proj"), &hidden, &width, SUMMANDS, false);
        let stream = self.add(stream, mapped, of_layer(layer) + 2);
        self.leave(stream)
    }

    /// A map as Llama has them: `[out, in]`, without a bias.
    fn map(
        &mut self,
        x: Val,
        name: &str,
        ins: &[usize],
        outs: &[usize],
        parallel: Parallel<'_>,
        in_attention: bool,
    ) -> Val {
        let (init, bias, transposed) = (NORMAL, false, true);
        self.b.linear(x, &LinearSpec { name, ins, outs, parallel, init, bias, transposed, in_attention })
    }

    fn gpt2_block(mut self, layer: usize) -> Builder<'s, 'p, K> {
        let prefix = prefix(&self.config.family, layer);
        let name = |rest: &str| format!("{prefix}{rest}");
        let config = self.config;
        // GPT-2: what is added to the trunk starts smaller the more often something is added.
        let init = NORMAL;
        let out_init = Init::Normal { deviation: DEVIATION / (2.0 * config.layers as f64).sqrt() };
        let stream = self.enter(layer);
        let normed = self.norm_for_branch(stream.x, &name("ln_1"));
        let attention = Attend {
            layer,
            project: &name("attn.c_attn"),
            out: &name("attn.c_proj"),
            context: None,
            width: config.width,
            heads: config.heads,
            queries: self.queries,
            causal: true,
            dropout: (of_layer(layer), config.dropout),
            bias: true,
            init,
            out_init,
        };
        let attended = attend(&mut self.b, normed, &attention);
        let stream = self.add(stream, attended, of_layer(layer) + 1);
        let normed = self.norm_for_branch(stream.x, &name("ln_2"));
        let map = FeedForward {
            up: &name("mlp.c_fc"),
            down: &name("mlp.c_proj"),
            width: config.width,
            hidden: config.hidden,
            activation: Activation::Gelu,
            up_init: init,
            down_init: out_init,
        };
        let mapped = feed_forward(&mut self.b, normed, &map);
        let stream = self.add(stream, mapped, of_layer(layer) + 2);
        self.leave(stream)
    }

    /// The stream as it comes into a block, or into the head behind the last one.
    fn enter(&mut self, layer: usize) -> Stream {
        let x = self.trunk("h");
        let late = match (self.config.residual, layer.checked_sub(1)) {
            // The feed-forward branch of the block before.
            (Residual::Ladder, Some(before)) => Some((self.trunk("late"), self.site(of_layer(before) + 2))),
            _ => None,
        };
        Stream { x, late }
    }

    /// With a branch behind it. On a ladder the one before lands in its place: the new one's sum is under way by then.
    fn add(&mut self, stream: Stream, branch: Val, site: u32) -> Stream {
        let (branch, site) = (self.b.want(branch, &self.trunk), self.site(site));
        match self.config.residual {
            Residual::Serial => Stream { x: self.b.residual(stream.x, branch, site), late: None },
            Residual::Ladder => Stream { x: self.landed(stream), late: Some((branch, site)) },
        }
    }

    /// All of it.
    fn landed(&mut self, stream: Stream) -> Val {
        match stream.late {
            Some((branch, site)) => self.b.residual(stream.x, branch, site),
            None => stream.x,
        }
    }

    fn leave(mut self, stream: Stream) -> Builder<'s, 'p, K> {
        self.b.give("h", stream.x);
        if let Some((branch, _)) = stream.late {
            self.b.give("late", branch);
        }
        self.b
    }

    /// What a branch begins with. On a ladder the norm is inside of the region where ranks compute parts: in B its gradient is summed behind it, and the sum is
    /// under way until the stream's gradient is needed, which is a branch later.
    fn norm_for_branch(&mut self, x: Val, name: &str) -> Val {
        match self.config.residual {
            Residual::Serial => self.norm(x, name),
            Residual::Ladder => {
                let entered = self.b.typed(x).lie.entering(TP);
                let x = self.b.want(x, &entered);
                self.norm(x, name)
            }
        }
    }

    /// Logits over the vocabulary, and their cross-entropy.
    pub fn head(mut self) -> Builder<'s, 'p, K> {
        let logits = self.logits();
        let targets = self.b.ids("targets", self.rows);
        let loss = self.b.cross_entropy(logits, targets, self.config.vocab, self.config.context);
        self.b.give("loss", loss);
        self.b
    }

    /// Logits alone.
    pub fn talking_head(mut self) -> Builder<'s, 'p, K> {
        let logits = self.logits();
        self.b.give("logits", logits);
        self.b
    }

    /// The last norm, and a product with the table.
    fn logits(&mut self) -> Val {
        let stream = self.enter(self.config.layers);
        let x = self.landed(stream);
        let Names { table: tokens, norm } = self.names();
        let normed = self.norm(x, norm);
        let name = if self.config.tied { tokens } else { "lm_head.weight" };
        self.b.times_table(normed, &table(self.config, name))
    }

    fn trunk(&mut self, name: &str) -> Val {
        let typed = self.b.matrix(self.rows, self.config.width, self.trunk.clone());
        self.b.take(name, typed)
    }

    fn norm(&mut self, x: Val, name: &str) -> Val {
        let spec = NormSpec { name, epsilon: self.config.epsilon };
        match self.config.family {
            Family::Gpt2 => self.b.layer_norm(x, &spec),
            Family::Llama { .. } => self.b.rms_norm(x, &spec),
        }
    }

    fn names(&self) -> Names {
        match self.config.family {
            Family::Gpt2 => Names { table: "wte.weight", norm: "ln_f" },
            Family::Llama { .. } => Names { table: "model.embed_tokens.weight", norm: "model.norm" },
        }
    }

    fn site(&self, id: u32) -> Site {
        Site { id, rate: self.config.dropout, rows: self.config.context }
    }
}

/// What the names of a block's weights begin with.
pub(super) fn prefix(family: &Family, layer: usize) -> String {
    match family {
        Family::Gpt2 => format!("h.{layer}."),
        Family::Llama { .. } => format!("model.layers.{layer}."),
    }
}

/// The first of a layer's three places where elements are dropped: attention, and what each branch adds.
fn of_layer(layer: usize) -> u32 {
    1 + 3 * layer as u32
}

/// What is called otherwise in each family.
struct Names {
    table: &'static str,
    norm: &'static str,
}

const NORMAL: Init = Init::Normal { deviation: DEVIATION };
const COLUMNS: Parallel<'_> = Parallel::Columns(&[(TP, 0)]);
const SUMMANDS: Parallel<'_> = Parallel::Summands(&[(TP, 0)]);
/// Heads of queries, as `[kv heads, heads that ask each, ..]`.
const HEADS: &[(Axis, usize)] = &[(KV, 0), (G, 1)];

/// The table of tokens, which embedding and head may share.
fn table(config: &GptConfig, name: &str) -> TableSpec {
    TableSpec { name: name.into(), rows: config.vocab, cols: config.width, init: NORMAL, axis: TP }
}
