//! From text to a document, and from a document to a plan.

use std::collections::HashMap;

use serde::Deserialize;

use crate::cluster::{Cluster, Host};
use crate::id::{Rank, RegionId, TransferId};
use crate::layout::Layout;
use crate::region::{Region, Span};
use crate::reshard::problem::Hosts;
use crate::reshard::{Plan, Problem};

use super::{LinkKind, PlanDoc, PlanDocError, SCHEMA, TensorDoc, TransferDoc};

/// How much to forward at a time where a document does not say.
const DEFAULT_CHUNK_BYTES: u64 = 1 << 20;

/// The part of a document that every version has.
#[derive(Deserialize)]
struct Head {
    schema: String,
}

impl PlanDoc {
    pub fn parse(text: &str) -> Result<Self, PlanDocError> {
        let Head { schema } = serde_json::from_str(text)?;
        if schema == SCHEMA {
            return Ok(serde_json::from_str(text)?);
        }
        let version = schema.strip_prefix("crossmesh.plan/").and_then(|v| v.parse::<u64>().ok());
        match version {
            Some(2..) => Err(PlanDocError::NewerSchema { schema }),
            _ => Err(PlanDocError::UnknownSchema { schema }),
        }
    }

    /// The plan that the document says, once everything it says agrees with itself.
    pub fn to_plan(&self) -> Result<Plan, PlanDocError> {
        self.check_figures()?;
        let problem = self.to_problem()?;
        self.check_meshes(&problem)?;
        let chunk_bytes = self.chunk_bytes.unwrap_or(DEFAULT_CHUNK_BYTES);
        let mut plan = Plan::new(problem, self.strategy.clone(), chunk_bytes);
        plan.reasons = self.reasons.clone();
        let reader = TransferReader::new(self)?;
        reader.read_into(&mut plan)?;
        Ok(plan)
    }

    fn check_figures(&self) -> Result<(), PlanDocError> {
        let seconds = [("lower_bound_s", self.lower_bound_s), ("predicted_s", self.predicted_s)];
        for (field, value) in seconds {
            if !(value.is_finite() && value >= 0.0) {
                return Err(PlanDocError::Figure { field, value: value.to_string() });
            }
        }
        if self.chunk_bytes == Some(0) {
            return Err(PlanDocError::Figure { field: "chunk_bytes", value: "0".into() });
        }
        let afters: usize = self.transfers.iter().map(|t| t.after.len()).sum();
        if self.transfers.len().max(afters) as u64 >= u64::from(u32::MAX) {
            return Err(PlanDocError::TooLarge);
        }
        Ok(())
    }

    fn to_problem(&self) -> Result<Problem, PlanDocError> {
        let cluster = match &self.cluster {
            Some(cluster) => cluster.to_cluster()?,
            None => self.assumed_cluster()?,
        };
        let mut pairs = Vec::new();
        for (i, tensor) in self.tensors()?.into_iter().enumerate() {
            let parse = |side, text: &str| {
                text.parse::<Layout>().map_err(|e| PlanDocError::Layout {
                    tensor: i,
                    side,
                    source: Box::new(e),
                })
            };
            let (src, dst) = (parse("src", &tensor.src)?, parse("dst", &tensor.dst)?);
            pairs.push((tensor.name, src, dst));
        }
        Ok(Problem::new(pairs, Hosts::Described(cluster))?)
    }

    fn tensors(&self) -> Result<Vec<TensorDoc>, PlanDocError> {
        let (Some(src), Some(dst)) = (&self.src, &self.dst) else {
            return if self.tensors.is_empty() {
                Err(PlanDocError::NoTensors)
            } else {
                Ok(self.tensors.clone())
            };
        };
        match self.tensors.as_slice() {
            [] => Ok(vec![TensorDoc { name: String::new(), src: src.clone(), dst: dst.clone(), cost: None }]),
            [only] if only.src == *src && only.dst == *dst => Ok(self.tensors.clone()),
            [first, ..] => Err(PlanDocError::TensorsContradict {
                top: format!("{src} -> {dst}"),
                listed: format!("{} -> {} ({} tensors)", first.src, first.dst, self.tensors.len()),
            }),
        }
    }

