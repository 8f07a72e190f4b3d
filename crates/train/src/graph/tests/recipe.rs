//! Graphs drawn at random: of every kind of op there is, over axes that nothing divides.

use crossmesh_core::mesh::Mesh;

use crate::graph::budget::within;
use crate::graph::build::Node;
use crate::graph::derive::can_be_dropped;
use crate::graph::ops::attention::AttentionSpec;
use crate::graph::ops::conv::{ConvSpec, Grid};
use crate::graph::ops::linear::{LinearSpec, Parallel, TableSpec};
use crate::graph::ops::norm::NormSpec;
use crate::graph::policy::{NEVER_AGAIN, OPS};
use crate::graph::*;
use crate::kernels::Activation;
use crate::kernels::cpu::Cpu;
use crate::models::gpt::rotary::RotaryConfig;
use crate::parameter::{Init, Parameters};
use crate::stage::Recompute;
use crate::stage_rank::{self, StageRank};

/// Random numbers that follow from a seed.
pub(super) struct Draws(pub u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.between(1, 100) <= percent
    }

    pub fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0
    }
}

/// A graph that can be built for any team.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    /// Lengths of the axes.
    pub axes: Vec<usize>,
    /// An axis that is cut into two, as `tp` is for heads that share keys and values; and the lengths of its parts.
    pub cut: Option<(usize, [usize; 2])>,
    /// The axis that splits rows between regions.
    pub rows_axis: Option<usize>,
    pub samples: usize,
    pub context: usize,
    /// Rows of a sample in another tensor, which queries may ask.
    pub keys: usize,
    pub width: usize,
    pub classes: usize,
    pub embeds: Option<usize>,
    pub steps: Vec<Piece>,
    pub end: End,
    pub recompute: Recompute,
    pub rules: Vec<Rule>,
    pub offloaded: bool,
    /// The reshard that gets a wrong gradient.
    pub spoiled: Option<usize>,
}

#[derive(Debug, Clone)]
pub(super) enum Piece {
    Norm,
    RmsNorm,
    Activate {
        again: bool,
    },
    /// Columns shared out along an axis and back to the trunk.
    Map {
        axis: usize,
        hidden: usize,
        dropout: bool,
    },
    /// The same with two maps in, one of which is the other's gate.
    Gated {
        axis: usize,
        hidden: usize,
    },
    Attend {
        axis: usize,
        heads: usize,
        head_dim: usize,
    },
    /// Attention to rows of another tensor.
    Cross {
        axis: usize,
        heads: usize,
        head_dim: usize,
    },
    /// Queries, keys and values apart, the first two turned by their positions, and several heads of queries for each of keys.
    Grouped {
        heads: Heads,
        kv_heads: usize,
        group: usize,
        head_dim: usize,
    },
    /// Rows as pixels: two convolutions, and between them a norm of groups of channels, with a row a sample added.
    Convolve {
        axis: usize,
        groups: usize,
        each: usize,
        kernel: usize,
        timed: bool,
    },
    /// Images of twice the size, and back.
    Resize,
    Linear,
    Dropout,
    /// The trunk plus a value of some time ago.
    Skip(usize),
    /// Joined with a value of some time ago, and back to as many columns.
    Join(usize),
}

