//! Registration of the TensorFlow ops, and their group.

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

use crate::comm::Comm;

/// Registers the ops once with the TensorFlow that this process has loaded, and sets their group. Without a group the ops
/// fail.
///
/// Raises ImportError if no TensorFlow is loaded, or if it lacks a required function.
#[pyfunction]
#[pyo3(signature = (comm))]
pub(crate) fn tensorflow(comm: Option<&Comm>) -> PyResult<()> {
    smddp_tensorflow::register().map_err(PyImportError::new_err)?;
    smddp_tensorflow::set_group(comm.map(|comm| comm.communicator().clone()));
    Ok(())
}

/// Returns true if an op is pending on any thread.
#[pyfunction]
pub(crate) fn tensorflow_is_pending() -> bool {
    smddp_tensorflow::is_any_running()
}
