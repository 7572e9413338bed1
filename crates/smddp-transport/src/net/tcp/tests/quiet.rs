//! A peer that takes nothing, and a host that answers nothing.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::super::dial::SILENT;
use super::super::endpoint::TcpEndpoint;
use super::super::host_liveness::HostLivenessLimits;
use super::super::sideband::Sideband;
use super::super::wire::TcpWire;
use super::*;
use crate::interface::{AddressFamily, InterfaceFilter};
use crate::net::frame::{Frame, HEADER, Kind};
use crate::net::wire::{Broken, Sink, Target, Ticket, Wire};
use crate::process::Endpoint;

/// What is sent again and again, as if it lay in the staging memory.
static PAYLOAD: [u8; 1 << 20] = [7; 1 << 20];
const LIMITS: HostLivenessLimits = HostLivenessLimits {
    silent: Duration::from_millis(300),
    lost: Duration::from_millis(900),
    interval: Duration::from_millis(20),
};

#[derive(Default)]
struct Sent(u64);

impl Sink for Sent {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::Discard
    }
    fn received(&mut self, _: usize, _: &Frame) {}
    fn sent(&mut self, _: Ticket) {
        self.0 += 1;
    }
}

/// Rank 0 of two; the other is a listener of the test's.
struct Lonely {
    wire: TcpWire,
    listener: TcpListener,
    sink: Sent,
    frames: u64,
}

impl Lonely {
    fn new() -> Self {
        let lo = InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" };
        let endpoint =
            TcpEndpoint::get(&Endpoint::get(8 << 20).unwrap(), &lo, AddressFamily::Any, PEER_TIMEOUT, false)
                .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address =
            TcpAddress { socket: listener.local_addr().unwrap(), group_listener: Default::default() };
        let group_listener = endpoint.group_listener(0, 2);
        group_listener.trust(&feed::known_token());
        let listeners = Sideband::new(0, group_listener, [None, Some(address)].into_iter()).unwrap();
        let wire = TcpWire::with(Arc::new(listeners), LIMITS).unwrap();
        Self { wire, listener, sink: Sent::default(), frames: 0 }
    }

    fn send(&mut self) {
        let frame = Frame { bytes: PAYLOAD.len() as u64, ..Frame::new(Kind::Data, 0) };
        // SAFETY: the payload is static.
        unsafe { self.wire.send(1, &frame, PAYLOAD.as_ptr(), self.frames) };
        self.frames += 1;
    }

    /// What a rank does that waits.
    fn turn(&mut self) -> Vec<Broken> {
        self.wire.poll(&mut self.sink);
        self.wire.check(Instant::now());
        std::thread::park_timeout(Duration::from_millis(2));
        self.wire.broken()
    }

    fn turn_for(&mut self, time: Duration) -> Vec<Broken> {
        let begun = Instant::now();
        while begun.elapsed() < time && self.turn().is_empty() {}
        self.wire.broken()
    }

    /// The peer's end of the connection, its first words said.
    fn accept(&mut self) -> TcpStream {
        let listener = self.listener.try_clone().unwrap();
        let answering = std::thread::spawn(move || feed::accept_peer(listener.accept().unwrap().0));
        let begun = Instant::now();
        while !answering.is_finished() {
            assert!(begun.elapsed() < DEADLINE);
            assert_eq!(self.turn(), []);
        }
        answering.join().unwrap()
    }

    /// Sends until nothing more is taken; the peer's end.
    fn fill(&mut self) -> TcpStream {
        (0..16).for_each(|_| self.send());
        let peer = self.accept();
        assert_eq!(self.turn_for(Duration::from_millis(200)), []);
        assert!(!self.wire.drained(), "sixteen messages fit the sockets");
        peer
    }
}

/// From now on nothing reaches that socket, and nothing is answered for it: its host is without power.
fn cut_off(socket: &impl AsRawFd) {
    filter(socket, &mut [instruction(libc::BPF_RET | libc::BPF_K, 0)]);
}

/// From now on packets of more than `bytes` do not reach that socket.
fn drop_large_packets(socket: &impl AsRawFd, bytes: u32) {
    let larger =
        libc::sock_filter { jt: 0, jf: 1, ..instruction(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, bytes) };
    filter(
        socket,
        &mut [
            instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_LEN, 0),
            larger,
            instruction(libc::BPF_RET | libc::BPF_K, 0),
            instruction(libc::BPF_RET | libc::BPF_K, u32::MAX),
        ],
    );
}