/// How heads that share keys and values are dealt out.
#[derive(Debug, Clone, Copy)]
pub(super) enum Heads {
    /// Keys and values along an axis, each with the queries that ask them.
    Along(usize),
    /// Keys and values along the first axis, the queries that ask the same ones along the second.
    Over(usize, usize),
    /// The same along the two parts of the axis that is cut.
    Cut,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum End {
    CrossEntropy { axis: usize },
    SquaredError,
}

pub(super) fn recipe(seed: u64) -> Recipe {
    let mut d = Draws(seed);
    let mut axes = vec![];
    for _ in 0..d.between(1, 3) {
        let most = 8 / axes.iter().product::<usize>();
        axes.push(d.between(1, most.clamp(1, 4)));
    }
    let any = |d: &mut Draws| d.between(0, axes.len() - 1);
    let rows_axis = d.chance(50).then(|| any(&mut d));
    let cut = d.chance(50).then(|| any(&mut d)).map(|axis| match axes[axis] {
        4 => (axis, [2, 2]),
        len if d.chance(50) => (axis, [1, len]),
        len => (axis, [len, 1]),
    });
    let mut steps = vec![];
    // A region has up to nine ops, a join two.
    let mut left = 8_usize;
    while left > 0 {
        let axis = any(&mut d);
        let other = any(&mut d);
        let whole = |axis: usize| rows_axis.is_none_or(|rows| rows == axis);
        let (piece, ops) = match d.between(0, 13) {
            0 => (Piece::Norm, 1),
            1 => (Piece::Activate { again: d.chance(50) }, 1),
            2 => (Piece::Map { axis, hidden: d.between(1, 7), dropout: d.chance(30) }, 4),
            3 if whole(axis) => {
                (Piece::Attend { axis, heads: d.between(1, 5), head_dim: d.between(1, 3) }, 4)
            }
            4 if whole(axis) => (Piece::Cross { axis, heads: d.between(1, 5), head_dim: d.between(1, 3) }, 5),
            5 => (Piece::Linear, 1),
            6 => (if d.chance(50) { Piece::Skip(d.between(0, 5)) } else { Piece::Join(d.between(0, 5)) }, 2),
            7 => (Piece::RmsNorm, 1),
            8 => (Piece::Gated { axis, hidden: d.between(1, 7) }, 5),
            9 | 10 => {
                let (heads, most) = match cut {
                    Some((axis, [kv, _])) if whole(axis) && d.chance(60) => (Heads::Cut, kv),
                    _ if axis != other && (whole(axis) || whole(other)) => {
                        (Heads::Over(axis, other), axes[axis])
                    }
                    _ if whole(axis) => (Heads::Along(axis), 4),
                    _ => continue,
                };
                // Where queries of the same keys are dealt out too, a rank has one head of keys at most.
                let (kv_heads, group) = (d.between(1, most), d.between(1, 3));
                (Piece::Grouped { heads, kv_heads, group, head_dim: 2 * d.between(1, 2) }, 8)
            }
            11 if whole(axis) => {
                let (groups, each) = (d.between(1, 4), d.between(1, 3));
                (
                    Piece::Convolve {
                        axis,
                        groups,
                        each,
                        kernel: [1, 3][d.between(0, 1)],
                        timed: d.chance(50),
                    },
                    6,
                )
            }
            12 if rows_axis.is_none() => (Piece::Resize, 3),
            _ => (Piece::Dropout, 1),
        };
        left = left.saturating_sub(ops);
        steps.push(piece);
    }
    let end = if d.chance(50) { End::CrossEntropy { axis: any(&mut d) } } else { End::SquaredError };
    let recompute = match d.between(0, 2) {
        0 => Recompute::Nothing,
        1 => Recompute::Attention,
        _ => Recompute::Within(d.between(0, 2000) as u64),
    };
    Recipe {
        cut,
        rows_axis,
        samples: d.between(1, 3),
        context: d.between(1, 4),
        keys: d.between(1, 3),
        width: d.between(1, 6),
        classes: d.between(1, 7),
        embeds: d.chance(40).then(|| any(&mut d)),
        steps,
        end,
        recompute,
        rules: vec![],
        offloaded: false,
        axes,
        spoiled: None,
    }
}

pub(super) const NORMAL: Init = Init::Normal { deviation: 0.7 };
const NAMES: [&str; 3] = ["x", "y", "z"];
/// Columns of the waves of time steps.
const WAVES: usize = 4;

impl Recipe {
    /// The same on one rank.
    pub fn alone(&self) -> Self {
        let cut = self.cut.map(|(axis, _)| (axis, [1, 1]));
        Self { axes: vec![1; self.axes.len()], cut, ..self.clone() }
    }

    pub fn rows(&self) -> usize {
        self.samples * self.context
    }

