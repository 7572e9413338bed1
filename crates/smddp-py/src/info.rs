//! What was found, the settings, the exit hook, the bench.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use smddp_core::config::SETTINGS;
use smddp_core::{Config, Endpoint};

use crate::errors::raise;

/// (name, value, default, source, what it does) of every setting.
#[pyfunction]
pub(crate) fn settings() -> Vec<(String, String, String, String, String)> {
    SETTINGS
        .iter()
        .map(|s| {
            let given = std::env::var(s.name).ok().filter(|v| !v.trim().is_empty());
            let source = if given.is_some() { "environment" } else { "default" };
            let value = given.unwrap_or_else(|| s.default.to_owned());
            (s.name.to_owned(), value, s.default.to_owned(), source.to_owned(), s.what.to_owned())
        })
        .collect()
}

/// What was found on this machine.
#[pyfunction]
pub(crate) fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let config = Config::get().map_err(|error| raise(py, error))?;
    let found = PyDict::new(py);
    found.set_item("version", env!("CARGO_PKG_VERSION"))?;
    found
        .set_item("host", std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim())?;
    found.set_item("pid", std::process::id())?;
    found.set_item("cores", smddp_core::cores())?;
    found.set_item("simd", smddp_core::simd_level())?;
    found.set_item("in_a_node", "shm: sealed memfd over an abstract unix socket")?;
    found
        .set_item("between_nodes", config.between_nodes().unwrap_or_else(|why| format!("nothing: {why}")))?;
    found.set_item("interfaces", smddp_core::interfaces())?;
    found.set_item("staging_cap", config.staging)?;
    let (_, resident, reserve) = Endpoint::existing().map_or((0, 0, 0), |e| e.staging());
    found.set_item("staging_resident", resident)?;
    found.set_item("staging_reserve_in_use", reserve)?;
    Ok(found)
}

/// What libfabric offers here and why it would be used or not, in lines. Opens the library.
#[pyfunction]
pub(crate) fn fabric(py: Python<'_>) -> PyResult<Vec<String>> {
    let config = Config::get().map_err(|error| raise(py, error))?;
    Ok(py.detach(|| config.fabric()).unwrap_or_else(|why| vec![format!("none: {why}")]))
}

/// Leaves all groups in good order.
#[pyfunction]
pub(crate) fn shutdown(py: Python<'_>) {
    py.detach(smddp_core::shutdown);
}

/// The smddp-bench program.
#[pyfunction]
pub(crate) fn bench_main(py: Python<'_>, argv: Vec<String>) -> PyResult<i32> {
    let python: String = py.import("sys")?.getattr("executable")?.extract()?;
    let spawn = [python, "-m".to_owned(), "smddp.cli".to_owned(), "bench".to_owned()];
    Ok(py.detach(|| smddp_bench::main_from(argv, &spawn)))
}
