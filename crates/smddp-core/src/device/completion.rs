//! Device operations between the enqueue of their work and its completion on the device.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use smddp_cuda::{Result, Stream};
use smddp_plan::Collective;

use super::site_handle::{DeviceSiteHandle, PooledEvent};
use crate::sync::completion::Completion;

/// An enqueued operation, as the engine keeps it.
pub(crate) struct Enqueued {
    pub(crate) site: usize,
    pub(crate) number: u64,
    pub(crate) seq: u64,
    pub(crate) collective: Collective,
    /// `None` until first requested.
    pub(crate) submitted: Option<Instant>,
    pub(crate) timeout: Duration,
    pub(crate) work: Option<Arc<Completion>>,
}

/// Completion of a call on the device, as its handle sees it.
#[derive(Clone)]
pub(crate) struct DeviceCompletion {
    pub(crate) handle: Arc<DeviceSiteHandle>,
    pub(crate) number: u64,
    /// End of the operation in the order of the site's stream. Set when all its work is enqueued.
    pub(crate) end: Arc<OnceLock<PooledEvent>>,
}

impl DeviceCompletion {
    pub(crate) fn enqueued(&self) -> bool {
        self.end.get().is_some()
    }

    /// Orders later work on `stream` after the operation. All its work must be enqueued, or the operation must have
    /// failed.
    pub(crate) fn wait_stream(&self, stream: Stream) -> Result<()> {
        let DeviceSiteHandle { device, stream: own, .. } = &*self.handle;
        if self.handle.is_done(self.number) {
            return Ok(());
        }
        match self.end.get() {
            Some(mark) => device.wait_event(stream, mark.event()),
            None => device.wait_event(stream, self.handle.mark(*own)?.event()),
        }
    }
}
