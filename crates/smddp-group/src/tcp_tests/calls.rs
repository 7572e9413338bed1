//! Connections to groups that end.

use std::net::TcpListener;

use smddp_tcp::address::{Credential, Purpose};
use smddp_tcp::connecting::{ConnectError, Connecting};

use super::*;

/// Delay before the proxy of a test accepts: longer than a dead group waits for its other data.
const LATE: Duration = Duration::from_millis(400);

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
fn the_report_of_a_dead_group_reaches_a_peer_that_accepts_the_first_connection_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap();
    let real = std::cell::Cell::new(here);
    let mut pair = Pair::with(
        |_| {},
        |rank_info| {
            if let (1, Ok((address, _))) = (rank_info.address.rank, &mut rank_info.offer.tcp) {
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
