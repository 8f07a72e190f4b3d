//! A plan on a cluster, simulated.

use crossmesh_cli::predict::Prediction;
use crossmesh_cli::simulation::{document, render, trace};
use pyo3::prelude::*;

use crate::errors::plan_error;

/// How long a plan takes on a cluster, and why; made by `Plan.simulate`. Printed, it is what `crossmesh simulate` prints.
#[pyclass(frozen, module = "crossmesh", name = "Simulation")]
pub struct Simulation(pub Prediction);

#[pymethods]
impl Simulation {
    /// How long it takes, in seconds.
    #[getter]
    fn predicted_s(&self) -> f64 {
        self.0.seconds()
    }

    /// No plan is faster there, in seconds.
    #[getter]
    fn lower_bound_s(&self) -> f64 {
        self.0.bound.seconds
    }

    /// The predicted time over the bound.
    #[getter]
    fn gap(&self) -> f64 {
        self.0.ratio()
    }

    /// The most memory that a rank needs beside its tensors.
    #[getter]
    fn peak_extra_bytes(&self) -> u64 {
        self.0.peak_extra_bytes()
    }

    /// The document `crossmesh.simulation/1`: links, tensors and the critical path.
    fn to_json(&self) -> PyResult<String> {
        document(&self.0).map_err(|error| plan_error(format!("{error:#}")))
    }

    /// The run as a Chrome trace, for ui.perfetto.dev.
    fn trace(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| trace(&self.0)).map_err(|error| plan_error(format!("{error:#}")))
    }

    fn __str__(&self) -> String {
        render(&self.0)
    }

    fn __repr__(&self) -> String {
        format!("<Simulation: {} s, {:.3} x the bound>", self.0.seconds(), self.0.ratio())
    }
}
