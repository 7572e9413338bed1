//! `Comm`: the communicator of one group.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use smddp_core::{Call, Collective, Communicator, DType, DeviceStream, Options, ParentGroup, RedOp, Stream};
use smddp_rendezvous::{LaunchEnvironment, RendezvousAddress};

use crate::arguments::{color_of, key_of};
use crate::blocks::parse;
use crate::errors::{raise, rendezvous_error, waited};
use crate::store::PyStore;
use crate::work::Work;
use smddp_core::duration as seconds;

/// The communicator of one group.
#[pyclass(frozen)]
pub(crate) struct Comm {
    #[pyo3(get)]
    rank: usize,
    #[pyo3(get)]
    size: usize,
    #[pyo3(get)]
    name: String,
    comm: Communicator,
}

/// A group that contains all ranks of a new group, their ranks in it, and the ranks of the sibling groups.
type KnownGroup<'py> = (PyRef<'py, Comm>, Vec<usize>, Vec<Vec<usize>>);

pub(crate) fn collective_of(code: u8) -> PyResult<Collective> {
    Collective::ALL
        .get(code as usize)
        .copied()
        .ok_or_else(|| PyValueError::new_err(format!("invalid collective number {code}")))
}

pub(crate) fn dtype_of(code: u8) -> PyResult<DType> {
    DType::from_u8(code).ok_or_else(|| PyValueError::new_err(format!("invalid element type number {code}")))
}

pub(crate) fn redop_of(code: u8, factor: f64) -> PyResult<RedOp> {
    RedOp::from_code(code, factor)
        .ok_or_else(|| PyValueError::new_err(format!("invalid reduction number {code}")))
}

fn options(keep: Py<PyAny>, timeout: f64) -> Options {
    Options { timeout: (timeout > 0.0).then(|| seconds(timeout)), keep: Some(Box::new(keep)), on: None }
}

#[pymethods]
impl Comm {
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    #[pyo3(signature = (store, call, name, rank, size, timeout, known=None))]
    fn make(
        py: Python<'_>,
        store: Py<PyAny>,
        call: &str,
        name: &str,
        rank: usize,
        size: usize,
        timeout: f64,
        known: Option<KnownGroup<'_>>,
    ) -> PyResult<Self> {
        let siblings = known.as_ref().map(|(_, _, siblings)| siblings.clone()).unwrap_or_default();
        let known = known.map(|(group, ranks, _)| (group.comm.clone(), ranks));
        let store = PyStore::new(store, (call, name), rank, seconds(timeout), known.clone());
        let made = py.detach(|| {
            let known =
                known.as_ref().map(|(group, ranks)| ParentGroup { group, ranks, siblings: &siblings });
            Communicator::make(&store, (call, name), rank, size, seconds(timeout), known)
        });
        let comm = made.map_err(|error| store.exception(py, error))?;
        Ok(Self::new(comm))
    }

    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    #[pyo3(signature = (call, name, rank, size, address, timeout, local_size=None))]
    fn join(
        py: Python<'_>,
        call: &str,
        name: &str,
        rank: usize,
        size: usize,
        address: Option<(String, u16, bool)>,
        timeout: f64,
        local_size: Option<usize>,
    ) -> PyResult<Self> {
        let address = address.map(|(host, port, local)| RendezvousAddress { host, port, local });
        let launched = LaunchEnvironment { rank, size, local_rank: None, local_size, address };
        let joined = py.detach(|| smddp_rendezvous::join((call, name), &launched, None, seconds(timeout)));
        joined.map(|joined| Self::new(joined.comm)).map_err(|error| rendezvous_error(py, error))
    }