    /// Rows as pixels of images.
    fn grid(&self) -> Grid {
        let width = if self.context.is_multiple_of(2) { 2 } else { 1 };
        Grid { samples: self.samples, height: self.context / width, width }
    }

    /// What an axis is called.
    pub fn name(&self, axis: usize) -> &'static str {
        match self.cut {
            Some((cut, _)) if cut == axis => "tp",
            _ => NAMES[axis],
        }
    }

    pub fn mesh(&self) -> Mesh {
        let axis = |(i, len): (usize, &usize)| match self.cut {
            Some((cut, [kv, g])) if cut == i => format!("{}:{kv},{}:{g}", stage_rank::KV, stage_rank::G),
            _ => format!("{}:{len}", self.name(i)),
        };
        let axes: Vec<String> = self.axes.iter().enumerate().map(axis).collect();
        format!("A{{{}}}", axes.join(",")).parse().unwrap()
    }

    pub fn team(&self, place: &StageRank) -> Team {
        let axis = |name: &str| TeamAxis { name: name.into(), along: place.along(name) };
        let team = Team { axes: (0..self.axes.len()).map(|i| axis(self.name(i))).collect() };
        let parts: &[&str] = if self.cut.is_some() { &[stage_rank::KV, stage_rank::G] } else { &[] };
        team.with_parts(parts.iter().map(|name| axis(name)))
    }

    fn site(&self, id: u32) -> Site {
        Site { id, rate: 0.3, rows: self.context }
    }

    /// Where nothing is dropped.
    fn everything(&self) -> Site {
        Site { rate: 0.0, ..self.site(0) }
    }

    pub fn build(&self, team: Team, parameters: &mut Parameters<'_>) -> Unit<Cpu<f64>> {
        let mut b = Builder::new(team, parameters);
        b.spoiled.0 = self.spoiled;
        self.describe(&mut b);
        let mut unit = Unit::ruled(b, self.recompute, &self.rules, self.offloaded);
        if let Recompute::Within(limit) = self.recompute {
            let choices = unit
                .choices()
                .iter()
                .map(|(held, again)| (held.after_forward.bytes::<Cpu<f64>>(), *again))
                .collect();
            unit.choose(within(&[choices], limit)[0]);
        }
        unit
    }

    pub fn describe(&self, b: &mut Builder<'_, '_, Cpu<f64>>) {
        let whole = b.team.whole();
        let trunk = self.rows_axis.map_or(whole.clone(), |axis| whole.along(Axis(axis), Spread::Rows));
        let typed = b.matrix(self.rows(), self.width, trunk);
        let mut x = b.take("h", typed);
        let typed = b.matrix(self.samples * self.keys, self.width, whole.clone());
        let asked = b.read("asked", typed);
        if let Some(axis) = self.embeds {
            let ids = b.ids("tokens", self.rows());
            let rows = b.embed(ids, &self.table("table", axis));
            let rows = b.positions(rows, "positions", self.context, NORMAL);
            x = b.residual(x, rows, self.everything());
        }
        let mut past = vec![x];
        for (i, piece) in self.steps.iter().enumerate() {
            x = Step { recipe: self, b: &mut *b, i, asked }.piece(x, &past, piece);
            past.push(x);
        }
        let x = b.want(x, &whole);
        let loss = match self.end {
            End::CrossEntropy { axis } => {
                let targets = b.ids("targets", self.rows());
                let logits = b.times_table(x, &self.table("head", axis));
                b.cross_entropy(logits, targets, self.classes, self.context)
            }
            End::SquaredError => {
                let target = b.matrix(self.rows(), self.width, whole);
                let target = b.data("wanted", target);
                b.squared_error(x, target, self.context * self.width)
            }
        };
        b.give("loss", loss);
    }

    fn table(&self, name: &str, axis: usize) -> TableSpec {
        TableSpec { name: name.into(), rows: self.classes, cols: self.width, init: NORMAL, axis: Axis(axis) }
    }

