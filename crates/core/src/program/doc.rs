//! The program document, `crossmesh.program/1`: docs/program-format.md.
//!
//! Reading takes what a file says for what it is: that ids lead somewhere, that boxes fit and that nothing waits in a cycle is
//! for [`crate::verify`] to say. Here only what could not be held in memory is refused.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    BoxTable, Buffer, Dep, DepKind, Holds, List, MemoryKind, Moved, OpKind, Parts, Program, RankProgram,
    Role, Tensor, Tile, TileId,
};
use crate::cluster::Cluster;
use crate::id::{Rank, RegionId};
use crate::layout::{MAX_DIMS, ReduceOp};
use crate::region::{Region, Span};
use crate::reshard::doc::{ClusterDoc, PlanDocError};

pub const SCHEMA: &str = "crossmesh.program/1";

/// The kind of memory that buffers are in where a document says nothing.
const HOST: &str = "host";

/// More ranks than a cluster may have devices are taken for a damaged file.
const MAX_RANKS: u32 = 1 << 20;

/// Why a document is not a program.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramDocError {
    #[error("not a program document: {message} (line {line}, column {column})")]
    Json { line: usize, column: usize, message: String },
    #[error(
        "the program has schema `{schema}`, newer than this program's `{SCHEMA}`\nhint: use the version of crossmesh that wrote it"
    )]
    NewerSchema { schema: String },
    #[error("unknown schema `{schema}`\nhint: a program document starts with \"schema\": \"{SCHEMA}\"")]
    UnknownSchema { schema: String },
    #[error("`num_ranks` is {found}, at most {MAX_RANKS} can be had")]
    TooManyRanks { found: u32 },
    #[error("`ranks` lists rank {rank}, `num_ranks` is {num_ranks}")]
    NoSuchRank { rank: u32, num_ranks: u32 },
    #[error("`ranks` lists rank {rank} twice")]
    RankTwice { rank: u32 },
    #[error("tensor {tensor}: `{field}` cannot be {value}")]
    BadTensor { tensor: usize, field: &'static str, value: String },
    #[error("box {index}: it runs backwards in dim {dim}, or has more than {MAX_DIMS} dims")]
    BadBox { index: usize, dim: usize },
    #[error("r{rank}, {what} {index}: `{field}` cannot be {value}")]
    BadField { rank: u32, what: &'static str, index: usize, field: &'static str, value: String },
    #[error("the document has more than 2^32 {what}")]
    TooLarge { what: &'static str },
    #[error(
        "the program has {ranks} ranks, its cluster {devices} devices\nhint: describe a larger `cluster`, or leave it out"
    )]
    FewDevices { ranks: u32, devices: usize },
    #[error(transparent)]
    Cluster(PlanDocError),
}

