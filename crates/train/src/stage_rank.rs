//! Where a rank stands in its stage's mesh, and the layouts that follow from it.
//!
//! A stage's mesh has data axes, over which the samples of a microbatch are split (`dp`; or `dpo` and `dpi`, where gradients or weights are to be dealt
//! out over one of them alone), and `tp`, which splits weights. Everything a stage holds or hands over is described by a [`Layout`] over that mesh,
//! so that whoever moves it needs to know nothing else.
//!
//! Where a model has fewer heads of keys and values than `tp` has ranks, `tp` is cut in two ([`sharing_heads`]): ranks along `kv` have
//! different ones, ranks along `g` the same. `tp` is then the name of both together, as `dp` is the name of all data axes:
//!
//! ```text
//! A{dp:2,tp:4}, 2 heads of keys   =   A{dp:2,kv:2,g:2}      keys (kv,_,_)   queries (kv,g,_,_)   hidden columns (kv+g,_)
//! ```

use std::ops::Range;

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::Layout;
use crossmesh_core::mesh::Mesh;

/// A mesh that no stage can live on.
#[derive(Debug, thiserror::Error)]
pub enum StageRankError {
    #[error(
        "mesh {mesh} has an axis `{axis}`\nhint: a stage's mesh has the axes `dp` (or `dpo` and `dpi`) and `tp`, or some of them"
    )]
    Axis { mesh: Mesh, axis: String },
    #[error("mesh {mesh} has {len} ranks, so there is no position {position}")]
    Position { mesh: Mesh, position: usize, len: usize },
}

/// A rank's place along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Along {
    pub rank: usize,
    pub size: usize,
}

impl Along {
    /// The part of `len` that falls to this rank, by torch.chunk's rule.
    pub fn part(self, len: usize) -> Range<usize> {
        let each = len.div_ceil(self.size);
        (self.rank * each).min(len)..((self.rank + 1) * each).min(len)
    }
}

/// The axes over which samples are split, however a mesh orders them.
pub const DATA_AXES: [&str; 3] = ["dp", "dpo", "dpi"];
/// The axis along which ranks have different heads of keys and values, and the one along which they have the same.
pub const KV: &str = "kv";
pub const G: &str = "g";

/// The mesh of a stage whose model has so many heads of keys and values: where `tp` has more ranks, and so many times as many, it is cut
/// into `kv` and `g`.
pub fn sharing_heads(mesh: &Mesh, kv_heads: usize) -> Mesh {
    let tp = mesh.axis_index("tp").map_or(1, |at| mesh.axes()[at].len);
    let refined = u32::try_from(kv_heads).ok().filter(|kv| *kv > 0 && tp > *kv && tp.is_multiple_of(*kv));
    let refined = refined.and_then(|kv| mesh.refined("tp", &[(KV, kv), (G, tp / kv)]));
    refined.unwrap_or_else(|| mesh.clone())
}

/// A rank of a stage.
#[derive(Debug, Clone)]
pub struct StageRank {
    mesh: Mesh,
    coord: Vec<u32>,
}

impl StageRank {
    /// The rank at `position` of a mesh, row-major.
    pub fn new(mesh: Mesh, position: usize) -> Result<Self, StageRankError> {
        let known = |name: &str| name == "tp" || [KV, G].contains(&name) || DATA_AXES.contains(&name);
        if let Some(axis) = mesh.axes().iter().find(|a| !known(&a.name)) {
            return Err(StageRankError::Axis { axis: axis.name.clone(), mesh });
        }
        Self::over(mesh, position)
    }

    /// The same for a mesh with any axes; those that are no data axes are for the ops of a graph to share out.
    pub fn over(mesh: Mesh, position: usize) -> Result<Self, StageRankError> {
        if position >= mesh.len() {
            return Err(StageRankError::Position { position, len: mesh.len(), mesh });
        }
        let coord = mesh.coord(position);
        Ok(Self { mesh, coord })
    }

