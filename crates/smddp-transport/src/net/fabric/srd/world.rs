//! State of the simulated fabric: devices, and packets in flight.

use std::collections::{HashMap, VecDeque};

use super::{Rule, SrdScript};
use crate::net::fabric::rail::{Completion, Context, LocalMemory, RemoteMemory};

/// Small random number generator (splitmix64) with reproducible results per seed.
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

    /// Returns true once in `n` calls on average.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Registered memory of a device.
#[derive(Clone, Copy)]
pub(super) struct KnownMemory {
    pub(super) at: usize,
    pub(super) bytes: usize,
    pub(super) key: u64,
    pub(super) base: u64,
}

/// Device of a rank.
#[derive(Default)]
pub(super) struct Device {
    pub(super) rank: usize,
    pub(super) address: Vec<u8>,
    /// Inserted peer devices, by their handles.
    pub(super) address_vector: HashMap<u64, usize>,
    /// Registered memory; index: descriptor - 1.
    pub(super) regions: Vec<KnownMemory>,
    pub(super) receives: VecDeque<(LocalMemory, Context)>,
    /// Completions that are not in the completion queue yet.
    unreported: Vec<Completion>,
    /// Completion queue.
    pub(super) queue: VecDeque<Completion>,
    /// Number of operations in flight.
    pub(super) busy: usize,
    /// Retries since a queue was full, without a poll.
    pub(super) tries: usize,
}

