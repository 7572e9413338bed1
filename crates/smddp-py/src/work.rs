//! `Work`, and how waits give way to Ctrl-C and to other Python threads.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use smddp_core::{PerProcess, duration as seconds};

use crate::errors::raise;

/// One call under way. Thread-safe; dropping it does not cancel the call.
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

    /// What comes next on that stream of the device is after this call; does not wait for the device.
    fn wait_stream(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        py.detach(|| self.0.wait_stream(smddp_core::Stream(stream))).map_err(|error| raise(py, error))
    }

    fn is_done(&self) -> bool {
        self.0.is_done()
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

    fn on_enqueued(&self, callback: Py<PyAny>) {
        self.0.on_enqueued(Box::new(move || enqueue(callback)));
    }

    fn on_done(&self, callback: Py<PyAny>) {
        self.0.on_done(Box::new(move || enqueue(callback)));
    }
}

static CALLBACKS: PerProcess<Mutex<Option<Sender<Py<PyAny>>>>> = PerProcess::new();

/// Hands a callback to the one thread that runs them: the thread that ends a call may hold locks that Python code
/// must not meet.
fn enqueue(callback: Py<PyAny>) {
    let mut guard = CALLBACKS.get().lock().unwrap_or_else(PoisonError::into_inner);
    if guard.is_none() {
        let (sender, receiver) = channel::<Py<PyAny>>();
        let spawned = std::thread::Builder::new().name("smddp-callbacks".to_owned()).spawn(move || {
            for callback in receiver {
                let ran = Python::try_attach(|py| {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, None);
                    }
                    drop(callback);
                });
                if ran.is_none() {
                    return;
                }
            }
        });
        if spawned.is_err() {
            return;
        }
        *guard = Some(sender);
    }
    if let Some(sender) = guard.as_ref() {
        let _ = sender.send(callback);
    }
}
