//! What was found, the settings, the exit hook, the bench.

use std::os::fd::{FromRawFd, OwnedFd};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use smddp_core::config::SETTINGS;
use smddp_core::{Config, Endpoint, SingleCopy, SymmetricBuffer, SymmetricUsage};
use smddp_rendezvous::LaunchEnvironment;

use crate::callbacks;
use crate::errors::{not_met, raise};

/// (name, value, default, source, what it does) of every setting.
#[pyfunction]
pub(crate) fn settings() -> Vec<(String, String, String, String, String)> {
    SETTINGS
        .iter()
        .map(|s| {
            let given = s.given();
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
    found.set_item("host", smddp_core::host_name())?;
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
    let SymmetricUsage { used, messages, .. } = SymmetricBuffer::usage();
    found.set_item("symmetric_in_use", used)?;
    found.set_item("symmetric_messages", messages)?;
    found.set_item("single_copy", single_copy(config.single_copy))?;
    found.set_item("single_copies", Endpoint::existing().map_or(0, |endpoint| endpoint.single_copies()))?;
    Ok(found)
}

/// Whether ranks of a node read large messages of this process where they lie, as far as it is this process's to say.
fn single_copy(setting: SingleCopy) -> &'static str {
    match setting {
        SingleCopy::Never => "no: SMDDP_SINGLE_COPY=0",
        SingleCopy::Always => "wherever it is permitted: SMDDP_SINGLE_COPY=1",
        SingleCopy::Auto if SingleCopy::is_quicker() => "where it is permitted: quicker here than staging",
        SingleCopy::Auto => "no: not quicker here than staging",
    }
}

/// The CUDA driver: whether there is one, or why not, its version, and its devices, a line each. `start`: it may be
/// initialised, after which a forked child cannot use CUDA; else no devices are told unless it is already.
#[pyfunction]
#[pyo3(signature = (start=true))]
pub(crate) fn cuda(py: Python<'_>, start: bool) -> PyResult<Bound<'_, PyDict>> {
    let looked = py.detach(|| {
        let (major, minor) = smddp_core::device::look_for_cuda()?;
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
    let (why, driver, devices) = match looked {
        Ok((driver, devices)) => (String::new(), driver, devices),
        Err(error) => (error.to_string(), String::new(), Vec::new()),
    };
    let found = PyDict::new(py);
    found.set_item("found", why.is_empty())?;
    found.set_item("why", why)?;
    found.set_item("driver", driver)?;
    found.set_item("devices", devices)?;
    Ok(found)
}

/// What libfabric offers here and why it would be used or not, in lines. Opens the library.
#[pyfunction]
pub(crate) fn fabric(py: Python<'_>) -> PyResult<Vec<String>> {
    let config = Config::get().map_err(|error| raise(py, error))?;
    Ok(py.detach(|| config.fabric()).unwrap_or_else(|why| vec![format!("none: {why}")]))
}

/// Calls `load`, which loads or initializes `library`, and returns its result. Restores signal handlers and the floating-point mode.
#[pyfunction]
pub(crate) fn undisturbed(py: Python<'_>, library: &str, load: Py<PyAny>) -> PyResult<Py<PyAny>> {
    smddp_core::undisturbed(library, || load.call0(py))
}

/// Ends the callbacks of futures, within `seconds`, then leaves all groups in good order.
#[pyfunction]
pub(crate) fn shutdown(py: Python<'_>, seconds: f64) {
    py.detach(|| {
        callbacks::stop(smddp_core::duration(seconds));
        callbacks::exit_here();
        smddp_core::shutdown();
    });
}

/// Has those who see this process go say that this was its last error.
#[pyfunction]
pub(crate) fn leave_error(text: &str) {
    smddp_core::leave_error(text);
}

/// What the recorder has of this process's groups, as JSON.
#[pyfunction]
pub(crate) fn dump(py: Python<'_>) -> String {
    py.detach(smddp_core::dump)
}

/// Whether the settings let others be told where the main thread is.
#[pyfunction]
pub(crate) fn stacks() -> bool {
    smddp_core::Config::get().is_ok_and(|config| config.stacks)
}

/// From now on `signal` has the main thread write its frames into `pipe`'s other end, and whoever asks is told them. Files
/// under `inner` are left out. The descriptor is the core's from now on.
#[pyfunction]
pub(crate) fn frames_from(signal: i32, pipe: i32, inner: Vec<String>) {
    // SAFETY: the caller has made the pipe for this and gives its end away.
    let pipe = unsafe { OwnedFd::from_raw_fd(pipe) };
    smddp_core::frames_from(signal, pipe, inner);
}

/// Returns (rank, size, local rank, local size, address of rank 0) of this process from its launcher's environment, `None`
/// without a launcher. The address is (host, port, whether all ranks are on this host).
#[pyfunction]
#[pyo3(signature = (port=None))]
pub(crate) fn launched(py: Python<'_>, port: Option<u16>) -> PyResult<Option<Told>> {
    let get = |name: &str| std::env::var(name).ok();
    let found = LaunchEnvironment::detect(&get, port, std::os::unix::process::parent_id());
    let found = found.map_err(|error| not_met(py, error))?;
    let meet = found.address.map(|meet| (meet.host, meet.port, meet.local));
    let told = (found.rank, found.size, found.local_rank, found.local_size, meet);
    Ok(LaunchEnvironment::is_launched(&get).then_some(told))
}

type Told = (usize, usize, Option<usize>, Option<usize>, Option<(String, u16, bool)>);

/// The smddp-bench program.
#[pyfunction]
pub(crate) fn bench_main(py: Python<'_>, argv: Vec<String>) -> PyResult<i32> {
    let python: String = py.import("sys")?.getattr("executable")?.extract()?;
    let spawn = [python, "-m".to_owned(), "smddp.tools.cli".to_owned(), "bench".to_owned()];
    Ok(py.detach(|| smddp_bench::main_from(argv, &spawn)))
}

/// Has this thread's collectives leave elements as they are between nodes, or not; what they did before.
#[pyfunction]
pub(crate) fn set_exact(exact: bool) -> bool {
    smddp_core::set_exact(exact)
}
