//! Exchange of random frames between the endpoints of a simulated fabric, for tests.

use std::collections::{HashMap, VecDeque};

use fake_libfabric::SimulatedFabric;
use smddp_net::frame::{ALL_CLASSES, Frame, Kind};
use smddp_net::wire::{Broken, Payload, Sink, Target, Ticket, Wire};

use super::simulated::{Memory, connect, endpoints};
use crate::endpoint::ProtocolError;
use crate::wire::FabricWire;

/// Size of a slot in bytes, and number of send slots and of receive slots per rank.
const SLOT: usize = 300 << 10;
const SLOTS: usize = 8;

/// Pseudorandom generator (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Fills a buffer owned by the test.
fn fill(at: *mut u8, bytes: usize, with: impl Fn(usize) -> u8) {
    for i in 0..bytes {
        // SAFETY: all callers own `bytes` bytes there, and one thread runs all ranks.
        unsafe { at.wrapping_add(i).write(with(i)) };
    }
}

/// Returns the index of the first wrong byte.
fn differs(at: *const u8, bytes: usize, with: impl Fn(usize) -> u8) -> Option<usize> {
    // SAFETY: as in `fill`.
    (0..bytes).find(|&i| unsafe { at.wrapping_add(i).read() } != with(i))
}

fn byte(from: usize, to: usize, index: u64, at: usize) -> u8 {
    (from * 31 + to * 17 + index as usize * 7 + at * 13 + (at >> 8)) as u8
}

/// One rank: its frames to send and its received frames.
pub(super) struct Rank {
    me: usize,
    pub(super) wire: FabricWire,
    sink: CheckingSink,
    /// (to, index, bytes) of the frames still to be sent.
    plan: VecDeque<(usize, u64, usize)>,
    free: Vec<usize>,
}

/// Sink that checks the order and content of the received frames.
struct CheckingSink {
    me: usize,
    memory: *mut u8,
    random: Random,
    /// By peer: index of the next frame.
    next: Vec<u64>,
    /// Targets of frames that have not arrived, by peer and index.
    targets: HashMap<(usize, u64), (*mut u8, Option<usize>)>,
    small: Vec<Vec<u8>>,
    free: Vec<usize>,
    sent: Vec<Ticket>,
    errors: Vec<String>,
}

// SAFETY: a target is a free slot of `SLOT` bytes in the staging memory, or an allocation of `frame.bytes` bytes. Both outlive the
// wire. The sink accesses a target in `received`, and then frees its slot.
unsafe impl Sink for CheckingSink {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        if let Some((at, _)) = self.targets.get(&(peer, frame.index)) {
            return Target::At(*at);
        }
        let bytes = frame.bytes as usize;
        if self.random.below(5) == 0 {
            return Target::Later;
        }
        let (at, slot) = if bytes > smddp_net::wire::INLINE_PAYLOAD {
            let Some(slot) = self.free.pop() else { return Target::Later };
            (self.memory.wrapping_add(slot * SLOT), Some(slot))
        } else {
            self.small.push(vec![0; bytes]);
            (self.small.last_mut().unwrap().as_mut_ptr(), None)
        };
        self.targets.insert((peer, frame.index), (at, slot));
        Target::At(at)
    }

    fn received(&mut self, peer: usize, frame: &Frame) {
        if frame.index != self.next[peer] {
            self.errors.push(format!("frame {} of rank {peer} instead of {}", frame.index, self.next[peer]));
        }
        self.next[peer] = frame.index + 1;
        let Some((at, slot)) = self.targets.remove(&(peer, frame.index)) else {
            self.errors.push(format!("frame {} of rank {peer} has no target", frame.index));
            return;
        };
        let bytes = frame.bytes as usize;
        if let Some(i) = differs(at, bytes, |i| byte(peer, self.me, frame.index, i)) {
            self.errors.push(format!("byte {i} of frame {} of rank {peer}", frame.index));
        }
        if let Some(slot) = slot {
            fill(at, bytes, |_| 0xdd);
            self.free.push(slot);
        }
    }

    fn sent(&mut self, ticket: Ticket) {
        self.sent.push(ticket);
    }
}

fn size(random: &mut Random) -> usize {
    match random.below(8) {
        0 => 0,
        1..=3 => random.below(200),
        4 => 8192,
        5 => 8000 + random.below(193),
        6 => 8193 + random.below(40_000),
        _ => 100_000 + random.below(SLOT - 100_000),
    }
}

/// Group of ranks over a simulated fabric.
pub(super) struct Run {
    pub(super) fabric: SimulatedFabric,
    pub(super) ranks: Vec<Rank>,
    memory: Memory,
    /// Rank 0 polls only once in this many rounds.
    pub(super) pause: usize,
}

