//! Connection attempts that fail.

use std::net::{SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketType};

use super::super::address::{Credential, Purpose};
use super::super::connecting::{self, ConnectError, Connecting, LOCAL_ERROR_RETRY, RETRY_INTERVAL};
use super::*;
use crate::CloseOnFork;
use crate::fuzzing::feed::{self, accept_peer, credential};
use crate::handshake::{ACCEPTED, CLOSED, GREETING_BYTES, Listener, REJECTED};

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
            drop(feed::accept_proof(listener.accept().unwrap().0));
        }
        accept_peer(listener.accept().unwrap().0)
    });
    assert!(outcome(&mut connecting).is_ok());
    responder.join().unwrap();
}

#[test]
fn late_connection_to_a_closed_group_reports_the_close() {
    // The process continues to listen.
    let [_other, pair] = [Pair::new(), Pair::new()];
    let (group_listener, token) = (pair.addresses[1].clone(), pair.token.clone());
    drop(pair);
    let credential = Credential { rank: 0, token, encrypts: false };
    let mut connecting = Connecting::new(credential, (1, group_listener), Purpose::Frames(1), DEADLINE);
    // The report does not depend on the time.
    let outcome = loop {
        match connecting.poll() {
            Ok(None) => assert!(connecting.socket().is_some(), "it retries"),
            outcome => break outcome,
        }
    };
    let Err(ConnectError::PeerLost(reason)) = outcome else { panic!("it was accepted") };
    assert!(reason.contains("it has closed its end of the group"), "{reason}");
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
        let reply = feed::responder_reply(Listener::Groups, &greeting, &other).unwrap();
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
            let mut theirs = feed::accept_proof(listener.accept().unwrap().0);
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

/// Delay before the proxy of the next test accepts: longer than a dead group waits for its other data.
const LATE: Duration = Duration::from_millis(400);

#[test]
fn the_report_of_a_dead_group_reaches_a_peer_that_accepts_the_first_connection_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap();
    let real = std::cell::Cell::new(here);
    let mut pair = Pair::with(
        |_| {},
        |rank_info| {
            if let (1, Ok((address, _))) = (rank_info.rank, &mut rank_info.offer.tcp) {
                real.set(std::mem::replace(&mut address.socket, here));
            }
        },
    );
    let real = real.get();
    std::thread::spawn(move || {
        std::thread::sleep(LATE);
        for caller in listener.incoming().map_while(Result::ok) {
            let peer = TcpStream::connect(real).unwrap();
            for (mut from, mut to) in
                [(caller.try_clone().unwrap(), peer.try_clone().unwrap()), (peer, caller)]
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    let [leaves, other] = &mut pair.groups;
    leaves.abort("calls differ");
    while !leaves.leave(Instant::now()) {
        std::thread::yield_now();
    }
    let begun = Instant::now();
    let faults = loop {
        other.poll();
        let faults = other.faults(Instant::now());
        if !faults.is_empty() {
            break faults;
        }
        assert!(begun.elapsed() < DEADLINE, "no report arrived");
    };
    assert_eq!(faults.first(), Some(&Fault::Aborted { rank: 0, reason: "calls differ".to_owned() }));
}
