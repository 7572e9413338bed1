//! Several connections at once, in one rank's name, with any bytes on each.

use std::io::Write;
use std::net::TcpStream;

use super::feed::Feed;
use super::script::Script;

/// Connections at once.
const MOST: usize = 6;
/// Bytes of a frame's payload that come at once.
const PAYLOAD: usize = 20 << 10;

pub fn tcp(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let mut feed = Feed::new();
    let mut streams: Vec<TcpStream> = Vec::new();
    while let Some(what) = script.step() {
        match what % 8 {
            0 if streams.len() < MOST => streams.push(patient(feed.connect(script.below(2)))),
            1 if streams.len() < MOST => streams.push(patient(caller(&mut script, &feed))),
            0 | 1 => {
                if let Some(at) = script.below(MOST).checked_rem(streams.len()) {
                    streams.swap_remove(at);
                }
            }
            2..6 => {
                let Some(at) = script.below(MOST).checked_rem(streams.len()) else { continue };
                let words = frame(&mut script);
                // What the rank does not take now is lost: the next bytes begin in the middle of something.
                let _ = streams[at].write(&words);
            }
            _ => drop(feed.poll()),
        }
    }
    feed.settle(&streams);
}

/// Somebody whose hello is nearly right, or not all there.
fn caller(script: &mut Script<'_>, feed: &Feed) -> TcpStream {
    let mut words = feed.hello(script.number() as usize, script.below(3));
    for _ in 0..script.below(3) {
        let at = script.below(words.len());
        words[at] = script.byte();
    }
    // And a proof that is none.
    let more = script.below(40);
    words.extend(script.take(more));
    feed.connect_with_bytes(&words[..if script.yes() { words.len() } else { script.below(words.len()) }])
}

/// Who writes to it does not wait for the rank to read.
fn patient(stream: TcpStream) -> TcpStream {
    let _ = stream.set_nonblocking(true);
    stream
}

fn frame(script: &mut Script<'_>) -> Vec<u8> {
    if script.below(16) == 0 {
        return script.take(80).to_vec();
    }
    let frame = script.frame(0);
    let mut words = frame.encode().to_vec();
    let rest = match script.below(4) {
        0 => script.number() as usize,
        _ => frame.bytes as usize,
    };
    words.resize(words.len() + rest.min(PAYLOAD), 0x5a);
    words
}
