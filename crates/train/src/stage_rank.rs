//! Where a rank stands in its stage's mesh, and the layouts that follow from it.
//!
//! A stage's mesh has data axes, over which the samples of a microbatch are split (`dp`; or `dpo` and `dpi`, where gradients or weights are to be dealt
//! out over one of them alone), and `tp`, which splits weights. Everything a stage holds or hands over is described by a [`Layout`] over that mesh,
//! so that whoever moves it needs to know nothing else.

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

/// A rank of a stage.
#[derive(Debug, Clone)]
pub struct StageRank {
    mesh: Mesh,
    coord: Vec<u32>,
}

impl StageRank {
    /// The rank at `position` of a mesh, row-major.
    pub fn new(mesh: Mesh, position: usize) -> Result<Self, StageRankError> {
        if let Some(axis) =
            mesh.axes().iter().find(|a| a.name != "tp" && !DATA_AXES.contains(&a.name.as_str()))
        {
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
        match self.mesh.axis_index(axis) {
            Some(i) => Along { rank: self.coord[i] as usize, size: self.mesh.axes()[i].len as usize },
            None => Along { rank: 0, size: 1 },
        }
    }

    /// Among all ranks along the data axes, row-major.
    pub fn dp(&self) -> Along {
        self.data_axes().iter().fold(Along { rank: 0, size: 1 }, |along, &axis| {
            let len = self.mesh.axes()[axis].len as usize;
            Along { rank: along.rank * len + self.coord[axis] as usize, size: along.size * len }
        })
    }

    /// The data axes, by their places in the mesh.
    pub fn data_axes(&self) -> Vec<usize> {
        let axes = self.mesh.axes().iter().enumerate();
        axes.filter(|(_, a)| DATA_AXES.contains(&a.name.as_str())).map(|(i, _)| i).collect()
    }

    /// Where the ranks stand that differ from this one along some axes only, itself among them, in the mesh's order.
    pub fn others(&self, axes: &[usize]) -> Vec<Vec<u32>> {
        let alike =
            |coord: &Vec<u32>| (0..coord.len()).all(|i| axes.contains(&i) || coord[i] == self.coord[i]);
        (0..self.mesh.len()).map(|position| self.mesh.coord(position)).filter(alike).collect()
    }

    /// The data axes in a layout's words: `dp`, or `dpo+dpi`.
    fn data(&self) -> String {
        let names: Vec<&str> = self.data_axes().iter().map(|&i| self.mesh.axes()[i].name.as_str()).collect();
        names.join("+")
    }

    pub fn tp(&self) -> Along {
        self.along("tp")
    }

    /// Weights, split over an axis along one dim or held by everybody.
    pub fn weight_layout(&self, dtype: DType, shape: &[usize], split: Option<(usize, &str)>) -> Layout {
        let axis = |d: usize| split.filter(|(dim, _)| *dim == d).map_or("_", |(_, axis)| axis);
        let dims: Vec<&str> = (0..shape.len()).map(axis).collect();
        self.layout(dtype, shape, &self.known(&dims), "")
    }

    /// The gradients of weights: every rank along `dp` has summands of them, and where a rank saw only some rows of its samples,
    /// every rank along the axis that shares them out too.
    pub fn grad_layout(&self, weights: &Layout, rows_over: Option<&str>) -> Layout {
        let long = |axis: &&str| self.along(axis).size > 1;
        let data = self.data();
        let axes: Vec<&str> = data.split('+').chain(rows_over).filter(long).collect();
        if axes.is_empty() {
            return weights.clone();
        }
        let text = weights.to_string();
        let open = text.strip_suffix(')').expect("a layout ends in a parenthesis");
        format!("{open} | sum {})", axes.join("+")).parse().expect("a layout with partial sums")
    }

    /// A tensor of one entry a sample: `[samples, dims..]`, samples split over `dp`.
    pub fn sample_layout(&self, dtype: DType, samples: usize, dims: &[usize]) -> Layout {
        let shape: Vec<usize> = [samples].iter().chain(dims).copied().collect();
        let data = self.data();
        let splits: Vec<&str> = [&data[..]].into_iter().chain(dims.iter().map(|_| "_")).collect();
        self.layout(dtype, &shape, &self.known(&splits), "")
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
        let data = self.data();
        let axes = if sequence_parallel { format!("{data}+tp") } else { data };
        let mut split = self.known(&[&axes]).remove(0);
        if !samples.is_multiple_of(self.dp().size) {
            // Chunks of rows would cut samples in two.
            let cuts = self.row_cuts(samples, rows, sequence_parallel);
            let cuts: Vec<String> = cuts.iter().map(usize::to_string).collect();
            split = format!("{split}[{}]", cuts.join(","));
        }
        self.layout(dtype, &[samples * rows, cols], &[split, "_".into()], "")
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
        let long = |axis: &&str| self.along(axis).size > 1;
        let data = self.data();
        let axes: Vec<&str> = data.split('+').filter(long).collect();
        let partial = if axes.is_empty() { String::new() } else { format!("| sum {}", axes.join("+")) };
        self.layout(DType::F64, &[], &[], &partial)
    }

    /// The axes of a split that this mesh has, `_` where there is none.
    fn known(&self, splits: &[&str]) -> Vec<String> {
        let keep = |split: &&str| {
            let axes: Vec<&str> = split.split('+').filter(|a| self.mesh.axis_index(a).is_some()).collect();
            if axes.is_empty() { "_".to_string() } else { axes.join("+") }
        };
        splits.iter().map(keep).collect()
    }

    fn layout(&self, dtype: DType, shape: &[usize], splits: &[String], partial: &str) -> Layout {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let text = format!("{dtype}[{}]@{}({}{partial})", shape.join(","), self.mesh, splits.join(","));
        text.parse().unwrap_or_else(|error| panic!("{text} is no layout: {error}"))
    }
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
        let weights = p.weight_layout(DType::F32, &[8, 6], Some((1, "tp")));
        assert_eq!(weights.to_string(), "f32[8,6]@A{dp:2,tp:3}(_,tp)");
        assert_eq!(p.grad_layout(&weights, None).to_string(), "f32[8,6]@A{dp:2,tp:3}(_,tp | sum dp)");
        let whole = p.weight_layout(DType::F32, &[8], None);
        assert_eq!(p.grad_layout(&whole, Some("tp")).to_string(), "f32[8]@A{dp:2,tp:3}(_ | sum dp+tp)");
        assert_eq!(shard_dims(&weights, p.coord()), [8, 2]);
        let few = p.weight_layout(DType::F32, &[8, 1], Some((1, "tp")));
        assert_eq!(shard_dims(&few, p.coord()), [8, 0]);
    }

    #[test]
    fn an_axis_that_is_not_there_splits_nothing() {
        let p = place("B{tp:2}", 1);
        assert_eq!(p.sample_layout(DType::I32, 4, &[7]).to_string(), "i32[4,7]@B{tp:2}(_,_)");
        assert_eq!(p.row_layout(DType::F64, 4, 5, 6, true).to_string(), "f64[20,6]@B{tp:2}(tp,_)");
        assert_eq!(p.loss_layout().to_string(), "f64[]@B{tp:2}()");
        let p = place("C{dp:2}", 1);
        assert_eq!(p.weight_layout(DType::F64, &[4], Some((0, "tp"))).to_string(), "f64[4]@C{dp:2}(_)");
        assert_eq!(p.loss_layout().to_string(), "f64[]@C{dp:2}(| sum dp)");
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
