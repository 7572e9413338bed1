//! The core's log: lines written by Python, and a reader of all lines.

use std::sync::Mutex;
use std::sync::mpsc::Receiver;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use smddp_core::{Config, lock, log};

/// Logs one line, at level WARN or INFO.
#[pyfunction]
pub(crate) fn log_line(warning: bool, text: &str) {
    // Reading the settings opens the log. The creation of a group reports invalid settings.
    if Config::get().is_ok() {
        log::say(if warning { log::Level::Warn } else { log::Level::Info }, text);
    }
}

/// Returns true if level INFO is enabled.
#[pyfunction]
pub(crate) fn is_info_enabled() -> bool {
    Config::get().is_ok() && log::is_enabled(log::Level::Info)
}

/// Reader of the log lines, which then do not go to standard error.
#[pyclass(frozen)]
pub(crate) struct LogReader(Mutex<Receiver<log::Line>>);

#[pymethods]
impl LogReader {
    /// Reads lines of `level` (WARN, INFO or TRACE) and above, and the lines that the settings enable.
    #[new]
    fn new(level: &str) -> PyResult<Self> {
        let level = match level {
            "WARN" => log::Level::Warn,
            "INFO" => log::Level::Info,
            "TRACE" => log::Level::Trace,
            other => {
                return Err(PyValueError::new_err(format!(
                    "invalid level {other:?}: expected WARN, INFO or TRACE"
                )));
            }
        };
        // Opens the log, so that lines before the first group are read too.
        let _ = Config::get();
        Ok(Self(Mutex::new(log::divert(level))))
    }

    /// Returns level, seconds since 1970 and text of the next line; `None` after `close` when all lines are read. Releases the
    /// GIL.
    fn next(&self, py: Python<'_>) -> Option<(String, f64, String)> {
        let lines = || lock(&self.0).recv().ok();
        py.detach(lines).map(|line| (format!("{:?}", line.level).to_uppercase(), line.time, line.text))
    }

    /// Sends log lines to standard error again.
    #[staticmethod]
    fn close() {
        log::end_diversion();
    }
}
