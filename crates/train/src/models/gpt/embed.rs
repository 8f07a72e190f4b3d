//! Tokens and positions, looked up. The table of tokens is split over the vocabulary.

use super::{DEVIATION, GptConfig, site};
use crate::chain::{Flow, Unit};
use crate::kernels::{Kernels, Lookup, PartMut};
use crate::layers::branch::Geometry;
use crate::layers::{Ctx, Elements, Remembered, Saved, Site};
use crate::parameter::{Declaration, Init, Parameters};
use crate::stage::{Recompute, StageError};

pub struct Embed {
    geometry: Geometry,
    context: usize,
    width: usize,
    tokens: usize,
    /// The tokens whose rows are here.
    held: std::ops::Range<usize>,
    positions: usize,
    site: Site,
}

/// The table of tokens, for those who share it.
pub(super) fn declare_tokens(name: &str, config: &GptConfig, parameters: &mut Parameters<'_>) -> usize {
    let declaration = Declaration {
        name: name.into(),
        shape: &[config.vocab, config.width],
        split: Some(0),
        init: Init::Normal { deviation: DEVIATION },
        decay: true,
        partial_over_tp: false,
    };
    parameters.declare(declaration).start
}

impl Embed {
    pub fn new(config: &GptConfig, geometry: Geometry, parameters: &mut Parameters<'_>) -> Self {
        let tokens = declare_tokens("wte.weight", config, parameters);
        let positions = parameters.declare(Declaration {
            name: "wpe.weight".into(),
            shape: &[config.context, config.width],
            split: None,
            init: Init::Normal { deviation: DEVIATION },
            decay: true,
            partial_over_tp: false,
        });
        Self {
            geometry,
            context: config.context,
            width: config.width,
            tokens,
            held: parameters.place.tp().part(config.vocab),
            positions: positions.start,
            site: site(config, 0),
        }
    }

    fn tokens<'a>(&self, ids: &'a [i32]) -> Lookup<'a> {
        Lookup { ids, held: self.held.clone(), cols: self.width }
    }

    fn positions<'a>(&self, ids: &'a [i32]) -> Lookup<'a> {
        Lookup { ids, held: 0..self.context, cols: self.width }
    }

    fn position_ids(&self, rows: std::ops::Range<usize>) -> Vec<i32> {
        rows.map(|row| (row % self.context) as i32).collect()
    }
}

impl<K: Kernels> Unit<K> for Embed {
    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let ids = flow.ids("tokens").to_vec();
        let mut x = ctx.kernels.buffer(self.geometry.region.size.len());
        ctx.kernels.lookup(&self.tokens(&ids), ctx.weight(self.tokens), false, &mut x);
        let mut x = self.geometry.region.leave(ctx, x)?;
        let positions = self.position_ids(self.geometry.own.clone());
        ctx.kernels.lookup(&self.positions(&positions), ctx.weight(self.positions), true, &mut x);
        if let Some(dropout) = ctx.dropout(self.site, self.geometry.own.start as u64, self.width) {
            let mut dropped = ctx.kernels.buffer(self.geometry.outside().len());
            ctx.kernels.dropout(&dropout, &x, &mut dropped);
            x = dropped;
        }
        flow.put_real("h", x);
        saved.put_ids("tokens", ids);
        Ok(())
    }

    fn backward_input(
        &self,
        ctx: &Ctx<'_, K>,
        flow: &mut Flow<K::Buf>,
        saved: &mut Saved<K::Buf>,
    ) -> Result<(), StageError> {
        let mut dy = flow.take_real("h");
        if let Some(dropout) = ctx.dropout(self.site, self.geometry.own.start as u64, self.width) {
            let mut dropped = ctx.kernels.buffer(self.geometry.outside().len());
            ctx.kernels.dropout(&dropout, &dy, &mut dropped);
            dy = dropped;
        }
        let all_rows = self.geometry.region.leave_grad(ctx, &dy)?;
        saved.put("dy", all_rows.unwrap_or(dy));
        Ok(())
    }

    fn backward_weight(&self, kernels: &K, saved: &mut Saved<K::Buf>, grads: &mut K::Buf) {
        let (ids, dy) = (saved.take_ids("tokens"), saved.take("dy"));
        kernels.lookup_grad(&self.tokens(&ids), &dy, PartMut { buf: grads, start: self.tokens });
        let positions = self.position_ids(0..self.geometry.rows());
        kernels.lookup_grad(&self.positions(&positions), &dy, PartMut { buf: grads, start: self.positions });
    }

    fn remembered(&self, _: Recompute) -> Remembered {
        let ids = self.geometry.rows();
        Remembered {
            after_forward: Elements { real: 0, ids },
            after_backward_input: Elements { real: self.geometry.region.size.len(), ids },
        }
    }
}
