//! Frames over the simulated fabric, many seeds; and that each of its rules bites.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::time::{Duration, Instant};

use super::world::Random;
use super::*;
use crate::net::fabric::endpoint::{PING, ProtocolError};
use crate::net::fabric::rail::{LocalMemory, Posted, Rail as _};
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket, Wire};

/// Bytes of a cell, and cells for sending and for receiving of each rank.
const CELL: usize = 300 << 10;
const CELLS: usize = 8;

/// Staging memory.
struct Memory {
    bytes: Arc<Vec<AtomicU8>>,
}

impl Memory {
    fn new(ranks: usize) -> Self {
        Self { bytes: Arc::new((0..ranks * 2 * CELLS * CELL).map(|_| AtomicU8::new(0)).collect()) }
    }

    fn at(&self, cell: usize) -> *mut u8 {
        self.bytes[cell * CELL].as_ptr()
    }

    fn staging(&self) -> RegisteredStaging {
        RegisteredStaging::new(self.at(0), self.bytes.len(), self.bytes.clone())
    }
}

/// Sets bytes of a buffer of this test's.
fn fill(at: *mut u8, bytes: usize, with: impl Fn(usize) -> u8) {
    for i in 0..bytes {
        // SAFETY: all callers own `bytes` bytes there, and one thread runs all ranks.
        unsafe { at.wrapping_add(i).write(with(i)) };
    }
}

/// The first byte that is not as it should be.
fn differs(at: *const u8, bytes: usize, with: impl Fn(usize) -> u8) -> Option<usize> {
    // SAFETY: as in `fill`.
    (0..bytes).find(|&i| unsafe { at.wrapping_add(i).read() } != with(i))
}

fn byte(from: usize, to: usize, index: u64, at: usize) -> u8 {
    (from * 31 + to * 17 + index as usize * 7 + at * 13 + (at >> 8)) as u8
}

/// One rank: what it sends, what it has got.
struct Rank {
    me: usize,
    wire: FabricWire,
    sink: Got,
    /// (to, index, bytes) still to be sent.
    plan: VecDeque<(usize, u64, usize)>,
    free: Vec<usize>,
}

struct Got {
    me: usize,
    memory: *mut u8,
    random: Random,
    /// By peer: index of the frame to arrive next, and places given to frames that have not arrived.
    next: Vec<u64>,
    places: HashMap<(usize, u64), (*mut u8, Option<usize>)>,
    small: Vec<Vec<u8>>,
    free: Vec<usize>,
    sent: Vec<Ticket>,
    wrong: Vec<String>,
}

impl Sink for Got {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        if let Some((at, _)) = self.places.get(&(peer, frame.index)) {
            return Target::At(*at);
        }
        let bytes = frame.bytes as usize;
        if self.random.once_in(5) {
            return Target::Later;
        }
        let (at, cell) = if bytes > crate::net::wire::INLINE_PAYLOAD {
            let Some(cell) = self.free.pop() else { return Target::Later };
            (self.memory.wrapping_add(cell * CELL), Some(cell))
        } else {
            self.small.push(vec![0; bytes]);
            (self.small.last_mut().unwrap().as_mut_ptr(), None)
        };
        self.places.insert((peer, frame.index), (at, cell));
        Target::At(at)
    }

    fn received(&mut self, peer: usize, frame: &Frame) {
        if frame.index != self.next[peer] {
            self.wrong.push(format!("frame {} of {peer} where {} is due", frame.index, self.next[peer]));
        }
        self.next[peer] = frame.index + 1;
        let Some((at, cell)) = self.places.remove(&(peer, frame.index)) else {
            self.wrong.push(format!("frame {} of {peer} has no place", frame.index));
            return;
        };
        let bytes = frame.bytes as usize;
        if let Some(i) = differs(at, bytes, |i| byte(peer, self.me, frame.index, i)) {
            self.wrong.push(format!("byte {i} of frame {} of {peer}", frame.index));
        }
        if let Some(cell) = cell {
            fill(at, bytes, |_| 0xdd);
            self.free.push(cell);
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
        _ => 100_000 + random.below(CELL - 100_000),
    }
}

struct Run {
    srd: Srd,
    ranks: Vec<Rank>,
    memory: Memory,
    /// Rank 0 has something else to do, and gets its turn every so often.
    pause: usize,
}

