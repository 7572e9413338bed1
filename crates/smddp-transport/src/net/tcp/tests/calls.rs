//! Calls that do not come through.

use std::net::{SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketType};

use super::super::address::{ACCEPTED, CLOSED, Credential, HELLO, Purpose, REJECTED};
use super::super::connecting::{self, ConnectError, Connecting, LOCAL_ERROR_RETRY, RETRY_INTERVAL};
use super::*;
use crate::close_on_fork::CloseOnFork;
use crate::fuzzing::feed::{self, credential, welcome};
use crate::token::{NONCE, Responder};

fn to(address: SocketAddr) -> Connecting {
    let address = TcpAddress { socket: address, group_listener: Default::default() };
    Connecting::new(credential(0), (1, address), Purpose::Frames(0), PEER_TIMEOUT)
}

/// Goes on until something comes of it. Time passes between attempts only.
fn outcome(call: &mut Connecting) -> Result<CloseOnFork<TcpStream>, ConnectError> {
    let (begun, mut now) = (Instant::now(), Instant::now());
    loop {
        assert!(begun.elapsed() < DEADLINE, "nothing comes of the call");
        if let Some((_, socket)) = call.poll()? {
            return Ok(socket);
        }
        match call.socket() {
            Some(_) => std::thread::yield_now(),
            None => {
                call.check(now)?;
                now += RETRY_INTERVAL;
            }
        }
    }
}

/// Makes an attempt, which fails, and holds it against that time.
fn fails_at(call: &mut Connecting, now: Instant) -> Result<(), ConnectError> {
    while {
        assert!(call.poll()?.is_none(), "somebody answers");
        call.socket().is_some()
    } {}
    call.check(now)
}

/// An address that refuses until somebody listens there.
fn refusing() -> (std::os::fd::OwnedFd, SocketAddr) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = TcpListener::from(socket.try_clone().unwrap()).local_addr().unwrap();
    (socket, address)
}

#[test]
fn a_refused_call_is_made_again() {
    let (socket, address) = refusing();
    let mut call = to(address);
    assert!(matches!(call.poll(), Ok(None)));
    rustix::net::listen(&socket, 8).unwrap();
    let answering = std::thread::spawn(move || welcome(TcpListener::from(socket).accept().unwrap().0));
    assert!(outcome(&mut call).is_ok());
    answering.join().unwrap();
}

#[test]
fn who_refuses_calls_for_so_long_is_gone_and_no_moment_earlier() {
    let (_socket, address) = refusing();
    let (mut call, begun) = (to(address), Instant::now());
    assert!(fails_at(&mut call, begun).is_ok());
    // Nobody is called again at once.
    assert!(call.check(begun + RETRY_INTERVAL).is_ok());
    assert!(fails_at(&mut call, begun + connecting::REFUSED_RETRY - Duration::from_nanos(1)).is_ok());
    assert!(call.check(begun + connecting::REFUSED_RETRY + RETRY_INTERVAL).is_ok());
    let reason = match fails_at(&mut call, begun + connecting::REFUSED_RETRY) {
        Err(ConnectError::PeerLost(reason)) => reason,
        Err(ConnectError::Local(reason)) => panic!("{reason}"),
        Ok(()) => panic!("it is waited for"),
    };
    assert!(reason.contains("refused") && reason.contains(&address.to_string()), "{reason}");
}

#[test]
fn who_was_hung_up_on_before_its_first_word_calls_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut call = to(listener.local_addr().unwrap());
    call.connect_only().unwrap();
    // It was stopped meanwhile, and the other end has lost patience.
    drop(listener.accept().unwrap());
    let answering = std::thread::spawn(move || welcome(listener.accept().unwrap().0));
    assert!(outcome(&mut call).is_ok());
    answering.join().unwrap();
}

/// There are too many callers: who has shown who it is may be hung up on all the same, and has lost nobody.
#[test]
fn who_was_hung_up_on_after_its_last_word_calls_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut call = to(listener.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        for _ in 0..3 {
            drop(feed::hear(listener.accept().unwrap().0));
        }
        welcome(listener.accept().unwrap().0)
    });
    assert!(outcome(&mut call).is_ok());
    answering.join().unwrap();
}

