//! Operations whose work is enqueued, until the device is through.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use smddp_cuda::{Result, Stream};
use smddp_plan::Collective;

use super::site_handle::{PooledEvent, SiteHandle};
use crate::sync::completion::Completion;

/// One of them, as the driver keeps it.
pub(crate) struct Enqueued {
    pub(crate) site: usize,
    pub(crate) number: u64,
    pub(crate) seq: u64,
    pub(crate) collective: Collective,
    /// `None` until that is asked for.
    pub(crate) submitted: Option<Instant>,
    pub(crate) timeout: Duration,
    pub(crate) work: Option<Arc<Completion>>,
}

/// What the handle of a call knows of the device.
#[derive(Clone)]
pub(crate) struct DeviceCompletion {
    pub(crate) handle: Arc<SiteHandle>,
    pub(crate) number: u64,
    /// Where the operation ends in the order of the site's stream; set when all of it is enqueued.
    pub(crate) end: Arc<OnceLock<PooledEvent>>,
}

impl DeviceCompletion {
    pub(crate) fn enqueued(&self) -> bool {
        self.end.get().is_some()
    }

    /// What comes next on `stream` is after the operation, all of which is enqueued; after what there is of one that failed.
    pub(crate) fn wait_stream(&self, stream: Stream) -> Result<()> {
        let SiteHandle { device, stream: own, .. } = &*self.handle;
        if self.handle.is_done(self.number) {
            return Ok(());
        }
        match self.end.get() {
            Some(mark) => device.wait_event(stream, mark.event()),
            None => device.wait_event(stream, self.handle.mark(*own)?.event()),
        }
    }
}