impl Run {
    fn new(size_of_group: usize, script: SrdScript, frames: u64, careless: Option<ProtocolError>) -> Self {
        let mut random = Random::of(script.seed ^ 0xabcd);
        let memory = Memory::new(size_of_group);
        let srd = Srd::new(size_of_group, script);
        let engine = |rank| srd.engine(rank, memory.staging(), size_of_group).unwrap();
        let engines: Vec<_> = (0..size_of_group).map(engine).collect();
        // One rank goes wrong; both where one alone would find that the other does not follow.
        let wrong = if careless == Some(ProtocolError::Writes) { 2 } else { 1 };
        engines[..wrong].iter().for_each(|engine| engine.lock().unwrap().careless = careless);
        for engine in &engines {
            let engine = &mut *engine.lock().unwrap();
            match careless {
                // Payloads on both sides of what a part of the memory takes.
                None => engine.staging.grain = 128 << 10,
                // The first thing that the device is told of, so that its key can be guessed where keys count up.
                Some(_) => drop(engine.staging.part(&mut engine.rails, 0, 1).unwrap()),
            }
        }
        let wires = connect(&engines).unwrap();
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
                let first = me * 2 * CELLS;
                let sink = Got {
                    me,
                    memory: memory.at(0),
                    random: Random::of(random.next()),
                    next: vec![0; size_of_group],
                    places: HashMap::new(),
                    small: Vec::new(),
                    free: (first..first + CELLS).collect(),
                    sent: Vec::new(),
                    wrong: Vec::new(),
                };
                let free = (first + CELLS..first + 2 * CELLS).collect();
                Rank { me, wire, sink, plan: plan.into(), free }
            })
            .collect();
        let pause = if careless == Some(ProtocolError::Completions) { 100 } else { 1 };
        Self { srd, ranks, memory, pause }
    }

    /// Who has not noted a device cannot read from it either: what is looked at is that nobody reads from *him*.
    fn one_way(&mut self, what: ProtocolError) {
        if what == ProtocolError::Book {
            self.ranks[1].plan.clear();
            self.ranks[0].sink.next.fill(u64::MAX);
        }
    }

    /// Sends what has a cell, then polls once.
    fn turn(&mut self, rank: usize) -> bool {
        let r = &mut self.ranks[rank];
        while let Some(&(to, index, bytes)) = r.plan.front() {
            let large = bytes > crate::net::wire::INLINE_PAYLOAD;
            let mut short = vec![0u8; if large { 0 } else { bytes }];
            let (at, ticket) = if large {
                let Some(cell) = r.free.pop() else { break };
                (self.memory.at(cell), cell as u64)
            } else {
                (short.as_mut_ptr(), u64::MAX)
            };
            fill(at, bytes, |i| byte(r.me, to, index, i));
            let frame = Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Data, 1) };
            // SAFETY: short, or a cell that is free again with its ticket.
            unsafe { r.wire.send(to, &frame, at, ticket) };
            short.fill(0xee);
            r.plan.pop_front();
        }
        let moved = r.wire.poll(&mut r.sink);
        for ticket in r.sink.sent.drain(..) {
            if ticket != u64::MAX {
                // The memory is free again: whoever still reads it reads this.
                fill(self.memory.at(ticket as usize), CELL, |_| 0xee);
                r.free.push(ticket as usize);
            }
        }
        moved
    }

    fn over(&self, frames: u64) -> bool {
        let size = self.ranks.len();
        self.ranks.iter().all(|r| {
            let all = (0..size).all(|peer| peer == r.me || r.sink.next[peer] >= frames);
            all && r.plan.is_empty() && r.free.len() == CELLS && r.wire.drained()
        })
    }

    /// Runs until all is there; the first thing that is wrong.
    fn run(&mut self, frames: u64, turns: usize) -> Result<(), String> {
        for turn in 0..turns {
            for rank in 0..self.ranks.len() {
                if rank > 0 || turn % self.pause == 0 {
                    self.turn(rank);
                }
                if let Some(wrong) = self.ranks[rank].sink.wrong.first() {
                    return Err(format!("rank {rank}: {wrong}"));
                }
                if let Some(broken) = self.ranks[rank].wire.broken().first() {
                    return Err(format!("rank {rank}: rank {} is broken: {}", broken.peer, broken.reason));
                }
            }
            if turn % 8 == 0 && self.over(frames) {
                return Ok(());
            }
        }
        Err("it hangs".to_owned())
    }
}

