//! What is under way on the simulated fabric, and what becomes of it.

use std::collections::{HashMap, VecDeque};

use super::{Rule, SrdScript};
use crate::net::fabric::rail::{Context, Event, LocalMemory, RemoteMemory};

/// A small generator (splitmix64): the same seed, the same run.
pub(super) struct Random(u64);

impl Random {
    #[cfg(test)]
    pub(super) fn of(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// True once in `n`.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Memory that a device knows.
#[derive(Clone, Copy)]
pub(super) struct KnownMemory {
    pub(super) at: usize,
    pub(super) bytes: usize,
    pub(super) key: u64,
    pub(super) base: u64,
}

/// One device of one rank.
#[derive(Default)]
pub(super) struct Device {
    pub(super) rank: usize,
    pub(super) address: Vec<u8>,
    /// Devices noted, by the number they were noted under.
    pub(super) book: HashMap<u64, usize>,
    /// By descriptor less one.
    pub(super) regions: Vec<KnownMemory>,
    pub(super) receives: VecDeque<(LocalMemory, Context)>,
    /// What is over and not yet in the completion queue, and what is.
    over: Vec<Event>,
    pub(super) queue: VecDeque<Event>,
    /// Operations under way.
    pub(super) busy: usize,
    /// Tries since a queue was full and nobody polled.
    pub(super) tries: usize,
}

/// Addresses are only used under the world's lock, while the operation that they belong to is under way.
#[derive(Clone, Copy)]
struct Bytes {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

enum Cargo {
    Message {
        local: LocalMemory,
        context: Context,
    },
    /// A piece of a one-sided operation.
    Piece {
        operation: u64,
        bytes: Bytes,
    },
}

struct Flight {
    from: usize,
    to: usize,
    /// Turns that it stays where it is.
    hold: usize,
    cargo: Cargo,
}

struct OneSided {
    from: usize,
    to: usize,
    context: Context,
    pieces: usize,
    /// What the target is told of a write.
    number: Option<u32>,
}

pub(crate) struct World {
    pub(super) script: SrdScript,
    pub(super) random: Random,
    /// Rank r's rails are devices r * rails and on.
    pub(super) devices: Vec<Device>,
    flights: Vec<Flight>,
    operations: HashMap<u64, OneSided>,
    next: u64,
    pub(super) violations: Vec<(Rule, String)>,
    dead: Vec<bool>,
}

// SAFETY: the addresses in here are of memory that its owners keep until the operations are over, or until their
// provider is dropped, which takes its flights out; any thread that holds the world's lock may copy.
unsafe impl Send for World {}

impl World {
    pub(super) fn new(ranks: usize, script: SrdScript) -> Self {
        let mut random = Random(script.seed);
        let devices = (0..ranks * script.rails)
            .map(|device| Device {
                rank: device / script.rails,
                address: [random.next().to_le_bytes(), (device as u64).to_le_bytes()].concat(),
                ..Device::default()
            })
            .collect();
        Self {
            script,
            random,
            devices,
            flights: Vec::new(),
            operations: HashMap::new(),
            next: 0,
            violations: Vec::new(),
            dead: vec![false; ranks],
        }
    }

    pub(super) fn holds(&self, rule: Rule) -> bool {
        !self.script.without.contains(&rule)
    }

    pub(super) fn violate(&mut self, rule: Rule, how: String) {
        if self.violations.len() < 1000 {
            self.violations.push((rule, how));
        }
    }

    pub(super) fn fly_message(&mut self, from: usize, to: usize, local: LocalMemory, context: Context) {
        self.fly(from, to, Cargo::Message { local, context });
    }

    fn fly(&mut self, from: usize, to: usize, cargo: Cargo) {
        // Now and then something stays behind for long.
        let hold = match self.holds(Rule::Order) {
            true if self.random.once_in(8) => self.random.below(200),
            _ => 0,
        };
        self.flights.push(Flight { from, to, hold, cargo });
    }

    /// Starts a one-sided operation; the target's side of it is looked at here.
    pub(super) fn fly_one_sided(
        &mut self,
        (from, to): (usize, usize),
        local: LocalMemory,
        remote: RemoteMemory,
        write: Option<u32>,
        context: Context,
    ) {
        let at = match self.target(from, to, local.bytes, remote) {
            Ok(at) => at,
            Err(reason) => {
                self.devices[from].over.push(Event::Failed(Some(context), reason));
                return;
            }
        };
        let operation = self.next;
        self.next += 1;
        let mut pieces = 0;
        let mut start = 0;
        while start < local.bytes || pieces == 0 {
            let rest = local.bytes - start;
            let bytes = if rest > 1 && !self.random.once_in(3) { 1 + self.random.below(rest) } else { rest };
            let (here, there) = (local.at.wrapping_add(start), (at + start) as *mut u8);
            let bytes = match write {
                Some(_) => Bytes { from: here, to: there, bytes },
                None => Bytes { from: there, to: here, bytes },
            };
            self.fly(from, to, Cargo::Piece { operation, bytes });
            start += bytes.bytes;
            pieces += 1;
        }
        self.operations.insert(operation, OneSided { from, to, context, pieces, number: write });
    }

    /// Where remote memory lies, if the target serves it.
    fn target(
        &mut self,
        from: usize,
        to: usize,
        bytes: usize,
        remote: RemoteMemory,
    ) -> Result<usize, String> {
        let known = self.devices[to].book.values().any(|&d| d == from);
        if !known && self.holds(Rule::Book) {
            let how = format!("device {to} does not know device {from}, which reads or writes its memory");
            self.violate(Rule::Book, how.clone());
            return Err(how);
        }
        let Some(region) = self.devices[to].regions.iter().find(|r| r.key == remote.key).copied() else {
            let how = format!("device {to} has no key {:#x}", remote.key);
            self.violate(Rule::Key, how.clone());
            return Err(how);
        };
        let inside = remote
            .address
            .checked_sub(region.base)
            .filter(|o| *o <= (region.bytes - bytes.min(region.bytes)) as u64);
        match inside {
            Some(offset) if bytes <= region.bytes => Ok(region.at + offset as usize),
            _ => {
                let how =
                    format!("{:#x} is no address in the memory of key {:#x}", remote.address, remote.key);
                self.violate(Rule::Address, how.clone());
                Err(how)
            }
        }
    }

    /// Whether nothing is under way.
    pub(super) fn still(&self) -> bool {
        self.flights.is_empty()
    }

    /// Moves a few things on.
    pub(super) fn turn(&mut self) {
        let in_order = !self.holds(Rule::Order);
        let steps = if in_order { 8 } else { 1 + self.random.below(6) };
        for _ in 0..steps.min(self.flights.len()) {
            let at = if in_order { 0 } else { self.random.below(self.flights.len()) };
            if self.flights[at].hold > 0 {
                self.flights[at].hold -= 1;
                continue;
            }
            // Order matters only where it is kept.
            let flight = if in_order { self.flights.remove(at) } else { self.flights.swap_remove(at) };
            self.land(flight);
        }
    }

    fn land(&mut self, flight: Flight) {
        let (from, to) = (flight.from, flight.to);
        if self.dead[self.devices[from].rank] {
            return;
        }
        if self.dead[self.devices[to].rank] {
            let context = match &flight.cargo {
                Cargo::Message { context, .. } => Some(*context),
                // Once for all its pieces.
                Cargo::Piece { operation, .. } => self.operations.remove(operation).map(|o| o.context),
            };
            if let Some(context) = context {
                self.over(from, Event::Failed(Some(context), "the peer cannot be reached".to_owned()));
            }
            return;
        }
        match flight.cargo {
            Cargo::Message { local, context } => {
                let Some((room, received)) = self.devices[to].receives.pop_front() else {
                    if self.holds(Rule::Receive) {
                        self.violate(Rule::Receive, format!("device {to} has no receive buffer posted"));
                    }
                    self.flights.push(Flight { hold: 3, ..flight });
                    return;
                };
                let bytes = local.bytes.min(room.bytes);
                if bytes < local.bytes {
                    self.violate(
                        Rule::Message,
                        format!("{} bytes for a buffer of {}", local.bytes, room.bytes),
                    );
                }
                // SAFETY: both belong to operations under way (see `World`), and are different buffers.
                unsafe { room.at.copy_from_nonoverlapping(local.at, bytes) };
                self.over(from, Event::Done(context));
                self.over(to, Event::Received(received, bytes));
            }
            Cargo::Piece { operation, bytes } => {
                let Some(o) = self.operations.get_mut(&operation) else { return };
                // SAFETY: local memory of an operation under way, and memory that the target registered and keeps
                // until its provider is dropped. In one process the two may be the same bytes.
                unsafe { std::ptr::copy(bytes.from, bytes.to, bytes.bytes) };
                o.pieces -= 1;
                if o.pieces == 0
                    && let Some(o) = self.operations.remove(&operation)
                {
                    self.over(o.from, Event::Done(o.context));
                    if let Some(number) = o.number {
                        self.number(o.to, number);
                    }
                }
            }
        }
    }

    /// A write's number comes to its target.
    fn number(&mut self, to: usize, number: u32) {
        if self.script.solicited {
            match self.devices[to].receives.pop_front() {
                Some((_, context)) => self.over(to, Event::Taken(context)),
                None => self.violate(Rule::Receive, format!("device {to} has no buffer for a number")),
            }
        }
        self.over(to, Event::Written(number));
    }

    fn over(&mut self, device: usize, event: Event) {
        let d = &self.devices[device];
        let waiting = d.over.len() + d.queue.len();
        if waiting >= self.script.completions && self.holds(Rule::Completions) {
            self.violate(Rule::Completions, format!("{waiting} completions wait at device {device}"));
            self.devices[device].over.push(Event::Failed(None, "the completion queue overran".to_owned()));
        }
        self.devices[device].over.push(event);
    }

    /// What a device's completion queue tells now.
    pub(super) fn completions(&mut self, device: usize, events: &mut Vec<Event>) {
        let in_order = !self.holds(Rule::Order);
        let d = &mut self.devices[device];
        d.tries = 0;
        let ready = if in_order { d.over.len() } else { self.random.below(d.over.len() + 1) };
        for _ in 0..ready {
            let at = if in_order { 0 } else { self.random.below(d.over.len()) };
            let event = d.over.remove(at);
            d.queue.push_back(event);
        }
        for _ in 0..16 {
            let Some(event) = d.queue.pop_front() else { break };
            match event {
                Event::Done(_) | Event::Failed(Some(_), _) => d.busy = d.busy.saturating_sub(1),
                _ => {}
            }
            events.push(event);
        }
    }

    pub(super) fn kill(&mut self, rank: usize) {
        self.dead[rank] = true;
    }

    /// A rank's device is gone, and its memory with it: nothing may touch that any more.
    pub(super) fn leave(&mut self, device: usize) {
        self.dead[self.devices[device].rank] = true;
        let mut kept = Vec::new();
        for flight in std::mem::take(&mut self.flights) {
            if flight.from != device && flight.to != device {
                kept.push(flight);
            } else if flight.from != device {
                self.land(flight);
            }
        }
        kept.append(&mut self.flights);
        self.flights = kept;
        self.devices[device].receives.clear();
    }
}