    /// Looks at the graph before its passes are derived, as the first rank has it.
    fn look<T>(&self, look: impl FnOnce(&Builder<'_, '_, Cpu<f64>>) -> T) -> T {
        let place = StageRank::over(self.mesh(), 0).unwrap();
        let mut parameters = Parameters::new::<f64>(&place);
        let mut b = Builder::new(self.team(&place), &mut parameters);
        self.describe(&mut b);
        look(&b)
    }

    /// How many reshards between ranks there are.
    pub fn num_reshards(&self) -> usize {
        self.look(|b| b.spoiled.1)
    }

    /// What ops are called; those that rules may have computed again can be.
    pub fn named_ops(&self) -> Vec<&'static str> {
        self.look(|b| {
            let able = |node: &Node<Cpu<f64>>| {
                let never = node.same || NEVER_AGAIN.contains(&node.op.name());
                assert!(never || can_be_dropped(node), "{}", node.op.name());
                node.op.name()
            };
            b.nodes.iter().map(able).collect()
        })
    }

    /// Rules, drawn at random.
    pub fn rules(&self, seed: u64) -> Vec<Rule> {
        let mut d = Draws(seed ^ 0x5eed);
        let rule = |d: &mut Draws| {
            let action = [Action::Keep, Action::Recompute, Action::Offload][d.between(0, 2)];
            let ops = (0..d.between(0, 4)).map(|_| OPS[d.between(0, OPS.len() - 1)]).collect();
            Rule { ops, action }
        };
        (0..d.between(1, 5)).map(|_| rule(&mut d)).collect()
    }

    /// Everything that comes in, whole.
    pub fn data(&self, seed: u64) -> Data {
        let mut d = Draws(seed ^ 0xd00d);
        let mut reals = |rows: usize| (0..rows * self.width).map(|_| d.real()).collect::<Vec<f64>>();
        let (h, wanted) = (reals(self.rows()), reals(self.rows()));
        let asked = reals(self.samples * self.keys);
        let mut ids = |n: usize, most: usize| (0..n).map(|_| d.between(0, most) as i32).collect::<Vec<i32>>();
        let (tokens, targets) = (ids(self.rows(), self.classes - 1), ids(self.rows(), self.classes - 1));
        Data { h, asked, wanted, tokens, targets, times: ids(self.samples, 999) }
    }
}

#[derive(Clone)]
pub(super) struct Data {
    pub h: Vec<f64>,
    pub asked: Vec<f64>,
    pub wanted: Vec<f64>,
    pub tokens: Vec<i32>,
    pub targets: Vec<i32>,
    pub times: Vec<i32>,
}

/// Puts one piece after the other into a graph.
struct Step<'a, 'b, 's, 'p> {
    recipe: &'a Recipe,
    b: &'b mut Builder<'s, 'p, Cpu<f64>>,
    i: usize,
    asked: Val,
}

