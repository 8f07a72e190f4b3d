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
create_exception!(
    crossmesh,
    ArrayError,
    CrossmeshError,
    "An array that does not fit the plan: its tensor, the rank, what was expected and what was given."
);
create_exception!(crossmesh, JobError, CrossmeshError, "Ranks that do not fit the plan, or each other.");
create_exception!(
    crossmesh,
    HandleError,
    CrossmeshError,
    "A transfer, or a job, that is no longer there to be asked."
);
create_exception!(
    crossmesh,
    CommError,
    CrossmeshError,
    "A transfer that did not come to its end. `culprit` is the rank that is to blame, `tensor` what was under way, where they are known."
);
create_exception!(crossmesh, PlanError, CrossmeshError, "Why there is no plan, or a plan is wrong.");

/// An error of a layout's notation, with the caret under what it is about.
pub fn layout_error(error: impl std::fmt::Display) -> PyErr {
    LayoutError::new_err(error.to_string())
}

pub fn plan_error(error: impl std::fmt::Display) -> PyErr {
    PlanError::new_err(error.to_string())
}

/// What went wrong between ranks.
pub fn comm_error(py: Python<'_>, error: &crossmesh_comm::error::CommError) -> PyErr {
    let raised = CommError::new_err(error.to_string());
    let value = raised.value(py);
    let set = value.setattr("culprit", error.culprit().map(|rank| rank.0));
    set.and_then(|()| value.setattr("tensor", error.tensor())).err().unwrap_or(raised)
}