    #[pyo3(signature = (color, key))]
    fn split(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = color_of)] color: Option<i64>,
        #[pyo3(from_py_with = key_of)] key: i64,
    ) -> PyResult<Option<Self>> {
        let made = waited(py, || self.comm.split(color, key))?;
        Ok(made.map(Self::new))
    }

    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    #[pyo3(signature = (collective, dtype, redop, factor, root, input, output, keep, timeout, asynchronous, device=-1, stream=0))]
    fn collective(
        &self,
        py: Python<'_>,
        collective: u8,
        dtype: u8,
        redop: u8,
        factor: f64,
        root: usize,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        keep: Py<PyAny>,
        timeout: f64,
        asynchronous: bool,
        device: i32,
        stream: u64,
    ) -> PyResult<Option<Work>> {
        let (input, output) = (parse(input)?, parse(output)?);
        let redop = redop_of(redop, factor)?;
        let call = Call {
            collective: collective_of(collective)?,
            dtype: dtype_of(dtype)?,
            redop,
            root,
            input: input.borrow(),
            output: output.borrow(),
        };
        let mut options = options(keep, timeout);
        let call = Sendable(&call);
        if device >= 0 {
            let on = py.detach(|| smddp_core::device::device(device)).map_err(|error| raise(py, error))?;
            options.on = Some(DeviceStream { device: on, stream: Stream(stream) });
        }
        if asynchronous || device >= 0 {
            // The GIL is released, because this call already transfers data if it can.
            // SAFETY: `keep` keeps the tensors alive until the call is done; Python owns them, the core borrows them.
            let work = py.detach(|| unsafe { self.comm.start(call.get(), options) });
            let work = work.map_err(|error| raise(py, error))?;
            return Ok(Some(Work(work)));
        }
        // SAFETY: the caller's frame and `keep` keep the tensors alive until the call is done.
        let done = py.detach(|| unsafe { self.comm.run(call.get(), options) });
        done.map(|()| None).map_err(|error| raise(py, error))
    }

    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn send(
        &self,
        py: Python<'_>,
        buffer: (usize, usize),
        dtype: u8,
        dst: usize,
        tag: u64,
        keep: Py<PyAny>,
        timeout: f64,
    ) -> PyResult<Work> {
        let (ptr, count) = buffer;
        let (dtype, options) = (dtype_of(dtype)?, options(keep, timeout));
        // SAFETY: `keep` keeps the tensor alive until the call is done.
        let work = py.detach(|| unsafe { self.comm.send(ptr as *const u8, count, dtype, dst, tag, options) });
        work.map(Work).map_err(|error| raise(py, error))
    }

    #[expect(clippy::too_many_arguments, reason = "the call as Python makes it, documented in _core.pyi")]
    fn recv(
        &self,
        py: Python<'_>,
        buffer: (usize, usize),
        dtype: u8,
        src: i64,
        tag: u64,
        keep: Py<PyAny>,
        timeout: f64,
    ) -> PyResult<Work> {
        let (ptr, count) = buffer;
        let src = usize::try_from(src).ok();
        let (dtype, options) = (dtype_of(dtype)?, options(keep, timeout));
        // SAFETY: `keep` keeps the tensor alive until the call is done.
        let work = py.detach(|| unsafe { self.comm.recv(ptr as *mut u8, count, dtype, src, tag, options) });
        work.map(Work).map_err(|error| raise(py, error))
    }

    fn set_timeout(&self, timeout: f64) {
        self.comm.set_timeout(seconds(timeout));
    }

    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.comm.abort(reason));
    }

    fn finish(&self, py: Python<'_>, limit: f64) -> PyResult<()> {
        waited(py, || self.comm.shutdown_checked(seconds(limit)))
    }

    /// Returns the value of SMDDP_LEAVE_SECONDS.
    #[staticmethod]
    fn leave_seconds() -> f64 {
        smddp_core::Config::get().map_or(0.0, |config| config.leave.as_secs_f64())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        waited(py, || {
            self.comm.close();
            Ok(())
        })
    }

    fn close_in_background(&self, py: Python<'_>) -> PyResult<()> {
        waited(py, || {
            self.comm.close_in_background();
            Ok(())
        })
    }

    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.comm.error().map(|error| raise(py, error).into_value(py).into_any())
    }

    fn sequence(&self) -> u64 {
        self.comm.sequence()
    }

    fn path(&self, collective: u8, dtype: u8, nbytes: usize) -> PyResult<String> {
        Ok(self.comm.path(collective_of(collective)?, dtype_of(dtype)?, nbytes))
    }

    fn estimate(
        &self,
        py: Python<'_>,
        collective: u8,
        dtype: u8,
        nbytes: usize,
        root: usize,
    ) -> PyResult<f64> {
        let (collective, dtype) = (collective_of(collective)?, dtype_of(dtype)?);
        py.detach(|| self.comm.estimate(collective, dtype, nbytes, root)).map_err(|error| raise(py, error))
    }

    fn estimate_message(&self, peer: i64, nbytes: usize) -> f64 {
        self.comm.estimate_message(usize::try_from(peer).ok(), nbytes)
    }

    /// Returns the raw handle of the group's stream on a device. The first call on a device is collective.
    fn device_stream(&self, py: Python<'_>, device: i32) -> PyResult<u64> {
        waited(py, || {
            let on = DeviceStream { device: smddp_core::device::device(device)?, stream: Stream(0) };
            self.comm.prepare_device(&on)
        })?;
        let stream = py.detach(|| self.comm.on_device(device)).map(|(stream, _)| stream.0);
        stream.ok_or_else(|| PyRuntimeError::new_err(format!("group {} is closed", self.name)))
    }

    /// Describes the path of device memory within a node; `None` before the first call on that device.
    fn device_path(&self, py: Python<'_>, device: i32) -> Option<String> {
        py.detach(|| self.comm.on_device(device)).map(|(_, path)| path)
    }

    fn transports(&self) -> String {
        self.comm.transport()
    }

    fn network(&self) -> Option<String> {
        self.comm.network().map(|known| known.to_string())
    }

    fn nodes(&self) -> Vec<usize> {
        self.comm.nodes()
    }

    fn path_counters(&self, py: Python<'_>) -> Vec<(&'static str, String, u64, u64, u64)> {
        let counters = py.detach(|| self.comm.path_counters());
        counters
            .into_iter()
            .map(|t| {
                (
                    smddp_core::name_of(t.collective),
                    smddp_core::variant_name(t.variant),
                    t.operations,
                    t.bytes,
                    t.internode_bytes,
                )
            })
            .collect()
    }

    fn arrived(&self, py: Python<'_>) -> Vec<usize> {
        py.detach(|| self.comm.arrived())
    }
}

