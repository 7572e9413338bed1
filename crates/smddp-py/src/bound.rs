//! `BoundCall`: a collective that is repeated on the same tensors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use smddp_core::{Call, Collective, Communicator, DType, Options, RedOp, Work, lock};

use crate::blocks::{BlockArgument, parse};
use crate::comm::{Comm, Sendable, Wait, collective_of, dtype_of, redop_of};
use crate::errors::raise;
use smddp_core::duration as seconds;

/// A tensor and its memory at the time of binding. A call reads and writes `elements` elements at `address`.
struct BoundTensor {
    tensor: Py<PyAny>,
    storage: Py<PyAny>,
    address: usize,
    elements: usize,
    /// Bytes of the storage up to the end of the tensor.
    end: usize,
}

impl BoundTensor {
    fn new(py: Python<'_>, tensor: Py<PyAny>) -> PyResult<Self> {
        let bound = tensor.bind(py);
        let storage = bound.call_method0(intern!(py, "untyped_storage"))?.unbind();
        let number = |name| bound.call_method0(name)?.extract::<usize>();
        let (address, elements) = (number("data_ptr")?, number("numel")?);
        let end = (number("storage_offset")? + elements) * number("element_size")?;
        Ok(Self { tensor, storage, address, elements, end })
    }

    /// Returns false after a resize, a transposition, `set_` or an assignment to `data`, or with a smaller storage.
    fn is_unchanged(&self, py: Python<'_>) -> PyResult<bool> {
        let tensor = self.tensor.bind(py);
        Ok(tensor.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()? == self.address
            && tensor.call_method0(intern!(py, "numel"))?.extract::<usize>()? == self.elements
            && tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?
            && self.storage.bind(py).call_method0(intern!(py, "nbytes"))?.extract::<usize>()? >= self.end)
    }
}

#[pyclass(frozen)]
pub(crate) struct BoundCall {
    comm: Communicator,
    operation: (Collective, DType, RedOp, usize),
    buffers: (BlockArgument, BlockArgument),
    tensors: Vec<BoundTensor>,
    timeout: Option<Duration>,
    /// Converts the core's exception to the caller's exception.
    translate: Py<PyAny>,
    /// A started call was not waited for.
    busy: AtomicBool,
    begun: Mutex<Option<Work>>,
}

// SAFETY: the addresses belong to `tensors`, which the value keeps alive; any thread may use them.
unsafe impl Send for BoundCall {}
// SAFETY: as above; mutable state is behind a lock or atomic.
unsafe impl Sync for BoundCall {}

impl BoundCall {
    fn call(&self) -> Call<'_> {
        let (collective, dtype, redop, root) = self.operation;
        let (input, output) = (self.buffers.0.borrow(), self.buffers.1.borrow());
        Call { collective, dtype, redop, root, input, output }
    }

    /// Returns the options of a new call. The call keeps `this` alive, and with it the tensors.
    fn options(this: &Bound<'_, Self>) -> PyResult<Options> {
        let py = this.py();
        for placed in &this.get().tensors {
            if !placed.is_unchanged(py)? {
                return Err(PyRuntimeError::new_err(
                    "the memory or shape of a tensor of this bound call has changed (it was \
                     resized, transposed, set or freed): bind it anew",
                ));
            }
        }
        let keep = this.clone().unbind();
        Ok(Options { timeout: this.get().timeout, keep: Some(Box::new(keep)), on: None })
    }

    fn failed(&self, py: Python<'_>, error: smddp_core::Error) -> PyErr {
        let raised = raise(py, error);
        match self.translate.call1(py, (raised.value(py),)) {
            Ok(translated) => PyErr::from_value(translated.into_bound(py)),
            Err(other) => other,
        }
    }

    fn begun(&self) -> MutexGuard<'_, Option<Work>> {
        lock(&self.begun)
    }
}

#[pymethods]
impl BoundCall {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn new(
        comm: &Comm,
        collective: u8,
        dtype: u8,
        redop: (u8, f64),
        root: usize,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        tensors: Vec<Py<PyAny>>,
        timeout: f64,
        translate: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            comm: comm.communicator().clone(),
            operation: (collective_of(collective)?, dtype_of(dtype)?, redop_of(redop.0, redop.1)?, root),
            buffers: (parse(input)?, parse(output)?),
            tensors: tensors
                .into_iter()
                .map(|tensor| BoundTensor::new(input.py(), tensor))
                .collect::<PyResult<_>>()?,
            timeout: (timeout > 0.0).then(|| seconds(timeout)),
            translate,
            busy: AtomicBool::new(false),
            begun: Mutex::default(),
        })
    }

    fn __call__(this: &Bound<'_, Self>) -> PyResult<()> {
        let (py, bound) = (this.py(), this.get());
        let (call, options) = (bound.call(), Self::options(this)?);
        let call = Sendable(&call);
        // SAFETY: `keep` keeps the tensors alive until the call is done, and their memory is unchanged.
        let done = unsafe { bound.comm.run_detached(call.get(), options, Wait::detached(py)) };
        done.map_err(|error| bound.failed(py, error))
    }

    fn start(this: &Bound<'_, Self>) -> PyResult<()> {
        let (py, bound) = (this.py(), this.get());
        if bound.busy.swap(true, Ordering::AcqRel) {
            return Err(PyRuntimeError::new_err(
                "start: the previous call was not waited for, or another thread starts or waits for it; \
                 call wait() first, and use the object from one thread at a time",
            ));
        }
        let call = bound.call();
        let call = Sendable(&call);
        let begun = Self::options(this).and_then(|options| {
            // SAFETY: as in `__call__`.
            let work = py.detach(|| unsafe { bound.comm.start(call.get(), options) });
            work.map_err(|error| bound.failed(py, error))
        });
        match begun {
            Ok(work) => *bound.begun() = Some(work),
            Err(error) => {
                bound.busy.store(false, Ordering::Release);
                return Err(error);
            }
        }
        Ok(())
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let Some(work) = self.begun().take() else {
            return Err(PyRuntimeError::new_err("wait: no call was started; call start() first"));
        };
        let waited = py.detach(|| work.wait(timeout.map(seconds)));
        if waited.is_err() && !work.is_done() {
            // The call is still pending, and the caller may wait for it again.
            *self.begun() = Some(work);
        } else {
            self.busy.store(false, Ordering::Release);
        }
        waited.map_err(|error| self.failed(py, error))
    }

    fn is_done(&self) -> bool {
        !self.busy.load(Ordering::Acquire) || self.begun().as_ref().is_some_and(Work::is_done)
    }
}
