//! `SymmetricBuffer`: memory for tensors that the other ranks of the node read directly.

use std::io::ErrorKind;

use pyo3::exceptions::{PyMemoryError, PyOSError};
use pyo3::prelude::*;
use smddp_core::{Config, SymmetricUsage};

use crate::errors::raise;

#[pyclass(frozen)]
pub(crate) struct SymmetricBuffer(smddp_core::SymmetricBuffer);

#[pymethods]
impl SymmetricBuffer {
    #[new]
    fn new(py: Python<'_>, bytes: usize) -> PyResult<Self> {
        let config = Config::get().map_err(|error| raise(py, error))?;
        let made =
            smddp_core::SymmetricBuffer::new(config.staging, bytes).map_err(|error| match error.kind() {
                ErrorKind::OutOfMemory => PyMemoryError::new_err(error.to_string()),
                _ => PyOSError::new_err(format!("cannot allocate symmetric memory: {error}")),
            })?;
        Ok(Self(made))
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.as_mut_ptr() as usize
    }

    /// Returns bytes in use, their limit, and the number of messages that were read in place, of this process.
    #[staticmethod]
    fn usage() -> (usize, usize, u64) {
        let SymmetricUsage { used, most, messages } = smddp_core::SymmetricBuffer::usage();
        (used, most, messages)
    }
}
