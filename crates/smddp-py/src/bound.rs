//! `BoundCall`: a collective on tensors that stay where they are, made again and again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use smddp_core::{Call, Collective, Communicator, DType, Options, RedOp, Work};

use crate::blocks::{Given, parse};
use crate::comm::{Comm, Sendable, Wait, collective_of, dtype_of, redop_of};
use crate::errors::raise;
use smddp_core::duration as seconds;

/// A tensor and the memory that it had when it was bound. A call reads and writes `elements` elements at `address`.
struct Placed {
    tensor: Py<PyAny>,
    storage: Py<PyAny>,
    address: usize,
    elements: usize,
    /// Bytes of the storage up to the end of the tensor.
    end: usize,
}

impl Placed {
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
    what: (Collective, DType, RedOp, usize),
    buffers: (Given, Given),
    tensors: Vec<Placed>,
    timeout: Option<Duration>,
    /// Makes of the core's error what the caller gets.
    translate: Py<PyAny>,
    /// A call was started that was not waited for.
    busy: AtomicBool,
    begun: Mutex<Option<Work>>,
}

// SAFETY: its addresses are those of `tensors`, which it holds; any thread may read and write them.
unsafe impl Send for BoundCall {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for BoundCall {}

impl BoundCall {
    fn call(&self) -> Call<'_> {
        let (collective, dtype, redop, root) = self.what;
        let (input, output) = (self.buffers.0.borrow(), self.buffers.1.borrow());
        Call { collective, dtype, redop, root, input, output }
    }

    /// The options of a call that is made now; what it works on lives as long as `this`.
    fn options(this: &Bound<'_, Self>) -> PyResult<Options> {
        let py = this.py();
        for placed in &this.get().tensors {
            if !placed.is_unchanged(py)? {
                return Err(PyRuntimeError::new_err(
                    "a tensor of this bound call has other memory or another shape now (it was \
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
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
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
            what: (collective_of(collective)?, dtype_of(dtype)?, redop_of(redop.0, redop.1)?, root),
            buffers: (parse(input)?, parse(output)?),
            tensors: tensors
                .into_iter()
                .map(|tensor| Placed::new(input.py(), tensor))
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
        // SAFETY: `keep` holds the tensors until the call is over, and they are where they were.
        let done = unsafe { bound.comm.run_aside(call.get(), options, Wait::detached(py)) };
        done.map_err(|error| bound.failed(py, error))
    }

    fn start(this: &Bound<'_, Self>) -> PyResult<()> {
        let (py, bound) = (this.py(), this.get());
        if bound.busy.swap(true, Ordering::AcqRel) {
            return Err(PyRuntimeError::new_err(
                "start: the call that was started before is not waited for, or another thread starts or waits for it; \
                 wait() first, and have one thread at a time use it",
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
            return Err(PyRuntimeError::new_err("wait: nothing was started; start() first"));
        };
        let waited = py.detach(|| work.wait(timeout.map(seconds)));
        if waited.is_err() && !work.is_done() {
            // It goes on, and may be waited for again.
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
