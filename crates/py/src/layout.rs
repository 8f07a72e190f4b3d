//! Layouts.

use crossmesh_core::id::Rank;
use crossmesh_core::layout::Layout as Inner;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::layout_error;

/// A tensor's dtype and shape, its mesh, and who holds what of it.
#[pyclass(frozen, eq, hash, str, from_py_object, module = "crossmesh", name = "Layout")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Layout(pub Inner);

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A box: start and end of every dim.
type Spans = Vec<(u64, u64)>;

impl Layout {
    /// The coordinate of a rank: where the mesh lists ranks, of the one that it names; else they count from 0.
    fn coord(&self, rank: u32) -> Option<Vec<u32>> {
        let mesh = self.0.mesh();
        let position = match mesh.listed_ranks() {
            Some(ranks) => ranks.iter().position(|r| *r == Rank(rank))?,
            None => rank as usize,
        };
        (position < mesh.len()).then(|| mesh.coord(position))
    }

    fn in_mesh(&self, rank: u32) -> PyResult<Vec<u32>> {
        let mesh = self.0.mesh();
        self.coord(rank).ok_or_else(|| PyIndexError::new_err(format!("rank {rank} is not in mesh {mesh}")))
    }
}

/// `None`, `"tp"` or `("tp", "dp")`.
fn term(term: &Bound<'_, PyAny>) -> PyResult<String> {
    if term.is_none() {
        return Ok("_".into());
    }
    match term.extract::<String>() {
        Ok(text) => Ok(text),
        Err(_) => Ok(term.extract::<Vec<String>>()?.join("+")),
    }
}

/// The notation's word for a dtype of torch, numpy or JAX: the last word of its name.
fn dtype_name(dtype: &Bound<'_, PyAny>) -> PyResult<String> {
    let named = |attribute: &str| dtype.getattr(attribute).ok()?.extract::<String>().ok();
    let name = match dtype.extract::<String>() {
        Ok(text) => text,
        Err(_) => named("name").or_else(|| named("__name__")).map_or_else(|| dtype.str()?.extract(), Ok)?,
    };
    Ok(name.rsplit('.').next().unwrap_or_default().to_string())
}

#[pymethods]
impl Layout {
    /// Who holds what of a tensor.
    ///
    /// `dims` says for every dim which axes split it: `None` (whole), `"tp"`, `"tp+dp"` or `("tp", "dp")`, and all else that the
    /// notation knows, such as `"tp of 4096+1024+1024"`. `partial` names axes along which values are parts, to be combined by `op`.
    ///
    /// >>> import crossmesh as cm
    /// >>> print(cm.Layout("f32", (8, 6), cm.Mesh("A", dp=2, tp=4), ("tp", None), partial="dp"))
    /// f32[8,6]@A{dp:2,tp:4}(tp,_ | sum dp)
    #[new]
    #[pyo3(signature = (dtype, shape, mesh, dims, *, partial=None, op="sum"))]
    fn new(
        dtype: &Bound<'_, PyAny>,
        shape: Vec<u64>,
        mesh: &Bound<'_, PyAny>,
        dims: Vec<Bound<'_, PyAny>>,
        partial: Option<Bound<'_, PyAny>>,
        op: &str,
    ) -> PyResult<Self> {
        let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let terms = dims.iter().map(term).collect::<PyResult<Vec<_>>>()?;
        let parts = partial.map(|axes| term(&axes)).transpose()?;
        let parts = parts.map_or(String::new(), |axes| format!(" | {op} {axes}"));
        let mesh: String = mesh.str()?.extract()?;
        Self::parse(&format!(
            "{}[{}]@{mesh}({}{parts})",
            dtype_name(dtype)?,
            sizes.join(","),
            terms.join(",")
        ))
    }

    /// Reads a layout: `Layout.parse("f32[8,6]@A{dp:2,tp:4}(tp,_)")`. Alpa's, torch's and JAX's notations are read too.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        text.parse().map(Self).map_err(layout_error)
    }

    fn __repr__(&self) -> String {
        format!("Layout.parse('{}')", self.0)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.0.shape().to_vec()
    }

    /// Bytes of the whole tensor, once.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }

    #[getter]
    fn mesh(&self) -> String {
        self.0.mesh().to_string()
    }

    /// The mesh's axes and their lengths, in order.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let axes = PyDict::new(py);
        for axis in self.0.mesh().axes() {
            axes.set_item(&axis.name, axis.len)?;
        }
        Ok(axes)
    }

    /// The ranks that the mesh lists; counted from 0 where it lists none.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        let mesh = self.0.mesh();
        let listed = mesh.listed_ranks().map(|ranks| ranks.iter().map(|r| r.0).collect());
        listed.unwrap_or_else(|| (0..mesh.len() as u32).collect())
    }

    /// How many parts the values are combined from: 1 where they are whole.
    #[getter]
    fn num_parts(&self) -> usize {
        self.0.num_contributions()
    }

    /// Whether a rank holds anything.
    pub fn holds(&self, rank: u32) -> bool {
        self.coord(rank).is_some_and(|coord| !self.0.shard_at(&coord).is_empty())
    }

    /// Which part of a partial sum a rank holds.
    fn part(&self, rank: u32) -> PyResult<usize> {
        Ok(self.0.contribution_at(&self.in_mesh(rank)?))
    }

    /// The boxes that a rank holds, in the order of its memory.
    fn boxes(&self, rank: u32) -> PyResult<Vec<Spans>> {
        let boxes = self.0.shard_at(&self.in_mesh(rank)?);
        Ok(boxes.iter().map(|b| b.spans().iter().map(|s| (s.start, s.end)).collect()).collect())
    }

    /// How many elements the memory of a rank's shard has room for.
    pub fn shard_elements(&self, rank: u32) -> PyResult<u64> {
        Ok(self.0.shard_elements(&self.in_mesh(rank)?))
    }

    /// The shape of a rank's shard as one array: boxes that differ in one dim lie behind each other in it, as of fused tensors.
    pub fn shard_shape(&self, rank: u32) -> PyResult<Vec<u64>> {
        let boxes = self.0.shard_at(&self.in_mesh(rank)?);
        if boxes.is_empty() {
            return Ok(empty_shape(self.0.shape()));
        }
        let shape =
            crossmesh_comm::arrays::stacked(&boxes.iter().collect::<Vec<_>>()).map(|(shape, _)| shape);
        shape.ok_or_else(|| {
            layout_error(format!(
                "the shard of rank {rank} is {} boxes that are no one array: {}\nhint: use `boxes` and `shard_elements`",
                boxes.len(),
                self.0
            ))
        })
    }
}

/// Of a shard without elements: the first dim is what is missing.
fn empty_shape(shape: &[u64]) -> Vec<u64> {
    let mut shape = shape.to_vec();
    if let Some(first) = shape.first_mut() {
        *first = 0;
    }
    shape
}
