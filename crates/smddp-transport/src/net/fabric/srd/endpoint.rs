//! One rank's device on the simulated fabric.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use super::Rule;
use super::world::{KnownMemory, World};
use crate::lock;
use crate::net::fabric::rail::{
    Completion, Context, LocalMemory, Posted, Rail, RailLimits, Registered, RemoteMemory,
};

/// Rail over a simulated device.
pub(super) struct SrdRail {
    world: Arc<Mutex<World>>,
    device: usize,
}

/// Retries after a full queue without a poll that are not a violation yet: many peers share a queue.
const MAX_RETRIES: usize = 1000;

/// Maximum number of simulation steps per poll while no completion appears.
const STEPS: usize = 16;

impl SrdRail {
    pub(super) fn new(world: Arc<Mutex<World>>, device: usize) -> Self {
        Self { world, device }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    /// Checks the rules that apply to every operation; returns the index of the device behind `to`.
    fn check(&self, world: &mut World, to: Option<u64>, local: LocalMemory) -> Result<usize, String> {
        let device = self.device;
        let peer = match to {
            None => device,
            Some(to) => match world.devices[device].address_vector.get(&to) {
                Some(&peer) => peer,
                None => {
                    let how = format!("device {device} uses address {to}, which was not inserted");
                    world.violate(Rule::AddressVector, how.clone());
                    return Err(how);
                }
            },
        };
        let known = |r: &KnownMemory| {
            let at = local.at as usize;
            r.at <= at && at + local.bytes <= r.at + r.bytes
        };
        let region = local.desc.checked_sub(1).and_then(|d| world.devices[device].regions.get(d));
        if !region.is_some_and(known) && world.enforces(Rule::Descriptor) {
            let how = format!(
                "descriptor {} does not cover the {} bytes of the operation",
                local.desc, local.bytes
            );
            world.violate(Rule::Descriptor, how.clone());
            return Err(how);
        }
        Ok(peer)
    }

    /// Returns true if an operation can be posted; sometimes false at random.
    fn has_capacity(world: &mut World, device: usize, full: bool) -> bool {
        let refuse = full
            || world.enforces(Rule::Again) && world.random.once_in(12)
            || world.devices[device].tries > 0;
        if refuse && (full || world.enforces(Rule::Again)) {
            world.devices[device].tries += 1;
            if world.devices[device].tries > MAX_RETRIES && world.enforces(Rule::Again) {
                let how = format!("{MAX_RETRIES} retries at device {device} without a poll");
                world.violate(Rule::Again, how);
                world.devices[device].tries = 0;
                return !full;
            }
            return false;
        }
        true
    }
}

impl Rail for SrdRail {
    fn limits(&self) -> RailLimits {
        let world = self.world();
        let script = &world.script;
        let unless = |rule, limit| if world.enforces(rule) { limit } else { usize::MAX >> 1 };
        RailLimits {
            message: unless(Rule::Message, script.message),
            one_sided: unless(Rule::OneSided, script.one_sided),
            operations: script.operations,
            receives: script.receives,
            completions: script.completions,
            writes: script.writes,
            holds_messages: false,
        }
    }

    fn address(&self) -> Vec<u8> {
        self.world().devices[self.device].address.clone()
    }

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> Result<Registered, String> {
        let mut world = self.world();
        let device = self.device;
        let random = world.random.next() & 0xffff_ffff | 1 << 20;
        let count = world.devices[device].regions.len() as u64 + 1;
        let key = if world.enforces(Rule::Key) { random } else { count };
        let base = if world.enforces(Rule::Address) { at as u64 } else { 0 };
        world.devices[device].regions.push(KnownMemory { at: at as usize, bytes, key, base });
        Ok(Registered { desc: count as usize, key, base })
    }

    fn insert(&mut self, address: &[u8]) -> Result<u64, String> {
        let mut world = self.world();
        let device = self.device;
        let Some(peer) = world.devices.iter().position(|d| d.address == address) else {
            return Err("no device has this address".to_owned());
        };
        // Not the device's index, so that a handle cannot be guessed.
        let number = world.random.next() >> 16;
        world.devices[device].address_vector.insert(number, peer);
        Ok(number)
    }

    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        let device = self.device;
        self.check(world, None, local)?;
        if world.devices[device].receives.len() >= world.script.receives {
            return Ok(Posted::QueueFull);
        }
        world.devices[device].receives.push_back((local, context));
        Ok(Posted::Accepted)
    }

    unsafe fn send(&mut self, to: u64, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        if local.bytes > world.script.message && world.enforces(Rule::Message) {
            let how = format!(
                "a message of {} bytes exceeds the maximum of {} bytes",
                local.bytes, world.script.message
            );
            world.violate(Rule::Message, how.clone());
            return Err(how);
        }
        let (device, peer) = (self.device, self.check(world, Some(to), local)?);
        let full = world.devices[device].busy >= world.script.operations;
        if !Self::has_capacity(world, device, full) {
            return Ok(Posted::QueueFull);
        }
        world.devices[device].busy += 1;
        world.launch_message(device, peer, local, context);
        Ok(Posted::Accepted)
    }

    unsafe fn one_sided(
        &mut self,
        to: u64,
        local: LocalMemory,
        remote: RemoteMemory,
        write: Option<u32>,
        context: Context,
    ) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        let (device, peer) = (self.device, self.check(world, Some(to), local)?);
        if local.bytes > world.script.one_sided && world.enforces(Rule::OneSided) {
            let how = format!(
                "a one-sided operation of {} bytes exceeds the maximum of {} bytes",
                local.bytes, world.script.one_sided
            );
            world.violate(Rule::OneSided, how.clone());
            return Err(how);
        }
        if write.is_some() && !world.script.writes && world.enforces(Rule::Writes) {
            world.violate(Rule::Writes, "a write to a device without native writes".to_owned());
            return Err("the device does not support writes".to_owned());
        }
        let full = world.devices[device].busy >= world.script.operations;
        if !Self::has_capacity(world, device, full) {
            return Ok(Posted::QueueFull);
        }
        world.devices[device].busy += 1;
        world.launch_one_sided((device, peer), local, remote, write, context);
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, events: &mut Vec<Completion>) {
        let mut world = self.world();
        let device = self.device;
        let before = events.len();
        // A caller without completions may sleep for longer than the fabric takes.
        for _ in 0..STEPS {
            world.step();
            world.completions(device, events);
            if events.len() > before || world.is_idle() {
                break;
            }
        }
    }

    fn interest(&mut self) -> Option<RawFd> {
        None
    }
}

impl Drop for SrdRail {
    fn drop(&mut self) {
        self.world().remove_device(self.device);
    }
}
