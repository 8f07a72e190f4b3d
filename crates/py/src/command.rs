//! The command `crossmesh`, where the package was installed without it.

use pyo3::prelude::*;

/// Runs the command with these arguments, the first being its own name, and returns its exit status. `again` are the words that start it.
#[pyfunction]
pub fn main(py: Python<'_>, arguments: Vec<std::ffi::OsString>, again: Vec<std::ffi::OsString>) -> u8 {
    crossmesh_cli::started_by(again);
    py.detach(|| crossmesh_cli::main_with(arguments))
}