    /// The hosts that `devices` speaks of, each like a host nobody described.
    fn assumed_cluster(&self) -> Result<Cluster, PlanDocError> {
        let mut hosts: Vec<Host> = Vec::new();
        for (expected, device) in (0..).zip(&self.devices) {
            if device.rank != expected {
                return Err(PlanDocError::DeviceOrder { expected, found: device.rank });
            }
            match hosts.len() as u32 {
                n if device.host == n => hosts.push(Host::with_devices(1)),
                n if u64::from(device.host) + 1 == u64::from(n) => hosts[n as usize - 1].devices += 1,
                _ => {
                    let why = "but hosts hold consecutive ranks and count up from 0".into();
                    return Err(PlanDocError::DeviceHost { rank: device.rank, host: device.host, why });
                }
            }
        }
        Ok(Cluster::of_hosts(hosts))
    }

    /// What `devices` says against what the layouts and the cluster say.
    fn check_meshes(&self, problem: &Problem) -> Result<(), PlanDocError> {
        let devices = problem.topology.num_ranks();
        if self.devices.len() != devices {
            return Err(PlanDocError::DeviceCount { listed: self.devices.len(), devices });
        }
        let in_meshes = problem.meshes_of_ranks();
        for (expected, device) in (0..).zip(&self.devices) {
            if device.rank != expected {
                return Err(PlanDocError::DeviceOrder { expected, found: device.rank });
            }
            let host = problem.topology.host(Rank(device.rank));
            if host.0 != device.host {
                let why = format!("the cluster on host {}", host.0);
                return Err(PlanDocError::DeviceHost { rank: device.rank, host: device.host, why });
            }
            let meshes = in_meshes.get(&Rank(device.rank)).into_iter().flatten();
            if !device.meshes.is_empty()
                && !meshes.clone().copied().eq(device.meshes.iter().map(String::as_str))
            {
                let (listed, meshes) = (device.meshes.clone(), meshes.map(|m| m.to_string()).collect());
                return Err(PlanDocError::DeviceMeshes { rank: device.rank, listed, meshes });
            }
        }
        Ok(())
    }
}

/// Reads the list of transfers, each box into the table of regions once.
struct TransferReader<'a> {
    doc: &'a PlanDoc,
    /// Ids rise but may leave gaps; then this says which transfer an id is.
    index: Option<HashMap<u32, u32>>,
    regions: HashMap<&'a [[u64; 2]], RegionId>,
}

impl<'a> TransferReader<'a> {
    fn new(doc: &'a PlanDoc) -> Result<Self, PlanDocError> {
        for (i, pair) in doc.transfers.windows(2).enumerate() {
            let (previous, id) = (pair[0].id, pair[1].id);
            if id <= previous {
                let twice = doc.transfers[..=i].iter().any(|t| t.id == id);
                return Err(if twice {
                    PlanDocError::IdTwice { id }
                } else {
                    PlanDocError::IdOrder { id, previous }
                });
            }
        }
        let dense = (0..).zip(&doc.transfers).all(|(i, t)| t.id == i);
        let index = (!dense).then(|| doc.transfers.iter().map(|t| t.id).zip(0..).collect());
        Ok(Self { doc, index, regions: HashMap::new() })
    }