    /// A stage on one rank.
    pub fn alone() -> Self {
        let mesh: Mesh = "S{dp:1,tp:1}".parse().expect("a mesh");
        Self::new(mesh, 0).expect("one rank")
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    pub fn coord(&self) -> &[u32] {
        &self.coord
    }

    /// Where this rank is along an axis; alone, along one that the mesh does not have.
    pub fn along(&self, axis: &str) -> Along {
        self.meant(axis).into_iter().fold(Along { rank: 0, size: 1 }, |along, i| {
            let len = self.mesh.axes()[i].len as usize;
            Along { rank: along.rank * len + self.coord[i] as usize, size: along.size * len }
        })
    }

    /// The axes of the mesh that a name means: one, or all that `tp` was cut into, or all data axes, or none.
    pub fn meant(&self, axis: &str) -> Vec<usize> {
        let parts = |name: &str| match axis {
            "tp" => [KV, G].contains(&name),
            "dp" => DATA_AXES.contains(&name),
            _ => false,
        };
        let meant = self.mesh.axes().iter().enumerate().filter(|(_, a)| a.name == axis || parts(&a.name));
        meant.map(|(i, _)| i).collect()
    }

    /// The names of the axes that some names mean, `+` between them.
    fn joined<'a>(&self, axes: impl IntoIterator<Item = &'a str>) -> String {
        let meant = axes.into_iter().flat_map(|axis| self.meant(axis));
        meant.map(|i| self.mesh.axes()[i].name.as_str()).collect::<Vec<_>>().join("+")
    }

    /// The same without axes of one rank, along which there is nothing to sum up.
    fn summed<'a>(&self, axes: impl IntoIterator<Item = &'a str>) -> String {
        let long = |i: &usize| self.mesh.axes()[*i].len > 1;
        let meant = axes.into_iter().flat_map(|axis| self.meant(axis)).filter(long);
        meant.map(|i| self.mesh.axes()[i].name.as_str()).collect::<Vec<_>>().join("+")
    }

    /// Among all ranks along the data axes, row-major.
    pub fn dp(&self) -> Along {
        self.along("dp")
    }

    /// The data axes, by their places in the mesh.
    pub fn data_axes(&self) -> Vec<usize> {
        self.meant("dp")
    }

    /// Where the ranks stand that differ from this one along some axes only, itself among them, in the mesh's order.
    pub fn others(&self, axes: &[usize]) -> Vec<Vec<u32>> {
        let alike =
            |coord: &Vec<u32>| (0..coord.len()).all(|i| axes.contains(&i) || coord[i] == self.coord[i]);
        (0..self.mesh.len()).map(|position| self.mesh.coord(position)).filter(alike).collect()
    }

    pub fn tp(&self) -> Along {
        self.along("tp")
    }

    /// Weights, with dims that axes split; along other axes everybody has the same.
    pub fn weight_layout(&self, dtype: DType, shape: &[usize], split: &[(usize, &str)]) -> Layout {
        let dim = |(d, len): (usize, &usize)| {
            let Some((_, axis)) = split.iter().find(|(dim, _)| *dim == d) else { return "_".to_string() };
            let (known, along) = (self.known(&[axis]).remove(0), self.along(axis));
            let parts = (0..along.size).map(|rank| Along { rank, ..along }.part(*len).end);
            match self.chunks_nest(axis, *len) {
                true => known,
                false => with_cuts(&known, [0].into_iter().chain(parts)),
            }
        };
        let dims: Vec<String> = shape.iter().enumerate().map(dim).collect();
        self.layout(dtype, shape, &dims, "")
    }

    /// The gradients of weights: every rank along `dp` has summands of them, and along other axes where it saw a part of what they
    /// sum over.
    pub fn grad_layout(&self, weights: &Layout, summed_over: &[&str]) -> Layout {
        let axes = self.summed(["dp"].iter().chain(summed_over).copied());
        if axes.is_empty() {
            return weights.clone();
        }
        let text = weights.to_string();
        let open = text.strip_suffix(')').expect("a layout ends in a parenthesis");
        format!("{open} | sum {axes})").parse().expect("a layout with partial sums")
    }

    /// A tensor of one entry a sample: `[samples, dims..]`, samples split over `dp`.
    pub fn sample_layout(&self, dtype: DType, samples: usize, dims: &[usize]) -> Layout {
        let shape: Vec<usize> = [samples].iter().chain(dims).copied().collect();
        let splits: Vec<&str> = ["dp"].into_iter().chain(dims.iter().map(|_| "_")).collect();
        let mut splits = self.known(&splits);
        if !self.chunks_nest("dp", samples) {
            splits[0] = with_cuts(&splits[0], self.row_cuts(samples, 1, false));
        }
        self.layout(dtype, &shape, &splits, "")
    }

    /// A tensor of `rows` rows a sample, `[samples * rows, cols]`: samples split over `dp`, and the rows of a rank's samples over `tp`
    /// where the sequence is parallel.
    pub fn row_layout(
        &self,
        dtype: DType,
        samples: usize,
        rows: usize,
        cols: usize,
        sequence_parallel: bool,
    ) -> Layout {
        let axes = if sequence_parallel { "dp+tp" } else { "dp" };
        let mut split = self.known(&[axes]).remove(0);
        // Chunks of rows would cut samples in two, or be other chunks.
        let each = samples / self.dp().size * rows;
        let nest =
            self.chunks_nest("dp", samples * rows) && (!sequence_parallel || self.chunks_nest("tp", each));
        if !samples.is_multiple_of(self.dp().size) || !nest {
            split = with_cuts(&split, self.row_cuts(samples, rows, sequence_parallel));
        }
        self.layout(dtype, &[samples * rows, cols], &[split, "_".into()], "")
    }

    /// Whether chunks of so many, axis by axis of those that a name means, are chunks over all its ranks at once.
    fn chunks_nest(&self, axis: &str, len: usize) -> bool {
        self.meant(axis).len() < 2 || len.is_multiple_of(self.along(axis).size)
    }

    /// Where the parts of all ranks begin, and where the last one ends.
    fn row_cuts(&self, samples: usize, rows: usize, sequence_parallel: bool) -> Vec<usize> {
        let inner = if sequence_parallel { self.tp().size } else { 1 };
        let mut cuts = vec![0];
        for rank in 0..self.dp().size {
            let part = Along { rank, ..self.dp() }.part(samples);
            let rows = part.start * rows..part.end * rows;
            let ends = (0..inner).map(|rank| Along { rank, size: inner }.part(rows.len()).end);
            cuts.extend(ends.map(|end| rows.start + end));
        }
        cuts
    }

    /// A number that the ranks along `dp` add up.
    pub fn loss_layout(&self) -> Layout {
        let partial =
            if self.dp().size > 1 { format!("| sum {}", self.joined(["dp"])) } else { String::new() };
        self.layout(DType::F64, &[], &[], &partial)
    }

    /// The axes of a split that this mesh has, `_` where there is none.
    fn known(&self, splits: &[&str]) -> Vec<String> {
        let keep = |split: &&str| {
            let axes = self.joined(split.split('+'));
            if axes.is_empty() { "_".to_string() } else { axes }
        };
        splits.iter().map(keep).collect()
    }

    fn layout(&self, dtype: DType, shape: &[usize], splits: &[String], partial: &str) -> Layout {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let text = format!("{dtype}[{}]@{}({}{partial})", shape.join(","), self.mesh, splits.join(","));
        text.parse().unwrap_or_else(|error| panic!("{text} is no layout: {error}"))
    }
}

