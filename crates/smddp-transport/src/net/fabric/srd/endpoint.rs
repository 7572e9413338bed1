//! One rank's end of the simulated fabric.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Rule;
use super::world::{Region, World};
use crate::net::fabric::provider::{Context, Event, Limits, Local, Posted, Provider, Registered, Remote};

pub(super) struct SrdProvider {
    world: Arc<Mutex<World>>,
    rank: usize,
}

/// Tries after a full queue, without a poll between them, that are no mistake yet: many peers share a queue.
const PATIENCE: usize = 1000;

/// Turns of the world while nothing comes of them for whoever polls.
const TURNS: usize = 16;

impl SrdProvider {
    pub(super) fn new(world: Arc<Mutex<World>>, rank: usize) -> Self {
        Self { world, rank }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at what every operation has to keep to. The device, and the peer's behind `to`.
    fn check(
        &self,
        world: &mut World,
        rail: usize,
        to: Option<u64>,
        local: Local,
    ) -> Result<(usize, usize), String> {
        let device = self.rank * world.script.rails + rail;
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
        let known = |r: &Region| {
            let at = local.at as usize;
            r.at <= at && at + local.bytes <= r.at + r.bytes
        };
        let region = local.desc.checked_sub(1).and_then(|d| world.devices[device].regions.get(d));
        if !region.is_some_and(known) && world.holds(Rule::Descriptor) {
            let how = format!("descriptor {} is not that of {} bytes given with it", local.desc, local.bytes);
            world.violate(Rule::Descriptor, how.clone());
            return Err(how);
        }
        Ok((device, peer))
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

    fn one_sided(
        &mut self,
        rail: usize,
        to: u64,
        local: Local,
        remote: Remote,
        write: Option<u32>,
        context: Context,
    ) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        let (device, peer) = self.check(world, rail, Some(to), local)?;
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
}

impl Provider for SrdProvider {
    fn describe(&self) -> String {
        format!("srd-sim (seed {})", self.world().script.seed)
    }

    fn rails(&self) -> usize {
        self.world().script.rails
    }

    fn limits(&self) -> Limits {
        let world = self.world();
        let script = &world.script;
        let unless = |rule, limit| if world.holds(rule) { limit } else { usize::MAX >> 1 };
        Limits {
            message: unless(Rule::Message, script.message),
            one_sided: unless(Rule::OneSided, script.one_sided),
            operations: script.operations,
            receives: script.receives,
            completions: script.completions,
            writes: script.writes,
            patient: false,
        }
    }

    fn address(&self, rail: usize) -> Vec<u8> {
        let world = self.world();
        world.devices[self.rank * world.script.rails + rail].address.clone()
    }

    unsafe fn register(&mut self, rail: usize, at: *mut u8, bytes: usize) -> Result<Registered, String> {
        let mut world = self.world();
        let device = self.rank * world.script.rails + rail;
        let random = world.random.next() & 0xffff_ffff | 1 << 20;
        let count = world.devices[device].regions.len() as u64 + 1;
        let key = if world.holds(Rule::Key) { random } else { count };
        let base = if world.holds(Rule::Address) { at as u64 } else { 0 };
        world.devices[device].regions.push(Region { at: at as usize, bytes, key, base });
        Ok(Registered { desc: count as usize, key, base })
    }

    fn insert(&mut self, rail: usize, address: &[u8]) -> Result<u64, String> {
        let mut world = self.world();
        let device = self.rank * world.script.rails + rail;
        let Some(peer) = world.devices.iter().position(|d| d.address == address) else {
            return Err("no device has that address".to_owned());
        };
        // Not the device's number: nobody may guess.
        let number = world.random.next() >> 16;
        world.devices[device].book.insert(number, peer);
        Ok(number)
    }

    unsafe fn receive(&mut self, rail: usize, local: Local, context: Context) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        let (device, _) = self.check(world, rail, None, local)?;
        if world.devices[device].receives.len() >= world.script.receives {
            return Ok(Posted::Again);
        }
        world.devices[device].receives.push_back((local, context));
        Ok(Posted::Yes)
    }

    unsafe fn send(
        &mut self,
        rail: usize,
        to: u64,
        local: Local,
        context: Context,
    ) -> Result<Posted, String> {
        let mut world = self.world();
        let world = &mut *world;
        if local.bytes > world.script.message && world.holds(Rule::Message) {
            let how = format!("a message of {} bytes, and {} is the most", local.bytes, world.script.message);
            world.violate(Rule::Message, how.clone());
            return Err(how);
        }
        let (device, peer) = self.check(world, rail, Some(to), local)?;
        let full = world.devices[device].busy >= world.script.operations;
        if !Self::room(world, device, full) {
            return Ok(Posted::Again);
        }
        world.devices[device].busy += 1;
        world.fly_message(device, peer, local, context);
        Ok(Posted::Yes)
    }

    unsafe fn read(
        &mut self,
        rail: usize,
        from: u64,
        local: Local,
        remote: Remote,
        context: Context,
    ) -> Result<Posted, String> {
        self.one_sided(rail, from, local, remote, None, context)
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
        self.one_sided(rail, to, local, remote, Some(number), context)
    }

    fn poll(&mut self, rail: usize, events: &mut Vec<Event>) {
        let mut world = self.world();
        let device = self.rank * world.script.rails + rail;
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

    fn interest(&mut self, _: &mut Vec<(RawFd, i16)>) -> bool {
        false
    }
}

impl Drop for SrdProvider {
    fn drop(&mut self) {
        let rank = self.rank;
        self.world().leave(rank);
    }
}