#[test]
fn a_group_that_is_closed_says_so_to_who_calls_late() {
    // The process goes on, and listens.
    let [_other, pair] = [Pair::new(), Pair::new()];
    let (group_listener, token) = (pair.group_listeners[1].clone(), pair.token.clone());
    drop(pair);
    let credential = Credential { rank: 0, token, encrypts: false };
    let mut call = Connecting::new(credential, (1, group_listener), Purpose::Frames(1), DEADLINE);
    // At once: the time does not matter.
    let outcome = loop {
        match call.poll() {
            Ok(None) => assert!(call.socket().is_some(), "it is called again"),
            outcome => break outcome,
        }
    };
    let Err(ConnectError::PeerLost(reason)) = outcome else { panic!("it was taken up") };
    assert!(reason.contains("it has closed its end of the group"), "{reason}");
}

#[test]
fn whoever_answers_without_the_token_gets_no_frame() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut call = to(listener.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        let mut theirs = listener.accept().unwrap().0;
        let mut words = vec![0; HELLO + NONCE];
        theirs.read_exact(&mut words).unwrap();
        let other = Arc::new(Token::random().unwrap());
        std::io::Write::write_all(&mut theirs, &Responder::new(other, words).unwrap().1).unwrap();
        // Nothing comes.
        assert_eq!(theirs.read(&mut [0; 1]).unwrap_or(0), 0);
    });
    let reason = match outcome(&mut call) {
        Err(ConnectError::PeerLost(reason)) => reason,
        Err(ConnectError::Local(reason)) => panic!("{reason}"),
        Ok(_) => panic!("it is called"),
    };
    assert!(reason.contains("does not have this group's token"), "{reason}");
    answering.join().unwrap();
}

#[test]
fn of_all_last_words_one_alone_makes_a_connection_and_each_other_says_why_there_is_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answering = std::thread::spawn(move || {
        for word in 0..=u8::MAX {
            let mut theirs = feed::hear(listener.accept().unwrap().0);
            std::io::Write::write_all(&mut theirs, &[word]).unwrap();
        }
    });
    for word in 0..=u8::MAX {
        let reason = match (outcome(&mut to(address)), word) {
            (Ok(_), ACCEPTED) => continue,
            (Err(ConnectError::PeerLost(reason)), _) => reason,
            (Ok(_), _) => panic!("{word} makes a connection"),
            (Err(ConnectError::Local(reason)), _) => panic!("{word} is this process's fault: {reason}"),
        };
        let wanted = match word {
            CLOSED => "it has closed its end of the group",
            REJECTED => "it already has a connection of this rank",
            _ => "invalid data",
        };
        assert!(reason.contains(wanted) && reason.contains(&address.to_string()), "{word}: {reason}");
    }
    answering.join().unwrap();
}

#[test]
fn what_this_process_lacks_is_no_loss_of_a_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (code, word) in [
        (libc::EMFILE, "ulimit -n"),
        (libc::ENFILE, "fs.file-max"),
        (libc::EADDRNOTAVAIL, "ip_local_port_range"),
        (libc::ENOBUFS, "tcp_mem"),
        (libc::ENOMEM, "tcp_mem"),
        (libc::EPERM, "firewall"),
        (libc::ENETDOWN, "ip route"),
    ] {
        let mut call = to(listener.local_addr().unwrap());
        let (begun, error) = (Instant::now(), std::io::Error::from_raw_os_error(code));
        // For a while it may pass.
        for waited in [Duration::ZERO, LOCAL_ERROR_RETRY - Duration::from_nanos(1)] {
            let again = std::io::Error::from_raw_os_error(code);
            assert!(
                call.simulate_failure(again).and_then(|()| call.check(begun + waited)).is_ok(),
                "{error}"
            );
        }
        let again = std::io::Error::from_raw_os_error(code);
        let Err(ConnectError::Local(reason)) =
            call.simulate_failure(again).and_then(|()| call.check(begun + LOCAL_ERROR_RETRY))
        else {
            panic!("{error} is told as a loss, or not at all")
        };
        assert!(reason.contains(word) && reason.contains(&error.to_string()), "{reason}");
        // And it did pass.
        let theirs = listener.try_clone().unwrap();
        let answering = std::thread::spawn(move || welcome(theirs.accept().unwrap().0));
        assert!(outcome(&mut to(listener.local_addr().unwrap())).is_ok());
        answering.join().unwrap();
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
    leaves.leave();
    let begun = Instant::now();
    let faults = loop {
        other.turn();
        let faults = other.faults(Instant::now());
        if !faults.is_empty() {
            break faults;
        }
        assert!(begun.elapsed() < DEADLINE, "no report arrived");
    };
    assert_eq!(faults.first(), Some(&Fault::Poisoned { rank: 0, reason: "calls differ".to_owned() }));
}
