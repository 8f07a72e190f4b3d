//! The Python module `crossmesh._native`: layouts, plans and jobs as Python sees them.
//!
//! ```text
//! python/crossmesh   names, keywords, torch and JAX        this crate converts        crossmesh-cli, -core decide and say
//! ```
//!
//! Whatever takes long runs without the interpreter's lock.

#![allow(rustdoc::broken_intra_doc_links, reason = "docstrings are Python's, where brackets are no links")]

mod array;
mod bind;
mod checkpoint;
mod command;
mod digest;
#[expect(unsafe_code, reason = "DLPack is C structures behind pointers")]
mod dlpack;
mod errors;
mod fingerprint;
mod job;
mod layout;
mod model;
mod plan;
mod simulation;
mod snapshot;

use pyo3::prelude::*;

/// What Python imports.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::array::{Array, arrays, dtype, sharing};
    #[pymodule_export]
    use crate::checkpoint::{Checkpoint, CheckpointError};
    #[pymodule_export]
    use crate::command::main;
    #[pymodule_export]
    use crate::digest::digests;
    #[pymodule_export]
    use crate::errors::{
        ArrayError, CommError, CrossmeshError, HandleError, JobError, LayoutError, PlanError,
    };
    #[pymodule_export]
    use crate::job::{Handle, Job, Report, host, join};
    #[pymodule_export]
    use crate::layout::Layout;
    #[pymodule_export]
    use crate::model::Model;
    #[pymodule_export]
    use crate::plan::{Plan, plan, read_plan};
    #[pymodule_export]
    use crate::simulation::Simulation;
    #[pymodule_export]
    use crate::snapshot::copy_in;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
