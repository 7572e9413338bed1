//! Tests with many peers: silent peers and lost peers.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use super::*;
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Broken, Close, Payload, Sink, Target, Ticket, Wire};

/// Sink that receives all frames into one target.
struct RecordingSink {
    target: *mut u8,
    arrived: Vec<(usize, u64)>,
}

impl Sink for RecordingSink {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::At(self.target)
    }
    fn received(&mut self, peer: usize, frame: &Frame) {
        self.arrived.push((peer, frame.index));
    }
    fn sent(&mut self, _: Ticket) {}
}

/// Staging memory with a part of the given size, in bytes, for each rank.
struct Memory(Arc<Vec<AtomicU8>>, usize);

impl Memory {
    fn new(ranks: usize, each: usize) -> Self {
        Self(Arc::new((0..ranks * each).map(|_| AtomicU8::new(0)).collect()), each)
    }
    fn at(&self, rank: usize) -> *mut u8 {
        self.0[rank * self.1].as_ptr()
    }
    fn endpoints(&self, srd: &Srd, ranks: usize) -> Vec<SharedEndpoint> {
        let staging = RegisteredStaging::new(self.at(0), self.0.len(), self.0.clone());
        (0..ranks).map(|rank| srd.endpoint(rank, staging.clone(), ranks).unwrap()).collect()
    }
    fn sinks(&self, ranks: usize) -> Vec<RecordingSink> {
        (0..ranks).map(|rank| RecordingSink { target: self.at(rank), arrived: Vec::new() }).collect()
    }
}

#[test]
fn receive_buffers_are_posted_for_peers_in_use() {
    const RANKS: usize = 100;
    const FRAMES: u64 = 30;
    for seed in 0..3 {
        // Enough for all peers' initial credits and a few windows, but not for the windows of all peers.
        let script = SrdScript { seed, receives: 250, ..SrdScript::default() };
        let (memory, srd) = (Memory::new(RANKS, 256), Srd::new(RANKS, script));
        let endpoints = memory.endpoints(&srd, RANKS);
        let mut wires = connect(&endpoints).unwrap();
        let mut sinks = memory.sinks(RANKS);
        let short = [7u8; 200];
        for (rank, wire) in wires.iter_mut().enumerate() {
            for index in 0..FRAMES {
                let frame = Frame { index, bytes: 200, ..Frame::new(Kind::Data, 1) };
                for next in [1, 2] {
                    // SAFETY: short.
                    unsafe {
                        wire.send((rank + next) % RANKS, &frame, Payload::Copied { at: short.as_ptr() })
                    };
                }
            }
        }
        let mut polls = 0;
        while sinks.iter().any(|sink| sink.arrived.len() < 2 * FRAMES as usize) {
            polls += 1;
            assert!(polls < 20_000, "seed {seed}: no progress");
            for (wire, sink) in wires.iter_mut().zip(&mut sinks) {
                wire.poll(sink);
                assert_eq!(Broken::among(wire.peers()), [], "seed {seed}");
            }
        }
        assert_eq!(srd.violations(), [], "seed {seed}");
    }
}

#[test]
fn shortage_of_receive_buffers_is_reported() {
    const RANKS: usize = 60;
    let script = SrdScript { receives: 150, ..SrdScript::default() };
    let (memory, srd) = (Memory::new(RANKS, 256), Srd::new(RANKS, script));
    let endpoints = memory.endpoints(&srd, RANKS);
    let mut wires = connect(&endpoints).unwrap();
    let mut sink = memory.sinks(1).remove(0);
    for to in 1..RANKS {
        // SAFETY: no payload.
        unsafe { wires[0].send(to, &Frame::new(Kind::Credit, 1), Payload::None) };
    }
    wires[0].poll(&mut sink);
    let broken = Broken::among(wires[0].peers());
    assert!(!broken.is_empty() && broken.len() < RANKS - 1, "{} lost peers", broken.len());
    assert!(
        broken[0].reason.contains("peers in use") && broken[0].reason.contains("room for"),
        "{}",
        broken[0].reason
    );
    assert_eq!(srd.violations(), []);
}

/// Event that ends the transfers of a lost peer.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The endpoint detects the lost peer.
    Lost,
    /// The group is aborted for another reason.
    Aborted,
    /// The group is closed.
    Closed,
}

#[test]
fn grants_to_a_lost_peer_do_not_block_other_peers() {
    const LARGE: usize = 300 << 10;
    for end in [End::Lost, End::Aborted, End::Closed] {
        // One payload uses more than half of the immediates.
        let script = SrdScript { writes: true, one_sided: 8192, ..SrdScript::default() };
        let (memory, srd) = (Memory::new(3, LARGE), Srd::new(3, script));
        let endpoints = memory.endpoints(&srd, 3);
        let (mut first, mut second) = (connect(&endpoints).unwrap(), connect(&endpoints).unwrap());
        let mut sinks = memory.sinks(3);
        let frame = Frame { bytes: LARGE as u64, ..Frame::new(Kind::Data, 1) };
        // SAFETY: staging memory of this rank, which does not change.
        unsafe { first[1].send(0, &frame, Payload::Borrowed { at: memory.at(1), ticket: 0 }) };
        // Full queues may not accept it at once.
        for _ in 0..20 {
            first[1].poll(&mut sinks[1]);
        }
        let granted = || endpoints[0].lock().unwrap().immediates > 0;
        for _ in 0..5_000 {
            if granted() {
                break;
            }
            first[0].poll(&mut sinks[0]);
            // Rank 1 is not polled, so it never processes the grant. Rank 2 only returns credits.
            first[2].poll(&mut sinks[2]);
        }
        assert!(granted(), "{end:?}");
        srd.kill(1);
        match end {
            End::Lost => {
                let mut endpoint = endpoints[0].lock().unwrap();
                let peer = endpoint.peers.iter().position(|peer| peer.peer_window_open).unwrap();
                endpoint.fail_peer(peer, "it is lost");
            }
            End::Aborted => _ = first[0].close(Close::Abort),
            End::Closed => drop(first.remove(0)),
        }
        // SAFETY: as above.
        unsafe { second[2].send(0, &frame, Payload::Borrowed { at: memory.at(2), ticket: 0 }) };
        let mut polls = 0;
        while !sinks[0].arrived.contains(&(2, 0)) {
            polls += 1;
            assert!(polls < 20_000, "{end:?}: the payload of another rank is not fetched");
            for rank in [0, 2] {
                second[rank].poll(&mut sinks[rank]);
            }
        }
        assert_eq!(srd.violations(), []);
    }
}
