//! The core's errors as Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::callbacks;

// The documented module is `smddp`; `smddp._core` only defines the exceptions.
create_exception!(smddp, Error, PyRuntimeError, "An operation or a group failed.");
create_exception!(
    smddp,
    CollectiveTimeoutError,
    Error,
    "A deadline passed; the text names the missing ranks."
);
create_exception!(smddp, MismatchError, Error, "Two ranks made different calls; the text names both.");
create_exception!(
    smddp,
    CorruptionError,
    Error,
    "Data changed between two ranks, or results differ (SMDDP_AUDIT); the text names the ranks."
);
create_exception!(
    smddp,
    DeadlockError,
    Error,
    "Ranks wait for each other in a cycle; the text names each call."
);
create_exception!(smddp, PeerLostError, Error, "A rank died or left while it was needed.");
create_exception!(smddp, ClosedError, Error, "The group was aborted or destroyed.");
create_exception!(
    smddp,
    TopologyError,
    Error,
    "Ranks cannot reach each other, or differ in version or settings."
);
create_exception!(smddp, ConfigError, PyValueError, "A setting is not valid.");

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    module.add("CollectiveTimeoutError", py.get_type::<CollectiveTimeoutError>())?;
    module.add("MismatchError", py.get_type::<MismatchError>())?;
    module.add("CorruptionError", py.get_type::<CorruptionError>())?;
    module.add("DeadlockError", py.get_type::<DeadlockError>())?;
    module.add("PeerLostError", py.get_type::<PeerLostError>())?;
    module.add("ClosedError", py.get_type::<ClosedError>())?;
    module.add("TopologyError", py.get_type::<TopologyError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())
}

/// Returns the exception of a core error, with the affected ranks in its attribute `ranks`.
pub(crate) fn raise(py: Python<'_>, error: smddp_core::Error) -> PyErr {
    use smddp_core::Error as E;
    let text = error.to_string();
    let (exception, ranks) = match &error {
        E::Invalid(_) => return PyValueError::new_err(text),
        E::Config(_) => return ConfigError::new_err(text),
        E::Interrupted => {
            // The exception of the signal handler is pending on this thread.
            return PyErr::take(py).unwrap_or_else(|| PyKeyboardInterrupt::new_err(()));
        }
        E::Timeout { missing, .. } => (CollectiveTimeoutError::new_err(text), missing.clone()),
        E::Mismatch { rank, .. } => (MismatchError::new_err(text), vec![*rank]),
        E::Corrupted { ranks, .. } => (CorruptionError::new_err(text), ranks.clone()),
        E::Deadlock { rank, .. } => (DeadlockError::new_err(text), vec![*rank]),
        E::PeerLost { rank, .. } => (PeerLostError::new_err(text), vec![*rank]),
        E::Closed { .. } => {
            callbacks::block_during_exit(py);
            (ClosedError::new_err(text), Vec::new())
        }
        E::Forked { .. } => (ClosedError::new_err(text), Vec::new()),
        E::Topology(_) => (TopologyError::new_err(text), Vec::new()),
        _ => (Error::new_err(text), Vec::new()),
    };
    let _ = exception.value(py).setattr("ranks", ranks);
    exception
}

/// Runs a blocking function of the core without the GIL.
///
/// Raises the exception of a signal handler that ran meanwhile, even if the core has completed the operation.
pub(crate) fn waited<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce() -> smddp_core::Result<T> + Send,
) -> PyResult<T> {
    let outcome = py.detach(wait).map_err(|error| raise(py, error));
    PyErr::take(py).map_or(outcome, Err)
}

/// Returns the exception of a failed rendezvous.
pub(crate) fn rendezvous_error(py: Python<'_>, error: smddp_rendezvous::Error) -> PyErr {
    use smddp_rendezvous::Error as E;
    match error {
        E::Core(error) => raise(py, error),
        E::Usage(text) => ConfigError::new_err(text),
        error => TopologyError::new_err(error.to_string()),
    }
}