/// A split with its cuts.
fn with_cuts(split: &str, cuts: impl IntoIterator<Item = usize>) -> String {
    let cuts: Vec<String> = cuts.into_iter().map(|cut| cut.to_string()).collect();
    format!("{split}[{}]", cuts.join(","))
}

/// The dims of a rank's shard, empty ones among them.
pub fn shard_dims(layout: &Layout, coord: &[u32]) -> Vec<usize> {
    let split = layout.by_axes().expect("parameters are split by axes");
    let dim = |dim: usize| {
        let spans = &split.part_spans(dim)[split.part_at(dim, coord)];
        spans.iter().map(|s| s.len() as usize).sum()
    };
    (0..layout.shape().len()).map(dim).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(mesh: &str, position: usize) -> StageRank {
        StageRank::new(mesh.parse().unwrap(), position).unwrap()
    }

    #[test]
    fn weights_and_their_gradients() {
        let p = place("A{dp:2,tp:3}", 4);
        assert_eq!((p.dp(), p.tp()), (Along { rank: 1, size: 2 }, Along { rank: 1, size: 3 }));
        let weights = p.weight_layout(DType::F32, &[8, 6], &[(1, "tp")]);
        assert_eq!(weights.to_string(), "f32[8,6]@A{dp:2,tp:3}(_,tp)");
        assert_eq!(p.grad_layout(&weights, &[]).to_string(), "f32[8,6]@A{dp:2,tp:3}(_,tp | sum dp)");
        let whole = p.weight_layout(DType::F32, &[8], &[]);
        assert_eq!(p.grad_layout(&whole, &["tp"]).to_string(), "f32[8]@A{dp:2,tp:3}(_ | sum dp+tp)");
        assert_eq!(shard_dims(&weights, p.coord()), [8, 2]);
        let few = p.weight_layout(DType::F32, &[8, 1], &[(1, "tp")]);
        assert_eq!(shard_dims(&few, p.coord()), [8, 0]);
    }

    #[test]
    fn an_axis_that_is_not_there_splits_nothing() {
        let p = place("B{tp:2}", 1);
        assert_eq!(p.sample_layout(DType::I32, 4, &[7]).to_string(), "i32[4,7]@B{tp:2}(_,_)");
        assert_eq!(p.row_layout(DType::F64, 4, 5, 6, true).to_string(), "f64[20,6]@B{tp:2}(tp,_)");
        assert_eq!(p.loss_layout().to_string(), "f64[]@B{tp:2}()");
        let p = place("C{dp:2}", 1);
        assert_eq!(p.weight_layout(DType::F64, &[4], &[(0, "tp")]).to_string(), "f64[4]@C{dp:2}(_)");
        assert_eq!(p.loss_layout().to_string(), "f64[]@C{dp:2}(| sum dp)");
    }

    #[test]
    fn heads_that_are_few_cut_tp_in_two() {
        let cut = |mesh: &str, kv| sharing_heads(&mesh.parse().unwrap(), kv).to_string();
        assert_eq!(cut("A{dp:2,tp:4}", 2), "A{dp:2,kv:2,g:2}");
        assert_eq!(cut("A{tp:6,dp:2}", 3), "A{kv:3,g:2,dp:2}");
        for (mesh, kv) in
            [("A{dp:2,tp:4}", 4), ("A{tp:4}", 5), ("A{tp:4}", 3), ("A{dp:4}", 1), ("A{tp:4}", 0)]
        {
            assert_eq!(cut(mesh, kv), mesh);
        }
        let p = place("A{dp:2,kv:2,g:3}", 10);
        assert_eq!((p.dp(), p.tp()), (Along { rank: 1, size: 2 }, Along { rank: 4, size: 6 }));
        assert_eq!((p.along(KV), p.along(G)), (Along { rank: 1, size: 2 }, Along { rank: 1, size: 3 }));
        let queries = p.weight_layout(DType::F32, &[2, 4, 5], &[(0, KV), (1, G)]);
        assert_eq!(queries.to_string(), "f32[2,4,5]@A{dp:2,kv:2,g:3}(kv,g,_)");
        let keys = p.weight_layout(DType::F32, &[2, 5], &[(0, KV)]);
        assert_eq!(p.grad_layout(&keys, &[G]).to_string(), "f32[2,5]@A{dp:2,kv:2,g:3}(kv,_ | sum dp+g)");
        let hidden = p.weight_layout(DType::F32, &[7], &[(0, "tp")]);
        assert_eq!(hidden.to_string(), "f32[7]@A{dp:2,kv:2,g:3}(kv+g[0,2,4,6,7,7,7])");
        let even = p.weight_layout(DType::F32, &[12], &[(0, "tp")]);
        assert_eq!(even.to_string(), "f32[12]@A{dp:2,kv:2,g:3}(kv+g)");
        assert_eq!(
            p.row_layout(DType::F32, 4, 5, 6, true).to_string(),
            "f32[20,6]@A{dp:2,kv:2,g:3}(dp+kv+g[0,2,4,6,8,10,10,12,14,16,18,20,20],_)"
        );
    }

    #[test]
    fn samples_stay_whole() {
        let p = place("A{dp:2,tp:2}", 0);
        assert_eq!(p.row_layout(DType::F32, 4, 5, 6, true).to_string(), "f32[20,6]@A{dp:2,tp:2}(dp+tp,_)");
        assert_eq!(
            p.row_layout(DType::F32, 3, 5, 6, false).to_string(),
            "f32[15,6]@A{dp:2,tp:2}(dp[0,10,15],_)"
        );
        let parallel = p.row_layout(DType::F32, 3, 5, 6, true);
        assert_eq!(parallel.to_string(), "f32[15,6]@A{dp:2,tp:2}(dp+tp[0,5,10,13,15],_)");
    }

    #[test]
    fn refuses_other_axes_and_positions() {
        let error = StageRank::new("A{ep:2}".parse().unwrap(), 0).unwrap_err();
        assert!(error.to_string().contains("axis `ep`"), "{error}");
        let error = StageRank::new("A{dp:2}".parse().unwrap(), 2).unwrap_err();
        assert!(error.to_string().contains("no position 2"), "{error}");
    }
}
