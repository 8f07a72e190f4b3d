//! Models as tables of tensors.

use crossmesh_core::models::Model as Inner;
use pyo3::prelude::*;

use crate::errors::{layout_error, plan_error};
use crate::layout::Layout;

/// A model's weights: names, shapes, and how jobs cut them.
#[pyclass(frozen, module = "crossmesh", name = "Model")]
pub struct Model(Inner);

#[pymethods]
impl Model {
    /// A model that is known by name, such as `llama3-70b`.
    #[staticmethod]
    fn preset(name: &str) -> PyResult<Self> {
        let known = || Inner::preset_names().collect::<Vec<_>>().join(", ");
        Inner::preset(name)
            .map(Self)
            .ok_or_else(|| layout_error(format!("no model is called `{name}`\nhint: one of {}", known())))
    }

    /// A model from the text of its config.json.
    #[staticmethod]
    fn from_config(text: &str) -> PyResult<Self> {
        Inner::from_config(text).map(Self).map_err(layout_error)
    }

    /// A model from the text of a table of tensors; see `crossmesh.models.from_shapes`.
    #[staticmethod]
    fn from_table(text: &str) -> PyResult<Self> {
        Inner::from_table(text).map(Self).map_err(layout_error)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// How many numbers it has learnt.
    #[getter]
    fn parameters(&self) -> u64 {
        self.0.parameters()
    }

    /// Names and shapes, in the order of the model.
    #[pyo3(signature = (*, fused=false))]
    fn tensors(&self, fused: bool) -> Vec<(String, Vec<u64>)> {
        self.0.tensors(fused).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
    }

    /// Every tensor's layout before and after, of jobs cut like `fsdp 64` and `dp 4, tp 8`.
    #[pyo3(signature = (src, dst, *, fused=false))]
    fn pairs(&self, src: &str, dst: &str, fused: bool) -> PyResult<Vec<(String, Layout, Layout)>> {
        let (src, dst) = (src.parse().map_err(layout_error)?, dst.parse().map_err(layout_error)?);
        let pairs = self.0.pairs(&src, &dst, fused).map_err(plan_error)?;
        Ok(pairs.into_iter().map(|(name, src, dst)| (name, Layout(src), Layout(dst))).collect())
    }

    fn __repr__(&self) -> String {
        format!("<Model {}: {} parameters>", self.0.name, self.0.parameters())
    }
}
