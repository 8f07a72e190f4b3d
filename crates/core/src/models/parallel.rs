//! How a job cuts a model: `fsdp 64`, `dp 4, tp 8`, `pp 2, ep 8`.

use std::fmt;
use std::str::FromStr;

use super::Model;
use super::tensors::{HeadPart, ModelTensor, Role};
use crate::id::Rank;
use crate::layout::{HeldBox, Layout};
use crate::mesh::{Axis, Mesh, RankList};
use crate::region::{Region, Span};

/// Axes and their lengths, the major one first; `pp` is always major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parallel {
    axes: Vec<(Kind, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pp,
    Dp,
    Fsdp,
    Tp,
    Ep,
}

const KINDS: [(&str, Kind); 5] =
    [("pp", Kind::Pp), ("dp", Kind::Dp), ("fsdp", Kind::Fsdp), ("tp", Kind::Tp), ("ep", Kind::Ep)];

/// Why a job cannot cut a model so.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    #[error(
        "`{text}` is no parallelism\nhint: axes and their lengths, the major one first: `fsdp 64`, `dp 4, tp 8`, `pp 2, ep 4, tp 2`"
    )]
    Syntax { text: String },
    #[error("`{axis}` is given twice in `{text}`")]
    Twice { axis: &'static str, text: String },
    #[error("`{text}` has {ranks} ranks\nhint: at most {} can be planned", crate::mesh::MAX_MESH_LEN)]
    TooManyRanks { text: String, ranks: u64 },
    #[error(
        "{name}: {heads} heads over tp {tp} leave some rank with a part of a head\nhint: tp divides the heads, or is a multiple of them"
    )]
    HeadsSplit { name: String, heads: u64, tp: u32 },
    #[error(
        "{name}: tp {tp} over {heads} KV heads replicates heads, which fsdp cannot cut as well\nhint: tp up to {heads} with fsdp, or dp instead of fsdp"
    )]
    ReplicatedHeads { name: String, heads: u64, tp: u32 },
    #[error("the model has no experts for `ep`\nhint: leave ep out")]
    NoExperts,
    #[error("pp {pp} for {layers} layers\nhint: a stage has at least a layer")]
    TooManyStages { pp: u32, layers: u64 },
    #[error("{name}: {why}")]
    Layout { name: String, why: String },
}

impl FromStr for Parallel {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let bad = || ParallelError::Syntax { text: text.into() };
        let mut axes = vec![];
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, len) = part.split_once([' ', ':', '=']).ok_or_else(bad)?;
            let (axis, kind) = *KINDS.iter().find(|(known, _)| *known == name.trim()).ok_or_else(bad)?;
            let len: u32 = len.trim().parse().ok().filter(|len| *len > 0).ok_or_else(bad)?;
            if axes.iter().any(|(other, _)| *other == kind) {
                return Err(ParallelError::Twice { axis, text: text.into() });
            }
            axes.push((kind, len));
        }
        if axes.is_empty() {
            return Err(bad());
        }
        axes.sort_by_key(|(kind, _)| *kind != Kind::Pp);
        let ranks = axes.iter().fold(1u64, |ranks, (_, len)| ranks.saturating_mul(u64::from(*len)));
        match ranks > crate::mesh::MAX_MESH_LEN {
            true => Err(ParallelError::TooManyRanks { text: text.into(), ranks }),
            false => Ok(Self { axes }),
        }
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |kind: Kind| KINDS.iter().find(|(_, k)| *k == kind).map_or("", |(name, _)| *name);
        let axes: Vec<String> =
            self.axes.iter().map(|(kind, len)| format!("{} {len}", name(*kind))).collect();
        f.write_str(&axes.join(", "))
    }
}

impl Parallel {
    pub fn num_ranks(&self) -> u32 {
        self.axes.iter().map(|(_, len)| *len).product()
    }

    fn len(&self, kind: Kind) -> u32 {
        self.axes.iter().find(|(k, _)| *k == kind).map_or(1, |(_, len)| *len)
    }

    fn has(&self, kind: Kind) -> bool {
        self.axes.iter().any(|(k, _)| *k == kind)
    }

    /// A tensor's layout; the mesh is called `name`, and its first rank is this one.
    pub fn layout(
        &self,
        model: &Model,
        tensor: &ModelTensor,
        name: &str,
        first: u32,
    ) -> Result<Layout, ParallelError> {
        self.check(model)?;
        let mesh = self.mesh(model, tensor, name, first);
        if let Role::Heads { parts } = &tensor.role
            && parts.iter().any(|part| part.heads < u64::from(self.len(Kind::Tp)))
        {
            return self.replicated_heads(model, tensor, parts, mesh);
        }
        let terms = self.terms(tensor)?;
        let sizes: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        let text = format!("{}[{}]@{mesh}({})", model.dtype, sizes.join(","), terms.join(","));
        text.parse().map_err(|error: crate::layout::NotationError| ParallelError::Layout {
            name: tensor.name.clone(),
            why: error.to_string(),
        })
    }

    fn check(&self, model: &Model) -> Result<(), ParallelError> {
        if self.has(Kind::Ep) && !model.has_experts() {
            return Err(ParallelError::NoExperts);
        }
        let pp = self.len(Kind::Pp);
        match u64::from(pp) > model.layers() {
            true => Err(ParallelError::TooManyStages { pp, layers: model.layers() }),
            false => Ok(()),
        }
    }