/// Copy between two ranks' memory. The addresses are used only under the world's lock, while their operation is in flight.
#[derive(Clone, Copy)]
struct Bytes {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

/// Content of a packet.
enum Packet {
    Message {
        local: LocalMemory,
        context: Context,
    },
    /// Fragment of a one-sided operation.
    Fragment {
        operation: u64,
        bytes: Bytes,
    },
}

/// Packet in flight.
struct InFlight {
    from: usize,
    to: usize,
    /// Number of steps by which the packet is delayed.
    hold: usize,
    content: Packet,
}

/// One-sided operation in flight.
struct OneSided {
    from: usize,
    to: usize,
    context: Context,
    fragments: usize,
    /// Immediate data of a write.
    immediate: Option<u32>,
}

/// Simulated fabric: devices, operations and packets in flight.
pub(crate) struct World {
    pub(super) script: SrdScript,
    pub(super) random: Random,
    /// Devices of all ranks: those of rank r start at index r * rails.
    pub(super) devices: Vec<Device>,
    in_flight: Vec<InFlight>,
    operations: HashMap<u64, OneSided>,
    next: u64,
    pub(super) violations: Vec<(Rule, String)>,
    dead: Vec<bool>,
}

// SAFETY: the addresses belong to memory that its owners keep until the operations complete, or until their rail is dropped, which
// removes its packets. Any thread that holds the world's lock may copy.
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
            in_flight: Vec::new(),
            operations: HashMap::new(),
            next: 0,
            violations: Vec::new(),
            dead: vec![false; ranks],
        }
    }

    pub(super) fn enforces(&self, rule: Rule) -> bool {
        !self.script.without.contains(&rule)
    }

    pub(super) fn violate(&mut self, rule: Rule, how: String) {
        if self.violations.len() < 1000 {
            self.violations.push((rule, how));
        }
    }

    pub(super) fn launch_message(&mut self, from: usize, to: usize, local: LocalMemory, context: Context) {
        self.launch(from, to, Packet::Message { local, context });
    }

    fn launch(&mut self, from: usize, to: usize, content: Packet) {
        // Some packets are delayed for long.
        let hold = match self.enforces(Rule::Order) {
            true if self.random.once_in(8) => self.random.below(200),
            _ => 0,
        };
        self.in_flight.push(InFlight { from, to, hold, content });
    }

    /// Starts a one-sided operation, and checks the target's rules.
    pub(super) fn launch_one_sided(
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
                self.devices[from].unreported.push(Completion::Failed(Some(context), reason));
                return;
            }
        };
        let operation = self.next;
        self.next += 1;
        let mut fragments = 0;
        let mut start = 0;
        while start < local.bytes || fragments == 0 {
            let rest = local.bytes - start;
            let bytes = if rest > 1 && !self.random.once_in(3) { 1 + self.random.below(rest) } else { rest };
            let (here, there) = (local.at.wrapping_add(start), (at + start) as *mut u8);
            let bytes = match write {
                Some(_) => Bytes { from: here, to: there, bytes },
                None => Bytes { from: there, to: here, bytes },
            };
            self.launch(from, to, Packet::Fragment { operation, bytes });
            start += bytes.bytes;
            fragments += 1;
        }
        self.operations.insert(operation, OneSided { from, to, context, fragments, immediate: write });
    }

    /// Returns the address of remote memory if the target allows the access.
    fn target(
        &mut self,
        from: usize,
        to: usize,
        bytes: usize,
        remote: RemoteMemory,
    ) -> Result<usize, String> {
        let known = self.devices[to].address_vector.values().any(|&d| d == from);
        if !known && self.enforces(Rule::AddressVector) {
            let how = format!("device {to} has not inserted device {from}, which accesses its memory");
            self.violate(Rule::AddressVector, how.clone());
            return Err(how);
        }
        let Some(region) = self.devices[to].regions.iter().find(|r| r.key == remote.key).copied() else {
            let how = format!("device {to} has no memory with key {:#x}", remote.key);
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
                    format!("address {:#x} is outside the memory of key {:#x}", remote.address, remote.key);
                self.violate(Rule::Address, how.clone());
                Err(how)
            }
        }
    }

    /// Returns true if no packet is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Delivers a few packets.
    pub(super) fn step(&mut self) {
        let in_order = !self.enforces(Rule::Order);
        let steps = if in_order { 8 } else { 1 + self.random.below(6) };
        for _ in 0..steps.min(self.in_flight.len()) {
            let at = if in_order { 0 } else { self.random.below(self.in_flight.len()) };
            if self.in_flight[at].hold > 0 {
                self.in_flight[at].hold -= 1;
                continue;
            }
            // `swap_remove` changes the order, which must hold only in order mode.
            let packet = if in_order { self.in_flight.remove(at) } else { self.in_flight.swap_remove(at) };
            self.deliver(packet);
        }
    }

    fn deliver(&mut self, packet: InFlight) {
        let (from, to) = (packet.from, packet.to);
        if self.dead[self.devices[from].rank] {
            return;
        }
        if self.dead[self.devices[to].rank] {
            let context = match &packet.content {
                Packet::Message { context, .. } => Some(*context),
                // Once for all fragments.
                Packet::Fragment { operation, .. } => self.operations.remove(operation).map(|o| o.context),
            };
            if let Some(context) = context {
                self.report(from, Completion::Failed(Some(context), "the peer cannot be reached".to_owned()));
            }
            return;
        }
        match packet.content {
            Packet::Message { local, context } => {
                let Some((room, received)) = self.devices[to].receives.pop_front() else {
                    if self.enforces(Rule::Receive) {
                        self.violate(Rule::Receive, format!("device {to} has no receive buffer posted"));
                    }
                    self.in_flight.push(InFlight { hold: 3, ..packet });
                    return;
                };
                let bytes = local.bytes.min(room.bytes);
                if bytes < local.bytes {
                    self.violate(
                        Rule::Message,
                        format!(
                            "a message of {} bytes for a receive buffer of {} bytes",
                            local.bytes, room.bytes
                        ),
                    );
                }
                // SAFETY: both belong to operations in flight (see `World`) and are different buffers.
                unsafe { room.at.copy_from_nonoverlapping(local.at, bytes) };
                self.report(from, Completion::Done(context));
                self.report(to, Completion::Received(received, bytes));
            }
            Packet::Fragment { operation, bytes } => {
                let Some(o) = self.operations.get_mut(&operation) else { return };
                // SAFETY: local memory of an operation in flight, and memory that the target registered and keeps until its rail
                // is dropped. In one process the two may be the same bytes.
                unsafe { std::ptr::copy(bytes.from, bytes.to, bytes.bytes) };
                o.fragments -= 1;
                if o.fragments == 0
                    && let Some(o) = self.operations.remove(&operation)
                {
                    self.report(o.from, Completion::Done(o.context));
                    if let Some(immediate) = o.immediate {
                        self.deliver_immediate(o.to, immediate);
                    }
                }
            }
        }
    }

    /// Delivers the immediate data of a write.
    fn deliver_immediate(&mut self, to: usize, immediate: u32) {
        if self.script.solicited {
            match self.devices[to].receives.pop_front() {
                Some((_, context)) => self.report(to, Completion::BufferConsumed(context)),
                None => self
                    .violate(Rule::Receive, format!("device {to} has no receive buffer for immediate data")),
            }
        }
        self.report(to, Completion::RemoteWrite(immediate));
    }

    fn report(&mut self, device: usize, event: Completion) {
        let d = &self.devices[device];
        let waiting = d.unreported.len() + d.queue.len();
        if waiting >= self.script.completions && self.enforces(Rule::Completions) {
            self.violate(Rule::Completions, format!("{waiting} unread completions at device {device}"));
            self.devices[device]
                .unreported
                .push(Completion::Failed(None, "the completion queue overran".to_owned()));
        }
        self.devices[device].unreported.push(event);
    }

    /// Moves completions of a device to its queue and reads some of them.
    pub(super) fn completions(&mut self, device: usize, events: &mut Vec<Completion>) {
        let in_order = !self.enforces(Rule::Order);
        let d = &mut self.devices[device];
        d.tries = 0;
        let ready = if in_order { d.unreported.len() } else { self.random.below(d.unreported.len() + 1) };
        for _ in 0..ready {
            let at = if in_order { 0 } else { self.random.below(d.unreported.len()) };
            let event = d.unreported.remove(at);
            d.queue.push_back(event);
        }
        for _ in 0..16 {
            let Some(event) = d.queue.pop_front() else { break };
            match event {
                Completion::Done(_) | Completion::Failed(Some(_), _) => d.busy = d.busy.saturating_sub(1),
                _ => {}
            }
            events.push(event);
        }
    }

    pub(super) fn kill(&mut self, rank: usize) {
        self.dead[rank] = true;
    }

    /// Removes a rank's device and its memory, which must not be accessed any more.
    pub(super) fn remove_device(&mut self, device: usize) {
        self.dead[self.devices[device].rank] = true;
        let mut kept = Vec::new();
        for packet in std::mem::take(&mut self.in_flight) {
            if packet.from != device && packet.to != device {
                kept.push(packet);
            } else if packet.from != device {
                self.deliver(packet);
            }
        }
        kept.append(&mut self.in_flight);
        self.in_flight = kept;
        self.devices[device].receives.clear();
    }
}
