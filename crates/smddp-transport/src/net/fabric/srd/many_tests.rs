//! Peers that never say anything, and peers that say no more.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use super::*;
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket, Wire};

/// Takes what comes to one place.
struct Taker {
    place: *mut u8,
    got: Vec<(usize, u64)>,
}

impl Sink for Taker {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::At(self.place)
    }
    fn received(&mut self, peer: usize, frame: &Frame) {
        self.got.push((peer, frame.index));
    }
    fn sent(&mut self, _: Ticket) {}
}

/// Staging memory, a part of so many bytes for each rank.
struct Memory(Arc<Vec<AtomicU8>>, usize);

impl Memory {
    fn new(ranks: usize, each: usize) -> Self {
        Self(Arc::new((0..ranks * each).map(|_| AtomicU8::new(0)).collect()), each)
    }
    fn at(&self, rank: usize) -> *mut u8 {
        self.0[rank * self.1].as_ptr()
    }
    fn engines(&self, srd: &Srd, ranks: usize) -> Vec<SharedEngine> {
        let staging = RegisteredStaging::new(self.at(0), self.0.len(), self.0.clone());
        (0..ranks).map(|rank| srd.engine(rank, staging.clone(), ranks).unwrap()).collect()
    }
    fn takers(&self, ranks: usize) -> Vec<Taker> {
        (0..ranks).map(|rank| Taker { place: self.at(rank), got: Vec::new() }).collect()
    }
}

#[test]
fn receive_buffers_are_posted_for_the_peers_that_are_used() {
    const RANKS: usize = 100;
    const FRAMES: u64 = 30;
    for seed in 0..3 {
        // Room for all peers' first messages and a few windows, not for windows of all.
        let script = SrdScript { seed, receives: 250, ..SrdScript::default() };
        let (memory, srd) = (Memory::new(RANKS, 256), Srd::new(RANKS, script));
        let engines = memory.engines(&srd, RANKS);
        let mut wires = connect(&engines).unwrap();
        let mut takers = memory.takers(RANKS);
        let short = [7u8; 200];
        for (rank, wire) in wires.iter_mut().enumerate() {
            for index in 0..FRAMES {
                let frame = Frame { index, bytes: 200, ..Frame::new(Kind::Data, 1) };
                for next in [1, 2] {
                    // SAFETY: short.
                    unsafe { wire.send((rank + next) % RANKS, &frame, short.as_ptr(), 0) };
                }
            }
        }
        let mut turns = 0;
        while takers.iter().any(|taker| taker.got.len() < 2 * FRAMES as usize) {
            turns += 1;
            assert!(turns < 20_000, "seed {seed}: it hangs");
            for (wire, taker) in wires.iter_mut().zip(&mut takers) {
                wire.poll(taker);
                assert_eq!(wire.broken(), [], "seed {seed}");
            }
        }
        assert_eq!(srd.violations(), [], "seed {seed}");
    }
}

#[test]
fn more_peers_in_use_than_there_are_buffers_for_are_told() {
    const RANKS: usize = 60;
    let script = SrdScript { receives: 150, ..SrdScript::default() };
    let (memory, srd) = (Memory::new(RANKS, 256), Srd::new(RANKS, script));
    let engines = memory.engines(&srd, RANKS);
    let mut wires = connect(&engines).unwrap();
    let mut taker = memory.takers(1).remove(0);
    for to in 1..RANKS {
        // SAFETY: no payload.
        unsafe { wires[0].send(to, &Frame::new(Kind::Credit, 1), std::ptr::null(), 0) };
    }
    wires[0].poll(&mut taker);
    let broken = wires[0].broken();
    assert!(!broken.is_empty() && broken.len() < RANKS - 1, "{} of them", broken.len());
    assert!(
        broken[0].reason.contains("peers in use") && broken[0].reason.contains("room for"),
        "{}",
        broken[0].reason
    );
    assert_eq!(srd.violations(), []);
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// The engine finds out that the peer is gone.
    Lost,
    /// The group hears so by other means, and is dead.
    Poisoned,
    /// The group is left.
    Closed,
}

#[test]
fn what_a_dead_peer_was_to_write_keeps_nobody_else_waiting() {
    const LARGE: usize = 300 << 10;
    for end in [End::Lost, End::Poisoned, End::Closed] {
        // One payload takes more than half of the numbers that there are.
        let script = SrdScript { writes: true, one_sided: 8192, ..SrdScript::default() };
        let (memory, srd) = (Memory::new(3, LARGE), Srd::new(3, script));
        let engines = memory.engines(&srd, 3);
        let (mut first, mut second) = (connect(&engines).unwrap(), connect(&engines).unwrap());
        let mut takers = memory.takers(3);
        let frame = Frame { bytes: LARGE as u64, ..Frame::new(Kind::Data, 1) };
        // SAFETY: staging memory of this rank's, which stays as it is.
        unsafe { first[1].send(0, &frame, memory.at(1), 0) };
        // Full queues do not take it at once.
        for _ in 0..20 {
            first[1].poll(&mut takers[1]);
        }
        let granted = || engines[0].lock().unwrap().numbers > 0;
        for _ in 0..5_000 {
            if granted() {
                break;
            }
            first[0].poll(&mut takers[0]);
            // Only credits are returned: it never learns where to write.
            first[2].poll(&mut takers[2]);
        }
        assert!(granted(), "{end:?}");
        srd.kill(1);
        match end {
            End::Lost => {
                let mut engine = engines[0].lock().unwrap();
                let peer = engine.peers.iter().position(|peer| peer.heard).unwrap();
                engine.lose(peer, "it is gone");
            }
            End::Poisoned => first[0].abandon(),
            End::Closed => drop(first.remove(0)),
        }
        // SAFETY: as above.
        unsafe { second[2].send(0, &frame, memory.at(2), 0) };
        let mut turns = 0;
        while !takers[0].got.contains(&(2, 0)) {
            turns += 1;
            assert!(turns < 20_000, "{end:?}: another rank's payload is not fetched");
            for rank in [0, 2] {
                second[rank].poll(&mut takers[rank]);
            }
        }
        assert_eq!(srd.violations(), []);
    }
}
