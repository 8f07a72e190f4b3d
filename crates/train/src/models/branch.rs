//! Branches of a transformer: a norm, attention or a feed-forward map, and back to the trunk.
//!
//! ```text
//! x -+-> norm -> [ attention | feed-forward ] -> dropout -+-> y
//!    +----------------------------------------------------+
//! ```
//!
//! What is between the brackets is a tensor-parallel region, as Megatron does it: columns of the first map are shared out, and everybody has a
//! summand of the last map's result. Weights of heads are declared with the head as a dim of its own (`[in, 3, heads, head_dim]`), so
//! that heads are shared out, unevenly where it must be (8 heads over 3 ranks: 3, 3 and 2), and never split.

use crate::chain::Setup;
use crate::graph::ops::attention::AttentionSpec;
use crate::graph::ops::linear::{LinearSpec, Parallel};
use crate::graph::{Axis, Builder, Team, TeamAxis, Val};
use crate::kernels::{Activation, Kernels};
use crate::parameter::Init;
use crate::stage_rank;

/// The axis that shares out columns.
pub const TP: Axis = Axis(0);
/// Its two parts, of a decoder's [`team`]: ranks along the first have other keys and values than each other, along the second the same.
pub const KV: Axis = Axis(1);
pub const G: Axis = Axis(2);

/// The ranks that compute a pass of a decoder together. Where the mesh does not cut `tp` in two, every rank has its own keys and values.
pub fn team(setup: &Setup) -> Team {
    let place = &setup.place;
    let is_cut = place.mesh().axis_index(stage_rank::KV).is_some();
    let part = |name: &str| TeamAxis { name: name.into(), along: place.along(name) };
    setup.team().with_parts([part(if is_cut { stage_rank::KV } else { "tp" }), part(stage_rank::G)])
}

/// Attention to be declared.
#[derive(Debug, Clone)]
pub struct Attend<'a> {
    /// Which of the model's attentions it is.
    pub layer: usize,
    pub project: &'a str,
    pub out: &'a str,
    /// Attention to a context: what it is, the name of its map, its columns, and its rows a sample.
    pub context: Option<(Val, &'a str, usize, usize)>,
    pub width: usize,
    pub heads: usize,
    /// Rows of a sample.
    pub queries: usize,
    pub causal: bool,
    pub dropout: (u32, f64),
    pub bias: bool,
    pub init: Init,
    pub out_init: Init,
}

/// Summands of the attention of `x`.
pub fn attend<K: Kernels>(b: &mut Builder<'_, '_, K>, x: Val, spec: &Attend<'_>) -> Val {
    let head_dim = spec.width / spec.heads;
    let project = |b: &mut Builder<'_, '_, K>, x, name: &str, ins: usize, parts: usize| {
        let outs = [parts, spec.heads, head_dim];
        let parallel = Parallel::Columns(&[(TP, 1)]);
        let (init, bias) = (spec.init, spec.bias);
        b.linear(
            x,
            &LinearSpec {
                name,
                ins: &[ins],
                outs: &outs,
                parallel,
                init,
                bias,
                transposed: false,
                in_attention: true,
            },
        )
    };
    let mut sizes = AttentionSpec {
        axis: TP,
        group_axis: None,
        layer: spec.layer,
        heads: spec.heads,
        kv_heads: spec.heads,
        head_dim,
        queries: spec.queries,
        keys: spec.queries,
        causal: spec.causal,
        dropout: spec.dropout,
    };
    let heads = match spec.context {
        None => {
            let projected = project(b, x, spec.project, spec.width, 3);
            b.self_attention(projected, sizes)
        }
        Some((context, name, cols, rows)) => {
            sizes.keys = rows;
            let queries = project(b, x, spec.project, spec.width, 1);
            let keys_and_values = project(b, context, name, cols, 2);
            b.cross_attention(queries, keys_and_values, sizes)
        }
    };
    let out = LinearSpec {
        name: spec.out,
        ins: &[spec.heads, head_dim],
        outs: &[spec.width],
        parallel: Parallel::Summands(&[(TP, 0)]),
        init: spec.out_init,
        bias: true,
        transposed: false,
        in_attention: false,
    };
    b.linear(heads, &out)
}

/// A feed-forward map to be declared.
#[derive(Debug, Clone)]
pub struct FeedForward<'a> {
    pub up: &'a str,
    pub down: &'a str,
    pub width: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub up_init: Init,
    pub down_init: Init,
}

/// Summands of the feed-forward map of `x`.
pub fn feed_forward<K: Kernels>(b: &mut Builder<'_, '_, K>, x: Val, spec: &FeedForward<'_>) -> Val {
    let up = LinearSpec {
        name: spec.up,
        ins: &[spec.width],
        outs: &[spec.hidden],
        parallel: Parallel::Columns(&[(TP, 0)]),
        init: spec.up_init,
        bias: true,
        transposed: false,
        in_attention: false,
    };
    let hidden = b.linear(x, &up);
    let active = b.activate(hidden, spec.activation);
    let down = LinearSpec {
        name: spec.down,
        ins: &[spec.hidden],
        outs: &[spec.width],
        parallel: Parallel::Summands(&[(TP, 0)]),
        init: spec.down_init,
        bias: true,
        transposed: false,
        in_attention: false,
    };
    b.linear(active, &down)
}