impl Step<'_, '_, '_, '_> {
    fn piece(&mut self, x: Val, past: &[Val], piece: &Piece) -> Val {
        let Recipe { width, .. } = *self.recipe;
        let everything = self.recipe.everything();
        let (recipe, i) = (self.recipe, self.i as u32);
        let site = |id: u32| recipe.site(id + i);
        let earlier = |back: usize| past[past.len() - 1 - back % past.len()];
        match *piece {
            Piece::Norm => self.b.layer_norm(x, &NormSpec { name: &self.name("norm"), epsilon: 0.1 }),
            Piece::RmsNorm => self.b.rms_norm(x, &NormSpec { name: &self.name("rms"), epsilon: 0.1 }),
            Piece::Activate { again: true } => self.b.activate_again(x, Activation::Silu),
            Piece::Activate { again: false } => self.b.activate(x, Activation::Gelu),
            Piece::Map { axis, hidden, dropout } => {
                let over = [(Axis(axis), 0)];
                let h = self.linear(x, "up", &[width], &[hidden], Parallel::Columns(&over));
                let h = self.b.activate(h, Activation::Gelu);
                let y = self.linear(h, "down", &[hidden], &[width], Parallel::Summands(&over));
                self.b.residual(x, y, if dropout { site(10) } else { everything })
            }
            Piece::Gated { axis, hidden } => {
                let over = [(Axis(axis), 0)];
                let gate = self.bare(x, "gate", &[width], &[hidden], Parallel::Columns(&over));
                let up = self.bare(x, "up", &[width], &[hidden], Parallel::Columns(&over));
                let h = self.b.gate(gate, up, Activation::Silu);
                let y = self.bare(h, "down", &[hidden], &[width], Parallel::Summands(&over));
                self.b.residual(x, y, everything)
            }
            Piece::Attend { axis, heads, head_dim } => {
                let outs = [3, heads, head_dim];
                let p = self.linear(x, "qkv", &[width], &outs, Parallel::Columns(&[(Axis(axis), 1)]));
                let h = self.b.self_attention(p, self.plain(axis, heads, head_dim));
                self.out_of_heads(x, h, axis, [heads, head_dim])
            }
            Piece::Cross { axis, heads, head_dim } => {
                let over = Parallel::Columns(&[(Axis(axis), 1)]);
                let q = self.linear(x, "q", &[width], &[1, heads, head_dim], over);
                let kv = self.linear(self.asked, "kv", &[width], &[2, heads, head_dim], over);
                let keys = self.recipe.keys;
                let spec = AttentionSpec { keys, causal: false, ..self.plain(axis, heads, head_dim) };
                let h = self.b.cross_attention(q, kv, spec);
                self.out_of_heads(x, h, axis, [heads, head_dim])
            }
            Piece::Grouped { heads, kv_heads, group, head_dim } => {
                self.grouped(x, heads, [kv_heads, group, head_dim])
            }
            Piece::Convolve { axis, groups, each, kernel, timed } => {
                self.convolve(x, axis, [groups, each], kernel, timed)
            }
            Piece::Resize => {
                let Grid { samples, height, width: columns } = self.recipe.grid();
                let large = self.b.upsample(x, self.recipe.grid());
                let grid = Grid { samples, height: 2 * height, width: 2 * columns };
                self.conv(large, "resize", grid, (3, 2), &[width], &[width], Parallel::None)
            }
            Piece::Linear => self.linear(x, "map", &[width], &[width], Parallel::None),
            Piece::Dropout => self.b.dropout(x, site(70)),
            Piece::Skip(back) => self.b.residual(x, earlier(back), everything),
            Piece::Join(back) => {
                let both = self.b.concat(x, earlier(back));
                self.linear(both, "join", &[2 * width], &[width], Parallel::None)
            }
        }
    }

    fn name(&self, what: &str) -> String {
        format!("{}.{what}", self.i)
    }

    fn linear(&mut self, x: Val, what: &str, ins: &[usize], outs: &[usize], parallel: Parallel<'_>) -> Val {
        let (name, in_attention) = (&self.name(what), ["q", "k", "kv", "qkv", "v"].contains(&what));
        let (init, bias, transposed) = (NORMAL, true, false);
        self.b.linear(x, &LinearSpec { name, ins, outs, parallel, init, bias, transposed, in_attention })
    }

    /// As Llama has them: `[out, in]`, without a bias.
    fn bare(&mut self, x: Val, what: &str, ins: &[usize], outs: &[usize], parallel: Parallel<'_>) -> Val {
        let (name, in_attention) = (&self.name(what), ["q", "k", "v"].contains(&what));
        let (init, bias, transposed) = (NORMAL, false, true);
        self.b.linear(x, &LinearSpec { name, ins, outs, parallel, init, bias, transposed, in_attention })
    }

    fn plain(&self, axis: usize, heads: usize, head_dim: usize) -> AttentionSpec {
        AttentionSpec {
            axis: Axis(axis),
            group_axis: None,
            layer: 0,
            heads,
            kv_heads: heads,
            head_dim,
            queries: self.recipe.context,
            keys: self.recipe.context,
            causal: true,
            dropout: (40 + self.i as u32, 0.2),
        }
    }

    fn out_of_heads(&mut self, x: Val, heads: Val, axis: usize, ins: [usize; 2]) -> Val {
        let over = [(Axis(axis), 0)];
        let y = self.linear(heads, "out", &ins, &[self.recipe.width], Parallel::Summands(&over));
        self.b.residual(x, y, self.recipe.everything())
    }

