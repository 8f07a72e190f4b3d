//! Random meshes, layouts and reshards, as proptest strategies.
//!
//! A layout is first drawn as [`LayoutWords`]: plain data that prints itself without help from the code under test.
//! Parsing those words gives the `Layout`, so a test may compare what was meant with what was read.
//!
//! ```
//! use crossmesh_testkit::arb::{Limits, arb_reshard};
//! use proptest::prelude::*;
//! proptest!(|((src, dst) in arb_reshard(Limits::small()))| {
//!     prop_assert_eq!(src.shape(), dst.shape());
//! });
//! ```

use std::fmt;

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::{Layout, ReduceOp};
use crossmesh_core::mesh::Mesh;
use proptest::collection::vec;
use proptest::prelude::*;

/// How large things get.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub axes: usize,
    pub axis_len: u32,
    pub devices: u32,
    pub dims: usize,
    pub dim_len: u64,
    /// Whether a source may hold partial sums.
    pub partial: bool,
}

impl Limits {
    /// For tests that look at every element: up to 8 devices a mesh, 3 dims of up to 9.
    pub fn small() -> Self {
        Self { axes: 3, axis_len: 4, devices: 8, dims: 3, dim_len: 9, partial: true }
    }

    /// For tests of the words alone: 8 dims of any size that fits.
    pub fn words() -> Self {
        Self { axes: 5, axis_len: 6, devices: 64, dims: 8, dim_len: 200, partial: true }
    }
}

/// A mesh as it will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshWords {
    pub name: String,
    pub axes: Vec<(String, u32)>,
    pub ranks: Option<Vec<u32>>,
}

impl MeshWords {
    pub fn num_devices(&self) -> u32 {
        self.axes.iter().map(|(_, len)| len).product()
    }
}

/// Where the cuts of a dim fall, as it will be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleWords {
    Chunk,
    Cuts(Vec<u64>),
    Parts(Vec<u64>),
}

/// A layout as it will be written. Axes are places in the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutWords {
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub mesh: MeshWords,
    pub splits: Vec<(Vec<usize>, RuleWords)>,
    pub partial: Option<(ReduceOp, Vec<usize>)>,
}

impl LayoutWords {
    pub fn parse(&self) -> Layout {
        let text = self.to_string();
        text.parse().unwrap_or_else(|e| panic!("the strategy drew a layout that cannot be: {e}"))
    }
}

fn joined<T: ToString>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(separator)
}

/// `0-3,8`: rising neighbours become a range.
fn ranges(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = vec![];
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    joined(runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }), ",")
}

impl fmt::Display for MeshWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{{{}}}", self.name, joined(self.axes.iter().map(|(n, len)| format!("{n}:{len}")), ","))?;
        self.ranks.as_ref().map_or(Ok(()), |ranks| write!(f, "={}", ranges(ranks)))
    }
}

impl fmt::Display for LayoutWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |axes: &[usize]| joined(axes.iter().map(|&a| &self.mesh.axes[a].0), "+");
        let term = |(axes, rule): &(Vec<usize>, RuleWords)| match rule {
            _ if axes.is_empty() => "_".to_string(),
            RuleWords::Chunk => names(axes),
            RuleWords::Cuts(cuts) => format!("{}[{}]", names(axes), joined(cuts, ",")),
            RuleWords::Parts(parts) => format!("{} of {}", names(axes), joined(parts, "+")),
        };
        let terms = joined(self.splits.iter().map(term), ",");
        let partial = self.partial.as_ref().map(|(op, axes)| format!("| {op} {}", names(axes)));
        let inside: Vec<String> =
            [Some(terms), partial].into_iter().flatten().filter(|s| !s.is_empty()).collect();
        write!(f, "{}[{}]@{}({})", self.dtype, joined(&self.shape, ","), self.mesh, inside.join(" "))
    }
}

/// Axis lengths whose product stays within the limit.
fn arb_axis_lens(limits: Limits) -> impl Strategy<Value = Vec<u32>> {
    vec(1..=limits.axis_len, 0..=limits.axes).prop_map(move |mut lens| {
        let mut devices = 1;
        for len in &mut lens {
            *len = (*len).min(limits.devices / devices).max(1);
            devices *= *len;
        }
        lens
    })
}

