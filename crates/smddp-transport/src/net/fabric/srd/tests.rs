//! Tests of frames over the simulated fabric with many seeds, and of each of its rules.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::time::{Duration, Instant};

use super::world::Random;
use super::*;
use crate::net::fabric::endpoint::ProtocolError;
use crate::net::fabric::liveness::PING_INTERVAL;
use crate::net::fabric::rail::{LocalMemory, Posted, Rail as _};
use crate::net::frame::{ALL_CLASSES, Frame, Kind};
use crate::net::wire::{Broken, Payload, Sink, Target, Ticket, Wire};

/// Size of a slot in bytes, and number of send slots and of receive slots per rank.
const SLOT: usize = 300 << 10;
const SLOTS: usize = 8;

/// Staging memory of all ranks.
struct Memory {
    bytes: Arc<Vec<AtomicU8>>,
}

impl Memory {
    fn new(ranks: usize) -> Self {
        Self { bytes: Arc::new((0..ranks * 2 * SLOTS * SLOT).map(|_| AtomicU8::new(0)).collect()) }
    }

    fn at(&self, slot: usize) -> *mut u8 {
        self.bytes[slot * SLOT].as_ptr()
    }

    fn staging(&self) -> RegisteredStaging {
        RegisteredStaging::new(self.at(0), self.bytes.len(), self.bytes.clone())
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
struct Rank {
    me: usize,
    wire: FabricWire,
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

impl Sink for CheckingSink {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        if let Some((at, _)) = self.targets.get(&(peer, frame.index)) {
            return Target::At(*at);
        }
        let bytes = frame.bytes as usize;
        if self.random.once_in(5) {
            return Target::Later;
        }
        let (at, slot) = if bytes > crate::net::wire::INLINE_PAYLOAD {
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
struct Run {
    srd: Srd,
    ranks: Vec<Rank>,
    memory: Memory,
    /// Rank 0 polls only once in this many rounds.
    pause: usize,
}

impl Run {
    fn new(
        size_of_group: usize,
        script: SrdScript,
        frames: u64,
        injected_error: Option<ProtocolError>,
    ) -> Self {
        let mut random = Random::of(script.seed ^ 0xabcd);
        let memory = Memory::new(size_of_group);
        let srd = Srd::new(size_of_group, script);
        let endpoint = |rank| srd.endpoint(rank, memory.staging(), size_of_group).unwrap();
        let endpoints: Vec<_> = (0..size_of_group).map(endpoint).collect();
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
        let wires = connect(&endpoints).unwrap();
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
                    random: Random::of(random.next()),
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
        Self { srd, ranks, memory, pause }
    }

    /// Leaves one direction only, for a rank with an incomplete address vector. It cannot read from the other rank either, but the
    /// test checks the other rank's reads from it.
    fn one_way(&mut self, error: ProtocolError) {
        if error == ProtocolError::AddressVector {
            self.ranks[1].plan.clear();
            self.ranks[0].sink.next.fill(u64::MAX);
        }
    }

    /// Sends frames while slots are free, then polls once.
    fn step(&mut self, rank: usize) -> bool {
        let r = &mut self.ranks[rank];
        while let Some(&(to, index, bytes)) = r.plan.front() {
            let large = bytes > crate::net::wire::INLINE_PAYLOAD;
            let mut short = vec![0u8; if large { 0 } else { bytes }];
            let (at, ticket) = if large {
                let Some(slot) = r.free.pop() else { break };
                (self.memory.at(slot), slot as u64)
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
                fill(self.memory.at(ticket as usize), SLOT, |_| 0xee);
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
    fn run(&mut self, frames: u64, rounds: usize) -> Result<(), String> {
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

const MAX_ROUNDS: usize = 200_000;

fn seeds() -> u64 {
    std::env::var("SRD_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(30)
}

#[test]
fn all_frames_arrive_complete_and_in_order_for_every_seed() {
    for seed in 0..seeds() {
        for rails in [1, 2, 4] {
            let script = SrdScript {
                seed,
                rails,
                writes: seed % 2 == 1,
                solicited: seed % 4 == 1,
                one_sided: [1 << 20, 20_000, 4096][seed as usize % 3],
                ..SrdScript::default()
            };
            let size = 2 + seed as usize % 3;
            let mut run = Run::new(size, script, 24, None);
            if let Err(reason) = run.run(24, MAX_ROUNDS) {
                panic!("seed {seed}, {rails} rails, {size} ranks: {reason}; {:?}", run.srd.violations());
            }
            assert_eq!(run.srd.violations(), [], "seed {seed}, {rails} rails");
        }
    }
}

/// Runs an endpoint that breaks a rule, with the rule switched on and off.
fn check_rule(error: ProtocolError, rule: Rule, script: &SrdScript) {
    let mut caught = None;
    for seed in 0..20 {
        let mut run = Run::new(2, SrdScript { seed, ..script.clone() }, 24, Some(error));
        run.one_way(error);
        let result = run.run(24, 5_000);
        let violations = run.srd.violations();
        // The fabric does not detect errors of order and counting: the received data are wrong.
        if violations.iter().any(|v| v.0 == rule) || rule == Rule::Order && result.is_err() {
            caught = Some((seed, result, violations));
            break;
        }
    }
    let Some((_, result, violations)) = caught else { panic!("{error:?} is not detected") };
    println!("{error:?}: {result:?} {:?}", violations.first());
    if error == ProtocolError::Counting {
        return;
    }
    for seed in 0..3 {
        let script = SrdScript { seed, without: vec![rule], ..script.clone() };
        let mut run = Run::new(2, script, 24, Some(error));
        run.one_way(error);
        let result = run.run(24, MAX_ROUNDS);
        assert_eq!((result, run.srd.violations()), (Ok(()), vec![]), "{error:?} fails without {rule:?}");
    }
}

#[test]
fn each_rule_detects_its_violation_only() {
    let plain = SrdScript::default();
    check_rule(ProtocolError::Desc, Rule::Descriptor, &plain);
    check_rule(ProtocolError::Key, Rule::Key, &plain);
    check_rule(ProtocolError::Address, Rule::Address, &plain);
    check_rule(ProtocolError::Size, Rule::Message, &plain);
    check_rule(ProtocolError::Cap, Rule::OneSided, &SrdScript { one_sided: 65_536, ..plain.clone() });
    check_rule(ProtocolError::Order, Rule::Order, &plain);
    check_rule(ProtocolError::Window, Rule::Receive, &SrdScript { receives: 8, ..plain.clone() });
    check_rule(ProtocolError::Again, Rule::Again, &plain);
    check_rule(ProtocolError::Writes, Rule::Writes, &plain);
    check_rule(
        ProtocolError::Counting,
        Rule::Order,
        &SrdScript { writes: true, one_sided: 4096, ..plain.clone() },
    );
    check_rule(ProtocolError::AddressVector, Rule::AddressVector, &SrdScript { rails: 2, ..plain.clone() });
    check_rule(
        ProtocolError::Completions,
        Rule::Completions,
        // Queues that are never full at random, for the maximum number of operations in flight.
        &SrdScript { one_sided: 4096, operations: 512, completions: 48, without: vec![Rule::Again], ..plain },
    );
}

#[test]
fn queues_do_not_overrun_at_a_rank_that_polls_rarely() {
    for seed in 0..5 {
        let script = SrdScript {
            seed,
            one_sided: [4096, 1 << 20][seed as usize % 2],
            operations: 512,
            completions: 64,
            writes: seed % 2 == 1,
            solicited: seed % 4 == 1,
            ..SrdScript::default()
        };
        let mut run = Run::new(3, script, 24, None);
        run.pause = 100;
        let result = run.run(24, MAX_ROUNDS);
        assert_eq!((result, run.srd.violations()), (Ok(()), vec![]), "seed {seed}");
    }
}

#[test]
fn killed_rank_is_reported_to_its_peers() {
    for seed in 0..10 {
        let mut run = Run::new(3, SrdScript { seed, ..SrdScript::default() }, 40, None);
        for _ in 0..20 {
            (0..3).for_each(|rank| {
                run.step(rank);
            });
        }
        run.srd.kill(2);
        for _ in 0..MAX_ROUNDS {
            (0..2).for_each(|rank| {
                run.step(rank);
            });
            let mut is_reported =
                |rank: usize| Broken::among(run.ranks[rank].wire.peers()).iter().any(|b| b.peer == 2);
            if is_reported(0) && is_reported(1) {
                break;
            }
        }
        for rank in 0..2 {
            let broken = Broken::among(run.ranks[rank].wire.peers());
            assert_eq!(broken.len(), 1, "{broken:?}");
            assert!(broken[0].peer == 2 && broken[0].reason.contains("cannot be reached"), "{broken:?}");
        }
    }
}

#[test]
fn groups_share_an_endpoint_without_mixing_their_frames() {
    for seed in 0..10 {
        let memory = Memory::new(2);
        let srd = Srd::new(2, SrdScript { seed, rails: 2, ..SrdScript::default() });
        let endpoints: Vec<_> = (0..2).map(|rank| srd.endpoint(rank, memory.staging(), 2).unwrap()).collect();
        let groups: Vec<_> = (0..3).map(|_| connect(&endpoints).unwrap()).collect();
        let mut wires: Vec<Vec<_>> = groups
            .into_iter()
            .map(|wires| wires.into_iter().map(|w| (w, Vec::<u64>::new())).collect())
            .collect();
        struct Count<'a>(&'a mut Vec<u64>);
        impl Sink for Count<'_> {
            fn target(&mut self, _: usize, _: &Frame) -> Target {
                Target::Discard
            }
            fn received(&mut self, _: usize, frame: &Frame) {
                self.0.push(frame.index);
            }
            fn sent(&mut self, _: Ticket) {}
        }
        for (g, group) in wires.iter_mut().enumerate() {
            for index in 0..20 {
                let frame = Frame { index: index * 3 + g as u64, ..Frame::new(Kind::Credit, 1) };
                // SAFETY: no payload.
                unsafe { group[0].0.send(1, &frame, Payload::None) };
            }
        }
        // Polls of the last group make progress for the other groups too; their frames wait for their own sinks.
        for _ in 0..5_000 {
            for (wire, frames) in wires[2].iter_mut() {
                wire.poll(&mut Count(frames));
            }
        }
        for (g, group) in wires.iter_mut().enumerate() {
            for _ in 0..200 {
                for (wire, frames) in group.iter_mut() {
                    wire.poll(&mut Count(frames));
                }
            }
            let want: Vec<u64> = (0..20).map(|i| i * 3 + g as u64).collect();
            assert_eq!(group[1].1, want, "seed {seed}, group {g}");
            assert!(group[0].0.is_flushed(ALL_CLASSES));
        }
        assert_eq!(srd.violations(), []);
    }
}

/// Any program on the host may be able to send to a fabric endpoint.
#[test]
fn foreign_messages_are_dropped_without_effect_on_groups() {
    struct Last(u64);
    impl Sink for Last {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::Discard
        }
        fn received(&mut self, _: usize, frame: &Frame) {
            self.0 = frame.index;
        }
        fn sent(&mut self, _: Ticket) {}
    }
    let memory = Memory::new(2);
    // The third device does not belong to smddp.
    let srd = Srd::new(3, SrdScript::default());
    let mut outsider = SrdRail::new(srd.0.clone(), 2);
    let endpoints: Vec<_> = (0..2).map(|rank| srd.endpoint(rank, memory.staging(), 2).unwrap()).collect();
    let mut wires = connect(&endpoints).unwrap();
    let to = outsider.insert(&lock(&endpoints[1]).rails[0].address()).unwrap();
    let mut garbage: Vec<u8> = (0..300).map(|i| (i * 7) as u8).collect();
    // SAFETY: `garbage` lives until the end of this test, and nothing writes to it.
    let desc = unsafe { outsider.register(garbage.as_mut_ptr(), garbage.len()) }.unwrap().desc;
    let mut last = Last(0);
    for round in 1..=8 {
        for bytes in [0, 1, 20, 300] {
            let local = LocalMemory { at: garbage.as_mut_ptr(), bytes, desc };
            let mut events = Vec::new();
            // SAFETY: as above.
            while unsafe { outsider.send(to, local, 0) } == Ok(Posted::QueueFull) {
                outsider.poll(&mut events);
            }
        }
        // SAFETY: no payload.
        unsafe { wires[0].send(1, &Frame { index: round, ..Frame::new(Kind::Credit, 1) }, Payload::None) };
        (0..500).for_each(|_| wires.iter_mut().for_each(|wire| _ = wire.poll(&mut last)));
        assert_eq!(
            wires.iter_mut().map(|wire| Broken::among(wire.peers()).len()).collect::<Vec<_>>(),
            [0, 0]
        );
        assert_eq!(last.0, round, "the group continues");
    }
    assert_eq!(lock(&endpoints[1]).foreign, 8 * 4);
}

#[test]
fn answering_peer_is_pinged_again_after_the_ping_interval() {
    struct Nothing;
    impl Sink for Nothing {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::Discard
        }
        fn received(&mut self, _: usize, _: &Frame) {}
        fn sent(&mut self, _: Ticket) {}
    }
    let (memory, now) = (Memory::new(2), Instant::now());
    let srd = Srd::new(2, SrdScript::default());
    let endpoints: Vec<_> = (0..2).map(|rank| srd.endpoint(rank, memory.staging(), 2).unwrap()).collect();
    let mut wires = connect(&endpoints).unwrap();
    // A frame in each direction opens both windows.
    for (rank, wire) in wires.iter_mut().enumerate() {
        // SAFETY: no payload.
        unsafe { wire.send(1 - rank, &Frame::new(Kind::Credit, 1), Payload::None) };
    }
    let mut last_ping = |waited: Option<Duration>| {
        if let Some(waited) = waited {
            wires[0].check(now + waited, &[1]);
        }
        (0..500).for_each(|_| wires.iter_mut().for_each(|wire| _ = wire.poll(&mut Nothing)));
        let peers = &lock(&endpoints[0]).peers;
        assert!(peers.iter().all(|peer| peer.unanswered_pings == 0), "a ping is not answered");
        peers.iter().find_map(|peer| peer.last_ping).map(|at| at - now)
    };
    assert_eq!(last_ping(None), None);
    for (waited, last) in [
        (Duration::ZERO, Duration::ZERO),
        (PING_INTERVAL - Duration::from_nanos(1), Duration::ZERO),
        (PING_INTERVAL, PING_INTERVAL),
        (2 * PING_INTERVAL - Duration::from_nanos(1), PING_INTERVAL),
        (9 * PING_INTERVAL, 9 * PING_INTERVAL),
    ] {
        assert_eq!(last_ping(Some(waited)), Some(last), "{waited:?}");
    }
}
