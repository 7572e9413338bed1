//! Facts about the machine, settings, exit hook, benchmark program.

use std::os::fd::{FromRawFd, OwnedFd};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use smddp_core::config::{DEPRECATED, SETTINGS};
use smddp_core::{Config, Endpoint, SingleCopy, SymmetricBuffer, SymmetricUsage};
use smddp_rendezvous::LaunchEnvironment;

use crate::callbacks;
use crate::errors::{raise, rendezvous_error};

/// Returns name, value, default, source of the value and description of every setting.
#[pyfunction]
pub(crate) fn settings() -> Vec<(String, String, String, String, String)> {
    SETTINGS
        .iter()
        .map(|s| {
            let environment_value = s.environment_value();
            let source = if environment_value.is_some() { "environment" } else { "default" };
            let value = environment_value.unwrap_or_else(|| s.default.to_owned());
            (s.name.to_owned(), value, s.default.to_owned(), source.to_owned(), s.description.to_owned())
        })
        .collect()
}

/// Returns name, replacement and equivalent values of the replacement, of every deprecated setting.
#[pyfunction]
pub(crate) fn deprecated_settings() -> Vec<(&'static str, &'static str, &'static str)> {
    DEPRECATED.iter().map(|row| (row.name, row.replacement, row.equivalents)).collect()
}

/// Returns facts about this machine.
#[pyfunction]
pub(crate) fn info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let config = Config::get().map_err(|error| raise(py, error))?;
    let found = PyDict::new(py);
    found.set_item("version", env!("CARGO_PKG_VERSION"))?;
    found.set_item("host", smddp_core::host_name())?;
    found.set_item("pid", std::process::id())?;
    found.set_item("cores", smddp_core::cores())?;
    found.set_item("simd", smddp_core::simd_level())?;
    found.set_item("in_a_node", "shm: sealed memfd over an abstract unix socket")?;
    found.set_item(
        "between_nodes",
        config.between_nodes().unwrap_or_else(|reason| format!("nothing: {reason}")),
    )?;
    found.set_item("audit", config.audit.describe())?;
    found.set_item("interfaces", smddp_core::interfaces())?;
    found.set_item("staging_cap", config.staging)?;
    let (_, resident, reserve) = Endpoint::existing().map_or((0, 0, 0), |e| e.staging());
    found.set_item("staging_resident", resident)?;
    found.set_item("staging_reserve_in_use", reserve)?;
    let SymmetricUsage { used, messages, .. } = SymmetricBuffer::usage();
    found.set_item("symmetric_in_use", used)?;
    found.set_item("symmetric_messages", messages)?;
    found.set_item("single_copy", single_copy(config.single_copy))?;
    found.set_item("single_copies", Endpoint::existing().map_or(0, |endpoint| endpoint.single_copies()))?;
    Ok(found)
}

/// Describes the single-copy setting of this process: whether the ranks of its node read its large messages in place.
fn single_copy(setting: SingleCopy) -> &'static str {
    match setting {
        SingleCopy::Never => "no: SMDDP_SINGLE_COPY=0",
        SingleCopy::Always => "wherever permitted: SMDDP_SINGLE_COPY=1",
        SingleCopy::Auto if SingleCopy::is_quicker() => "where it is permitted: quicker here than staging",
        SingleCopy::Auto => "no: not quicker here than staging",
    }
}

