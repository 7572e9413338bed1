//! One rank's device on the simulated fabric.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use super::Rule;
use super::world::{KnownMemory, World};
use crate::lock;
use crate::net::fabric::rail::{
    Context, Event, LocalMemory, Posted, Rail, RailLimits, Registered, RemoteMemory,
};

pub(super) struct SrdRail {
    world: Arc<Mutex<World>>,
    device: usize,
}

/// Tries after a full queue, without a poll between them, that are no mistake yet: many peers share a queue.
const PATIENCE: usize = 1000;

/// Turns of the world while nothing comes of them for whoever polls.
const TURNS: usize = 16;

impl SrdRail {
    pub(super) fn new(world: Arc<Mutex<World>>, device: usize) -> Self {
        Self { world, device }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    /// Looks at what every operation has to keep to. The device behind `to`.
    fn check(&self, world: &mut World, to: Option<u64>, local: LocalMemory) -> Result<usize, String> {
        let device = self.device;
        let peer = match to {
            None => device,
            Some(to) => match world.devices[device].book.get(&to) {
                Some(&peer) => peer,
                None => {
                    let how = format!("device {device} has noted no address {to}");
                    world.violate(Rule::Book, how.clone());
                    return Err(how);
                }
            },
        };
        let known = |r: &KnownMemory| {
            let at = local.at as usize;
            r.at <= at && at + local.bytes <= r.at + r.bytes
        };
        let region = local.desc.checked_sub(1).and_then(|d| world.devices[device].regions.get(d));
        if !region.is_some_and(known) && world.holds(Rule::Descriptor) {
            let how = format!("descriptor {} is not that of {} bytes given with it", local.desc, local.bytes);
            world.violate(Rule::Descriptor, how.clone());
            return Err(how);
        }
        Ok(peer)
    }

    /// Whether there is room for an operation; full now and then.
    fn room(world: &mut World, device: usize, full: bool) -> bool {
        let refuse =
            full || world.holds(Rule::Again) && world.random.once_in(12) || world.devices[device].tries > 0;
        if refuse && (full || world.holds(Rule::Again)) {
            world.devices[device].tries += 1;
            if world.devices[device].tries > PATIENCE && world.holds(Rule::Again) {
                let how = format!("{PATIENCE} tries at device {device}, and its completions were not read");
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
        let unless = |rule, limit| if world.holds(rule) { limit } else { usize::MAX >> 1 };
        RailLimits {
            message: unless(Rule::Message, script.message),
            one_sided: unless(Rule::OneSided, script.one_sided),
            operations: script.operations,
            receives: script.receives,
            completions: script.completions,
            writes: script.writes,
            patient: false,
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
        let key = if world.holds(Rule::Key) { random } else { count };
        let base = if world.holds(Rule::Address) { at as u64 } else { 0 };
        world.devices[device].regions.push(KnownMemory { at: at as usize, bytes, key, base });
        Ok(Registered { desc: count as usize, key, base })
    }

    fn insert(&mut self, address: &[u8]) -> Result<u64, String> {
        let mut world = self.world();
        let device = self.device;
        let Some(peer) = world.devices.iter().position(|d| d.address == address) else {
            return Err("no device has that address".to_owned());
        };
        // Not the device's number: nobody may guess.
        let number = world.random.next() >> 16;
        world.devices[device].book.insert(number, peer);
        Ok(number)
    }

    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        let device = self.device;
        self.check(world, None, local)?;
        if world.devices[device].receives.len() >= world.script.receives {
            return Ok(Posted::Again);
        }
        world.devices[device].receives.push_back((local, context));
        Ok(Posted::Yes)
    }

    unsafe fn send(&mut self, to: u64, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        if local.bytes > world.script.message && world.holds(Rule::Message) {
            let how = format!("a message of {} bytes, and {} is the most", local.bytes, world.script.message);
            world.violate(Rule::Message, how.clone());
            return Err(how);
        }
        let (device, peer) = (self.device, self.check(world, Some(to), local)?);
        let full = world.devices[device].busy >= world.script.operations;
        if !Self::room(world, device, full) {
            return Ok(Posted::Again);
        }
        world.devices[device].busy += 1;
        world.fly_message(device, peer, local, context);
        Ok(Posted::Yes)
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
        if local.bytes > world.script.one_sided && world.holds(Rule::OneSided) {
            let how = format!("{} bytes at once, and {} is the most", local.bytes, world.script.one_sided);
            world.violate(Rule::OneSided, how.clone());
            return Err(how);
        }
        if write.is_some() && !world.script.writes && world.holds(Rule::Writes) {
            world.violate(Rule::Writes, "a write, and the device has none".to_owned());
            return Err("the device does not write".to_owned());
        }
        let full = world.devices[device].busy >= world.script.operations;
        if !Self::room(world, device, full) {
            return Ok(Posted::Again);
        }
        world.devices[device].busy += 1;
        world.fly_one_sided((device, peer), local, remote, write, context);
        Ok(Posted::Yes)
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let mut world = self.world();
        let device = self.device;
        let before = events.len();
        // Whoever asks in vain may go to sleep for longer than the fabric takes.
        for _ in 0..TURNS {
            world.turn();
            world.completions(device, events);
            if events.len() > before || world.still() {
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
        self.world().leave(self.device);
    }
}
