//! Plans: made, read, proven, predicted and shown.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crossmesh_cli::input::{HostArgs, PlanArgs};
use crossmesh_cli::predict::Prediction;
use crossmesh_cli::simulation::predict_on;
use crossmesh_core::cluster::Cluster;
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::program::doc::ProgramDoc;
use crossmesh_core::program::posting::{Matching, Post};
use crossmesh_core::reshard::doc::PlanDoc;
use crossmesh_core::reshard::jobs::offset_destinations;
use crossmesh_core::reshard::lower::{Addressing, posting, project};
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Placed, Plan as Inner, Problem, Reshard, lower_bound, plan as make};
use crossmesh_core::verify::{Verified, verify};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::Array;
use crate::errors::plan_error;
use crate::fingerprint::fingerprint;
use crate::layout::Layout;
use crate::simulation::Simulation;

/// Transfers of boxes that turn source layouts into destination layouts.
#[pyclass(frozen, module = "crossmesh", name = "Plan")]
pub struct Plan {
    plan: Inner,
    /// Made when somebody asks.
    prediction: OnceLock<Prediction>,
    bound_s: OnceLock<f64>,
    verified: OnceLock<Verified>,
    hash: OnceLock<i64>,
    /// Before and after, by tensor.
    layouts: OnceLock<Vec<(Layout, Layout)>>,
    /// Who asked last, and the answer: a plan that runs again is asked again.
    posts: Mutex<Option<(Asked, Arc<Vec<Post>>)>>,
}

/// A rank, and the size of pieces.
type Asked = (u32, Option<u64>);

impl Plan {
    fn new(plan: Inner) -> Self {
        Self {
            plan,
            prediction: OnceLock::new(),
            bound_s: OnceLock::new(),
            verified: OnceLock::new(),
            hash: OnceLock::new(),
            layouts: OnceLock::new(),
            posts: Mutex::default(),
        }
    }

    fn check_rank(&self, rank: u32) -> PyResult<()> {
        let num_ranks = self.plan.problem.topology.num_ranks();
        match (rank as usize) < num_ranks {
            true => Ok(()),
            false => {
                let text = format!("rank {rank}: the plan has ranks 0 to {}", num_ranks - 1);
                Err(PyIndexError::new_err(text))
            }
        }
    }

    fn posts_of(&self, rank: u32, piece_bytes: Option<u64>) -> Result<Arc<Vec<Post>>, String> {
        let known = || self.posts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((asked, posts)) = &*known()
            && *asked == (rank, piece_bytes)
        {
            return Ok(posts.clone());
        }
        let matching = match piece_bytes {
            Some(piece_bytes) => Matching::ByTag { piece_bytes },
            None => Matching::ByOrder,
        };
        let posting = posting(&self.plan, matching).map_err(|e| e.to_string())?;
        let program = project(&self.plan, Rank(rank), Addressing::Apart);
        let posts = Arc::new(posting.of_rank(&program.ranks[rank as usize], Rank(rank)));
        *known() = Some(((rank, piece_bytes), posts.clone()));
        Ok(posts)
    }

    /// The program of all ranks, proven: what an engine takes.
    pub fn verified(&self, py: Python<'_>) -> PyResult<&Verified> {
        if self.verified.get().is_none() {
            let proven = py.detach(|| Verified::plan(&self.plan, Addressing::Apart)).map_err(plan_error)?;
            let _ = self.verified.set(proven); // somebody else's is as good
        }
        Ok(self.verified.get().expect("just made"))
    }

    /// A tensor's name and type.
    pub fn tensor(&self, tensor: u32) -> (&str, DType) {
        let reshard = &self.plan.problem.reshards[tensor as usize];
        (&reshard.name, reshard.src.layout.dtype())
    }

    pub fn knows(&self, name: &str) -> bool {
        self.plan.problem.reshards.iter().any(|reshard| reshard.name == name)
    }