fn instruction(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn filter(socket: &impl AsRawFd, instructions: &mut [libc::sock_filter]) {
    let filter = libc::sock_fprog { len: instructions.len() as u16, filter: instructions.as_mut_ptr() };
    // SAFETY: the kernel copies the filter, which lives until the call is over.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

fn lost() -> Vec<Broken> {
    vec![Broken { peer: 1, reason: SILENT.to_owned() }]
}

#[test]
fn a_peer_that_takes_nothing_for_long_is_not_lost() {
    let mut rank = Lonely::new();
    let mut peer = rank.fill();
    // Many times as long as a host may be silent.
    assert_eq!(rank.turn_for(10 * LIMITS.lost), []);
    let reading = std::thread::spawn(move || {
        let mut all = vec![0; 16 * (HEADER + PAYLOAD.len())];
        peer.read_exact(&mut all).unwrap();
        (peer, all)
    });
    let begun = Instant::now();
    while rank.sink.0 < rank.frames {
        assert!(begun.elapsed() < DEADLINE);
        assert_eq!(rank.turn(), []);
    }
    let (_peer, all) = reading.join().unwrap();
    assert!(all[HEADER..].ends_with(&PAYLOAD));
}

#[test]
fn a_host_that_answers_nothing_is_noticed_though_its_window_was_shut() {
    let mut rank = Lonely::new();
    let peer = rank.fill();
    cut_off(&rank.listener);
    cut_off(&peer);
    let cut = Instant::now();
    assert_eq!(rank.turn_for(DEADLINE), lost());
    assert!(cut.elapsed() >= LIMITS.lost, "{:?}", cut.elapsed());
}

#[test]
fn a_host_that_answers_nothing_is_noticed_while_bytes_are_under_way() {
    let mut rank = Lonely::new();
    // A little is taken.
    let frame = Frame::new(Kind::Credit, 0);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, std::ptr::null(), 0) };
    let peer = rank.accept();
    assert_eq!(rank.turn_for(Duration::from_millis(50)), []);
    cut_off(&rank.listener);
    cut_off(&peer);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, std::ptr::null(), 0) };
    assert_eq!(rank.turn_for(DEADLINE), lost());
}

#[test]
fn lost_large_packets_are_diagnosed_while_small_ones_arrive() {
    let mut rank = Lonely::new();
    let frame = Frame::new(Kind::Credit, 0);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, std::ptr::null(), 0) };
    let peer = rank.accept();
    drop_large_packets(&peer, 1000);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, std::ptr::null(), 0) };
    assert_eq!(rank.turn_for(Duration::from_millis(50)), []);
    assert_eq!(rank.wire.unacknowledged(), [], "small packets arrive");
    rank.send();
    let begun = Instant::now();
    while rank.wire.unacknowledged().is_empty() {
        assert!(begun.elapsed() < DEADLINE);
        rank.turn();
    }
    let [(1, payload)] = rank.wire.unacknowledged()[..] else { panic!("one connection") };
    assert!(payload > 1000, "{payload}");
}

#[test]
fn a_host_that_goes_while_it_is_looked_after_is_noticed() {
    let mut rank = Lonely::new();
    let peer = rank.fill();
    rank.listener.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let watch = loop {
        assert!(begun.elapsed() < DEADLINE, "nobody looks after the peer");
        assert_eq!(rank.turn(), []);
        if let Ok((watch, _)) = rank.listener.accept() {
            break watch;
        }
    };
    assert_eq!(rank.turn_for(LIMITS.lost), []);
    for socket in [&peer, &watch] {
        cut_off(socket);
    }
    cut_off(&rank.listener);
    assert_eq!(rank.turn_for(DEADLINE), lost());
}

/// Waits for the peer for that time, or until it is lost. Nothing is under way to it.
fn wait_for(rank: &mut Lonely, time: Duration) -> Vec<Broken> {
    let begun = Instant::now();
    while begun.elapsed() < time && rank.turn().is_empty() {
        rank.wire.watch(1, false, Instant::now());
    }
    rank.wire.broken()
}

#[test]
fn a_host_that_goes_while_its_peer_is_waited_for_is_noticed_and_a_peer_that_is_only_late_is_not_lost() {
    let mut rank = Lonely::new();
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &Frame::new(Kind::Credit, 0), std::ptr::null(), 0) };
    let peer = rank.accept();
    // It is looked after by another connection, which its kernel takes up.
    assert_eq!(wait_for(&mut rank, 5 * LIMITS.lost), []);
    cut_off(&peer);
    cut_off(&rank.listener);
    rank.listener.set_nonblocking(true).unwrap();
    while let Ok((watch, _)) = rank.listener.accept() {
        cut_off(&watch);
        // Closing it would say something.
        std::mem::forget(watch);
    }
    let cut = Instant::now();
    // The kernel's probes come by the second: the first after one, and another one for its answer.
    assert_eq!(wait_for(&mut rank, DEADLINE), lost());
    assert!(cut.elapsed() < Duration::from_secs(5), "{:?}", cut.elapsed());
}