impl Comm {
    fn new(comm: Communicator) -> Self {
        Self { rank: comm.rank(), size: comm.size(), name: comm.name().to_owned(), comm }
    }

    pub(crate) fn communicator(&self) -> &Communicator {
        &self.comm
    }
}

/// A call that crosses `detach`, which requires `Send`. It contains plain addresses and no Python references.
pub(crate) struct Sendable<'a>(pub(crate) &'a Call<'a>);

impl<'a> Sendable<'a> {
    pub(crate) fn get(&self) -> &'a Call<'a> {
        self.0
    }
}

// SAFETY: addresses and counts, dereferenced under the contract of `Communicator::run`.
unsafe impl Send for Sendable<'_> {}
// SAFETY: as above.
unsafe impl Sync for Sendable<'_> {}

/// The core's wait function that crosses `detach`, which requires `Send`.
pub(crate) struct Wait<'a>(&'a mut dyn FnMut());

impl Wait<'_> {
    /// Returns a function that runs the core's wait without the GIL.
    pub(crate) fn detached(py: Python<'_>) -> impl FnOnce(&mut dyn FnMut()) {
        move |wait| {
            let wait = Wait(wait);
            py.detach(|| wait.run());
        }
    }

    fn run(self) {
        (self.0)();
    }
}

// SAFETY: it runs on this thread, and contains addresses, counts and references to the group.
unsafe impl Send for Wait<'_> {}
