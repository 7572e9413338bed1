//! A frame for which the sink has no target yet.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use smddp_net::frame::{ALL_CLASSES, Frame, Kind};
use smddp_net::fuzzing::{accept_peer, known_token};
use smddp_net::interface::{AddressFamily, InterfaceFilter};
use smddp_net::wire::{Payload, Sink, Target, Ticket, Wire};
use smddp_process::Endpoint;

use super::{DEADLINE, PEER_TIMEOUT};
use crate::TcpAddress;
use crate::endpoint::TcpEndpoint;
use crate::sideband::Sideband;
use crate::wire::TcpWire;

/// Number of peers: so many that the wire uses epoll.
const PEERS: usize = 4;

/// Sink that has a target once `open` is set, like an operation that starts later.
#[derive(Default)]
struct Late {
    open: bool,
    queried: u32,
    received: Vec<usize>,
    buffer: [u8; 8],
}

// SAFETY: the only payload has 8 bytes. The sink does not move, and the test reads `buffer` after the frame is received.
unsafe impl Sink for Late {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        self.queried += 1;
        if self.open { Target::At(self.buffer.as_mut_ptr()) } else { Target::Later }
    }
    fn received(&mut self, peer: usize, _: &Frame) {
        self.received.push(peer);
    }
    fn sent(&mut self, _: Ticket) {}
}

#[test]
fn frame_without_a_target_is_received_at_the_first_poll_with_one() {
    let lo = InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" };
    let endpoint =
        TcpEndpoint::get(&Endpoint::get(8 << 20).unwrap(), &lo, AddressFamily::Any, PEER_TIMEOUT, false)
            .unwrap();
    let listeners: Vec<_> = (0..PEERS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let address = |listener: &TcpListener| {
        Some(TcpAddress { socket: listener.local_addr().unwrap(), listener_id: Default::default() })
    };
    let group_listener = endpoint.group_listener(0, 1 + PEERS);
    group_listener.trust(&known_token());
    let addresses = std::iter::once(None).chain(listeners.iter().map(address));
    let mut wire = TcpWire::new(Arc::new(Sideband::new(0, group_listener, addresses).unwrap())).unwrap();
    let mut sink = Late::default();
    let responder = std::thread::spawn(move || {
        listeners.iter().map(|listener| accept_peer(listener.accept().unwrap().0)).collect::<Vec<_>>()
    });
    for peer in 1..=PEERS {
        // SAFETY: no payload.
        unsafe { wire.send(peer, &Frame::new(Kind::Credit, 0), Payload::None) };
    }
    let begun = Instant::now();
    while !responder.is_finished() || !wire.is_flushed(ALL_CLASSES) {
        assert!(begun.elapsed() < DEADLINE);
        wire.poll(&mut sink);
    }
    let mut peers = responder.join().unwrap();
    let frame = Frame { bytes: 8, ..Frame::new(Kind::Data, 0) };
    peers[2].write_all(&[&frame.encode()[..], &[7; 8]].concat()).unwrap();
    while sink.queried == 0 {
        assert!(begun.elapsed() < DEADLINE);
        wire.poll(&mut sink);
    }
    assert_eq!(sink.received, []);
    sink.open = true;
    // No more data arrives over that connection, so a poll that skipped it would sleep for ever.
    assert!(wire.poll(&mut sink));
    assert_eq!((sink.received, sink.buffer), (vec![3], [7; 8]));
}
