//! Peers that do not read, and hosts that do not respond.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_net::frame::{ALL_CLASSES, Frame, HEADER, Kind};
use smddp_net::fuzzing::{accept_peer, known_token};
use smddp_net::interface::{AddressFamily, InterfaceFilter};
use smddp_net::wire::{Broken, Payload, Sink, Target, Ticket, Wire};
use smddp_process::Endpoint;

use super::{DEADLINE, PEER_TIMEOUT};
use crate::TcpAddress;
use crate::dial::SILENT;
use crate::endpoint::TcpEndpoint;
use crate::host_liveness::HostLivenessLimits;
use crate::sideband::Sideband;
use crate::wire::TcpWire;

/// Payload of every message; static memory takes the place of the staging memory.
static PAYLOAD: [u8; 1 << 20] = [7; 1 << 20];
const LIMITS: HostLivenessLimits = HostLivenessLimits {
    silent: Duration::from_millis(300),
    lost: Duration::from_millis(900),
    interval: Duration::from_millis(20),
};

#[derive(Default)]
struct Sent(u64);

// SAFETY: `target` returns no address.
unsafe impl Sink for Sent {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::Discard
    }
    fn received(&mut self, _: usize, _: &Frame) {}
    fn sent(&mut self, _: Ticket) {
        self.0 += 1;
    }
}

/// Rank 0 of two ranks. A listener of the test takes the place of rank 1.
struct SingleRank {
    wire: TcpWire,
    listener: TcpListener,
    sink: Sent,
    frames: u64,
}

impl SingleRank {
    fn new() -> Self {
        let lo = InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" };
        let endpoint =
            TcpEndpoint::get(&Endpoint::get(8 << 20).unwrap(), &lo, AddressFamily::Any, PEER_TIMEOUT, false)
                .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = TcpAddress { socket: listener.local_addr().unwrap(), listener_id: Default::default() };
        let group_listener = endpoint.group_listener(0, 2);
        group_listener.trust(&known_token());
        let sideband = Sideband::new(0, group_listener, [None, Some(address)].into_iter()).unwrap();
        let wire = TcpWire::with(Arc::new(sideband), LIMITS).unwrap();
        Self { wire, listener, sink: Sent::default(), frames: 0 }
    }

    fn send(&mut self) {
        let frame = Frame { bytes: PAYLOAD.len() as u64, ..Frame::new(Kind::Data, 0) };
        // SAFETY: the payload is static.
        unsafe { self.wire.send(1, &frame, Payload::Borrowed { at: PAYLOAD.as_ptr(), ticket: self.frames }) };
        self.frames += 1;
    }

    /// Polls and checks the wire once, like a rank that waits.
    fn poll(&mut self) -> Vec<Broken> {
        self.wire.poll(&mut self.sink);
        self.wire.check(Instant::now(), &[]);
        std::thread::park_timeout(Duration::from_millis(2));
        Broken::among(self.wire.peers())
    }

    /// Polls for that time, or until the peer is lost.
    fn poll_for(&mut self, time: Duration) -> Vec<Broken> {
        let begun = Instant::now();
        while begun.elapsed() < time && self.poll().is_empty() {}
        Broken::among(self.wire.peers())
    }

    /// Accepts the connection. Returns the peer's end after the handshake.
    fn accept(&mut self) -> TcpStream {
        let listener = self.listener.try_clone().unwrap();
        let responder = std::thread::spawn(move || accept_peer(listener.accept().unwrap().0));
        let begun = Instant::now();
        while !responder.is_finished() {
            assert!(begun.elapsed() < DEADLINE);
            assert_eq!(self.poll(), []);
        }
        responder.join().unwrap()
    }

    /// Sends until the sockets are full. Returns the peer's end.
    fn fill(&mut self) -> TcpStream {
        (0..16).for_each(|_| self.send());
        let peer = self.accept();
        assert_eq!(self.poll_for(Duration::from_millis(200)), []);
        assert!(!self.wire.is_flushed(ALL_CLASSES), "the sockets have room for sixteen messages");
        peer
    }
}

/// Drops all packets to that socket, as if its host were without power. The kernel answers none of them.
fn cut_off(socket: &impl AsRawFd) {
    filter(socket, &mut [instruction(libc::BPF_RET | libc::BPF_K, 0)]);
}

/// Drops packets of more than `bytes` bytes to that socket.
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
    // SAFETY: the kernel copies the filter, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn lost() -> Vec<Broken> {
    vec![Broken { peer: 1, reason: SILENT.to_owned() }]
}