impl Run {
    /// Creates a group on a fabric. `seed` determines the frames: `frames` from each rank to each other rank.
    pub(super) fn new(
        size_of_group: usize,
        fabric: SimulatedFabric,
        seed: u64,
        frames: u64,
        injected_error: Option<ProtocolError>,
    ) -> Self {
        let mut random = Random(seed ^ 0xabcd);
        let memory = Memory::new(size_of_group * 2 * SLOTS * SLOT);
        let endpoints = endpoints(&fabric, size_of_group, &memory);
        // One rank breaks the rule. Both do if the violation needs the other rank's cooperation.
        let breaking = if injected_error == Some(ProtocolError::Writes) { 2 } else { 1 };
        endpoints[..breaking]
            .iter()
            .for_each(|endpoint| endpoint.lock().unwrap().injected_error = injected_error);
        for endpoint in &endpoints {
            let endpoint = &mut *endpoint.lock().unwrap();
            match injected_error {
                // Payloads on both sides of the size limit of a registered part.
                None => endpoint.staging.grain = 128 << 10,
                // The first registration, so that its key can be guessed if keys count up.
                Some(_) => drop(endpoint.staging.part(&mut endpoint.rails, 0, 1).unwrap()),
            }
        }
        let wires = connect(&endpoints);
        let ranks = wires
            .into_iter()
            .enumerate()
            .map(|(me, wire)| {
                let mut plan = Vec::new();
                for index in 0..frames {
                    for to in (0..size_of_group).filter(|&to| to != me) {
                        plan.push((to, index, size(&mut random)));
                    }
                }
                let first = me * 2 * SLOTS;
                let sink = CheckingSink {
                    me,
                    memory: memory.at(0),
                    random: Random(random.next()),
                    next: vec![0; size_of_group],
                    targets: HashMap::new(),
                    small: Vec::new(),
                    free: (first..first + SLOTS).collect(),
                    sent: Vec::new(),
                    errors: Vec::new(),
                };
                let free = (first + SLOTS..first + 2 * SLOTS).collect();
                Rank { me, wire, sink, plan: plan.into(), free }
            })
            .collect();
        let pause = if injected_error == Some(ProtocolError::Completions) { 100 } else { 1 };
        Self { fabric, ranks, memory, pause }
    }

    /// Leaves one direction only, for a rank with an incomplete address vector. It cannot read from the other rank either, but the
    /// test checks the other rank's reads from it.
    pub(super) fn one_way(&mut self, error: ProtocolError) {
        if error == ProtocolError::AddressVector {
            self.ranks[1].plan.clear();
            self.ranks[0].sink.next.fill(u64::MAX);
        }
    }

    /// Sends frames while slots are free, then polls once.
    pub(super) fn step(&mut self, rank: usize) -> bool {
        let r = &mut self.ranks[rank];
        while let Some(&(to, index, bytes)) = r.plan.front() {
            let large = bytes > smddp_net::wire::INLINE_PAYLOAD;
            let mut short = vec![0u8; if large { 0 } else { bytes }];
            let (at, ticket) = if large {
                let Some(slot) = r.free.pop() else { break };
                (self.memory.at(slot * SLOT), slot as u64)
            } else {
                (short.as_mut_ptr(), u64::MAX)
            };
            fill(at, bytes, |i| byte(r.me, to, index, i));
            let frame = Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Data, 1) };
            // SAFETY: short, or a slot that stays unchanged until its ticket returns.
            unsafe { r.wire.send(to, &frame, Payload::Borrowed { at, ticket }) };
            short.fill(0xee);
            r.plan.pop_front();
        }
        let moved = r.wire.poll(&mut r.sink);
        for ticket in r.sink.sent.drain(..) {
            if ticket != u64::MAX {
                // The memory is free: a late reader gets these bytes, and the check fails.
                fill(self.memory.at(ticket as usize * SLOT), SLOT, |_| 0xee);
                r.free.push(ticket as usize);
            }
        }
        moved
    }

    fn over(&self, frames: u64) -> bool {
        let size = self.ranks.len();
        self.ranks.iter().all(|r| {
            let all = (0..size).all(|peer| peer == r.me || r.sink.next[peer] >= frames);
            all && r.plan.is_empty() && r.free.len() == SLOTS && r.wire.is_flushed(ALL_CLASSES)
        })
    }

    /// Runs until all frames have arrived; returns the first error.
    pub(super) fn run(&mut self, frames: u64, rounds: usize) -> Result<(), String> {
        for round in 0..rounds {
            for rank in 0..self.ranks.len() {
                if rank > 0 || round % self.pause == 0 {
                    self.step(rank);
                }
                if let Some(error) = self.ranks[rank].sink.errors.first() {
                    return Err(format!("rank {rank}: {error}"));
                }
                if let Some(broken) = Broken::among(self.ranks[rank].wire.peers()).first() {
                    return Err(format!("rank {rank}: rank {} is lost: {}", broken.peer, broken.reason));
                }
            }
            if round % 8 == 0 && self.over(frames) {
                return Ok(());
            }
        }
        Err("no progress".to_owned())
    }
}
