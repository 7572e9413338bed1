//! The part of a group's site on one device that any thread may use.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_cuda::{Address, Device, Event, Result, Stream};
use smddp_plan::Memory;

use super::flags::DeviceFlags;
use crate::sync::lock;

/// An event of the handle's pool, returned to it on drop.
pub(crate) struct PooledEvent {
    handle: Arc<DeviceSiteHandle>,
    event: Event,
}

impl PooledEvent {
    pub(crate) fn event(&self) -> Event {
        self.event
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        lock(&self.handle.events).push(self.event);
    }
}

/// The part of a site that any thread may use.
pub(crate) struct DeviceSiteHandle {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    /// Index of the site in the group, equal on all ranks.
    pub(crate) site: usize,
    pub(crate) memory: Memory,
    /// Transport inside a node, and the reason for its choice, for logs.
    pub(crate) path: String,
    pub(crate) flags: ManuallyDrop<DeviceFlags>,
    events: Mutex<Vec<Event>>,
    /// Number of operations that have received a number.
    numbers: AtomicU64,
}

/// Maximum time to wait for an empty stream on drop. After it, the stream and its resources are leaked.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl DeviceSiteHandle {
    pub(crate) fn new(
        device: Arc<Device>,
        (site, memory): (usize, Memory),
        path: String,
        flags: DeviceFlags,
    ) -> Result<Arc<Self>> {
        let stream = device.create_stream()?;
        let flags = ManuallyDrop::new(flags);
        let (events, numbers) = (Mutex::default(), AtomicU64::new(0));
        Ok(Arc::new(Self { device, stream, site, memory, path, flags, events, numbers }))
    }

    /// Records an event at the current position of `stream`.
    pub(crate) fn mark(self: &Arc<Self>, stream: Stream) -> Result<PooledEvent> {
        let pooled = lock(&self.events).pop();
        let event = pooled.map_or_else(|| self.device.create_event(), Ok)?;
        let mark = PooledEvent { handle: self.clone(), event };
        self.device.record(event, stream)?;
        Ok(mark)
    }

    /// Returns the next operation number, from 1. Call it in submission order.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns true if the device has completed the operation, or a failure released all waits.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.flags.reached(self.flags.done(), number)
    }

    /// Returns true if a failure released all waits.
    pub(crate) fn released(&self) -> bool {
        self.flags.released()
    }

    pub(crate) fn done_flag(&self) -> Address {
        self.flags.done()
    }

    /// Waits up to [`DRAIN_TIMEOUT`] for an empty stream. Returns true if it is empty.
    pub(crate) fn wait_drained(&self) -> bool {
        let Ok(event) = self.device.create_event() else { return false };
        let begun = Instant::now();
        let mut passed = self.device.record(event, self.stream).map(|()| false);
        while passed == Ok(false) && begun.elapsed() < DRAIN_TIMEOUT {
            passed = self.device.passed(event);
            if passed == Ok(false) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.device.destroy_event(event);
        passed == Ok(true)
    }
}

impl Drop for DeviceSiteHandle {
    fn drop(&mut self) {
        if !self.wait_drained() {
            return;
        }
        for event in lock(&self.events).drain(..) {
            self.device.destroy_event(event);
        }
        self.device.destroy_stream(self.stream);
        // SAFETY: dropped once, here. The stream that writes the flags is empty.
        unsafe { ManuallyDrop::drop(&mut self.flags) };
    }
}
