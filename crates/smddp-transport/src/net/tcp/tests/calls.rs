//! Calls that do not come through.

use std::net::{SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketType};

use super::super::call::{Call, Failed};
use super::super::hello::{Credential, HELLO, Purpose};
use super::*;
use crate::fuzzing::feed::{self, credential, welcome};
use crate::own::Uninherited;
use crate::token::{Challenge, SALT};

fn to(address: SocketAddr) -> Call {
    let address = TcpAddress { socket: address, door: Default::default() };
    Call::new(credential(0), address, Purpose::Class(0), PEER_TIMEOUT)
}

/// Goes on until something comes of it.
fn outcome(call: &mut Call) -> Result<Uninherited<TcpStream>, Failed> {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < DEADLINE, "nothing comes of the call");
        match call.go_on() {
            Ok(None) => std::thread::park_timeout(Duration::from_millis(1)),
            Ok(Some((_, socket))) => return Ok(socket),
            Err(failed) => return Err(failed),
        }
    }
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
    assert!(matches!(call.go_on(), Ok(None)));
    rustix::net::listen(&socket, 8).unwrap();
    let answering = std::thread::spawn(move || welcome(TcpListener::from(socket).accept().unwrap().0));
    assert!(outcome(&mut call).is_ok());
    answering.join().unwrap();
}

#[test]
fn a_process_that_is_gone_is_noticed_within_a_second_all_the_same() {
    let (_socket, address) = refusing();
    let once = || {
        let begun = Instant::now();
        let why = match outcome(&mut to(address)) {
            Err(Failed::Lost(why)) => why,
            Err(Failed::Unable(why)) => panic!("{why}"),
            Ok(_) => panic!("it is there"),
        };
        assert!(why.contains("refused") && why.contains(&address.to_string()), "{why}");
        begun.elapsed()
    };
    // The machine may hold up this thread once.
    let quickest = (0..3).map(|_| once()).min().unwrap();
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
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
    let (door, token) = (pair.doors[1].clone(), pair.token.clone());
    drop(pair);
    let credential = Credential { rank: 0, token, encrypts: false };
    let begun = Instant::now();
    let mut call = Call::new(credential, door, Purpose::Class(1), DEADLINE);
    let Err(Failed::Lost(why)) = outcome(&mut call) else { panic!("it was taken up") };
    assert!(why.contains("it has closed its end of the group"), "{why}");
    assert!(begun.elapsed() < DEADLINE / 2, "it was called again and again");
}

#[test]
fn whoever_answers_without_the_token_gets_no_frame() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut call = to(listener.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        let mut theirs = listener.accept().unwrap().0;
        let mut words = vec![0; HELLO + SALT];
        theirs.read_exact(&mut words).unwrap();
        let other = Arc::new(Token::random().unwrap());
        std::io::Write::write_all(&mut theirs, &Challenge::new(other, words).unwrap().1).unwrap();
        // Nothing comes.
        assert_eq!(theirs.read(&mut [0; 1]).unwrap_or(0), 0);
    });
    let why = match outcome(&mut call) {
        Err(Failed::Lost(why)) => why,
        Err(Failed::Unable(why)) => panic!("{why}"),
        Ok(_) => panic!("it is called"),
    };
    assert!(why.contains("does not know this group's token"), "{why}");
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
        let error = std::io::Error::from_raw_os_error(code);
        // For a while it may pass.
        assert!(matches!(call.fails_with(&error, Duration::ZERO), Ok(None)), "{error}");
        let Err(Failed::Unable(why)) = call.fails_with(&error, Duration::from_secs(60)) else {
            panic!("{error} is told as a loss")
        };
        assert!(why.contains(word) && why.contains(&error.to_string()), "{why}");
        // And it did pass.
        let theirs = listener.try_clone().unwrap();
        let answering = std::thread::spawn(move || welcome(theirs.accept().unwrap().0));
        assert!(outcome(&mut to(listener.local_addr().unwrap())).is_ok());
        answering.join().unwrap();
    }
}
