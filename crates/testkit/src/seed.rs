//! Randomness from a seed, and random problems made of it: the same number gives the same problem everywhere.
//!
//! Proptest shrinks, which thousands of whole plans cannot afford; a failing test here names its seed instead.

use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::Problem;
use crossmesh_core::reshard::problem::{Assumed, Hosts};

/// SplitMix64: small, and good enough to shake plans with.
#[derive(Debug, Clone)]
pub struct Seed(pub u64);

impl Seed {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n.max(1) as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// What random problems are like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// A mesh has up to this many hosts, and devices in each.
    pub hosts: usize,
    pub devices: usize,
    pub dims: usize,
    pub dim_len: usize,
    pub tensors: usize,
    pub partial: bool,
}

impl Shape {
    /// Small enough to look at every element.
    pub const SMALL: Shape = Shape { hosts: 2, devices: 3, dims: 3, dim_len: 7, tensors: 2, partial: true };
    /// Meshes up to 4 hosts of 8 devices.
    pub const FULL: Shape = Shape { hosts: 4, devices: 8, dims: 3, dim_len: 40, tensors: 2, partial: true };
}

/// A problem: meshes that are disjoint, overlapping or the same, dims split evenly, unevenly, by cuts, fused, or not.
pub fn problem(seed: u64, shape: Shape) -> Problem {
    let mut seed = Seed(seed);
    let mesh_a = mesh(&mut seed, "A", shape);
    let mut mesh_b = mesh(&mut seed, "B", shape);
    match seed.below(4) {
        0 => mesh_b = mesh_a.clone(),
        1 => mesh_b.first_rank = Some(seed.below(mesh_a.len() + 1)),
        _ => {}
    }
    let tensors = 1 + if seed.one_in(3) { seed.below(shape.tensors) } else { 0 };
    let mut pairs = Vec::new();
    for i in 0..tensors {
        let dims: Vec<usize> =
            (0..seed.below(shape.dims + 1)).map(|_| seed.below(shape.dim_len + 1)).collect();
        let dims = if seed.one_in(8) { dims } else { dims.iter().map(|d| d.max(&1) + 1).collect() };
        let dtype = seed.pick(&["f32", "bf16", "u8"]);
        let partial = shape.partial && seed.one_in(4);
        let src = axis_layout(&mut seed, &mesh_a, dtype, &dims, partial);
        let dst = axis_layout(&mut seed, &mesh_b, dtype, &dims, false);
        pairs.push((format!("t{i}"), src, dst));
    }
    let per_host = seed.one_in(2).then(|| 1 + seed.below(shape.devices) as u32);
    let hosts = Hosts::Assumed(Assumed { devices_per_host: per_host, ..Assumed::default() });
    Problem::new(pairs, hosts).expect("the seed makes good problems")
}

/// A problem whose destination is a partial sum, too: of as many parts as the source has, or of fewer.
pub fn partial_destination(seed: u64, dim_len: usize) -> Problem {
    let mut seed = Seed(seed);
    let groups = 2 + seed.below(2);
    let each = 1 + seed.below(2);
    let len = 1 + seed.below(dim_len);
    let dtype = seed.pick(&["f32", "bf16", "u8"]);
    let op = seed.pick(&["sum", "max"]);
    let side = |seed: &mut Seed, name: &str, parts: usize| {
        let (along, split) = (1 + seed.below(2), seed.pick(&["x", "_"]));
        let axes = seed.pick(&[["p", "x"], ["x", "p"]]);
        let axes = axes.map(|axis| format!("{axis}:{}", if axis == "p" { parts } else { along })).join(",");
        let text = format!("{dtype}[{len}]@{name}{{{axes}}}({split} | {op} p)");
        text.parse().unwrap_or_else(|e| panic!("the seed made a bad layout: {e}"))
    };
    let (src, dst) = (side(&mut seed, "A", groups * each), side(&mut seed, "B", groups));
    let per_host = seed.one_in(2).then(|| 1 + seed.below(3) as u32);
    let hosts = Hosts::Assumed(Assumed { devices_per_host: per_host, ..Assumed::default() });
    Problem::new(vec![("t".into(), src, dst)], hosts).expect("the seed makes good problems")
}

#[derive(Clone)]
pub(crate) struct MeshDraft {
    pub name: &'static str,
    pub axes: Vec<usize>,
    pub first_rank: Option<usize>,
}

impl MeshDraft {
    pub fn len(&self) -> usize {
        self.axes.iter().product()
    }

    pub fn text(&self) -> String {
        let axes: Vec<String> = self.axes.iter().enumerate().map(|(i, len)| format!("x{i}:{len}")).collect();
        let ranks =
            self.first_rank.map_or(String::new(), |first| format!("={first}-{}", first + self.len() - 1));
        format!("{}{{{}}}{ranks}", self.name, axes.join(","))
    }
}

fn mesh(seed: &mut Seed, name: &'static str, shape: Shape) -> MeshDraft {
    let mut axes = vec![1 + seed.below(shape.hosts), 1 + seed.below(shape.devices)];
    if axes[1] % 2 == 0 && seed.one_in(3) {
        axes[1] /= 2;
        axes.push(2);
    }
    MeshDraft { name, axes, first_rank: None }
}

/// A layout of this tensor whose dims the axes of the mesh split.
pub(crate) fn axis_layout(
    seed: &mut Seed,
    mesh: &MeshDraft,
    dtype: &str,
    dims: &[usize],
    partial: bool,
) -> Layout {
    let mut splits: Vec<Vec<usize>> = vec![vec![]; dims.len()];
    let mut summed: Vec<usize> = vec![];
    for axis in 0..mesh.axes.len() {
        match seed.below(dims.len() + 2) {
            d if d < dims.len() => splits[d].push(axis),
            d if partial && (d == dims.len() || summed.is_empty()) => summed.push(axis),
            _ => {}
        }
    }
    let names = |axes: &[usize]| axes.iter().map(|a| format!("x{a}")).collect::<Vec<_>>().join("+");
    let mut terms = Vec::new();
    for (axes, &len) in splits.iter().zip(dims) {
        let parts: usize = axes.iter().map(|a| mesh.axes[*a]).product();
        terms.push(match seed.below(6) {
            _ if axes.is_empty() => "_".into(),
            0 => format!("{}[{}]", names(axes), cuts(seed, len, parts)),
            1 => {
                let first = seed.below(len + 1);
                format!("{} of {}+{}", names(axes), first, len - first)
            }
            _ => names(axes),
        });
    }
    let lens: Vec<String> = dims.iter().map(usize::to_string).collect();
    let sum = if summed.is_empty() { String::new() } else { format!(" | sum {}", names(&summed)) };
    let text = format!("{dtype}[{}]@{}({}{sum})", lens.join(","), mesh.text(), terms.join(","));
    text.parse().unwrap_or_else(|e| panic!("the seed made a bad layout: {e}"))
}

fn cuts(seed: &mut Seed, len: usize, parts: usize) -> String {
    let mut cuts: Vec<usize> = (1..parts).map(|_| seed.below(len + 1)).chain([0, len]).collect();
    cuts.sort_unstable();
    cuts.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}
