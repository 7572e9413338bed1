//! The devices that a group has met, and its calls on them.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use pyo3::intern;
use pyo3::prelude::*;
use smddp_core::{Call, Communicator, On, Options, Stream};

use crate::buffers::dlpack::ON_CUDA;
use crate::comm::Sendable;
use crate::errors::raise;
use crate::work::Work;

/// Gives this thread's current stream of a device; not 0: an exception is set.
pub(super) type Current = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// One device.
struct Place {
    on: On,
    /// torch's object for the group's stream there.
    stream: Py<PyAny>,
}

/// As many as a group has words for. Which one comes first is chance.
#[derive(Default)]
pub(super) struct Met([OnceLock<Place>; 4]);

/// What a call on a device came to.
pub(super) enum Started {
    /// Nothing has moved: the long way says why, or makes the call.
    No,
    /// The current stream waits for it.
    Waits,
    UnderWay(Work),
}

impl Met {
    pub(super) fn any(&self) -> bool {
        self.0[0].get().is_some()
    }

    fn find(&self, device: i32) -> Option<&Place> {
        self.0.iter().filter_map(OnceLock::get).find(|place| place.on.device.ordinal() == device)
    }

    pub(super) fn add(&self, py: Python<'_>, device: i32, stream: Py<PyAny>) -> PyResult<()> {
        if self.find(device).is_none() {
            let found = py.detach(|| smddp_core::device::device(device));
            let device = found.map_err(|error| raise(py, error))?;
            let mut place = Some(Place { on: On { device, stream: Stream(0) }, stream });
            for slot in &self.0 {
                if let Some(Err(refused)) = place.take().map(|place| slot.set(place)) {
                    place = Some(refused);
                }
            }
        }
        Ok(())
    }

    /// The call on memory of `device`, after what the current stream holds. `handle`: the caller wants one; else that stream
    /// waits at once.
    pub(super) fn start(
        &self,
        current: Current,
        device: i32,
        comm: &Communicator,
        call: &Call<'static>,
        handle: bool,
        tensors: [&Bound<'_, PyAny>; 2],
    ) -> PyResult<Started> {
        let py = tensors[0].py();
        let Some(place) = self.find(device) else { return Ok(Started::No) };
        let mut stream = std::ptr::null_mut();
        // SAFETY: torch's function of that type, with the GIL, which fills in the handle.
        if unsafe { current(ON_CUDA, device, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        let stream = Stream(stream as u64);
        if place.on.device.capturing(stream).unwrap_or(true) {
            return Ok(Started::No);
        }
        let kept = tensors.map(|tensor| tensor.clone().unbind());
        let on = Some(On { stream, ..place.on.clone() });
        let options = Options { keep: Some(Box::new(kept)), on, timeout: None };
        let call = Sendable(call);
        // Without the GIL: what can be moved at once is moved here.
        let started = py.detach(|| {
            // SAFETY: `keep` holds the tensors until the call is over; Python owns them, the core only borrows.
            unsafe {
                match handle {
                    true => comm.start(call.get(), options).map(|work| (work, Ok(()))),
                    false => comm.start_for(call.get(), options, stream),
                }
            }
        });
        let (work, waits) = started.map_err(|error| raise(py, error))?;
        // A stream that waits needs no record: whoever gets the memory next, in the order of that stream, is after the call.
        // Where it does not, its tensors' storages may be given back before the call is over, though others have them.
        if handle || waits.is_err() {
            let [first, second] = tensors;
            for tensor in [Some(first), Some(second).filter(|second| !second.is(first))].into_iter().flatten()
            {
                tensor.call_method1(intern!(py, "record_stream"), (&place.stream,))?;
            }
        }
        waits.map_err(|error| raise(py, error))?;
        Ok(if handle { Started::UnderWay(Work(work)) } else { Started::Waits })
    }
}