    /// The first few names, for a hint.
    pub fn some_names(&self) -> String {
        let all = &self.plan.problem.reshards;
        let mut names: Vec<String> = all.iter().take(5).map(|r| format!("`{}`", r.name)).collect();
        if all.len() > names.len() {
            names.push(format!("and {} more", all.len() - names.len()));
        }
        names.join(", ")
    }

    /// Layouts whose meshes list their ranks: read once, asked for by every call that makes arrays.
    fn layouts(&self) -> &[(Layout, Layout)] {
        let of = |r: &Reshard| (Layout(listed(&r.src)), Layout(listed(&r.dst)));
        self.layouts.get_or_init(|| self.plan.problem.reshards.iter().map(of).collect())
    }

    /// The plan, proven and simulated.
    fn prediction(&self, py: Python<'_>) -> PyResult<&Prediction> {
        if self.prediction.get().is_none() {
            let made = py.detach(|| Prediction::of_plan(self.plan.clone()));
            let made = made.map_err(|error| plan_error(format!("{error:#}")))?;
            let _ = self.prediction.set(made); // somebody else's is as good
        }
        Ok(self.prediction.get().expect("just made"))
    }
}

#[pymethods]
impl Plan {
    /// Proves that every element arrives exactly once, in an order that cannot get stuck; raises PlanError with the law that is broken.
    fn verify(&self, py: Python<'_>) -> PyResult<String> {
        let proof = py.detach(|| verify(&self.plan)).map_err(plan_error)?;
        Ok(proof.to_string())
    }

    /// How long it takes on its own cluster, or on another: a `Cluster` or the path of a cluster file. `nic`, `nics`, `local` and
    /// `latency` change the cluster's own.
    ///
    /// >>> import crossmesh as cm
    /// >>> plan = cm.plan({"w": ("f32[4096,4096]@A{tp:2}(tp,_)", "f32[4096,4096]@B{tp:4}(_,tp)")}, nic="10Gbit")
    /// >>> slow, fast = plan.simulate(), plan.simulate(nic="100Gbit")
    /// >>> round(slow.predicted_s / fast.predicted_s, 2), round(fast.gap, 2)
    /// (10.0, 1.0)
    #[pyo3(signature = (cluster=None, *, nic=None, nics=None, local=None, latency=None))]
    fn simulate(
        &self,
        py: Python<'_>,
        cluster: Option<Bound<'_, PyAny>>,
        nic: Option<String>,
        nics: Option<u32>,
        local: Option<String>,
        latency: Option<String>,
    ) -> PyResult<Simulation> {
        let read =
            |cluster| py.import("crossmesh")?.call_method1("_cluster", (cluster,))?.extract::<String>();
        let toml = cluster.map(read).transpose()?;
        let hosts = HostArgs { cluster: None, nic, nics, local, latency, devices_per_host: None };
        let program = self.verified(py)?.clone();
        let simulated = py.detach(|| {
            let mut cluster = match &toml {
                Some(toml) => Cluster::from_toml(toml).map_err(|e| format!("the cluster: {e}"))?,
                None => self.plan.problem.cluster.clone(),
            };
            hosts.adjust(&mut cluster).map_err(|e| format!("{e:#}"))?;
            predict_on(self.plan.clone(), program, cluster).map_err(|e| format!("{e:#}"))
        });
        simulated.map(Simulation).map_err(plan_error)
    }