/// A mesh of this name that lists no ranks.
fn arb_plain_mesh(name: &'static str, limits: Limits) -> impl Strategy<Value = MeshWords> {
    let names = Just(vec!["dp", "tp", "of", "sum", "P", "S0", "x_1"]).prop_shuffle();
    (arb_axis_lens(limits), names).prop_map(move |(lens, names)| MeshWords {
        name: name.into(),
        axes: names.iter().map(|n| n.to_string()).zip(lens).collect(),
        ranks: None,
    })
}

/// Any mesh, its ranks listed or not; listed ranks may be anywhere below 2^32 - 1.
pub fn arb_mesh_words(limits: Limits) -> impl Strategy<Value = MeshWords> {
    (arb_plain_mesh("A", limits), prop_oneof![Just(None), (0u32..10, any::<u32>()).prop_map(Some)])
        .prop_flat_map(|(mesh, listed)| {
            let len = mesh.num_devices();
            let (gap, first) = listed.unwrap_or((0, 0));
            // Some neighbours, some gaps, in any order.
            let first = first.min(u32::MAX - 1 - len * (gap + 1));
            let ranks: Vec<u32> = (0..len).map(|i| first + i + i / 3 * gap).collect();
            let ranks = prop_oneof![Just(ranks.clone()), Just(ranks).prop_shuffle()];
            (Just(mesh), ranks, Just(listed.is_some()))
        })
        .prop_map(|(mesh, ranks, listed)| MeshWords { ranks: listed.then_some(ranks), ..mesh })
}

pub fn arb_mesh(limits: Limits) -> impl Strategy<Value = Mesh> {
    arb_mesh_words(limits)
        .prop_map(|words| words.to_string().parse().expect("the strategy draws good meshes"))
}

/// What an axis of the mesh is used for: the dim it splits, the sum it carries, or nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Use {
    Split(usize),
    Reduce,
    Replicate,
}

fn arb_use(dims: usize, partial: bool) -> BoxedStrategy<Use> {
    let mut choices = vec![(2, Just(Use::Replicate).boxed())];
    if dims > 0 {
        choices.push((5, (0..dims).prop_map(Use::Split).boxed()));
    }
    if partial {
        choices.push((1, Just(Use::Reduce).boxed()));
    }
    proptest::strategy::Union::new_weighted(choices).boxed()
}

/// The rule of a dim: mostly chunks, some cuts and fused parts, from fractions of the dim's length.
fn arb_rule(dim_len: u64, parts: usize) -> impl Strategy<Value = RuleWords> {
    let at = move |fraction: f64| ((dim_len as f64 * fraction) as u64).min(dim_len);
    let sorted = move |fractions: Vec<f64>| {
        let mut cuts: Vec<u64> = fractions.into_iter().map(at).chain([0, dim_len]).collect();
        cuts.sort_unstable();
        cuts
    };
    prop_oneof![
        4 => Just(RuleWords::Chunk),
        1 => vec(0.0..1.0, parts - 1).prop_map(sorted).prop_map(RuleWords::Cuts),
        1 => vec(0.0..1.0, 0..3).prop_map(sorted)
            .prop_map(|cuts| RuleWords::Parts(cuts.windows(2).map(|w| w[1] - w[0]).collect())),
    ]
}

