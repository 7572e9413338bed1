//! Calls on devices. All ranks of a group come to the same way for its devices: once, at the first call on them.

use std::sync::{Arc, TryLockError};

use smddp_cuda::Uuid;
use smddp_plan::Memory;
use smddp_transport::SharedPage;

use super::Communicator;
use crate::call::{self, Call};
use crate::config::DevicePath;
use crate::device::{LEAST_SLAB, MOST_SITES, On, Pages, Sample, Site, SiteHandle, Words, refused};
use crate::engine::Command;
use crate::error::{Error, Result};
use crate::exec::device::DeviceOp;
use crate::log::{self, Level};
use crate::sync::completion::in_handler;
use crate::sync::lock;

/// What a rank says of its device: its name for itself, and the number of a sample of its memory.
const CARD: usize = 24;
/// What it says of the way: a byte, then why not by reference.
const VERDICT: usize = 256;
const REFERENCE: u8 = 1;
const HOST: u8 = 0;
const NOT_AT_ALL: u8 = 2;

impl Communicator {
    /// What a call on a device has besides: its place in the order of the caller's stream. The first call on a device meets
    /// all ranks of the group, which all make it.
    pub(super) fn device_op(&self, on: &On, call: &Call<'_>) -> Result<Box<DeviceOp>> {
        let name = call::name_of(call.collective);
        let refused =
            |error| refused(&format!("{name} on group `{}`, {}", self.0.name, on.device.describe()), &error);
        if on.device.capturing(on.stream).map_err(refused)? {
            return Err(Error::Invalid(format!(
                "{name}: the stream is being captured into a CUDA graph, which smddp cannot be part of: its operations wait for \
                 words whose values differ from run to run; call it outside the graph"
            )));
        }
        let handle = self.handle(on)?;
        let after = handle.mark(on.stream).map_err(refused)?;
        Ok(Box::new(DeviceOp::new(handle, after, call.redop)))
    }

    /// This group's site on a device; made by all ranks together at the first call there.
    pub fn prepare_device(&self, on: &On) -> Result<()> {
        self.handle(on).map(drop)
    }

    fn handle(&self, on: &On) -> Result<Arc<SiteHandle>> {
        let state = &self.0;
        if let Some(known) = self.prepared(on.device.ordinal()) {
            return Ok(known);
        }
        if in_handler() && matches!(state.preparing.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(Error::System {
                what: format!("prepare {} for group `{}` in a signal handler", on.device.describe(), state.name),
                reason: "the call that the handler interrupted, or another thread, prepares a device of this group; make the \
                      call after the handler has returned"
                    .to_owned(),
            });
        }
        let _preparing = lock(&state.preparing);
        if let Some(known) = self.prepared(on.device.ordinal()) {
            return Ok(known);
        }
        let (count, first) = {
            let handles = lock(&state.handles);
            (handles.len(), handles.first().cloned())
        };
        // Two collectives: other threads may ask for the devices that are prepared meanwhile.
        let (handle, site) = agree(self, on, count, first.as_ref(), state.shared_page.clone())?;
        state.submit(|| Command::Site(Box::new(site)));
        lock(&state.handles).push(handle.clone());
        Ok(handle)
    }

    /// The group's handle of a device that it has been used on.
    fn prepared(&self, ordinal: i32) -> Option<Arc<SiteHandle>> {
        lock(&self.0.handles).iter().find(|handle| handle.device.ordinal() == ordinal).cloned()
    }

    /// The stream on which this group moves memory of that device, and the way it goes, in words; `None` before the first
    /// call there.
    pub fn on_device(&self, ordinal: i32) -> Option<(smddp_cuda::Stream, String)> {
        let handle = self.prepared(ordinal)?;
        Some((handle.stream, handle.path.clone()))
    }
}

