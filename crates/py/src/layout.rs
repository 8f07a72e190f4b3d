//! Layouts.

use crossmesh_comm::arrays::{beside, one_array};
use crossmesh_core::id::Rank;
use crossmesh_core::layout::{HeldBox, Layout as Inner};
use crossmesh_core::region::Region;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::layout_error;

/// A tensor's dtype and shape, its mesh, and who holds what of it.
///
/// `dims` says for every dim which axes split it: `None` (whole), `"tp"`, `"tp+dp"` or `("tp", "dp")`, and all else that the
/// notation knows, such as `"tp of 4096+1024+1024"`. `partial` names axes along which values are parts, to be combined by `op`.
///
/// >>> import crossmesh as cm
/// >>> print(cm.Layout("f32", (8, 6), cm.Mesh("A", dp=2, tp=4), ("tp", None), partial="dp"))
/// f32[8,6]@A{dp:2,tp:4}(tp,_ | sum dp)
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

fn spans(region: &Region) -> Spans {
    region.spans().iter().map(|s| (s.start, s.end)).collect()
}

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

    /// A rank's shard as one array: its shape, and where its boxes lie in it; None where it holds nothing.
    fn array(&self, rank: u32) -> PyResult<Option<(Vec<u64>, Vec<Region>)>> {
        let held = self.0.held_at(&self.in_mesh(rank)?);
        if held.is_empty() {
            return Ok(None);
        }
        let place = |held: &HeldBox| held.is_row_major().then_some(held.offset_elements);
        let boxes: Vec<_> = held.iter().map(|held| (&held.region, place(held))).collect();
        let Some((shape, dim)) = one_array(&boxes) else {
            return Err(layout_error(format!(
                "the shard of rank {rank} is {} boxes that are no one array: {}\nhint: use `boxes`, and one row of `shard_elements`",
                held.len(),
                self.0
            )));
        };
        let regions: Vec<&Region> = held.iter().map(|held| &held.region).collect();
        Ok(Some((shape, beside(&regions, dim))))
    }

    /// Of a shard without elements: how much it has of every dim. Where boxes are listed, nothing of the first.
    fn empty_shape(&self, rank: u32) -> PyResult<Vec<u64>> {
        let coord = self.in_mesh(rank)?;
        let of_boxes =
            || (0..).zip(self.0.shape()).map(|(dim, len)| if dim == 0 { 0 } else { *len }).collect();
        Ok(self.0.by_axes().map_or_else(of_boxes, |by_axes| by_axes.lens_at(&coord)))
    }

    /// Axes by name.
    fn names(&self, axes: &[usize]) -> Vec<&str> {
        axes.iter().map(|axis| self.0.mesh().axes()[*axis].name.as_str()).collect()
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
        Ok(boxes.iter().map(spans).collect())
    }

    /// How many elements the memory of a rank's shard has room for.
    pub fn shard_elements(&self, rank: u32) -> PyResult<u64> {
        Ok(self.0.shard_elements(&self.in_mesh(rank)?))
    }

    /// The shape of a rank's shard as one array: boxes that differ in one dim lie beside each other along it, as of fused tensors.
    pub fn shard_shape(&self, rank: u32) -> PyResult<Vec<u64>> {
        match self.array(rank)? {
            Some((shape, _)) => Ok(shape),
            None => self.empty_shape(rank),
        }
    }

    /// Where each of `boxes` lies in the array of `shard_shape`: `array[local] = tensor[box]`.
    ///
    /// >>> import crossmesh as cm
    /// >>> layout = cm.Layout.parse("bf16[4,6]@A{tp:2}(_,tp of 4+2)")
    /// >>> layout.boxes(1), layout.shard_shape(1)
    /// ([[(0, 4), (2, 4)], [(0, 4), (5, 6)]], [4, 3])
    /// >>> layout.local_boxes(1)
    /// [[(0, 4), (0, 2)], [(0, 4), (2, 3)]]
    fn local_boxes(&self, rank: u32) -> PyResult<Vec<Spans>> {
        Ok(self.array(rank)?.map_or_else(Vec::new, |(_, places)| places.iter().map(spans).collect()))
    }

    /// For every dim the axes that chunk it, major first, which is all that torch's placements and JAX's specs can say; raises
    /// LayoutError naming what they cannot.
    ///
    /// >>> import crossmesh as cm
    /// >>> cm.Layout.parse("f32[8,6]@A{dp:2,tp:2}(tp+dp,_)").chunking_axes()
    /// [['tp', 'dp'], []]
    fn chunking_axes(&self) -> PyResult<Vec<Vec<&str>>> {
        let dims = self.0.chunking_axes().map_err(layout_error)?;
        Ok(dims.into_iter().map(|axes| self.names(axes)).collect())
    }

    /// The axes along which values are parts that still have to be combined; none where they are whole.
    #[getter]
    fn partial(&self) -> Vec<&str> {
        self.0.partial().map_or_else(Vec::new, |partial| self.names(&partial.axes))
    }

    /// How parts combine: `sum`, `max` or `min`; None where values are whole.
    #[getter]
    fn op(&self) -> Option<&'static str> {
        self.0.partial().map(|partial| partial.op.name())
    }
}
