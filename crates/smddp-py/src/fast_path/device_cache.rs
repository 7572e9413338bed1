//! The devices of a group that the fast path has cached, and calls on them.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use smddp_core::{Call, Communicator, DeviceStream, Options, Stream};

use crate::buffers::dlpack::ON_CUDA;
use crate::comm::Sendable;
use crate::errors::raise;
use crate::work::Work;

/// Returns the current stream of a device on this thread. Returns nonzero with an exception set on failure.
pub(super) type CurrentStream = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// A cached device.
struct CachedDevice {
    on: DeviceStream,
    /// torch's object for the group's stream on the device.
    stream: Py<PyAny>,
}

/// The devices of a group, at most four (the number that a group supports), in no particular order.
#[derive(Default)]
pub(super) struct DeviceCache([OnceLock<CachedDevice>; 4]);

/// The result of starting a call on a device.
pub(super) enum StartedCall {
    /// No data was sent: the Python implementation runs the call or reports the error.
    Unsupported,
    /// The current stream waits for the call.
    StreamWaits,
    Pending(Work),
}

impl DeviceCache {
    pub(super) fn any(&self) -> bool {
        self.0[0].get().is_some()
    }

    fn find(&self, device: i32) -> Option<&CachedDevice> {
        self.0.iter().filter_map(OnceLock::get).find(|cached| cached.on.device.ordinal() == device)
    }

    pub(super) fn add(&self, py: Python<'_>, device: i32, stream: Py<PyAny>) -> PyResult<()> {
        if self.find(device).is_none() {
            let found = py.detach(|| smddp_core::device::device(device));
            let device = found.map_err(|error| raise(py, error))?;
            let mut cached = Some(CachedDevice { on: DeviceStream { device, stream: Stream(0) }, stream });
            for slot in &self.0 {
                if let Some(Err(refused)) = cached.take().map(|cached| slot.set(cached)) {
                    cached = Some(refused);
                }
            }
        }
        Ok(())
    }

    /// Starts the call on memory of `device` after the work on the current stream. Returns a handle if `handle`; otherwise the
    /// current stream waits for the call.
    pub(super) fn start(
        &self,
        current: CurrentStream,
        device: i32,
        comm: &Communicator,
        call: &Call<'static>,
        handle: bool,
        tensors: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<StartedCall> {
        let py = tensors[0].py();
        let Some(cached) = self.find(device) else { return Ok(StartedCall::Unsupported) };
        let mut stream = std::ptr::null_mut();
        // SAFETY: torch's function of that type, called with the GIL held; it fills in the handle.
        if unsafe { current(ON_CUDA, device, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        let stream = Stream(stream as u64);
        if cached.on.device.capturing(stream).unwrap_or(true) {
            return Ok(StartedCall::Unsupported);
        }
        let kept = tensors.map(|tensor| tensor.clone().unbind());
        let on = Some(DeviceStream { stream, ..cached.on.clone() });
        let options = Options { keep: Some(Box::new(kept)), on, timeout: None };
        let call = Sendable(call);
        // The GIL is released, because this call already transfers data if it can.
        let started = py.detach(|| {
            // SAFETY: `keep` keeps the tensors alive until the call is done; Python owns them, the core borrows them.
            unsafe {
                match handle {
                    true => comm.start(call.get(), options).map(|work| (work, Ok(()))),
                    false => comm.start_for(call.get(), options, stream),
                }
            }
        });
        let (work, waits) = started.map_err(|error| raise(py, error))?;
        // A waiting stream needs no `record_stream`: later uses of the memory on that stream run after the call. Otherwise the
        // storages could be freed and reused before the call is done.
        if handle || waits.is_err() {
            let [first, second] = tensors;
            for tensor in [Some(first), Some(second).filter(|second| !second.is(first))].into_iter().flatten()
            {
                tensor.call_method1(intern!(py, "record_stream"), (&cached.stream,))?;
            }
        }
        waits.map_err(|error| raise(py, error))?;
        Ok(if handle { StartedCall::Pending(Work(work)) } else { StartedCall::StreamWaits })
    }
}
