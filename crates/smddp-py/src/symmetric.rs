//! `SymmetricBuffer`: memory for tensors that other ranks of the node read where they lie.

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
                _ => PyOSError::new_err(format!("no symmetric memory: {error}")),
            })?;
        Ok(Self(made))
    }

    /// Where it begins.
    #[getter]
    fn address(&self) -> usize {
        self.0.as_mut_ptr() as usize
    }

    /// (bytes of buffers, bytes that there may be, messages that were read where they lay) of this process.
    #[staticmethod]
    fn usage() -> (usize, usize, u64) {
        let SymmetricUsage { used, most, messages } = smddp_core::SymmetricBuffer::usage();
        (used, most, messages)
    }
}
