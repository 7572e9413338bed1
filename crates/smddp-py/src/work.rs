//! `Work`: the handle of a started call. Waits release the GIL and are interrupted by Ctrl-C.

use pyo3::prelude::*;
use smddp_core::duration as seconds;

use crate::callbacks;
use crate::errors::raise;

/// One started call. Thread-safe; dropping it does not cancel the call.
#[pyclass(frozen)]
pub(crate) struct Work(pub(crate) smddp_core::Work);

#[pymethods]
impl Work {
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if self.0.is_done() && self.0.error().is_none() {
            return Ok(());
        }
        let timeout = timeout.map(seconds);
        py.detach(|| self.0.wait(timeout)).map_err(|error| raise(py, error))
    }

    /// Orders later work on the device's stream after this call. Does not wait for the device.
    fn wait_stream(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        py.detach(|| self.0.wait_stream(smddp_core::Stream(stream))).map_err(|error| raise(py, error))
    }

    fn is_done(&self, py: Python<'_>) -> bool {
        self.0.is_done() || (self.0.needs_polling() && py.detach(|| self.0.poll()))
    }

    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.0.error().map(|error| raise(py, error).into_value(py).into_any())
    }

    fn source(&self) -> i64 {
        self.0.source().map_or(-1, |rank| rank as i64)
    }

    fn is_enqueued(&self) -> bool {
        self.0.is_enqueued()
    }

    /// Runs the callback when the call is enqueued. Returns false if callbacks do not run anymore: the caller must wait.
    fn on_enqueued(&self, callback: Py<PyAny>) -> bool {
        let runs = callbacks::start();
        if runs {
            self.0.on_enqueued(Box::new(move || callbacks::enqueue(callback)));
        }
        runs
    }

    /// Runs the callback when the call is done, as `on_enqueued`.
    fn on_done(&self, callback: Py<PyAny>) -> bool {
        let runs = callbacks::start();
        if runs {
            self.0.on_done(Box::new(move || callbacks::enqueue(callback)));
        }
        runs
    }
}
