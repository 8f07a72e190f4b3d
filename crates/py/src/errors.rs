//! What goes wrong, as Python's exceptions. Their texts are the ones that the command prints.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(crossmesh, CrossmeshError, PyException, "Anything that crossmesh could not do.");
create_exception!(
    crossmesh,
    LayoutError,
    CrossmeshError,
    "A layout that says nothing, or contradicts itself."
);
create_exception!(crossmesh, PlanError, CrossmeshError, "Why there is no plan, or a plan is wrong.");

/// An error of a layout's notation, with the caret under what it is about.
pub fn layout_error(error: impl std::fmt::Display) -> PyErr {
    LayoutError::new_err(error.to_string())
}

pub fn plan_error(error: impl std::fmt::Display) -> PyErr {
    PlanError::new_err(error.to_string())
}