    /// What `crossmesh explain` prints: who sends what to whom, how long it takes, and why.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        Ok(crossmesh_cli::explained(self.prediction(py)?))
    }

    /// The report as one HTML page.
    fn html(&self, py: Python<'_>) -> PyResult<String> {
        let version = format!("crossmesh {}", env!("CARGO_PKG_VERSION"));
        Ok(crossmesh_cli::page(self.prediction(py)?, vec![version]))
    }

    /// The document `crossmesh.plan/1`.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.prediction(py)?.document())
    }

    /// What one rank does, as a document `crossmesh.program/1` in which the others do nothing.
    fn for_rank(&self, py: Python<'_>, rank: u32) -> PyResult<String> {
        self.check_rank(rank)?;
        let program = py.detach(|| project(&self.plan, Rank(rank), Addressing::Apart));
        Ok(ProgramDoc::new(&program, None).to_json())
    }

    /// In which order a rank posts its ops on a transport that it can only post to and wait for, free of deadlock: an op and which piece of
    /// it (of a receive all are posted), the piece's tag, and what has to be over first, as ops and how many pieces of each. With
    /// `piece_bytes` messages are cut, and matched by tag; without they go whole, and are matched by their order alone.
    #[pyo3(signature = (rank, piece_bytes=None))]
    fn posts(&self, py: Python<'_>, rank: u32, piece_bytes: Option<u64>) -> PyResult<Vec<Posted>> {
        self.check_rank(rank)?;
        let posts = py.detach(|| self.posts_of(rank, piece_bytes)).map_err(plan_error)?;
        Ok(posts.iter().map(|post| (post.op, post.piece, post.tag, post.waits.clone())).collect())
    }

    /// No plan is faster, in seconds.
    #[getter]
    fn lower_bound_s(&self, py: Python<'_>) -> PyResult<f64> {
        if let Some(seconds) = self.bound_s.get() {
            return Ok(*seconds);
        }
        let bound = py.detach(|| lower_bound(&self.plan.problem)).map_err(plan_error)?;
        Ok(*self.bound_s.get_or_init(|| bound.seconds))
    }

    /// How long it takes, simulated, in seconds.
    #[getter]
    fn predicted_s(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.prediction(py)?.seconds())
    }

    /// The predicted time over the bound.
    #[getter]
    fn gap(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.prediction(py)?.ratio())
    }

    /// The most memory that a rank needs beside its tensors.
    #[getter]
    fn peak_extra_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.prediction(py)?.peak_extra_bytes())
    }

    #[getter]
    fn strategy(&self) -> &str {
        &self.plan.strategy
    }

    #[getter]
    fn bytes_moved(&self) -> u64 {
        self.plan.bytes_moved()
    }

    #[getter]
    fn num_transfers(&self) -> usize {
        self.plan.transfers().len()
    }

    #[getter]
    pub fn num_ranks(&self) -> usize {
        self.plan.problem.topology.num_ranks()
    }

    /// The tensors in order: a name, the layout before and the layout after. Meshes list their ranks.
    #[getter]
    fn tensors(&self) -> Vec<(String, Layout, Layout)> {
        let names = self.plan.problem.reshards.iter().map(|r| r.name.clone());
        names.zip(self.layouts()).map(|(name, (src, dst))| (name, src.clone(), dst.clone())).collect()
    }

    /// A number that differs where plans do: ranks compare theirs before anything moves.
    #[getter]
    pub fn fingerprint(&self, py: Python<'_>) -> i64 {
        if let Some(hash) = self.hash.get() {
            return *hash;
        }
        // Not inside the cell: who computes there waits for the interpreter, whose holder would wait for the cell.
        let hash = py.detach(|| fingerprint(&self.plan));
        *self.hash.get_or_init(|| hash)
    }

    /// Arrays for what a rank is to get (`side="dst"`), or for what it gives (`"src"`), by name: in memory that ranks of its host read
    /// without a copy.
    #[pyo3(signature = (rank, side="dst"))]
    pub fn empty<'py>(&self, py: Python<'py>, rank: u32, side: &str) -> PyResult<Bound<'py, PyDict>> {
        let mut wanted = vec![];
        let mut names = vec![];
        for (reshard, (src, dst)) in self.plan.problem.reshards.iter().zip(self.layouts()) {
            let layout = match side {
                "dst" => dst,
                "src" => src,
                other => return Err(plan_error(format!("side `{other}` is neither `src` nor `dst`"))),
            };
            if layout.holds(rank) {
                let shape = layout
                    .shard_shape(rank)
                    .or_else(|_| Ok::<_, PyErr>(vec![layout.shard_elements(rank)?]))?;
                wanted.push((layout.0.dtype(), shape));
                names.push(&reshard.name);
            }
        }
        let arrays = py
            .detach(|| Array::make(wanted))
            .map_err(|e| plan_error(format!("no memory for the shards: {e}")))?;
        let out = PyDict::new(py);
        for (name, array) in names.into_iter().zip(arrays) {
            out.set_item(name, Bound::new(py, array)?)?;
        }
        Ok(out)
    }

    fn _repr_html_(&self, py: Python<'_>) -> PyResult<String> {
        let page = self.html(py)?.replace('&', "&amp;").replace('"', "&quot;");
        Ok(format!("<iframe srcdoc=\"{page}\" style=\"width:100%;height:720px;border:0\"></iframe>"))
    }

    fn __repr__(&self) -> String {
        let (tensors, transfers) = (self.plan.problem.reshards.len(), self.plan.transfers().len());
        format!(
            "<Plan of {tensors} tensors: {transfers} transfers, {} B, by {}>",
            self.plan.bytes_moved(),
            self.plan.strategy
        )
    }
}

