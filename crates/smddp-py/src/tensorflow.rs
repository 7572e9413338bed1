//! The ops of TensorFlow: which group they use.

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

use crate::comm::Comm;

/// Tells the TensorFlow that this process has loaded of the ops, once, and which group they use from now on (none: they
/// fail).
///
/// Raises ImportError where no TensorFlow is loaded, or one without a function that is needed.
#[pyfunction]
#[pyo3(signature = (comm))]
pub(crate) fn tensorflow(comm: Option<&Comm>) -> PyResult<()> {
    smddp_tensorflow::register().map_err(PyImportError::new_err)?;
    smddp_tensorflow::set_group(comm.map(|comm| comm.communicator().clone()));
    Ok(())
}

/// Whether an op of a step is under way, on any thread.
#[pyfunction]
pub(crate) fn tensorflow_waits() -> bool {
    smddp_tensorflow::any_under_way()
}