    fn read_into(mut self, plan: &mut Plan) -> Result<(), PlanDocError> {
        let mut after = Vec::new();
        for t in &self.doc.transfers {
            check_ends(plan, t)?;
            let region = self.region_of(plan, t)?;
            after.clear();
            for &id in &t.after {
                after.push(self.find(id).ok_or(PlanDocError::UnknownAfter { id: t.id, after: id })?);
            }
            let id = plan.add(t.tensor, Rank(t.src), Rank(t.dst), region, &after);
            check_transfer(plan, id, t)?;
            let reduce = check_reduce(plan, t)?;
            let added = plan.transfer_mut(id);
            added.reduce = reduce;
            added.then_own = t.then_own;
            added.weight = t.weight.unwrap_or(added.weight);
            added.lane = t.lane.unwrap_or(added.lane);
        }
        Ok(())
    }

    fn find(&self, id: u32) -> Option<TransferId> {
        match &self.index {
            Some(index) => index.get(&id).copied().map(TransferId),
            None => ((id as usize) < self.doc.transfers.len()).then_some(TransferId(id)),
        }
    }

    fn region_of(&mut self, plan: &mut Plan, t: &'a TransferDoc) -> Result<RegionId, PlanDocError> {
        check_region(plan, t)?;
        if let Some(known) = self.regions.get(t.region.as_slice()) {
            return Ok(*known);
        }
        let spans = t.region.iter().map(|&[start, end]| Span::new(start, end)).collect();
        let region = plan.add_region(Region::new(spans));
        self.regions.insert(&t.region, region);
        Ok(region)
    }
}

fn check_ends(plan: &Plan, t: &TransferDoc) -> Result<(), PlanDocError> {
    let (id, devices, tensors) = (t.id, plan.problem.topology.num_ranks(), plan.problem.reshards.len());
    if t.tensor as usize >= tensors {
        return Err(PlanDocError::Tensor { id, tensor: t.tensor, tensors });
    }
    for (field, rank) in [("src", t.src), ("dst", t.dst)] {
        if rank as usize >= devices {
            return Err(PlanDocError::Rank { id, field, rank, devices });
        }
    }
    Ok(())
}

fn check_region(plan: &Plan, t: &TransferDoc) -> Result<(), PlanDocError> {
    let id = t.id;
    let shape = plan.problem.reshards[t.tensor as usize].src.layout.shape();
    if t.region.len() != shape.len() {
        return Err(PlanDocError::RegionDims { id, found: t.region.len(), dims: shape.len() });
    }
    for (dim, (&[start, end], &dim_len)) in t.region.iter().zip(shape).enumerate() {
        if end < start {
            return Err(PlanDocError::RegionBackwards { id, dim, start, end });
        }
        if end > dim_len {
            return Err(PlanDocError::RegionOutside { id, dim, end, dim_len });
        }
    }
    Ok(())
}

/// What a transfer says of itself against what follows from its region and ends.
fn check_transfer(plan: &Plan, id: TransferId, t: &TransferDoc) -> Result<(), PlanDocError> {
    let (added, id) = (&plan.transfers()[id.index()], t.id);
    if added.bytes != t.bytes {
        return Err(PlanDocError::Bytes { id, stated: t.bytes, region_bytes: added.bytes });
    }
    if t.weight == Some(0) {
        return Err(PlanDocError::WeightZero { id });
    }
    if LinkKind::of(plan, added) != t.link {
        let host = |rank| plan.problem.topology.host(Rank(rank)).0;
        let (src, dst, stated) = (t.src, t.dst, t.link.name());
        return Err(PlanDocError::Link { id, stated, src, dst, src_host: host(src), dst_host: host(dst) });
    }
    Ok(())
}

fn check_reduce(plan: &Plan, t: &TransferDoc) -> Result<bool, PlanDocError> {
    let Some(found) = &t.reduce else { return Ok(false) };
    let partial = plan.problem.reshards[t.tensor as usize].src.layout.partial();
    match partial {
        Some(partial) if partial.op.name() == found => Ok(true),
        _ => {
            let expected = partial.map_or("whole values".into(), |p| format!("`{}`", p.op));
            Err(PlanDocError::Reduce { id: t.id, found: found.clone(), expected })
        }
    }
}