/// An op, a piece, its tag, and what it waits for: ops and how many pieces of each.
type Posted = (u32, u32, u32, Vec<(u32, u32)>);

/// The layout, whose mesh says which ranks it got.
fn listed(placed: &Placed) -> crossmesh_core::layout::Layout {
    let text = placed.layout.to_string();
    if placed.layout.mesh().listed_ranks().is_some() {
        return placed.layout.clone();
    }
    let mesh = placed.layout.mesh().to_string();
    let ranks = crossmesh_core::mesh::RankList(&placed.ranks).to_string();
    text.replacen(&mesh, &format!("{mesh}={ranks}"), 1).parse().expect("a layout is printed as it is read")
}

/// Plans tensors together: a name, the layout before and the layout after of each. `cluster` is the text of a cluster file.
#[pyfunction]
#[pyo3(signature = (pairs, *, cluster=None, nic=None, nics=None, local=None, latency=None, devices_per_host=None,
    strategy="flow", chunk=None, max_extra_bytes=None, seed=0, dst_rank_offset=None))]
#[expect(clippy::too_many_arguments, reason = "Python's keywords")]
pub fn plan(
    py: Python<'_>,
    pairs: Vec<(String, Layout, Layout)>,
    cluster: Option<&str>,
    nic: Option<String>,
    nics: Option<u32>,
    local: Option<String>,
    latency: Option<String>,
    devices_per_host: Option<u32>,
    strategy: &str,
    chunk: Option<String>,
    max_extra_bytes: Option<String>,
    seed: u64,
    dst_rank_offset: Option<u32>,
) -> PyResult<Plan> {
    let hosts = HostArgs { cluster: None, nic, nics, local, latency, devices_per_host };
    let how = PlanArgs { strategy: Some(strategy.into()), chunk, max_extra_bytes, seed: Some(seed) };
    let pairs: Vec<_> = pairs.into_iter().map(|(name, src, dst)| (name, src.0, dst.0)).collect();
    let planned = py.detach(|| {
        let pairs = match dst_rank_offset {
            Some(offset) => offset_destinations(pairs, offset).map_err(|e| e.to_string())?,
            None => pairs,
        };
        let problem = match cluster {
            None => hosts.problem(pairs).map_err(|e| format!("{e:#}"))?,
            Some(toml) => {
                let mut cluster = Cluster::from_toml(toml).map_err(|e| format!("the cluster: {e}"))?;
                hosts.adjust(&mut cluster).map_err(|e| format!("{e:#}"))?;
                Problem::new(pairs, Hosts::Described(cluster)).map_err(|e| e.to_string())?
            }
        };
        let options = how.options().map_err(|e| format!("{e:#}"))?;
        make(&problem, &options).map_err(|e| e.to_string())
    });
    planned.map(Plan::new).map_err(plan_error)
}

/// Reads a plan document.
#[pyfunction]
pub fn read_plan(text: &str) -> PyResult<Plan> {
    let doc = PlanDoc::parse(text).map_err(plan_error)?;
    doc.to_plan().map(Plan::new).map_err(plan_error)
}
