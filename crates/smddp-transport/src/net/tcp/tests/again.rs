//! A frame for which there is no place yet.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;

use super::super::endpoint::TcpEndpoint;
use super::super::sideband::Sideband;
use super::super::wire::TcpWire;
use super::*;
use crate::interface::{AddressFamily, InterfaceFilter};
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket, Wire};
use crate::process::Endpoint;

/// Peers: more than are read at every look, so the kernel is asked which of them have something.
const PEERS: usize = 4;

/// Has a place from a certain moment on, as where an operation has yet to begin.
#[derive(Default)]
struct Late {
    open: bool,
    asked: u32,
    arrived: Vec<usize>,
    place: [u8; 8],
}

impl Sink for Late {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        self.asked += 1;
        if self.open { Target::At(self.place.as_mut_ptr()) } else { Target::Later }
    }
    fn received(&mut self, peer: usize, _: &Frame) {
        self.arrived.push(peer);
    }
    fn sent(&mut self, _: Ticket) {}
}

#[test]
fn a_frame_that_had_no_place_is_taken_at_the_first_look_that_has_one() {
    let lo = InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" };
    let endpoint =
        TcpEndpoint::get(&Endpoint::get(8 << 20).unwrap(), &lo, AddressFamily::Any, PEER_TIMEOUT, false)
            .unwrap();
    let listeners: Vec<_> = (0..PEERS).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let address = |listener: &TcpListener| {
        Some(TcpAddress { socket: listener.local_addr().unwrap(), group_listener: Default::default() })
    };
    let group_listener = endpoint.group_listener(0, 1 + PEERS);
    group_listener.trust(&feed::known_token());
    let addresses = std::iter::once(None).chain(listeners.iter().map(address));
    let mut wire = TcpWire::new(Arc::new(Sideband::new(0, group_listener, addresses).unwrap())).unwrap();
    let mut sink = Late::default();
    let answering = std::thread::spawn(move || {
        listeners.iter().map(|listener| feed::accept_peer(listener.accept().unwrap().0)).collect::<Vec<_>>()
    });
    for peer in 1..=PEERS {
        // SAFETY: there is no payload.
        unsafe { wire.send(peer, &Frame::new(Kind::Credit, 0), std::ptr::null(), 0) };
    }
    let begun = Instant::now();
    while !answering.is_finished() || !wire.drained() {
        assert!(begun.elapsed() < DEADLINE);
        wire.poll(&mut sink);
    }
    let mut peers = answering.join().unwrap();
    let frame = Frame { bytes: 8, ..Frame::new(Kind::Data, 0) };
    peers[2].write_all(&[&frame.encode()[..], &[7; 8]].concat()).unwrap();
    while sink.asked == 0 {
        assert!(begun.elapsed() < DEADLINE);
        wire.poll(&mut sink);
    }
    assert_eq!(sink.arrived, []);
    sink.open = true;
    // Nothing more comes over that connection: who sleeps now is woken by nobody.
    assert!(wire.poll(&mut sink));
    assert_eq!((sink.arrived, sink.place), (vec![3], [7; 8]));
}