    /// The ranks that hold a tensor: all, or those of its stage.
    fn mesh(&self, model: &Model, tensor: &ModelTensor, name: &str, first: u32) -> Mesh {
        let pp = u64::from(self.len(Kind::Pp));
        let stage = (tensor.layer * pp / model.layers()) as u32;
        let of_stage = self.num_ranks() / pp as u32;
        let start = first + stage * of_stage;
        let axes = self.axes.iter().filter(|(kind, _)| *kind != Kind::Pp);
        let axis_name = |kind: Kind| KINDS.iter().find(|(_, k)| *k == kind).map_or("", |(name, _)| *name);
        let mut axes: Vec<Axis> =
            axes.map(|(kind, len)| Axis { name: axis_name(*kind).into(), len: *len }).collect();
        if axes.is_empty() {
            axes.push(Axis { name: "x".into(), len: 1 });
        }
        let name = if pp > 1 { format!("{name}{stage}") } else { name.into() };
        Mesh { name, axes, ranks: Some((start..start + of_stage).map(Rank).collect()) }
    }

    /// For every dim the axes that split it. FSDP cuts the rows of what tensor parallelism left.
    fn terms(&self, tensor: &ModelTensor) -> Result<Vec<String>, ParallelError> {
        let tp = self.has(Kind::Tp).then_some("tp");
        let fsdp = self.has(Kind::Fsdp).then_some("fsdp");
        let ep = self.has(Kind::Ep).then_some("ep");
        let join = |axes: &[Option<&str>], parts: &[u64]| {
            let axes: Vec<&str> = axes.iter().flatten().copied().collect();
            match (axes.is_empty(), parts.len()) {
                (true, _) => "_".to_string(),
                (false, 0 | 1) => axes.join("+"),
                _ => {
                    let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                    format!("{} of {}", axes.join("+"), parts.join("+"))
                }
            }
        };
        Ok(match &tensor.role {
            Role::Column { parts } => {
                let mut terms = vec!["_".to_string(); tensor.shape.len()];
                terms[0] = join(&[tp, fsdp], parts);
                terms
            }
            Role::Heads { parts } => {
                self.check_heads(tensor, parts)?;
                let rows: Vec<u64> = parts.iter().map(|part| part.rows).collect();
                vec![join(&[tp, fsdp], &rows), "_".into()]
            }
            Role::Row => vec![join(&[fsdp], &[]), join(&[tp], &[])],
            Role::Whole => {
                let mut terms = vec!["_".to_string(); tensor.shape.len()];
                terms.iter_mut().take(1).for_each(|term| *term = join(&[fsdp], &[]));
                terms
            }
            Role::Experts { row: true, parts } => {
                vec![join(&[ep, fsdp], &[]), join(&[tp], parts), "_".into()]
            }
            Role::Experts { row: false, .. } => vec![join(&[ep, fsdp], &[]), "_".into(), join(&[tp], &[])],
        })
    }

    fn check_heads(&self, tensor: &ModelTensor, parts: &[HeadPart]) -> Result<(), ParallelError> {
        let tp = self.len(Kind::Tp);
        match parts.iter().find(|part| !part.heads.is_multiple_of(u64::from(tp))) {
            None => Ok(()),
            Some(part) => Err(ParallelError::HeadsSplit { name: tensor.name.clone(), heads: part.heads, tp }),
        }
    }

    /// Fewer KV heads than ranks along `tp`: neighbours hold the same head.
    fn replicated_heads(
        &self,
        model: &Model,
        tensor: &ModelTensor,
        parts: &[HeadPart],
        mesh: Mesh,
    ) -> Result<Layout, ParallelError> {
        let tp = self.len(Kind::Tp);
        let (name, few) = (tensor.name.clone(), parts.iter().map(|part| part.heads).min().unwrap_or(1));
        let whole = |part: &HeadPart| {
            part.heads.is_multiple_of(u64::from(tp)) || u64::from(tp).is_multiple_of(part.heads)
        };
        if let Some(part) = parts.iter().find(|part| !whole(part)) {
            return Err(ParallelError::HeadsSplit { name, heads: part.heads, tp });
        }
        if self.has(Kind::Fsdp) {
            return Err(ParallelError::ReplicatedHeads { name, heads: few, tp });
        }
        let axis = mesh.axis_index("tp").unwrap_or(0);
        let columns = tensor.shape[1];
        let held = |position: usize| {
            let at = u64::from(mesh.coord(position)[axis]);
            let (mut start, mut offset, mut boxes) = (0, 0, vec![]);
            for part in parts {
                let rows = (part.rows / u64::from(tp)).max(part.rows / part.heads);
                let first = start + at * part.rows / u64::from(tp) / rows * rows;
                let region = Region::new(vec![Span::new(first, first + rows), Span::new(0, columns)]);
                boxes.push(HeldBox::packed(region, offset));
                (start, offset) = (start + part.rows, offset + rows * columns);
            }
            boxes
        };
        let positions = (0..mesh.len()).map(held).collect();
        let ranks = RankList(mesh.ranks.as_deref().unwrap_or_default()).to_string();
        Layout::of_boxes(model.dtype, tensor.shape.clone(), mesh, positions)
            .map_err(|error| ParallelError::Layout { name, why: format!("on ranks {ranks}: {error}") })
    }
}
