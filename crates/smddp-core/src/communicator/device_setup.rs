//! Setup of devices for calls on device buffers. At the first call on a device all ranks of the group agree on its
//! data path.

use std::sync::{Arc, TryLockError};

use smddp_cuda::Uuid;
use smddp_plan::Memory;
use smddp_shm::SharedPage;

use super::Communicator;
use crate::call::{self, Call};
use crate::config::DevicePath;
use crate::device::{
    DeviceFlags, DeviceSite, DeviceSiteHandle, DeviceStream, FlagPages, MAX_SITES, MIN_SLAB_BYTES,
    ProbeAllocation, driver_error,
};
use crate::engine::Command;
use crate::error::{Error, Result};
use crate::exec::device::DeviceOp;
use crate::log::{self, Level};
use crate::sync::completion::in_handler;
use crate::sync::lock;

/// Bytes of a rank's device record: UUID of the device and token of a probe allocation.
const DEVICE_RECORD: usize = 24;
/// Bytes of a rank's path result: the possible path, then the reason why not by reference.
const PATH_RESULT: usize = 256;
const REFERENCE: u8 = 1;
const HOST: u8 = 0;
const IMPOSSIBLE: u8 = 2;

impl Communicator {
    /// Prepares the device part of a call, ordered after the caller's stream. At the first call on a device, all
    /// ranks of the group take part in its setup.
    pub(super) fn device_op(&self, on: &DeviceStream, call: &Call<'_>) -> Result<Box<DeviceOp>> {
        let name = call::name_of(call.collective);
        let driver_error = |error| {
            driver_error(&format!("{name} on group `{}`, {}", self.0.name, on.device.describe()), &error)
        };
        if on.device.capturing(on.stream).map_err(driver_error)? {
            return Err(Error::Invalid(format!(
                "{name}: the stream is being captured into a CUDA graph, which smddp does not support: its operations wait for \
                 sequence numbers that differ from run to run; make the call outside the graph"
            )));
        }
        let handle = self.handle(on)?;
        let after = handle.mark(on.stream).map_err(driver_error)?;
        Ok(Box::new(DeviceOp::new(handle, after, call.redop)))
    }

    /// Prepares a device for this group. A collective operation at the first call on that device.
    ///
    /// # Errors
    /// [`Error::System`] if the driver fails, or in a signal handler that interrupted the preparation of
    /// another device. [`Error::Invalid`] if the group has used its maximum number of devices.
    /// [`Error::Topology`] if the ranks' devices cannot work together. Errors of [`Communicator::run`] for the
    /// exchange among the ranks.
    pub fn prepare_device(&self, on: &DeviceStream) -> Result<()> {
        self.handle(on).map(drop)
    }

    fn handle(&self, on: &DeviceStream) -> Result<Arc<DeviceSiteHandle>> {
        let state = &self.0;
        if let Some(handle) = self.prepared(on.device.ordinal()) {
            return Ok(handle);
        }
        if in_handler() && matches!(state.preparing.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(Error::System {
                operation: format!("prepare {} for group `{}` in a signal handler", on.device.describe(), state.name),
                reason: "the call that the handler interrupted, or another thread, prepares a device of this group; make the \
                      call after the handler has returned"
                    .to_owned(),
            });
        }
        let _preparing = lock(&state.preparing);
        if let Some(handle) = self.prepared(on.device.ordinal()) {
            return Ok(handle);
        }
        let (count, first) = {
            let handles = lock(&state.handles);
            (handles.len(), handles.first().cloned())
        };
        // Two collectives, without holding the lock on `handles`: other threads may look up prepared devices
        // meanwhile.
        let (handle, site) = set_up(self, on, count, first.as_ref(), state.shared_page.clone())?;
        let _ = state.engine.submit(|| Command::Site(Box::new(site)));
        lock(&state.handles).push(handle.clone());
        Ok(handle)
    }

    /// Returns the group's handle of a device that it has been used on.
    fn prepared(&self, ordinal: i32) -> Option<Arc<DeviceSiteHandle>> {
        lock(&self.0.handles).iter().find(|handle| handle.device.ordinal() == ordinal).cloned()
    }

    /// Returns the stream on which this group copies memory of that device, and the description of the data path.
    /// `None` before the first call on the device.
    pub fn on_device(&self, ordinal: i32) -> Option<(smddp_cuda::Stream, String)> {
        let handle = self.prepared(ordinal)?;
        Some((handle.stream, handle.path.clone()))
    }
}

