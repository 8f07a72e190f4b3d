//! A transformer block: attention and a feed-forward branch, one behind the other.

use super::{DEVIATION, GptConfig, site};
use crate::chain::{Flow, Unit};
use crate::kernels::{Activation, Kernels};
use crate::layers::attention::{Attention, AttentionSpec};
use crate::layers::branch::{Branch, Geometry, Inner};
use crate::layers::mlp::{Mlp, MlpSpec};
use crate::layers::norm::{Norm, NormSpec};
use crate::layers::{Ctx, Remembered, Saved};
use crate::parameter::{Init, Parameters};
use crate::stage::{Recompute, StageError};

pub struct Block {
    attention: Branch,
    mlp: Branch,
}

impl Block {
    pub fn new(
        config: &GptConfig,
        layer: usize,
        geometry: Geometry,
        parameters: &mut Parameters<'_>,
    ) -> Self {
        let first_site = 1 + 3 * layer as u32;
        let partial_over_tp = geometry.region.sequence_parallel;
        let norm = |name: &str, parameters: &mut Parameters<'_>| {
            let name = &format!("h.{layer}.{name}");
            let (shape, epsilon) = ([config.width], config.epsilon);
            Norm::new(&NormSpec { name, shape: &shape, split: None, epsilon, partial_over_tp }, parameters)
        };
        let norm_1 = norm("ln_1", parameters);
        let attention = attention(config, layer, first_site, parameters);
        let norm_2 = norm("ln_2", parameters);
        let mlp = mlp(config, layer, parameters);
        let branch =
            |norm, inner, id| Branch { geometry: geometry.clone(), norm, inner, site: site(config, id) };
        Self {
            attention: branch(norm_1, Inner::Attention(attention), first_site + 1),
            mlp: branch(norm_2, Inner::Mlp(mlp), first_site + 2),
        }
    }
}

/// GPT-2: what is added to the trunk starts smaller the more often something is added.
fn out_init(config: &GptConfig) -> Init {
    Init::Normal { deviation: DEVIATION / (2.0 * config.layers as f64).sqrt() }
}

fn attention(config: &GptConfig, layer: usize, site: u32, parameters: &mut Parameters<'_>) -> Attention {
    let spec = AttentionSpec {
        project: &format!("h.{layer}.attn.c_attn"),
        out: &format!("h.{layer}.attn.c_proj"),
        context: None,
        width: config.width,
        heads: config.heads,
        queries: config.context,
        causal: true,
        dropout: (site, config.dropout),
        bias: true,
        init: Init::Normal { deviation: DEVIATION },
        out_init: out_init(config),
    };
    Attention::new(&spec, parameters)
}

fn mlp(config: &GptConfig, layer: usize, parameters: &mut Parameters<'_>) -> Mlp {
    let spec = MlpSpec {
        up: &format!("h.{layer}.mlp.c_fc"),
        down: &format!("h.{layer}.mlp.c_proj"),
        width: config.width,
        hidden: config.hidden,
        activation: Activation::Gelu,
        up_init: Init::Normal { deviation: DEVIATION },
        down_init: out_init(config),
    };
    Mlp::new(&spec, parameters)
}

impl<K: Kernels> Unit<K> for Block {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let x = flow.take_real("h");
        let middle = self.attention.forward(ctx, x, None, saved.part("attention"))?;
        let y = self.mlp.forward(ctx, middle, None, saved.part("mlp"))?;
        flow.put_real("h", y);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let dy = flow.take_real("h");
        let d_middle = self.mlp.backward_input(ctx, dy, saved.part("mlp"))?;
        let dx = self.attention.backward_input(ctx, d_middle, saved.part("attention"))?;
        flow.put_real("h", dx);
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        self.mlp.backward_weight(kernels, saved.part("mlp"), grads);
        self.attention.backward_weight(kernels, saved.part("attention"), grads);
    }

    fn remembered(&self, recompute: Recompute) -> Remembered {
        self.attention.remembered(recompute) + self.mlp.remembered(recompute)
    }
}