const TURNS: usize = 200_000;

fn seeds() -> u64 {
    std::env::var("SRD_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(30)
}

#[test]
fn all_frames_arrive_in_order_and_whole_for_every_seed() {
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
            if let Err(reason) = run.run(24, TURNS) {
                panic!("seed {seed}, {rails} rails, {size} ranks: {reason}; {:?}", run.srd.violations());
            }
            assert_eq!(run.srd.violations(), [], "seed {seed}, {rails} rails");
        }
    }
}

/// Runs a careless engine, with and without the rule that it breaks.
fn careless(what: ProtocolError, rule: Rule, script: &SrdScript) {
    let mut caught = None;
    for seed in 0..20 {
        let mut run = Run::new(2, SrdScript { seed, ..script.clone() }, 24, Some(what));
        run.one_way(what);
        let result = run.run(24, 5_000);
        let violations = run.srd.violations();
        // Order and counting are not the fabric's to see: what arrives is wrong.
        if violations.iter().any(|v| v.0 == rule) || rule == Rule::Order && result.is_err() {
            caught = Some((seed, result, violations));
            break;
        }
    }
    let Some((_, result, violations)) = caught else { panic!("{what:?} goes unnoticed") };
    println!("{what:?}: {result:?} {:?}", violations.first());
    if what == ProtocolError::Counting {
        return;
    }
    for seed in 0..3 {
        let script = SrdScript { seed, without: vec![rule], ..script.clone() };
        let mut run = Run::new(2, script, 24, Some(what));
        run.one_way(what);
        let result = run.run(24, TURNS);
        assert_eq!((result, run.srd.violations()), (Ok(()), vec![]), "{what:?} is fine without {rule:?}");
    }
}

#[test]
fn each_rule_bites_who_breaks_it_and_nobody_else() {
    let plain = SrdScript::default();
    careless(ProtocolError::Desc, Rule::Descriptor, &plain);
    careless(ProtocolError::Key, Rule::Key, &plain);
    careless(ProtocolError::Address, Rule::Address, &plain);
    careless(ProtocolError::Size, Rule::Message, &plain);
    careless(ProtocolError::Cap, Rule::OneSided, &SrdScript { one_sided: 65_536, ..plain.clone() });
    careless(ProtocolError::Order, Rule::Order, &plain);
    careless(ProtocolError::Window, Rule::Receive, &SrdScript { receives: 8, ..plain.clone() });
    careless(ProtocolError::Again, Rule::Again, &plain);
    careless(ProtocolError::Writes, Rule::Writes, &plain);
    careless(
        ProtocolError::Counting,
        Rule::Order,
        &SrdScript { writes: true, one_sided: 4096, ..plain.clone() },
    );
    careless(ProtocolError::Book, Rule::Book, &SrdScript { rails: 2, ..plain.clone() });
    careless(
        ProtocolError::Completions,
        Rule::Completions,
        // Queues that are never full, to get as many under way as there are.
        &SrdScript { one_sided: 4096, operations: 512, completions: 48, without: vec![Rule::Again], ..plain },
    );
}

#[test]
fn no_queue_overruns_at_a_rank_that_seldom_looks() {
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
        let result = run.run(24, TURNS);
        assert_eq!((result, run.srd.violations()), (Ok(()), vec![]), "seed {seed}");
    }
}

#[test]
fn a_dead_rank_is_told_to_those_who_deal_with_it() {
    for seed in 0..10 {
        let mut run = Run::new(3, SrdScript { seed, ..SrdScript::default() }, 40, None);
        for _ in 0..20 {
            (0..3).for_each(|rank| {
                run.turn(rank);
            });
        }
        run.srd.kill(2);
        for _ in 0..TURNS {
            (0..2).for_each(|rank| {
                run.turn(rank);
            });
            let told = |rank: usize| run.ranks[rank].wire.broken().iter().any(|b| b.peer == 2);
            if told(0) && told(1) {
                break;
            }
        }
        for rank in 0..2 {
            let broken = run.ranks[rank].wire.broken();
            assert_eq!(broken.len(), 1, "{broken:?}");
            assert!(broken[0].peer == 2 && broken[0].reason.contains("cannot be reached"), "{broken:?}");
        }
    }
}

