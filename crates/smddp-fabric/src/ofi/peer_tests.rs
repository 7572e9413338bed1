//! Tests of several groups and of many peers: silent peers and lost peers.

use std::time::{Duration, Instant};

use fake_libfabric::{Rule, SimulatedFabric, knob};
use smddp_base::lock;
use smddp_net::frame::{ALL_CLASSES, Frame, Kind};
use smddp_net::wire::{Broken, Close, Payload, Sink, Target, Ticket, Wire};

use super::open;
use super::simulated::{Memory, choose, connect, endpoints};
use crate::liveness::PING_INTERVAL;
use crate::rail::{LocalMemory, Posted, Rail as _};

/// Sink that receives all frames into one target.
struct RecordingSink {
    target: *mut u8,
    arrived: Vec<(usize, u64)>,
}

// SAFETY: the target is in the staging memory, with room for the largest frame of the test. Only wires access it.
unsafe impl Sink for RecordingSink {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::At(self.target)
    }
    fn received(&mut self, peer: usize, frame: &Frame) {
        self.arrived.push((peer, frame.index));
    }
    fn sent(&mut self, _: Ticket) {}
}

/// Returns a sink for each rank.
fn sinks(memory: &Memory, ranks: usize, each: usize) -> Vec<RecordingSink> {
    let sink = |rank| RecordingSink { target: memory.at(rank * each), arrived: Vec::new() };
    (0..ranks).map(sink).collect()
}

#[test]
fn receive_buffers_are_posted_for_peers_in_use() {
    const RANKS: usize = 100;
    const FRAMES: u64 = 30;
    for seed in 0..3 {
        // Enough for all peers' initial credits and a few windows, but not for the windows of all peers.
        let (fabric, memory) =
            (SimulatedFabric::with_small_limits(seed, &[(knob::RECEIVES, 250)]), Memory::new(RANKS * 256));
        let endpoints = endpoints(&fabric, RANKS, &memory);
        let mut wires = connect(&endpoints);
        let mut sinks = sinks(&memory, RANKS, 256);
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
        assert_eq!(fabric.violations(), [], "seed {seed}");
    }
}

#[test]
fn shortage_of_receive_buffers_is_reported() {
    const RANKS: usize = 60;
    let (fabric, memory) =
        (SimulatedFabric::with_small_limits(0, &[(knob::RECEIVES, 150)]), Memory::new(RANKS * 256));
    let endpoints = endpoints(&fabric, RANKS, &memory);
    let mut wires = connect(&endpoints);
    let mut sink = sinks(&memory, 1, 256).remove(0);
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
    assert_eq!(fabric.violations(), []);
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
        let fabric =
            SimulatedFabric::with_small_limits(0, &[(knob::EMULATED_WRITE, 0), (knob::ONE_SIDED, 8192)]);
        let memory = Memory::new(3 * LARGE);
        let mut endpoints = endpoints(&fabric, 3, &memory);
        let (mut first, mut second) = (connect(&endpoints), connect(&endpoints));
        let mut sinks = sinks(&memory, 3, LARGE);
        let frame = Frame { bytes: LARGE as u64, ..Frame::new(Kind::Data, 1) };
        // SAFETY: staging memory of this rank, which does not change.
        unsafe { first[1].send(0, &frame, Payload::Borrowed { at: memory.at(LARGE), ticket: 0 }) };
        // Full queues may not accept it at once.
        for _ in 0..20 {
            first[1].poll(&mut sinks[1]);
        }
        let receiver = endpoints[0].clone();
        let granted = || lock(&receiver).immediates > 0;
        for _ in 0..5_000 {
            if granted() {
                break;
            }
            first[0].poll(&mut sinks[0]);
            // Rank 1 is not polled, so it never processes the grant. Rank 2 only returns credits.
            first[2].poll(&mut sinks[2]);
        }
        assert!(granted(), "{end:?}");
        // Closes the endpoint of rank 1.
        drop((first.remove(1), second.remove(1), endpoints.remove(1)));
        match end {
            End::Lost => {
                let mut endpoint = lock(&endpoints[0]);
                let peer = endpoint.peers.iter().position(|peer| peer.peer_window_open).unwrap();
                endpoint.fail_peer(peer, "it is lost");
            }
            End::Aborted => _ = first[0].close(Close::Abort),
            End::Closed => drop(first.remove(0)),
        }
        // SAFETY: as above.
        unsafe { second[1].send(0, &frame, Payload::Borrowed { at: memory.at(2 * LARGE), ticket: 0 }) };
        let mut polls = 0;
        while !sinks[0].arrived.contains(&(2, 0)) {
            polls += 1;
            assert!(polls < 20_000, "{end:?}: the payload of another rank is not fetched");
            // Entry 1 is now rank 2.
            second[0].poll(&mut sinks[0]);
            second[1].poll(&mut sinks[2]);
        }
        assert_eq!(fabric.violations(), []);
    }
}

#[test]
fn groups_share_an_endpoint_without_mixing_their_frames() {
    for seed in 0..10 {
        let (fabric, memory) =
            (SimulatedFabric::with_small_limits(seed, &[(knob::DEVICES, 2)]), Memory::new(4096));
        let endpoints = endpoints(&fabric, 2, &memory);
        let groups: Vec<_> = (0..3).map(|_| connect(&endpoints)).collect();
        let mut wires: Vec<Vec<_>> = groups
            .into_iter()
            .map(|wires| wires.into_iter().map(|w| (w, Vec::<u64>::new())).collect())
            .collect();
        struct Count<'a>(&'a mut Vec<u64>);
        // SAFETY: `target` returns no address.
        unsafe impl Sink for Count<'_> {
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
        assert_eq!(fabric.violations(), []);
    }
}

/// Any program on the host may be able to send to a fabric endpoint.
#[test]
fn foreign_messages_are_dropped_without_effect_on_groups() {
    struct Last(u64);
    // SAFETY: `target` returns no address.
    unsafe impl Sink for Last {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::Discard
        }
        fn received(&mut self, _: usize, frame: &Frame) {
            self.0 = frame.index;
        }
        fn sent(&mut self, _: Ticket) {}
    }
    let (fabric, memory) = (SimulatedFabric::with_small_limits(0, &[]), Memory::new(4096));
    // This endpoint does not belong to smddp.
    let mut outsider = open(&choose(None, None)).unwrap().1.remove(0);
    let endpoints = endpoints(&fabric, 2, &memory);
    let mut wires = connect(&endpoints);
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
    // SAFETY: `target` returns no address.
    unsafe impl Sink for Nothing {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::Discard
        }
        fn received(&mut self, _: usize, _: &Frame) {}
        fn sent(&mut self, _: Ticket) {}
    }
    let (fabric, memory, now) =
        (SimulatedFabric::with_small_limits(0, &[]), Memory::new(4096), Instant::now());
    // A ping that finds a full queue is repeated at the next check only.
    fabric.set_without(&[Rule::Again]);
    let endpoints = endpoints(&fabric, 2, &memory);
    let mut wires = connect(&endpoints);
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
