//! The units of a GPT: embedding, blocks, head.

use super::{DEVIATION, GptConfig};
use crate::chain::Setup;
use crate::graph::ops::linear::TableSpec;
use crate::graph::ops::norm::NormSpec;
use crate::graph::{Builder, Lie, Site, Spread, Val};
use crate::kernels::{Activation, Kernels};
use crate::models::branch::{Attend, FeedForward, TP, attend, feed_forward};
use crate::parameter::Init;

/// What all units know.
pub(super) struct Units<'a, 's, 'p, K: Kernels> {
    pub config: &'a GptConfig,
    pub b: Builder<'s, 'p, K>,
    /// Rows of this rank's samples, and how they lie between branches.
    pub rows: usize,
    pub trunk: Lie,
}

impl<'a, 's, 'p, K: Kernels> Units<'a, 's, 'p, K> {
    pub fn new(config: &'a GptConfig, setup: &Setup, b: Builder<'s, 'p, K>) -> Self {
        let rows = setup.own_samples().len() * config.context;
        let whole = b.team.whole();
        let trunk = if setup.sequence_parallel { whole.along(TP, Spread::Rows) } else { whole };
        Self { config, b, rows, trunk }
    }

    /// Tokens and positions, looked up. The table of tokens is split over the vocabulary.
    pub fn embed(mut self) -> Builder<'s, 'p, K> {
        let ids = self.b.ids("tokens", self.rows);
        let table = table(self.config, "wte.weight");
        let x = self.b.embed(ids, &table);
        let normal = Init::Normal { deviation: DEVIATION };
        let x = self.b.positions(x, "wpe.weight", self.config.context, normal);
        let x = self.b.want(x, &self.trunk);
        let x = self.b.dropout(x, self.site(0));
        self.b.give("h", x);
        self.b
    }

    /// A block: attention and a feed-forward map, one behind the other.
    pub fn block(mut self, layer: usize) -> Builder<'s, 'p, K> {
        let name = |rest: &str| format!("h.{layer}.{rest}");
        let site = 1 + 3 * layer as u32;
        let config = self.config;
        // GPT-2: what is added to the trunk starts smaller the more often something is added.
        let init = Init::Normal { deviation: DEVIATION };
        let out_init = Init::Normal { deviation: DEVIATION / (2.0 * config.layers as f64).sqrt() };
        let x = self.trunk("h");
        let normed = self.norm(x, &name("ln_1"));
        let attention = Attend {
            project: &name("attn.c_attn"),
            out: &name("attn.c_proj"),
            context: None,
            width: config.width,
            heads: config.heads,
            queries: config.context,
            causal: true,
            dropout: (site, config.dropout),
            bias: true,
            init,
            out_init,
        };
        let attended = attend(&mut self.b, normed, &attention);
        let x = self.b.residual(x, attended, self.site(site + 1));
        let normed = self.norm(x, &name("ln_2"));
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
        let x = self.b.residual(x, mapped, self.site(site + 2));
        self.b.give("h", x);
        self.b
    }

    /// The last norm, logits over the vocabulary, and their cross-entropy.
    pub fn head(mut self) -> Builder<'s, 'p, K> {
        let x = self.trunk("h");
        let targets = self.b.ids("targets", self.rows);
        let normed = self.norm(x, "ln_f");
        let name = if self.config.tied { "wte.weight" } else { "lm_head.weight" };
        let logits = self.b.times_table(normed, &table(self.config, name));
        let loss = self.b.cross_entropy(logits, targets, self.config.vocab, self.config.context);
        self.b.give("loss", loss);
        self.b
    }

    fn trunk(&mut self, name: &str) -> Val {
        let typed = self.b.matrix(self.rows, self.config.width, self.trunk.clone());
        self.b.take(name, typed)
    }

    fn norm(&mut self, x: Val, name: &str) -> Val {
        self.b.layer_norm(x, &NormSpec { name, epsilon: self.config.epsilon })
    }

    fn site(&self, id: u32) -> Site {
        Site { id, rate: self.config.dropout, rows: self.config.context }
    }
}

/// The table of tokens, which embedding and head may share.
fn table(config: &GptConfig, name: &str) -> TableSpec {
    let init = Init::Normal { deviation: DEVIATION };
    TableSpec { name: name.into(), rows: config.vocab, cols: config.width, init, axis: TP }
}
