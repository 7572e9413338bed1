//! What callers of any thread see of a group's site on one device.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_cuda::{Address, Device, Event, Result, Stream};
use smddp_plan::Memory;

use super::flags::DeviceFlags;
use crate::sync::lock;

/// An event of the handle's pool, which gets it back when nobody has it any more.
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

/// What all threads see of a site.
pub(crate) struct DeviceSiteHandle {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    /// Its number in the group; all ranks have the same.
    pub(crate) site: usize,
    pub(crate) memory: Memory,
    /// How messages go inside a node, and why, in words.
    pub(crate) path: String,
    pub(crate) flags: ManuallyDrop<DeviceFlags>,
    events: Mutex<Vec<Event>>,
    /// Operations that were given a number.
    numbers: AtomicU64,
}

/// A stream that is not empty after this time is left alone with what it uses.
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

    /// A place in the order of `stream`.
    pub(crate) fn mark(self: &Arc<Self>, stream: Stream) -> Result<PooledEvent> {
        let pooled = lock(&self.events).pop();
        let event = pooled.map_or_else(|| self.device.create_event(), Ok)?;
        let mark = PooledEvent { handle: self.clone(), event };
        self.device.record(event, stream)?;
        Ok(mark)
    }

    /// The next operation's number, from 1. Called where submissions have an order.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether the device is through with that operation, or all were released.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.flags.reached(self.flags.done(), number)
    }

    /// Whether a failure released everything.
    pub(crate) fn released(&self) -> bool {
        self.flags.released()
    }

    pub(crate) fn done_flag(&self) -> Address {
        self.flags.done()
    }

    /// Whether the stream is empty, or becomes so soon.
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
        // SAFETY: dropped once, here; the stream that writes the words is empty.
        unsafe { ManuallyDrop::drop(&mut self.flags) };
    }
}