/// Creates the group's site number `index` on a device. All ranks do so at the same call. `first`: the handle of
/// the group's first device, if this is another one.
fn set_up(
    comm: &Communicator,
    on: &DeviceStream,
    index: usize,
    first: Option<&Arc<DeviceSiteHandle>>,
    shared_page: Option<Arc<SharedPage>>,
) -> Result<(Arc<DeviceSiteHandle>, DeviceSite)> {
    let (rank, size, device) = (comm.rank(), comm.size(), &on.device);
    if index >= MAX_SITES {
        return Err(Error::Invalid(format!(
            "group `{}` has used {MAX_SITES} devices already; create another group for this device",
            comm.name()
        )));
    }
    let failed = |error| driver_error(&format!("group `{}` on {}", comm.name(), device.describe()), &error);
    // Kernels are loaded now: lazy loading at first use may wait for streams that wait for other ranks.
    let obstacle =
        device.mem_ops_error().or(device.prepare().err().map(|error| format!("its kernels: {error}")));
    let (memory, path, pages, sample) = if size == 1 {
        if let Some(reason) = obstacle {
            return Err(impossible(comm, &format!("rank 0: {reason}")));
        }
        (Memory::Reference, "one rank: a copy at most".to_owned(), None, None)
    } else {
        let pages_of_first = first.and_then(|handle| handle.flags.pages());
        comm.abort_on_interrupt("the preparation of a device", || {
            choose_path(comm, on, pages_of_first, shared_page.clone(), obstacle)
        })?
    };
    if memory == Memory::Bounced && comm.config().device_path == DevicePath::Reference {
        return Err(Error::Topology(format!(
            "group `{}`: SMDDP_CUDA_PATH=ipc, and device memory would go {path}",
            comm.name()
        )));
    }
    log::say(
        Level::Info,
        &format!("group `{}`: rank {rank} on {}: within the node {path}", comm.name(), device.describe()),
    );
    let flags = DeviceFlags::new(device.clone(), pages, (rank, size), index).map_err(failed)?;
    let handle = DeviceSiteHandle::new(device.clone(), (index, memory), path, flags).map_err(failed)?;
    let shared_page = shared_page.filter(|_| memory == Memory::Reference && size > 1);
    let site = DeviceSite::new(handle.clone(), shared_page, size, sample.and_then(ProbeAllocation::keep));
    Ok((handle, site))
}

/// Memory kind of a data path, its description, the node's flag pages, and the probe allocation.
type PathChoice = (Memory, String, Option<Arc<FlagPages>>, Option<ProbeAllocation>);

/// Exchanges the capabilities of all ranks' devices and chooses the best common data path.
fn choose_path(
    comm: &Communicator,
    on: &DeviceStream,
    pages_of_first: Option<Arc<FlagPages>>,
    shared_page: Option<Arc<SharedPage>>,
    obstacle: Option<String>,
) -> Result<PathChoice> {
    let device = &on.device;
    let mut probe = match (&shared_page, comm.config().device_path) {
        (_, DevicePath::Host) => Err("SMDDP_CUDA_PATH=host".to_owned()),
        (None, _) => Err("it shares no memory with the ranks of its node".to_owned()),
        (Some(_), _) if obstacle.is_some() => Err(String::new()),
        (Some(shared_page), _) => {
            ProbeAllocation::new(device, shared_page, MIN_SLAB_BYTES).map_err(|error| error.to_string())
        }
    };
    let mut record = device.uuid().to_vec();
    record.extend(probe.as_ref().map_or(0, |sample| sample.token).to_le_bytes());
    let records = comm.all_gather_bytes(record)?;
    let access = probe.as_ref().map_err(Clone::clone).and_then(|_| {
        let shared_page = shared_page.clone().ok_or_else(String::new)?;
        check_access(comm, on, &records, &shared_page)?;
        match pages_of_first {
            Some(pages) => Ok(pages),
            None => FlagPages::new(device.clone(), shared_page, comm.size())
                .map(Arc::new)
                .map_err(|error| format!("its flag pages cannot be mapped by the device: {error}")),
        }
    });
    let (kind, reason) = match (&obstacle, &access) {
        (Some(reason), _) => (IMPOSSIBLE, reason.clone()),
        (None, Ok(_)) => (REFERENCE, String::new()),
        (None, Err(reason)) => (HOST, reason.clone()),
    };
    let mut result = vec![kind];
    result.extend(reason.bytes().take(PATH_RESULT - 1));
    result.resize(PATH_RESULT, 0);
    let results = comm.all_gather_bytes(result.to_vec())?;
    if let Ok(sample) = &mut probe {
        // All ranks have tried the probe allocation.
        sample.withdraw();
    }
    let first = |kind: u8| {
        let rank = results.chunks_exact(PATH_RESULT).position(|result| result[0] == kind)?;
        let text = String::from_utf8_lossy(&results[rank * PATH_RESULT + 1..(rank + 1) * PATH_RESULT]);
        Some(format!("rank {rank}: {}", text.trim_end_matches('\0')))
    };
    let sample = probe.ok();
    if let Some(reason) = first(IMPOSSIBLE) {
        return Err(impossible(comm, &reason));
    }
    Ok(match first(HOST) {
        None => {
            let path = "by reference: copy engines read the peers' memory".to_owned();
            (Memory::Reference, path, access.ok(), sample)
        }
        Some(reason) => (Memory::Bounced, format!("through pinned host memory ({reason})"), None, sample),
    })
}

fn impossible(comm: &Communicator, reason: &str) -> Error {
    Error::Topology(format!(
        "group `{}`: smddp cannot move device memory here ({reason}); give its CUDA tensors to another backend, as in \
         init_process_group('cpu:smddp,cuda:nccl')",
        comm.name()
    ))
}

/// Checks that this rank's device can access the memory of all other devices of the node, using a probe allocation
/// of each.
fn check_access(
    comm: &Communicator,
    on: &DeviceStream,
    records: &[u8],
    shared_page: &Arc<SharedPage>,
) -> Result<(), String> {
    let topology = comm.topology();
    for peer in (0..comm.size()).filter(|&peer| topology.share_node(peer, comm.rank())) {
        let record = &records[peer * DEVICE_RECORD..(peer + 1) * DEVICE_RECORD];
        let (mut uuid, mut token) = (Uuid::default(), [0; 8]);
        uuid.copy_from_slice(&record[..16]);
        token.copy_from_slice(&record[16..]);
        if peer == comm.rank() {
            continue;
        }
        if !on.device.reaches(&uuid) {
            return Err(format!("{} does not reach the device of rank {peer}", on.device.describe()));
        }
        ProbeAllocation::check_import(&on.device, shared_page, peer, u64::from_le_bytes(token))?;
    }
    Ok(())
}
