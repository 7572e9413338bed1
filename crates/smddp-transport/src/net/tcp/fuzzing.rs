//! Fuzz targets for the TCP transport: hello decoding and straggler queries.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::address::{self, HELLO, TcpAddress};
use super::straggler_query::StragglerQuery;
use crate::fuzzing::Script;
use crate::fuzzing::feed::{credential, responder_reply};
use crate::token::NONCE;

pub(crate) fn hello(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<HELLO>() else { return };
    if let Some(hello) = address::parse(bytes) {
        assert!(address::has_greeting_prefix(bytes) && address::has_greeting_prefix(&bytes[..9]));
        assert_eq!(hello.to_bytes(), *bytes);
    }
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
pub(crate) fn straggler_query(script: &mut Script<'_>) {
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
                const GREETING: usize = HELLO + NONCE;
                let mut greeting = [0; GREETING];
                match streams[at].read(&mut greeting) {
                    Ok(GREETING) => {
                        assert!(greeting.first_chunk().and_then(address::parse).is_some());
                        // Most of them have the token.
                        if script.below(4) > 0 {
                            let _ = streams[at].write(&responder_reply(&greeting));
                            let _ = streams[at].write(&[address::ACCEPTED]);
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    _ => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corpus_hellos_match_the_protocol_version() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/hello");
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            assert!(address::parse(bytes.first_chunk().unwrap()).is_some(), "{}", path.display());
        }
    }
}