#[test]
fn groups_share_an_engine_and_keep_their_frames_apart() {
    for seed in 0..10 {
        let memory = Memory::new(2);
        let srd = Srd::new(2, SrdScript { seed, rails: 2, ..SrdScript::default() });
        let engines: Vec<_> = (0..2).map(|rank| srd.engine(rank, memory.staging(), 2).unwrap()).collect();
        let groups: Vec<_> = (0..3).map(|_| connect(&engines).unwrap()).collect();
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
                unsafe { group[0].0.send(1, &frame, std::ptr::null(), 0) };
            }
        }
        // The last group's owner moves the others' frames on, too; they wait for their own.
        for _ in 0..5_000 {
            for (wire, got) in wires[2].iter_mut() {
                wire.poll(&mut Count(got));
            }
        }
        for (g, group) in wires.iter_mut().enumerate() {
            for _ in 0..200 {
                for (wire, got) in group.iter_mut() {
                    wire.poll(&mut Count(got));
                }
            }
            let want: Vec<u64> = (0..20).map(|i| i * 3 + g as u64).collect();
            assert_eq!(group[1].1, want, "seed {seed}, group {g}");
            assert!(group[0].0.drained());
        }
        assert_eq!(srd.violations(), []);
    }
}

/// Any program of the machine may be able to send to an endpoint of the fabric.
#[test]
fn messages_of_other_programs_are_dropped_and_end_no_group() {
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
    // The third device is not smddp's.
    let srd = Srd::new(3, SrdScript::default());
    let mut outsider = SrdRail::new(srd.0.clone(), 2);
    let engines: Vec<_> = (0..2).map(|rank| srd.engine(rank, memory.staging(), 2).unwrap()).collect();
    let mut wires = connect(&engines).unwrap();
    let to = outsider.insert(&lock(&engines[1]).rails[0].address()).unwrap();
    let mut garbage: Vec<u8> = (0..300).map(|i| (i * 7) as u8).collect();
    // SAFETY: `garbage` lives until the end of this test, and nothing writes to it.
    let desc = unsafe { outsider.register(garbage.as_mut_ptr(), garbage.len()) }.unwrap().desc;
    let mut last = Last(0);
    for round in 1..=8 {
        for bytes in [0, 1, 20, 300] {
            let local = LocalMemory { at: garbage.as_mut_ptr(), bytes, desc };
            let mut events = Vec::new();
            // SAFETY: as above.
            while unsafe { outsider.send(to, local, 0) } == Ok(Posted::Again) {
                outsider.poll(&mut events);
            }
        }
        // SAFETY: no payload.
        unsafe {
            wires[0].send(1, &Frame { index: round, ..Frame::new(Kind::Credit, 1) }, std::ptr::null(), 0)
        };
        (0..500).for_each(|_| wires.iter_mut().for_each(|wire| _ = wire.poll(&mut last)));
        assert_eq!(wires.iter().map(|wire| wire.broken().len()).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(last.0, round, "the group goes on");
    }
    assert_eq!(lock(&engines[1]).foreign, 8 * 4);
}

#[test]
fn who_is_waited_for_and_answers_is_pinged_again_after_a_while_and_no_moment_earlier() {
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
    let engines: Vec<_> = (0..2).map(|rank| srd.engine(rank, memory.staging(), 2).unwrap()).collect();
    let mut wires = connect(&engines).unwrap();
    // Each has heard of the other.
    for (rank, wire) in wires.iter_mut().enumerate() {
        // SAFETY: no payload.
        unsafe { wire.send(1 - rank, &Frame::new(Kind::Credit, 1), std::ptr::null(), 0) };
    }
    let mut last_ping = |waited: Option<Duration>| {
        if let Some(waited) = waited {
            wires[0].watch(1, false, now + waited);
        }
        (0..500).for_each(|_| wires.iter_mut().for_each(|wire| _ = wire.poll(&mut Nothing)));
        let peers = &lock(&engines[0]).peers;
        assert!(peers.iter().all(|peer| peer.pinged == 0), "a ping is not answered");
        peers.iter().find_map(|peer| peer.ping).map(|at| at - now)
    };
    assert_eq!(last_ping(None), None);
    for (waited, last) in [
        (Duration::ZERO, Duration::ZERO),
        (PING - Duration::from_nanos(1), Duration::ZERO),
        (PING, PING),
        (2 * PING - Duration::from_nanos(1), PING),
        (9 * PING, 9 * PING),
    ] {
        assert_eq!(last_ping(Some(waited)), Some(last), "{waited:?}");
    }
}
