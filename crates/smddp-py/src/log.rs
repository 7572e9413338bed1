//! The core's log: what Python adds to it, and its lines for whoever reads them.

use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use smddp_core::{Config, log};

/// A line of the log, where SMDDP_DEBUG asks for facts like it.
#[pyfunction]
pub(crate) fn say(warning: bool, text: &str) {
    // Whoever reads the settings first opens the log; one that is not valid is told by whoever makes a group.
    if Config::get().is_ok() {
        log::say(if warning { log::Level::Warn } else { log::Level::Info }, text);
    }
}

/// Whether facts are told.
#[pyfunction]
pub(crate) fn tells() -> bool {
    Config::get().is_ok() && log::tells(log::Level::Info)
}

/// Lines of the log, for whoever reads them instead of standard error.
#[pyclass(frozen)]
pub(crate) struct Lines(Mutex<Receiver<log::Line>>);

#[pymethods]
impl Lines {
    /// From `level` (WARN, INFO or TRACE) on, and whatever the settings ask for.
    #[new]
    fn new(level: &str) -> PyResult<Self> {
        let level = match level {
            "WARN" => log::Level::Warn,
            "INFO" => log::Level::Info,
            "TRACE" => log::Level::Trace,
            other => return Err(PyValueError::new_err(format!("no level is called {other:?}"))),
        };
        // What is told before any group is made is told, too.
        let _ = Config::get();
        Ok(Self(Mutex::new(log::divert(level))))
    }

    /// (level, seconds since 1970, text) of the next one, without the GIL; `None` once they go elsewhere and all are out.
    fn next(&self, py: Python<'_>) -> Option<(String, f64, String)> {
        let lines = || self.0.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        py.detach(lines).map(|line| (format!("{:?}", line.level).to_uppercase(), line.time, line.text))
    }

    /// Lines go to standard error again.
    #[staticmethod]
    fn close() {
        log::divert_no_more();
    }
}