#[test]
fn peer_that_does_not_read_is_not_lost() {
    let mut rank = SingleRank::new();
    let mut peer = rank.fill();
    // Many times the limit for a silent host.
    assert_eq!(rank.poll_for(10 * LIMITS.lost), []);
    let reading = std::thread::spawn(move || {
        let mut all = vec![0; 16 * (HEADER + PAYLOAD.len())];
        peer.read_exact(&mut all).unwrap();
        (peer, all)
    });
    let begun = Instant::now();
    while rank.sink.0 < rank.frames {
        assert!(begun.elapsed() < DEADLINE);
        assert_eq!(rank.poll(), []);
    }
    let (_peer, all) = reading.join().unwrap();
    assert!(all[HEADER..].ends_with(&PAYLOAD));
}

#[test]
fn silent_host_is_detected_with_a_zero_receive_window() {
    let mut rank = SingleRank::new();
    let peer = rank.fill();
    cut_off(&rank.listener);
    cut_off(&peer);
    let cut = Instant::now();
    assert_eq!(rank.poll_for(DEADLINE), lost());
    assert!(cut.elapsed() >= LIMITS.lost, "{:?}", cut.elapsed());
}

#[test]
fn silent_host_is_detected_with_data_in_flight() {
    let mut rank = SingleRank::new();
    // A short frame arrives.
    let frame = Frame::new(Kind::Credit, 0);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, Payload::None) };
    let peer = rank.accept();
    assert_eq!(rank.poll_for(Duration::from_millis(50)), []);
    cut_off(&rank.listener);
    cut_off(&peer);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, Payload::None) };
    assert_eq!(rank.poll_for(DEADLINE), lost());
}

#[test]
fn lost_large_packets_are_diagnosed_while_small_ones_arrive() {
    let mut rank = SingleRank::new();
    let frame = Frame::new(Kind::Credit, 0);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, Payload::None) };
    let peer = rank.accept();
    drop_large_packets(&peer, 1000);
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &frame, Payload::None) };
    assert_eq!(rank.poll_for(Duration::from_millis(50)), []);
    assert_eq!(rank.wire.connection_stats(1).unacknowledged_packet, None, "small packets arrive");
    rank.send();
    let begun = Instant::now();
    let payload = loop {
        assert!(begun.elapsed() < DEADLINE);
        rank.poll();
        if let Some(payload) = rank.wire.connection_stats(1).unacknowledged_packet {
            break payload;
        }
    };
    assert!(payload > 1000, "{payload}");
}

#[test]
fn host_lost_during_its_probe_is_detected() {
    let mut rank = SingleRank::new();
    let peer = rank.fill();
    rank.listener.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let probe = loop {
        assert!(begun.elapsed() < DEADLINE, "the peer is not probed");
        assert_eq!(rank.poll(), []);
        if let Ok((probe, _)) = rank.listener.accept() {
            break probe;
        }
    };
    assert_eq!(rank.poll_for(LIMITS.lost), []);
    for socket in [&peer, &probe] {
        cut_off(socket);
    }
    cut_off(&rank.listener);
    assert_eq!(rank.poll_for(DEADLINE), lost());
}

/// Waits for the peer for that time, or until it is lost. No data is in flight to it.
fn wait_for(rank: &mut SingleRank, time: Duration) -> Vec<Broken> {
    let begun = Instant::now();
    while begun.elapsed() < time && rank.poll().is_empty() {
        rank.wire.check(Instant::now(), &[1]);
    }
    Broken::among(rank.wire.peers())
}

#[test]
fn lost_host_of_an_awaited_peer_is_detected_and_a_late_peer_is_not_lost() {
    let mut rank = SingleRank::new();
    // SAFETY: no payload.
    unsafe { rank.wire.send(1, &Frame::new(Kind::Credit, 0), Payload::None) };
    let peer = rank.accept();
    // A second connection probes it, which its kernel accepts.
    assert_eq!(wait_for(&mut rank, 5 * LIMITS.lost), []);
    cut_off(&peer);
    cut_off(&rank.listener);
    rank.listener.set_nonblocking(true).unwrap();
    while let Ok((probe, _)) = rank.listener.accept() {
        cut_off(&probe);
        // Closing the socket would send a packet.
        std::mem::forget(probe);
    }
    let cut = Instant::now();
    // Keepalive probes have a resolution of one second: one until the first probe, and another one for its answer.
    assert_eq!(wait_for(&mut rank, DEADLINE), lost());
    assert!(cut.elapsed() < Duration::from_secs(5), "{:?}", cut.elapsed());
}
