//! The plan document, `crossmesh.plan/1`: a plan as JSON, complete in itself.
//!
//! ```json
//! { "schema": "crossmesh.plan/1", "src": "f32[4]@A{x:2}(x)", "dst": "f32[4]@B{x:1}(_)", "strategy": "flow",
//!   "devices": [{"rank": 0, "host": 0, "meshes": ["A"]}],
//!   "bytes": 16, "lower_bound_s": 1.28e-8, "predicted_s": 1.28e-8, "peak_extra_bytes": 0,
//!   "transfers": [{"id": 0, "src": 0, "dst": 2, "region": [[0, 2]], "bytes": 8, "link": "nic", "after": []}] }
//! ```
//!
//! Beside these a document carries what they leave open: the `tensors` where there are several, the resolved `cluster`,
//! `chunk_bytes`, `reasons`, what each of many tensors costs, and for a transfer its `tensor` (if not the first), its `weight` (if not its bytes), its
//! `lane` (if not the usual one), what it `reduce`s by, and whether the receiver `then_own` adds its own part. A plan
//! without sums is complete without all of them.
//!
//! Reading trusts nothing: what contradicts itself is refused with the transfer and the field.

mod cluster;
mod error;
mod read;

use serde::{Deserialize, Serialize};

pub use cluster::{ClusterDoc, GroupDoc, HostDoc, TierDoc};
pub use error::PlanDocError;

use crate::id::TransferId;

use super::plan::{Plan, Transfer};

/// The one schema this program reads and writes.
pub const SCHEMA: &str = "crossmesh.plan/1";

/// A plan file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanDoc {
    pub schema: String,
    /// The layouts, where there is one tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub src: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dst: Option<String>,
    #[serde(default)]
    pub tensors: Vec<TensorDoc>,
    pub strategy: String,
    pub devices: Vec<DeviceDoc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterDoc>,
    /// Over all transfers.
    pub bytes: u64,
    pub lower_bound_s: f64,
    pub predicted_s: f64,
    pub peak_extra_bytes: u64,
    /// What was assumed of hosts that nobody described, where people should know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assumed: Option<String>,
    /// Of which tensors have shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busiest_link: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_bytes: Option<u64>,
    #[serde(default)]
    pub reasons: Vec<String>,
    pub transfers: Vec<TransferDoc>,
}

/// One tensor and its two layouts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorDoc {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub src: String,
    pub dst: String,
    /// Predicted, where there are several tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostDoc>,
}

/// What a tensor costs among others. Whoever reads a plan need not believe it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostDoc {
    pub bytes_moved: u64,
    pub transfers: u64,
    /// When its first byte leaves and its last one arrives.
    pub start_s: f64,
    pub end_s: f64,
    /// Of the bytes that the busiest link carries.
    pub share_of_busiest_link: f64,
}

/// Where a rank is, and the meshes it is in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceDoc {
    pub rank: u32,
    pub host: u32,
    #[serde(default)]
    pub meshes: Vec<String>,
}

/// One box on its way from one rank to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransferDoc {
    pub id: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tensor: u32,
    pub src: u32,
    pub dst: u32,
    pub region: Vec<[u64; 2]>,
    pub bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub then_own: bool,
    pub link: LinkKind,
    pub after: Vec<u32>,
}

/// What a transfer travels over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// From host to host.
    Nic,
    /// Inside a host.
    Local,
}

impl LinkKind {
    pub fn of(plan: &Plan, transfer: &Transfer) -> Self {
        if plan.crosses_hosts(transfer) { LinkKind::Nic } else { LinkKind::Local }
    }

    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Nic => "nic",
            LinkKind::Local => "local",
        }
    }
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

/// What is known of a plan beside the plan itself.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Figures {
    pub lower_bound_s: f64,
    pub predicted_s: f64,
    /// The most over all ranks.
    pub peak_extra_bytes: u64,
}

impl PlanDoc {
    pub fn new(plan: &Plan, figures: Figures) -> Self {
        let tensors: Vec<TensorDoc> = plan.problem.reshards.iter().map(TensorDoc::new).collect();
        let only = match tensors.as_slice() {
            [only] => Some(only.clone()),
            _ => None,
        };
        Self {
            schema: SCHEMA.into(),
            src: only.as_ref().map(|t| t.src.clone()),
            dst: only.map(|t| t.dst),
            tensors,
            strategy: plan.strategy.clone(),
            devices: devices(plan),
            cluster: Some(ClusterDoc::new(&plan.problem.cluster)),
            bytes: plan.bytes_moved(),
            lower_bound_s: figures.lower_bound_s,
            predicted_s: figures.predicted_s,
            peak_extra_bytes: figures.peak_extra_bytes,
            assumed: None,
            busiest_link: None,
            chunk_bytes: Some(plan.chunk_bytes),
            reasons: plan.reasons.clone(),
            transfers: (0..).zip(plan.transfers()).map(|(id, t)| TransferDoc::new(plan, id, t)).collect(),
        }
    }

