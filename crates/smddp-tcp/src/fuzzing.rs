//! Fuzz target for straggler queries.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use smddp_net::fuzzing::{Script, known_token, responder_reply};
use smddp_net::handshake::{ACCEPTED, GREETING_BYTES, Listener};

use crate::address::{Credential, TcpAddress};
use crate::straggler_query::StragglerQuery;

/// Returns the credential of rank `rank` of a test group.
pub fn credential(rank: usize) -> Credential {
    Credential { rank, token: known_token(), encrypts: false }
}

/// Returns the listener at the address of all queried ranks.
fn shared_listener() -> &'static TcpListener {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    LISTENER.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback interface");
        listener.set_nonblocking(true).expect("a socket that does not block");
        listener
    })
}

/// Queries ranks, some of which send arbitrary replies.
pub fn straggler_query(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let listener = shared_listener();
    let Ok(socket) = listener.local_addr() else { return };
    let queried = 1 + script.below(6);
    let address = |peer: usize| (peer, TcpAddress { socket, listener_id: [peer as u8; 16] });
    let mut query = StragglerQuery::new(credential(0), (1..=queried).map(address));
    let mut streams: Vec<TcpStream> = Vec::new();
    while let Some(step) = script.step() {
        match step % 4 {
            0 | 1 => {
                for (peer, _) in query.poll(Duration::ZERO, Instant::now()) {
                    assert!((1..=queried).contains(&peer), "rank {peer} was not queried");
                }
            }
            2 => {
                if let Ok((stream, _)) = listener.accept() {
                    let _ = stream.set_nonblocking(true);
                    streams.push(stream);
                }
            }
            _ => {
                let Some(at) = script.below(6).checked_rem(streams.len()) else { continue };
                let mut greeting = [0; GREETING_BYTES];
                if matches!(streams[at].read(&mut greeting), Ok(GREETING_BYTES)) {
                    let reply = responder_reply(Listener::Groups, &greeting, &known_token());
                    let reply = reply.expect("a greeting");
                    // Most of them have the token.
                    if script.below(4) > 0 {
                        let _ = streams[at].write(&reply);
                        let _ = streams[at].write(&[ACCEPTED]);
                    }
                }
                let _ = streams[at].write(script.take(9));
                if script.below(4) == 0 {
                    streams.swap_remove(at);
                }
            }
        }
    }
    // Drop connections that were not accepted, so that the next input does not see them.
    drop(query);
    while listener.accept().is_ok() {}
}
