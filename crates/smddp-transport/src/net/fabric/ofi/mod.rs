//! The real thing: libfabric's endpoints, one per device.

mod contexts;
mod rail;

#[cfg(test)]
mod fake_tests;
#[cfg(test)]
mod tests;

use std::os::fd::RawFd;

use super::choose::Choice;
use super::provider::{Context, Event, Limits, Local, Posted, Provider, Registered, Remote};
use rail::Rail;
#[cfg(test)]
pub(super) use rail::{OPERATIONS, RECEIVES};

pub(crate) struct Ofi {
    name: String,
    rails: Vec<Rail>,
    writes: bool,
}

impl Ofi {
    /// Opens an endpoint on every device of a choice.
    pub(crate) fn open(choice: &Choice) -> Result<Self, String> {
        let mut rails = Vec::new();
        for info in choice.devices() {
            let Some(copy) = info.duplicate() else { return Err("out of memory".to_owned()) };
            let rail =
                Rail::open(copy).map_err(|why| format!("{} on {}: {why}", choice.provider, info.domain()))?;
            rails.push(rail);
        }
        let devices = choice.rails().join("+");
        let name = format!("{} (libfabric {}) {devices}", choice.provider, choice.version);
        if rails.is_empty() {
            return Err(format!("{name} has no device"));
        }
        Ok(Self { name, rails, writes: true })
    }

    /// Large payloads are read, though the device could write them.
    #[cfg(test)]
    pub(crate) fn without_writes(mut self) -> Self {
        self.writes = false;
        self
    }
}

impl Provider for Ofi {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn rails(&self) -> usize {
        self.rails.len()
    }

    /// What all rails can do.
    fn limits(&self) -> Limits {
        let mut all = self.rails[0].limits;
        for rail in &self.rails {
            let one = rail.limits;
            all.message = all.message.min(one.message);
            all.one_sided = all.one_sided.min(one.one_sided);
            all.operations = all.operations.min(one.operations);
            all.receives = all.receives.min(one.receives);
            all.completions = all.completions.min(one.completions);
            all.writes &= one.writes;
            all.patient &= one.patient;
        }
        all.writes &= self.writes;
        all
    }

    fn address(&self, rail: usize) -> Vec<u8> {
        self.rails[rail].address.clone()
    }

    unsafe fn register(&mut self, rail: usize, at: *mut u8, bytes: usize) -> Result<Registered, String> {
        // SAFETY: the caller's promise.
        unsafe { self.rails[rail].register(at, bytes) }
    }

    fn insert(&mut self, rail: usize, address: &[u8]) -> Result<u64, String> {
        self.rails[rail].insert(address)
    }

    unsafe fn receive(&mut self, rail: usize, local: Local, context: Context) -> Result<Posted, String> {
        // SAFETY: the caller's promise.
        unsafe { self.rails[rail].receive(local, context) }
    }

    unsafe fn send(
        &mut self,
        rail: usize,
        to: u64,
        local: Local,
        context: Context,
    ) -> Result<Posted, String> {
        // SAFETY: the caller's promise.
        unsafe { self.rails[rail].send(to, local, context) }
    }

    unsafe fn read(
        &mut self,
        rail: usize,
        from: u64,
        local: Local,
        remote: Remote,
        context: Context,
    ) -> Result<Posted, String> {
        // SAFETY: the caller's promise.
        unsafe { self.rails[rail].read(from, local, remote, context) }
    }

    unsafe fn write(
        &mut self,
        rail: usize,
        to: u64,
        local: Local,
        remote: Remote,
        number: u32,
        context: Context,
    ) -> Result<Posted, String> {
        // SAFETY: the caller's promise.
        unsafe { self.rails[rail].write(to, local, remote, number, context) }
    }

    fn poll(&mut self, rail: usize, events: &mut Vec<Event>) {
        self.rails[rail].poll(events);
    }

    fn interest(&mut self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        for rail in &mut self.rails {
            match rail.interest() {
                Some(fd) => fds.push((fd, libc::POLLIN)),
                None => return false,
            }
        }
        true
    }
}
