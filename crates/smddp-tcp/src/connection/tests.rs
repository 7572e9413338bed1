//! Tests of one connection over the loopback interface.

use std::net::TcpListener;

use smddp_net::frame::Kind;
use smddp_net::fuzzing::accept_peer;
use smddp_net::wire::Target;

use super::*;
use crate::address::{Purpose, TcpAddress};
use crate::dial::Dial;
use crate::fuzzing::credential;

fn accepted(socket: TcpStream) -> io::Result<Connection> {
    let stream = CloseOnFork::new(socket);
    Connection::accept(FrameConnection { rank: 1, class: 0, stream, seal: None }, Duration::from_secs(20))
}

#[test]
fn round_trip_time_is_available_after_the_first_acknowledgement() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ours = accepted(socket).unwrap();
    let minimum = ours.round_trip().unwrap();
    assert!(minimum < Duration::from_secs(10), "{minimum:?}");
}

/// Returns the time after which the kernel ends a connection whose keepalive probes are not answered.
fn detection_time(socket: &TcpStream) -> Duration {
    let probing = sockopt::tcp_keepintvl(socket).unwrap() * sockopt::tcp_keepcnt(socket).unwrap();
    sockopt::tcp_keepidle(socket).unwrap() + probing
}

#[test]
fn keepalive_ends_liveness_connections_fast_and_frame_connections_slowly() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address =
        TcpAddress { socket: listener.local_addr().unwrap(), listener_id: smddp_base::random::bytes() };
    let peer_timeout = Duration::from_secs(10);
    let dial = Dial::new(&credential(0), (1, &address), Purpose::Watch, peer_timeout).unwrap();
    assert!(detection_time(&dial.socket) <= peer_timeout);
    let accepted = Connection::accept(
        FrameConnection {
            rank: 1,
            class: 0,
            stream: CloseOnFork::new(listener.accept().unwrap().0),
            seal: None,
        },
        peer_timeout,
    );
    assert!(detection_time(accepted.unwrap().open().unwrap()) >= 4 * peer_timeout);
    let mut connecting = Connecting::new(credential(0), (1, address), Purpose::Frames(0), peer_timeout);
    let connected = std::thread::scope(|scope| {
        let responder = scope.spawn(|| accept_peer(listener.accept().unwrap().0));
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            assert!(Instant::now() < until, "no answer");
            if let Some((_, socket)) = connecting.poll().unwrap() {
                drop(responder.join().unwrap());
                break socket;
            }
        }
    });
    assert!(detection_time(&connected) >= 4 * peer_timeout);
}

#[test]
fn send_buffer_is_requested_only_if_larger_than_autotuning() {
    assert_eq!(required_send_buffer(64 << 10), None);
    if let Some(bytes) = required_send_buffer(1 << 30) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = accepted(socket).unwrap();
        let before = sockopt::socket_send_buffer_size(ours.open().unwrap()).unwrap();
        ours.set_send_buffer(bytes);
        assert!(sockopt::socket_send_buffer_size(ours.open().unwrap()).unwrap() > before);
    }
}

#[test]
fn bytes_to_a_closed_peer_count_as_acknowledged() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut ours = accepted(socket).unwrap();
    drop(listener.accept().unwrap());
    // SAFETY: no payload.
    assert!(unsafe { ours.send(&Frame::new(Kind::Leave, 0), std::ptr::null(), 0) });
    ours.shut_down_send();
    let until = Instant::now() + Duration::from_secs(10);
    while !ours.acknowledged() {
        assert!(Instant::now() < until, "it still waits for an acknowledgement");
        std::thread::yield_now();
    }
}

struct Tickets(Vec<Ticket>);

// SAFETY: `target` returns no address.
unsafe impl Sink for Tickets {
    fn target(&mut self, _: usize, _: &Frame) -> Target {
        Target::Discard
    }
    fn received(&mut self, _: usize, _: &Frame) {}
    fn sent(&mut self, ticket: Ticket) {
        self.0.push(ticket);
    }
}

#[test]
fn payload_is_sent_unchanged_after_its_buffer_is_released() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = accepted(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
    let (mut theirs, _) = listener.accept().unwrap();
    // More than the kernel accepts while the peer does not read.
    let mut buffer = vec![7u8; 64 << 20];
    let frame = Frame { bytes: buffer.len() as u64, ..Frame::new(Kind::Data, 0) };
    // SAFETY: unchanged until it is released.
    assert!(!unsafe { ours.send(&frame, buffer.as_ptr(), 3) }, "everything was sent at once");
    ours.release_user_buffers();
    buffer.fill(9);
    let wanted = HEADER + buffer.len();
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; wanted];
        io::Read::read_exact(&mut theirs, &mut got).map(|()| got)
    });
    let (mut sink, until) = (Tickets(Vec::new()), Instant::now() + Duration::from_secs(20));
    while !ours.idle() {
        assert!(Instant::now() < until, "the frame is not sent");
        ours.flush(&mut |ticket| sink.sent(ticket));
    }
    let got = reader.join().unwrap().unwrap();
    assert!(got[HEADER..].iter().all(|&byte| byte == 7), "the buffer was read after its release");
    assert_eq!(sink.0, [3]);
}

#[test]
fn writing_to_a_closed_peer_raises_no_signal() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let raised = smddp_net::fuzzing::raises_sigpipe(|| {
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut ours = accepted(socket).unwrap();
        drop(listener.accept().unwrap());
        let until = Instant::now() + Duration::from_secs(10);
        while !ours.send_failed {
            assert!(Instant::now() < until, "writing to a closed peer returned no error");
            // SAFETY: no payload.
            unsafe { ours.send(&Frame::new(Kind::Leave, 0), std::ptr::null(), 0) };
        }
    });
    assert!(!raised, "SIGPIPE was raised");
}