/// Returns facts about the CUDA driver: found, why (if not found), driver version, devices (a line each).
///
/// `start`: initialize the driver, after which a forked child cannot use CUDA; false: without devices.
#[pyfunction]
#[pyo3(signature = (start=true))]
pub(crate) fn cuda(py: Python<'_>, start: bool) -> PyResult<Bound<'_, PyDict>> {
    let probed = py.detach(|| {
        let (major, minor) = smddp_core::device::cuda_version()?;
        let mut devices = Vec::new();
        if start {
            let cuda = smddp_core::device::cuda()?;
            for ordinal in 0..cuda.count() {
                devices.push(match smddp_core::device::device(ordinal) {
                    Ok(device) => format!("{ordinal}: {}", device.describe()),
                    Err(error) => format!("{ordinal}: {error}"),
                });
            }
        }
        Ok::<_, smddp_core::Error>((format!("CUDA {major}.{minor}"), devices))
    });
    let (reason, driver, devices) = match probed {
        Ok((driver, devices)) => (String::new(), driver, devices),
        Err(error) => (error.to_string(), String::new(), Vec::new()),
    };
    let found = PyDict::new(py);
    found.set_item("found", reason.is_empty())?;
    found.set_item("why", reason)?;
    found.set_item("driver", driver)?;
    found.set_item("devices", devices)?;
    Ok(found)
}

/// Returns libfabric's providers, and the reason why each is used or not, as lines. Opens the library.
#[pyfunction]
pub(crate) fn fabric(py: Python<'_>) -> PyResult<Vec<String>> {
    let config = Config::get().map_err(|error| raise(py, error))?;
    Ok(py.detach(|| config.fabric()).unwrap_or_else(|reason| vec![format!("none: {reason}")]))
}

/// Calls `load`, which loads or initializes `library`, and returns its result. Restores signal handlers and the floating-point mode.
#[pyfunction]
pub(crate) fn undisturbed(py: Python<'_>, library: &str, load: Py<PyAny>) -> PyResult<Py<PyAny>> {
    smddp_core::undisturbed(library, || load.call0(py))
}

/// Finishes the callbacks of futures within `seconds`, then closes all groups.
#[pyfunction]
pub(crate) fn shutdown(py: Python<'_>, seconds: f64) {
    py.detach(|| {
        callbacks::stop(smddp_core::duration(seconds));
        callbacks::exit_here();
        smddp_core::shutdown();
    });
}

/// Sets the last error that other processes report if this process exits.
#[pyfunction]
pub(crate) fn set_last_error(text: &str) {
    smddp_core::record_error(text);
}

/// Returns the recorder's content for this process's groups as JSON.
#[pyfunction]
pub(crate) fn dump(py: Python<'_>) -> String {
    py.detach(smddp_core::dump)
}

/// Returns true if the settings allow other ranks to receive the main thread's frames.
#[pyfunction]
pub(crate) fn are_stacks_enabled() -> bool {
    smddp_core::Config::get().is_ok_and(|config| config.stacks)
}

/// Registers the signal on which the main thread writes its frames into the other end of `pipe`. Frames of files under
/// `inner` and `packages` are omitted. The core owns the descriptor afterwards.
#[pyfunction]
pub(crate) fn set_frame_source(signal: i32, pipe: i32, inner: Vec<String>, packages: Vec<String>) {
    // SAFETY: the caller created the pipe for this purpose and transfers the ownership of its end.
    let pipe = unsafe { OwnedFd::from_raw_fd(pipe) };
    smddp_core::set_frame_source(signal, pipe, inner, packages);
}

/// Returns (rank, size, local rank, local size, address of rank 0) of this process from its launcher's environment, or `None`
/// without a launcher. The address is (host, port, all ranks are on this host).
#[pyfunction]
#[pyo3(signature = (port=None))]
pub(crate) fn launched(py: Python<'_>, port: Option<u16>) -> PyResult<Option<LaunchTuple>> {
    let get = |name: &str| std::env::var(name).ok();
    let found = LaunchEnvironment::detect(&get, port, std::os::unix::process::parent_id());
    let found = found.map_err(|error| rendezvous_error(py, error))?;
    let address = found.address.map(|address| (address.host, address.port, address.local));
    let values = (found.rank, found.size, found.local_rank, found.local_size, address);
    Ok(LaunchEnvironment::is_launched(&get).then_some(values))
}

type LaunchTuple = (usize, usize, Option<usize>, Option<usize>, Option<(String, u16, bool)>);

/// Runs the smddp-bench program and returns its exit status.
#[pyfunction]
pub(crate) fn bench_main(py: Python<'_>, argv: Vec<String>) -> PyResult<i32> {
    let python: String = py.import("sys")?.getattr("executable")?.extract()?;
    let spawn = [python, "-m".to_owned(), "smddp.tools.cli".to_owned(), "bench".to_owned()];
    Ok(py.detach(|| smddp_bench::main_from(argv, &spawn)))
}

/// Sets whether this thread's collectives transfer elements between nodes without a lossy format. Returns the previous value.
#[pyfunction]
pub(crate) fn set_exact(exact: bool) -> bool {
    smddp_core::set_lossless(exact)
}
