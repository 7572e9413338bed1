//! Fabric device whose peers send arbitrary messages.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use smddp_base::lock;
pub(super) use smddp_fabric::rail::{
    Completion, Context, LocalMemory, Posted, Rail, RailLimits, Registered, RemoteMemory,
};

/// Posted operations that are not completed.
#[derive(Default)]
pub(super) struct Queues {
    pub(super) receives: VecDeque<(LocalMemory, Context)>,
    /// Sends and writes; the device reads their memory.
    pub(super) sends: Vec<(LocalMemory, Context)>,
    /// Reads; the device writes their memory.
    pub(super) reads: Vec<(LocalMemory, Context)>,
    pub(super) events: Vec<Completion>,
}

// SAFETY: addresses of endpoint and staging memory; one thread uses all of them.
unsafe impl Send for Queues {}

#[derive(Clone)]
pub(super) struct Device {
    pub(super) queues: Arc<Mutex<Queues>>,
    writes: bool,
}

impl Device {
    pub(super) fn new(writes: bool) -> Self {
        Self { queues: Arc::default(), writes }
    }

    pub(super) fn with<T>(&self, of: impl FnOnce(&mut Queues) -> T) -> T {
        of(&mut lock(&self.queues))
    }

    /// Delivers a message to the next posted receive buffer, if there is one.
    pub(super) fn message(&self, bytes: &[u8]) {
        self.with(|queues| {
            let Some((local, context)) = queues.receives.pop_front() else { return };
            let bytes = &bytes[..bytes.len().min(local.bytes)];
            // SAFETY: a posted buffer of that size, which the device owns until the completion is reported.
            unsafe { local.at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            queues.events.push(Completion::Received(context, bytes.len()));
        });
    }
}

// SAFETY: the target accesses the memory of queued operations only. It removes an operation from its queue when it reports it, and
// accesses none after the endpoint is dropped.
unsafe impl Rail for Device {
    fn limits(&self) -> RailLimits {
        RailLimits {
            message: 8400,
            one_sided: 32 << 10,
            operations: 64,
            receives: 256,
            completions: 512,
            writes: self.writes,
            holds_messages: true,
        }
    }

    fn address(&self) -> Vec<u8> {
        vec![1]
    }

    unsafe fn register(&mut self, at: *mut u8, _: usize) -> Result<Registered, String> {
        Ok(Registered { desc: 1, key: 1, base: at as u64 })
    }

    fn insert(&mut self, address: &[u8]) -> Result<u64, String> {
        address.first().map(|&first| first.into()).ok_or_else(|| "no address".to_owned())
    }

    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String> {
        self.with(|queues| queues.receives.push_back((local, context)));
        Ok(Posted::Accepted)
    }

    unsafe fn send(&mut self, _: u64, local: LocalMemory, context: Context) -> Result<Posted, String> {
        self.with(|queues| {
            if queues.sends.len() >= 48 {
                return Ok(Posted::QueueFull);
            }
            queues.sends.push((local, context));
            Ok(Posted::Accepted)
        })
    }

    unsafe fn one_sided(
        &mut self,
        peer: u64,
        local: LocalMemory,
        _: RemoteMemory,
        write: Option<u32>,
        context: Context,
    ) -> Result<Posted, String> {
        if write.is_some() {
            // SAFETY: the contract of `send` is the same.
            return unsafe { self.send(peer, local, context) };
        }
        self.with(|queues| queues.reads.push((local, context)));
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, events: &mut Vec<Completion>) {
        self.with(|queues| events.append(&mut queues.events));
    }

    fn wait_sources(&mut self) -> Option<RawFd> {
        None
    }
}