/// A program as a document. Ranks with nothing to do are left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramDoc {
    pub schema: String,
    pub num_ranks: u32,
    /// Missing where nobody follows what has half arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<u64>,
    /// Where it is to run; the program itself does not need it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterDoc>,
    pub tensors: Vec<TensorDoc>,
    pub boxes: Vec<Vec<[u64; 2]>>,
    pub ranks: Vec<RankDoc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorDoc {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<PartialDoc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartialDoc {
    pub op: String,
    pub parts: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankDoc {
    pub rank: u32,
    pub buffers: Vec<BufferDoc>,
    pub tiles: Vec<TileDoc>,
    pub ops: Vec<OpDoc>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BufferDoc {
    pub bytes: u64,
    pub role: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<u32>,
    /// Missing where it is `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TileDoc {
    pub tensor: u32,
    #[serde(rename = "box")]
    pub region: u32,
    pub buffer: u32,
    pub offset: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<u64>>,
    /// `source`, `goal`, `made` or, where it is missing, whatever passes through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<u32>,
}

/// An op of any kind; the fields that others have are missing.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OpDoc {
    pub op: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<u32>,
    #[serde(rename = "box", skip_serializing_if = "Option::is_none")]
    pub region: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub into: Option<u32>,
    #[serde(skip_serializing_if = "is_false")]
    pub reduce: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nanos: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub makes: Vec<u32>,
    /// Ops that end first, and ops that it follows as they go.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub follows: Vec<u32>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl ProgramDoc {
    pub fn new(program: &Program, cluster: Option<&Cluster>) -> Self {
        let busy = (0..).zip(&program.ranks).filter(|(_, r)| !r.is_idle());
        Self {
            schema: SCHEMA.into(),
            num_ranks: program.ranks.len() as u32,
            chunk_bytes: Some(program.chunk_bytes).filter(|chunk| *chunk != u64::MAX),
            cluster: cluster.map(ClusterDoc::new),
            tensors: program.tensors.iter().map(TensorDoc::new).collect(),
            boxes: program
                .boxes
                .iter()
                .map(|r| r.spans().iter().map(|s| [s.start, s.end]).collect())
                .collect(),
            ranks: busy.map(|(rank, r)| RankDoc::new(rank, r)).collect(),
        }
    }

    pub fn parse(text: &str) -> Result<Self, ProgramDocError> {
        #[derive(Deserialize)]
        struct Head {
            schema: String,
        }
        let head: Head = serde_json::from_str(text)?;
        if head.schema != SCHEMA {
            let number = head.schema.strip_prefix("crossmesh.program/").and_then(|n| n.parse::<u32>().ok());
            let schema = head.schema;
            return Err(match number {
                Some(n) if n > 1 => ProgramDocError::NewerSchema { schema },
                _ => ProgramDocError::UnknownSchema { schema },
            });
        }
        Ok(serde_json::from_str(text)?)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data is JSON") + "\n"
    }

    pub fn to_program(&self) -> Result<Program, ProgramDocError> {
        let num_ranks = self.num_ranks;
        if num_ranks > MAX_RANKS {
            return Err(ProgramDocError::TooManyRanks { found: num_ranks });
        }
        let tensors =
            self.tensors.iter().enumerate().map(|(i, t)| t.to_tensor(i)).collect::<Result<_, _>>()?;
        let mut boxes = BoxTable::default();
        for (index, spans) in self.boxes.iter().enumerate() {
            boxes.push(to_region(index, spans)?);
        }
        let mut ranks = vec![RankProgram::default(); num_ranks as usize];
        for doc in &self.ranks {
            let rank = doc.rank;
            let slot = ranks.get_mut(rank as usize).ok_or(ProgramDocError::NoSuchRank { rank, num_ranks })?;
            if !slot.is_idle() {
                return Err(ProgramDocError::RankTwice { rank });
            }
            *slot = doc.to_rank()?;
        }
        Ok(Program { chunk_bytes: self.chunk_bytes.unwrap_or(u64::MAX), tensors, boxes, ranks })
    }

    pub fn to_cluster(&self) -> Result<Option<Cluster>, ProgramDocError> {
        let Some(cluster) = &self.cluster else { return Ok(None) };
        let cluster = cluster.to_cluster().map_err(ProgramDocError::Cluster)?;
        match cluster.num_devices() < self.num_ranks as usize {
            true => {
                Err(ProgramDocError::FewDevices { ranks: self.num_ranks, devices: cluster.num_devices() })
            }
            false => Ok(Some(cluster)),
        }
    }
}

fn to_region(index: usize, spans: &[[u64; 2]]) -> Result<Region, ProgramDocError> {
    let backwards = spans.iter().position(|[start, end]| start > end);
    let dim = backwards.or((spans.len() > MAX_DIMS).then_some(MAX_DIMS));
    match dim {
        Some(dim) => Err(ProgramDocError::BadBox { index, dim }),
        None => Ok(Region::new(spans.iter().map(|[start, end]| Span::new(*start, *end)).collect())),
    }
}

impl TensorDoc {
    fn new(tensor: &Tensor) -> Self {
        let partial = tensor.partial.map(|p| PartialDoc { op: p.op.name().into(), parts: p.count });
        let (name, dtype) = (tensor.name.to_string(), tensor.dtype.name().into());
        Self { name, dtype, shape: tensor.shape.to_vec(), partial }
    }

    fn to_tensor(&self, tensor: usize) -> Result<Tensor, ProgramDocError> {
        let bad = |field, value: &str| ProgramDocError::BadTensor { tensor, field, value: value.into() };
        if self.shape.len() > MAX_DIMS {
            return Err(bad("shape", &format!("of {} dims", self.shape.len())));
        }
        let partial = match &self.partial {
            None => None,
            Some(p) => {
                let op = ReduceOp::ALL.into_iter().find(|op| op.name() == p.op);
                Some(Parts { op: op.ok_or_else(|| bad("partial.op", &p.op))?, count: p.parts })
            }
        };
        let dtype = self.dtype.parse().map_err(|_| bad("dtype", &self.dtype))?;
        Ok(Tensor { name: Arc::from(self.name.as_str()), dtype, shape: self.shape.clone().into(), partial })
    }
}

impl RankDoc {
    fn new(rank: u32, ranked: &RankProgram) -> Self {
        Self {
            rank,
            buffers: ranked.buffers.iter().map(BufferDoc::new).collect(),
            tiles: ranked.tiles.iter().map(TileDoc::new).collect(),
            ops: (0..ranked.ops.len()).map(|op| OpDoc::new(ranked, op)).collect(),
        }
    }

    fn to_rank(&self) -> Result<RankProgram, ProgramDocError> {
        let mut ranked = RankProgram::default();
        for (index, buffer) in self.buffers.iter().enumerate() {
            let role = buffer.role().ok_or_else(|| self.bad("buffer", index, "role", &buffer.role))?;
            let memory = buffer.memory.as_deref().unwrap_or(HOST);
            if memory != HOST {
                return Err(self.bad("buffer", index, "memory", memory));
            }
            ranked.buffers.push(Buffer { bytes: buffer.bytes, role, memory: MemoryKind::Host });
        }
        for (index, tile) in self.tiles.iter().enumerate() {
            let holds = tile
                .holds()
                .ok_or_else(|| self.bad("tile", index, "holds", tile.holds.as_deref().unwrap_or_default()))?;
            let strides = tile.strides.as_ref().map(|s| s.as_slice().into());
            let TileDoc { tensor, region, buffer, offset, .. } = *tile;
            ranked.tiles.push(Tile { tensor, region: RegionId(region), buffer, offset, strides, holds });
        }
        let waits: usize = self.ops.iter().map(|o| o.after.len() + o.follows.len()).sum();
        if self.ops.len().max(waits).max(self.tiles.len()) >= u32::MAX as usize {
            return Err(ProgramDocError::TooLarge { what: "ops, tiles or dependencies" });
        }
        for (index, op) in self.ops.iter().enumerate() {
            self.add_op(&mut ranked, index, op)?;
        }
        Ok(ranked)
    }

    fn bad(&self, what: &'static str, index: usize, field: &'static str, value: &str) -> ProgramDocError {
        ProgramDocError::BadField { rank: self.rank, what, index, field, value: value.into() }
    }

    fn add_op(&self, ranked: &mut RankProgram, index: usize, op: &OpDoc) -> Result<(), ProgramDocError> {
        let missing = |field| move || self.bad("op", index, field, "left out");
        let tile = |tile: Option<u32>| tile.map_or(TileId::NOWHERE, TileId);
        let peer = || op.peer.map(Rank).ok_or_else(missing("peer"));
        let tag = || op.tag.ok_or_else(missing("tag"));
        let lane = op.lane.unwrap_or(0);
        let kind = match op.op.as_str() {
            "send" => {
                let weight = op.weight.unwrap_or(op.bytes.unwrap_or(0)).max(1);
                OpKind::Send { to: peer()?, lane, tag: tag()?, weight, from: tile(op.from) }
            }
            "recv" => {
                OpKind::Recv { from: peer()?, lane, tag: tag()?, into: tile(op.into), reduce: op.reduce }
            }
            "copy" => OpKind::Copy { from: tile(op.from), into: tile(op.into), reduce: op.reduce },
            "compute" => OpKind::Compute {
                pass: op.pass.ok_or_else(missing("pass"))?,
                nanos: op.nanos.unwrap_or(0),
                needs: ranked.touch(op.needs.iter().copied().map(TileId)),
                makes: ranked.touch(op.makes.iter().copied().map(TileId)),
            },
            other => return Err(self.bad("op", index, "op", other)),
        };
        let moved = Moved {
            tensor: op.tensor.unwrap_or(0),
            region: RegionId(op.region.unwrap_or(0)),
            bytes: op.bytes.unwrap_or(0),
        };
        let after = op.after.iter().map(|op| Dep::done(*op));
        let follows = op.follows.iter().map(|op| Dep { op: *op, kind: DepKind::Stream });
        let deps: Vec<Dep> = after.chain(follows).collect();
        ranked.push(kind, moved, &deps);
        Ok(())
    }
}

impl BufferDoc {
    fn new(buffer: &Buffer) -> Self {
        let (role, tensor) = match buffer.role {
            Role::Source(tensor) => ("source", Some(tensor)),
            Role::Destination(tensor) => ("destination", Some(tensor)),
            Role::InPlace(tensor) => ("in_place", Some(tensor)),
            Role::Crossing => ("crossing", None),
            Role::Staging => ("staging", None),
        };
        let memory = match buffer.memory {
            MemoryKind::Host => None,
        };
        Self { bytes: buffer.bytes, role: role.into(), tensor, memory }
    }

    fn role(&self) -> Option<Role> {
        match (self.role.as_str(), self.tensor) {
            ("source", Some(tensor)) => Some(Role::Source(tensor)),
            ("destination", Some(tensor)) => Some(Role::Destination(tensor)),
            ("in_place", Some(tensor)) => Some(Role::InPlace(tensor)),
            ("crossing", None) => Some(Role::Crossing),
            ("staging", None) => Some(Role::Staging),
            _ => None,
        }
    }
}

impl TileDoc {
    fn new(tile: &Tile) -> Self {
        let (holds, part) = match tile.holds {
            Holds::Transit => (None, None),
            Holds::Source(part) => (Some("source"), Some(part)),
            Holds::Goal => (Some("goal"), None),
            Holds::Made(part) => (Some("made"), Some(part)),
        };
        Self {
            tensor: tile.tensor,
            region: tile.region.0,
            buffer: tile.buffer,
            offset: tile.offset,
            strides: tile.strides.as_ref().map(|s| s.to_vec()),
            holds: holds.map(Into::into),
            part: part.filter(|part| *part > 0),
        }
    }

    fn holds(&self) -> Option<Holds> {
        match self.holds.as_deref() {
            None => Some(Holds::Transit),
            Some("source") => Some(Holds::Source(self.part.unwrap_or(0))),
            Some("made") => Some(Holds::Made(self.part.unwrap_or(0))),
            Some("goal") => Some(Holds::Goal),
            Some(_) => None,
        }
    }
}

impl OpDoc {
    fn new(ranked: &RankProgram, index: usize) -> Self {
        let op = &ranked.ops[index];
        let tile = |tile: TileId| Some(tile.0).filter(|_| tile != TileId::NOWHERE);
        let tiles = |list: List| ranked.touched(list).iter().map(|t| t.0).collect();
        let waits = |kind: DepKind| {
            ranked.deps(op).iter().filter(|d| d.kind == kind).map(|d| d.op).collect::<Vec<u32>>()
        };
        let moves = !matches!(op.kind, OpKind::Compute { .. });
        let doc = Self {
            tensor: moves.then_some(op.tensor),
            region: (op.bytes > 0).then_some(op.region.0),
            bytes: moves.then_some(op.bytes),
            after: waits(DepKind::Done),
            follows: waits(DepKind::Stream),
            ..Self::default()
        };
        match op.kind {
            OpKind::Send { to, lane, tag, weight, from } => Self {
                op: "send".into(),
                peer: Some(to.0),
                tag: Some(tag),
                lane: Some(lane),
                weight: Some(weight).filter(|w| *w != op.bytes.max(1)),
                from: tile(from),
                ..doc
            },
            OpKind::Recv { from, lane, tag, into, reduce } => Self {
                op: "recv".into(),
                peer: Some(from.0),
                tag: Some(tag),
                lane: Some(lane),
                into: tile(into),
                reduce,
                ..doc
            },
            OpKind::Copy { from, into, reduce } => {
                Self { op: "copy".into(), from: tile(from), into: tile(into), reduce, ..doc }
            }
            OpKind::Compute { pass, nanos, needs, makes } => Self {
                op: "compute".into(),
                pass: Some(pass),
                nanos: Some(nanos),
                needs: tiles(needs),
                makes: tiles(makes),
                ..doc
            },
        }
    }
}

impl From<serde_json::Error> for ProgramDocError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let message = text.split(" at line ").next().unwrap_or(&text).into();
        ProgramDocError::Json { line, column, message }
    }
}
