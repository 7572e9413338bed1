//! Fuzzing of the TCP transport: several connections as one rank, with arbitrary bytes on each.

use std::io::Write;
use std::net::TcpStream;

use smddp_net::fuzzing::Script;

use super::feed::Feed;

/// Connections at a time.
const MAX_CONNECTIONS: usize = 6;
/// Maximum bytes of a frame's payload that are sent.
const PAYLOAD: usize = 20 << 10;

/// Sends arbitrary frames and connections to the TCP transport as one peer.
pub fn tcp(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let mut feed = Feed::new();
    let mut streams: Vec<TcpStream> = Vec::new();
    while let Some(action) = script.step() {
        match action % 8 {
            0 if streams.len() < MAX_CONNECTIONS => streams.push(nonblocking(feed.connect(script.below(2)))),
            1 if streams.len() < MAX_CONNECTIONS => {
                streams.push(nonblocking(invalid_connection(&mut script, &feed)))
            }
            0 | 1 => {
                if let Some(at) = script.below(MAX_CONNECTIONS).checked_rem(streams.len()) {
                    streams.swap_remove(at);
                }
            }
            2..6 => {
                let Some(at) = script.below(MAX_CONNECTIONS).checked_rem(streams.len()) else { continue };
                let bytes = frame(&mut script);
                // Bytes that do not fit are lost: the next ones begin in the middle of a frame.
                let _ = streams[at].write(&bytes);
            }
            _ => drop(feed.poll()),
        }
    }
    feed.settle(&streams);
}

/// Opens a connection whose greeting is almost valid or truncated.
fn invalid_connection(script: &mut Script<'_>, feed: &Feed) -> TcpStream {
    let mut bytes = feed.greeting(script.number() as usize, script.below(3));
    for _ in 0..script.below(3) {
        let at = script.below(bytes.len());
        bytes[at] = script.byte();
    }
    // Appends an invalid proof.
    let more = script.below(40);
    bytes.extend(script.take(more));
    feed.connect_with_bytes(&bytes[..if script.yes() { bytes.len() } else { script.below(bytes.len()) }])
}

/// Makes writes non-blocking.
fn nonblocking(stream: TcpStream) -> TcpStream {
    let _ = stream.set_nonblocking(true);
    stream
}

fn frame(script: &mut Script<'_>) -> Vec<u8> {
    if script.below(16) == 0 {
        return script.take(80).to_vec();
    }
    let frame = script.frame(0);
    let mut bytes = frame.encode().to_vec();
    let rest = match script.below(4) {
        0 => script.number() as usize,
        _ => frame.bytes as usize,
    };
    bytes.resize(bytes.len() + rest.min(PAYLOAD), 0x5a);
    bytes
}
