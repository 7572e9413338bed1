//! Connection attempts that fail.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType};
use smddp_base::CloseOnFork;
use smddp_net::Token;
use smddp_net::fuzzing::{accept_peer, accept_proof, responder_reply};
use smddp_net::handshake::{ACCEPTED, CLOSED, GREETING_BYTES, Listener, Purpose, REJECTED};

use super::{DEADLINE, PEER_TIMEOUT};
use crate::address::TcpAddress;
use crate::connecting::{self, ConnectError, Connecting, LOCAL_ERROR_RETRY, RETRY_INTERVAL};
use crate::fuzzing::credential;

fn to(address: SocketAddr) -> Connecting {
    let address = TcpAddress { socket: address, listener_id: Default::default() };
    Connecting::new(credential(0), (1, address), Purpose::Frames(0), PEER_TIMEOUT)
}

/// Polls until the attempt succeeds or fails. The time advances between attempts only.
fn outcome(connecting: &mut Connecting) -> Result<CloseOnFork<TcpStream>, ConnectError> {
    let (begun, mut now) = (Instant::now(), Instant::now());
    loop {
        assert!(begun.elapsed() < DEADLINE, "the attempt does not end");
        if let Some((_, socket)) = connecting.poll()? {
            return Ok(socket);
        }
        match connecting.socket() {
            Some(_) => std::thread::yield_now(),
            None => {
                connecting.check(now)?;
                now += RETRY_INTERVAL;
            }
        }
    }
}

/// Makes an attempt, which fails, and checks it at that time.
fn fails_at(connecting: &mut Connecting, now: Instant) -> Result<(), ConnectError> {
    while {
        assert!(connecting.poll()?.is_none(), "the attempt succeeded");
        connecting.socket().is_some()
    } {}
    connecting.check(now)
}

/// Returns an address that refuses connections until its socket listens.
fn refusing_address() -> (std::os::fd::OwnedFd, SocketAddr) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = TcpListener::from(socket.try_clone().unwrap()).local_addr().unwrap();
    (socket, address)
}

#[test]
fn refused_connection_is_retried() {
    let (socket, address) = refusing_address();
    let mut connecting = to(address);
    assert!(matches!(connecting.poll(), Ok(None)));
    rustix::net::listen(&socket, 8).unwrap();
    let responder = std::thread::spawn(move || accept_peer(TcpListener::from(socket).accept().unwrap().0));
    assert!(outcome(&mut connecting).is_ok());
    responder.join().unwrap();
}

#[test]
fn peer_that_refuses_is_lost_exactly_after_the_retry_time() {
    let (_socket, address) = refusing_address();
    let (mut connecting, begun) = (to(address), Instant::now());
    assert!(fails_at(&mut connecting, begun).is_ok());
    // The next attempt waits for the retry interval.
    assert!(connecting.check(begun + RETRY_INTERVAL).is_ok());
    assert!(fails_at(&mut connecting, begun + connecting::REFUSED_RETRY - Duration::from_nanos(1)).is_ok());
    assert!(connecting.check(begun + connecting::REFUSED_RETRY + RETRY_INTERVAL).is_ok());
    let reason = match fails_at(&mut connecting, begun + connecting::REFUSED_RETRY) {
        Err(ConnectError::PeerLost(reason)) => reason,
        Err(ConnectError::Local(reason)) => panic!("{reason}"),
        Ok(()) => panic!("it still retries"),
    };
    assert!(reason.contains("refused") && reason.contains(&address.to_string()), "{reason}");
}

#[test]
fn connection_closed_before_the_greeting_is_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut connecting = to(listener.local_addr().unwrap());
    connecting.connect_only().unwrap();
    // This process was stopped, and the listener has closed the silent connection.
    drop(listener.accept().unwrap());
    let responder = std::thread::spawn(move || accept_peer(listener.accept().unwrap().0));
    assert!(outcome(&mut connecting).is_ok());
    responder.join().unwrap();
}