    fn grouped(&mut self, x: Val, heads: Heads, [kv_heads, group, head_dim]: [usize; 3]) -> Val {
        let (width, first_part) = ([self.recipe.width], self.recipe.axes.len());
        let (kv, g) = match heads {
            Heads::Along(axis) => (Axis(axis), None),
            Heads::Over(kv, g) => (Axis(kv), Some(Axis(g))),
            Heads::Cut => (Axis(first_part), Some(Axis(first_part + 1))),
        };
        let cut = self.recipe.cut.filter(|_| matches!(heads, Heads::Cut)).map(|(axis, _)| Axis(axis));
        let of_queries: Vec<(Axis, usize)> = [(kv, 0)].into_iter().chain(g.map(|g| (g, 1))).collect();
        let (asks, asked) = ([kv_heads, group, head_dim], [kv_heads, head_dim]);
        // All ranks that share the heads out compute parts behind this.
        let into = cut.map_or(of_queries.iter().map(|(axis, _)| *axis).collect(), |axis| vec![axis]);
        let entered = into.iter().fold(self.b.typed(x).lie.clone(), |lie, axis| lie.entering(*axis));
        let mut entered = self.b.want(x, &entered);
        if let Some(axis) = cut {
            entered = self.b.seen_along(entered, &[axis], &[kv, Axis(first_part + 1)]);
        }
        let q = self.bare(entered, "q", &width, &asks, Parallel::Columns(&of_queries));
        let k = self.bare(entered, "k", &width, &asked, Parallel::Columns(&[(kv, 0)]));
        let v = self.bare(entered, "v", &width, &asked, Parallel::Columns(&[(kv, 0)]));
        let turns = RotaryConfig::default().turns(head_dim, self.recipe.context);
        let (q, k) = (self.b.rotate(q, &turns), self.b.rotate(k, &turns));
        let spec =
            AttentionSpec { axis: kv, group_axis: g, kv_heads, ..self.plain(0, kv_heads * group, head_dim) };
        let attended = self.b.grouped_attention(q, k, v, spec);
        let mut y = self.bare(attended, "out", &asks, &width, Parallel::Summands(&of_queries));
        if let Some(axis) = cut {
            y = self.b.seen_along(y, &[kv, Axis(first_part + 1)], &[axis]);
        }
        self.b.residual(x, y, self.recipe.everything())
    }

    fn convolve(&mut self, x: Val, axis: usize, channels: [usize; 2], kernel: usize, timed: bool) -> Val {
        let Recipe { width, samples, context, .. } = *self.recipe;
        let (grid, over, [groups, each]) = (self.recipe.grid(), [(Axis(axis), 0)], channels);
        let mut h = self.conv(x, "conv1", grid, (kernel, 1), &[width], &channels, Parallel::Columns(&over));
        if timed {
            let steps = self.b.ids("times", samples);
            let waves = self.b.time_waves(steps, WAVES);
            let rows = self.linear(waves, "time", &[WAVES], &channels, Parallel::Columns(&over));
            h = self.b.add_per_sample(h, rows, context);
        }
        let spec = NormSpec { name: &self.name("groups"), epsilon: 0.1 };
        let h = self.b.group_norm(h, &spec, context, groups, each);
        let h = self.b.activate_again(h, Activation::Silu);
        let y = self.conv(h, "conv2", grid, (kernel, 1), &channels, &[width], Parallel::Summands(&over));
        self.b.residual(x, y, self.recipe.everything())
    }

    #[expect(clippy::too_many_arguments, reason = "a convolution has many sizes")]
    fn conv(
        &mut self,
        x: Val,
        what: &str,
        grid: Grid,
        (kernel, stride): (usize, usize),
        ins: &[usize],
        outs: &[usize],
        parallel: Parallel<'_>,
    ) -> Val {
        let name = &self.name(what);
        self.b.conv(x, grid, &ConvSpec { name, kernel, stride, ins, outs, parallel, init: NORMAL })
    }
}