/// Makes the group's site number `index` on a device. All ranks do so at the same call. `first`: the group's first, if this
/// is another one.
fn agree(
    comm: &Communicator,
    on: &On,
    index: usize,
    first: Option<&Arc<SiteHandle>>,
    shared_page: Option<Arc<SharedPage>>,
) -> Result<(Arc<SiteHandle>, Site)> {
    let (rank, size, device) = (comm.rank(), comm.size(), &on.device);
    if index >= MOST_SITES {
        return Err(Error::Invalid(format!(
            "group `{}` has used {MOST_SITES} devices already; make another group for this one",
            comm.name()
        )));
    }
    let failed = |error| refused(&format!("group `{}` on {}", comm.name(), device.describe()), &error);
    // Loaded later, at first use, a kernel may wait for streams that wait for other ranks.
    let unable = device.no_words().or(device.prepare().err().map(|error| format!("its kernels: {error}")));
    let (memory, path, pages, sample) = if size == 1 {
        if let Some(reason) = unable {
            return Err(impossible(comm, &format!("rank 0: {reason}")));
        }
        (Memory::Reference, "one rank: a copy at most".to_owned(), None, None)
    } else {
        let known = first.and_then(|handle| handle.words.pages());
        comm.one_call("the preparation of a device", || meet(comm, on, known, shared_page.clone(), unable))?
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
    let words = Words::new(device.clone(), pages, (rank, size), index).map_err(failed)?;
    let handle = SiteHandle::new(device.clone(), (index, memory), path, words).map_err(failed)?;
    let shared_page = shared_page.filter(|_| memory == Memory::Reference && size > 1);
    let site = Site::new(handle.clone(), shared_page, size, sample.and_then(Sample::keep));
    Ok((handle, site))
}

/// A way, in words too, and what it needs: the node's pages, and memory that was allocated to find out.
type Found = (Memory, String, Option<Arc<Pages>>, Option<Sample>);

/// All ranks say what their devices can do, and come to the same.
fn meet(
    comm: &Communicator,
    on: &On,
    known: Option<Arc<Pages>>,
    shared_page: Option<Arc<SharedPage>>,
    unable: Option<String>,
) -> Result<Found> {
    let device = &on.device;
    let mut asked = match (&shared_page, comm.config().device_path) {
        (_, DevicePath::Host) => Err("SMDDP_CUDA_PATH=host".to_owned()),
        (None, _) => Err("it shares no memory with the ranks of its node".to_owned()),
        (Some(_), _) if unable.is_some() => Err(String::new()),
        (Some(shared_page), _) => {
            Sample::new(device, shared_page, LEAST_SLAB).map_err(|error| error.to_string())
        }
    };
    let mut card = device.uuid().to_vec();
    card.extend(asked.as_ref().map_or(0, |sample| sample.token).to_le_bytes());
    let cards = comm.all_gather_bytes(card)?;
    let found = asked.as_ref().map_err(Clone::clone).and_then(|_| {
        let shared_page = shared_page.clone().ok_or_else(String::new)?;
        reach(comm, on, &cards, &shared_page)?;
        match known {
            Some(pages) => Ok(pages),
            None => Pages::new(device.clone(), shared_page, comm.size())
                .map(Arc::new)
                .map_err(|error| format!("its words cannot be made known to the device: {error}")),
        }
    });
    let (kind, reason) = match (&unable, &found) {
        (Some(reason), _) => (NOT_AT_ALL, reason.clone()),
        (None, Ok(_)) => (REFERENCE, String::new()),
        (None, Err(reason)) => (HOST, reason.clone()),
    };
    let mut verdict = vec![kind];
    verdict.extend(reason.bytes().take(VERDICT - 1));
    verdict.resize(VERDICT, 0);
    let verdicts = comm.all_gather_bytes(verdict.to_vec())?;
    if let Ok(sample) = &mut asked {
        // All have tried it.
        sample.withdraw();
    }
    let first = |kind: u8| {
        let rank = verdicts.chunks_exact(VERDICT).position(|verdict| verdict[0] == kind)?;
        let text = String::from_utf8_lossy(&verdicts[rank * VERDICT + 1..(rank + 1) * VERDICT]);
        Some(format!("rank {rank}: {}", text.trim_end_matches('\0')))
    };
    let sample = asked.ok();
    if let Some(reason) = first(NOT_AT_ALL) {
        return Err(impossible(comm, &reason));
    }
    Ok(match first(HOST) {
        None => {
            let path = "by reference: copy engines read the peers' memory".to_owned();
            (Memory::Reference, path, found.ok(), sample)
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

/// Whether this rank's device has the memory of its node's devices: tried with a sample of each.
fn reach(comm: &Communicator, on: &On, cards: &[u8], shared_page: &Arc<SharedPage>) -> Result<(), String> {
    let topology = comm.topology();
    for mate in (0..comm.size()).filter(|&mate| topology.share_node(mate, comm.rank())) {
        let card = &cards[mate * CARD..(mate + 1) * CARD];
        let (mut uuid, mut token) = (Uuid::default(), [0; 8]);
        uuid.copy_from_slice(&card[..16]);
        token.copy_from_slice(&card[16..]);
        if mate == comm.rank() {
            continue;
        }
        if !on.device.reaches(&uuid) {
            return Err(format!("{} does not reach the device of rank {mate}", on.device.describe()));
        }
        Sample::try_of(&on.device, shared_page, mate, u64::from_le_bytes(token))?;
    }
    Ok(())
}