    /// With what every tensor costs, in the order of the plan.
    pub fn with_costs(mut self, busiest_link: String, costs: impl IntoIterator<Item = CostDoc>) -> Self {
        self.busiest_link = Some(busiest_link);
        for (tensor, cost) in self.tensors.iter_mut().zip(costs) {
            tensor.cost = Some(cost);
        }
        self
    }

    /// The id under which the document lists a transfer of its plan. Ids rise, but may leave gaps.
    pub fn id_of(&self, transfer: TransferId) -> TransferId {
        self.transfers.get(transfer.index()).map_or(transfer, |t| TransferId(t.id))
    }

    /// The document as text: a field a line, and a line for every device and every transfer.
    pub fn to_json(&self) -> String {
        let mut out = String::with_capacity(160 * self.transfers.len() + 1024);
        let mut separator = "{";
        let mut field = |name: &str, value: String| {
            out.push_str(separator);
            out.push_str(&format!("\n  \"{name}\": {value}"));
            separator = ",";
        };
        field("schema", json(&self.schema));
        if let (Some(src), Some(dst)) = (&self.src, &self.dst) {
            field("src", json(src));
            field("dst", json(dst));
        }
        field("tensors", lines(&self.tensors));
        field("strategy", json(&self.strategy));
        field("devices", lines(&self.devices));
        if let Some(cluster) = &self.cluster {
            field("cluster", json(cluster));
        }
        field("bytes", self.bytes.to_string());
        field("lower_bound_s", json(&self.lower_bound_s));
        field("predicted_s", json(&self.predicted_s));
        field("peak_extra_bytes", self.peak_extra_bytes.to_string());
        if let Some(assumed) = &self.assumed {
            field("assumed", json(assumed));
        }
        if let Some(link) = &self.busiest_link {
            field("busiest_link", json(link));
        }
        if let Some(chunk_bytes) = self.chunk_bytes {
            field("chunk_bytes", chunk_bytes.to_string());
        }
        field("reasons", lines(&self.reasons));
        field("transfers", lines(&self.transfers));
        out.push_str("\n}\n");
        out
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and lists of them always serialize")
}

fn lines(values: &[impl Serialize]) -> String {
    let mut out = String::from("[");
    for (i, value) in values.iter().enumerate() {
        out.push_str(if i == 0 { "\n    " } else { ",\n    " });
        out.push_str(&json(value));
    }
    out.push_str(if values.is_empty() { "]" } else { "\n  ]" });
    out
}

impl TensorDoc {
    fn new(reshard: &super::Reshard) -> Self {
        let (src, dst) = (reshard.src.layout.to_string(), reshard.dst.layout.to_string());
        Self { name: reshard.name.clone(), src, dst, cost: None }
    }
}

fn devices(plan: &Plan) -> Vec<DeviceDoc> {
    let meshes = plan.problem.meshes_of_ranks();
    let device = |rank: u32| {
        let rank = crate::id::Rank(rank);
        let meshes = meshes.get(&rank).into_iter().flatten().map(|m| m.to_string()).collect();
        DeviceDoc { rank: rank.0, host: plan.problem.topology.host(rank).0, meshes }
    };
    (0..plan.problem.topology.num_ranks() as u32).map(device).collect()
}

impl TransferDoc {
    fn new(plan: &Plan, id: u32, t: &Transfer) -> Self {
        let partial = plan.problem.reshards[t.tensor as usize].src.layout.partial();
        Self {
            id,
            tensor: t.tensor,
            src: t.src.0,
            dst: t.dst.0,
            region: plan.region(t).spans().iter().map(|s| [s.start, s.end]).collect(),
            bytes: t.bytes,
            weight: (t.weight != t.bytes.max(1)).then_some(t.weight),
            lane: plan.has_own_lane(TransferId(id)).then_some(t.lane),
            reduce: t.reduce.then(|| partial.map_or("sum", |p| p.op.name()).into()),
            then_own: t.then_own,
            link: LinkKind::of(plan, t),
            after: plan.after(t).iter().map(|a| a.0).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