/// A listener with too many incoming connections may close even an authenticated one, which is not the loss of a peer.
#[test]
fn connection_closed_after_the_proof_is_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut connecting = to(listener.local_addr().unwrap());
    let responder = std::thread::spawn(move || {
        for _ in 0..3 {
            drop(accept_proof(listener.accept().unwrap().0));
        }
        accept_peer(listener.accept().unwrap().0)
    });
    assert!(outcome(&mut connecting).is_ok());
    responder.join().unwrap();
}

#[test]
fn peer_without_the_token_gets_no_frame() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut connecting = to(listener.local_addr().unwrap());
    let responder = std::thread::spawn(move || {
        let mut theirs = listener.accept().unwrap().0;
        let mut greeting = vec![0; GREETING_BYTES];
        theirs.read_exact(&mut greeting).unwrap();
        let other = Arc::new(Token::random().unwrap());
        let reply = responder_reply(Listener::Groups, &greeting, &other).unwrap();
        std::io::Write::write_all(&mut theirs, &reply).unwrap();
        // It sends nothing more.
        assert_eq!(theirs.read(&mut [0; 1]).unwrap_or(0), 0);
    });
    let reason = match outcome(&mut connecting) {
        Err(ConnectError::PeerLost(reason)) => reason,
        Err(ConnectError::Local(reason)) => panic!("{reason}"),
        Ok(_) => panic!("it is connected"),
    };
    assert!(reason.contains("does not have this group's token"), "{reason}");
    responder.join().unwrap();
}

#[test]
fn only_the_accepting_verdict_connects_and_any_other_reports_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let responder = std::thread::spawn(move || {
        for verdict in 0..=u8::MAX {
            let mut theirs = accept_proof(listener.accept().unwrap().0);
            std::io::Write::write_all(&mut theirs, &[verdict]).unwrap();
        }
    });
    for verdict in 0..=u8::MAX {
        let reason = match (outcome(&mut to(address)), verdict) {
            (Ok(_), ACCEPTED) => continue,
            (Err(ConnectError::PeerLost(reason)), _) => reason,
            (Ok(_), _) => panic!("verdict {verdict} makes a connection"),
            (Err(ConnectError::Local(reason)), _) => panic!("verdict {verdict} is a local error: {reason}"),
        };
        let wanted = match verdict {
            CLOSED => "it has closed its end of the group",
            REJECTED => "it already has a connection of this rank",
            _ => "invalid data",
        };
        assert!(
            reason.contains(wanted) && reason.contains(&address.to_string()),
            "verdict {verdict}: {reason}"
        );
    }
    responder.join().unwrap();
}

#[test]
fn local_error_is_not_the_loss_of_a_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (code, advice) in [
        (libc::EMFILE, "ulimit -n"),
        (libc::ENFILE, "fs.file-max"),
        (libc::EADDRNOTAVAIL, "ip_local_port_range"),
        (libc::ENOBUFS, "tcp_mem"),
        (libc::ENOMEM, "tcp_mem"),
        (libc::EPERM, "firewall"),
        (libc::ENETDOWN, "ip route"),
    ] {
        let mut connecting = to(listener.local_addr().unwrap());
        let (begun, error) = (Instant::now(), std::io::Error::from_raw_os_error(code));
        // It is retried for a while.
        for waited in [Duration::ZERO, LOCAL_ERROR_RETRY - Duration::from_nanos(1)] {
            let again = std::io::Error::from_raw_os_error(code);
            assert!(
                connecting.simulate_failure(again).and_then(|()| connecting.check(begun + waited)).is_ok(),
                "{error}"
            );
        }
        let again = std::io::Error::from_raw_os_error(code);
        let Err(ConnectError::Local(reason)) =
            connecting.simulate_failure(again).and_then(|()| connecting.check(begun + LOCAL_ERROR_RETRY))
        else {
            panic!("{error} is reported as a loss, or not at all")
        };
        assert!(reason.contains(advice) && reason.contains(&error.to_string()), "{reason}");
        // Afterwards a connection succeeds.
        let theirs = listener.try_clone().unwrap();
        let responder = std::thread::spawn(move || accept_peer(theirs.accept().unwrap().0));
        assert!(outcome(&mut to(listener.local_addr().unwrap())).is_ok());
        responder.join().unwrap();
    }
}
