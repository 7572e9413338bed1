//! State of one operation on a device.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::bind::BlockRun;
use crate::call::types::RedOp;
use crate::device::completion::DeviceCompletion;
use crate::device::site_handle::{DeviceSiteHandle, PooledEvent};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Opening,
    Running,
    /// All work is enqueued except the waits for the peers that read this rank's memory.
    Ending,
}

/// A message in a pinned slot on its way to the group.
pub(super) struct OutgoingMessage {
    pub(super) channel: usize,
    pub(super) slot: usize,
    /// The run of which it is one segment.
    pub(super) run: BlockRun,
    pub(super) segment: usize,
    /// The slot is filled once the stream has passed this number.
    pub(super) filled_at: u64,
}

/// State of an operation on device memory.
pub(crate) struct DeviceOp {
    pub(crate) handle: Arc<DeviceSiteHandle>,
    pub(crate) number: u64,
    pub(crate) end: Arc<OnceLock<PooledEvent>>,
    /// Position in the caller's stream.
    pub(super) after: Option<PooledEvent>,
    pub(super) redop: RedOp,
    /// True if the input overlaps the output in a form that no plan supports in place.
    pub(crate) overlaps: bool,
    pub(super) stage: Stage,
    /// Value of this rank's progress flag once the input is ready.
    pub(super) ready_at: u64,
    /// (channel, bytes) of messages that are written to staging slots but not published yet.
    pub(super) unpublished: Vec<(usize, usize)>,
    pub(super) outbox: VecDeque<OutgoingMessage>,
    pub(crate) slabs: Vec<usize>,
}

impl DeviceOp {
    pub(crate) fn new(handle: Arc<DeviceSiteHandle>, after: PooledEvent, redop: RedOp) -> Self {
        Self {
            handle,
            number: 0,
            end: Arc::default(),
            after: Some(after),
            redop,
            overlaps: false,
            stage: Stage::Opening,
            ready_at: 0,
            unpublished: Vec::new(),
            outbox: VecDeque::new(),
            slabs: Vec::new(),
        }
    }

    /// Returns the completion for the handle of the call. The number must be set.
    pub(crate) fn completion(&self) -> DeviceCompletion {
        DeviceCompletion { handle: self.handle.clone(), number: self.number, end: self.end.clone() }
    }
}