/// Any layout of this tensor on this mesh.
fn arb_layout_on(
    dtype: DType,
    shape: Vec<u64>,
    mesh: MeshWords,
    partial: bool,
) -> impl Strategy<Value = LayoutWords> {
    let dims = shape.len();
    let axes: Vec<usize> = (0..mesh.axes.len()).collect();
    let uses = vec(arb_use(dims, partial), mesh.axes.len());
    (Just(axes).prop_shuffle(), uses, proptest::sample::select(ReduceOp::ALL.to_vec())).prop_flat_map(
        move |(order, uses, op)| {
            let used =
                |wanted: Use| order.iter().copied().filter(|&a| uses[a] == wanted).collect::<Vec<usize>>();
            let splits: Vec<_> = (0..dims)
                .map(|dim| {
                    let axes = used(Use::Split(dim));
                    let parts = axes.iter().map(|&a| mesh.axes[a].1 as usize).product();
                    let rule = arb_rule(shape[dim], parts);
                    rule.prop_map(move |rule| {
                        let rule = if axes.is_empty() { RuleWords::Chunk } else { rule };
                        (axes.clone(), rule)
                    })
                })
                .collect();
            let reduced = used(Use::Reduce);
            let partial = (!reduced.is_empty()).then_some((op, reduced));
            let (shape, mesh) = (shape.clone(), mesh.clone());
            splits.prop_map(move |splits| LayoutWords {
                dtype,
                shape: shape.clone(),
                mesh: mesh.clone(),
                splits,
                partial: partial.clone(),
            })
        },
    )
}

fn arb_tensor(limits: Limits) -> impl Strategy<Value = (DType, Vec<u64>)> {
    let dim_len = prop_oneof![1 => Just(0), 1 => Just(1), 8 => 1..=limits.dim_len];
    (proptest::sample::select(DType::ALL.to_vec()), vec(dim_len, 0..=limits.dims))
}

/// Any layout, as words.
pub fn arb_layout_words(limits: Limits) -> impl Strategy<Value = LayoutWords> {
    let one_long_dim = any::<u64>().prop_map(|len| (DType::U8, vec![len]));
    let tensor = prop_oneof![15 => arb_tensor(limits), 1 => one_long_dim];
    (tensor, arb_mesh_words(limits))
        .prop_flat_map(move |((dtype, shape), mesh)| arb_layout_on(dtype, shape, mesh, limits.partial))
}

pub fn arb_layout(limits: Limits) -> impl Strategy<Value = Layout> {
    arb_layout_words(limits).prop_map(|words| words.parse())
}

/// Two meshes that are disjoint, the same, or share some devices. Ranks stay dense, so both can be placed.
fn arb_meshes(limits: Limits) -> impl Strategy<Value = (MeshWords, MeshWords)> {
    let pair =
        (arb_plain_mesh("A", limits), arb_plain_mesh("B", limits), 0u32..6, any::<prop::sample::Index>());
    pair.prop_flat_map(|(src, dst, relation, shared)| {
        let (a, b) = (src.num_devices(), dst.num_devices());
        let common = shared.index(a.min(b) as usize + 1) as u32;
        let src_ranks = Just((0..a).collect::<Vec<u32>>()).prop_shuffle();
        // Devices of the source mesh first, then new ones, in any order.
        let pool = Just((0..a).collect::<Vec<u32>>()).prop_shuffle();
        let dst_ranks = pool.prop_flat_map(move |pool| {
            let ranks: Vec<u32> = pool[..common as usize].iter().copied().chain(a..a + b - common).collect();
            Just(ranks).prop_shuffle()
        });
        (Just((src, dst, relation)), src_ranks, dst_ranks)
    })
    .prop_map(|((mut src, mut dst, relation), src_ranks, dst_ranks)| {
        match relation {
            0 | 1 => {}
            2 => dst = src.clone(),
            3 => {
                src.ranks = Some(src_ranks);
                dst = src.clone();
            }
            4 => dst.ranks = Some(dst_ranks),
            _ => {
                src.ranks = Some(src_ranks);
                dst.ranks = Some(dst_ranks);
            }
        }
        (src, dst)
    })
}

/// A tensor and two layouts it can move between: disjoint, overlapping or the same meshes; uneven, replicated, cut and
/// fused dims; a source of partial sums where the limits say so. `Problem::pair` takes every one of them.
pub fn arb_reshard(limits: Limits) -> impl Strategy<Value = (Layout, Layout)> {
    (arb_tensor(limits), arb_meshes(limits)).prop_flat_map(move |((dtype, shape), (src, dst))| {
        let src = arb_layout_on(dtype, shape.clone(), src, limits.partial);
        let dst = arb_layout_on(dtype, shape, dst, false);
        (src, dst).prop_map(|(src, dst)| (src.parse(), dst.parse()))
    })
}
