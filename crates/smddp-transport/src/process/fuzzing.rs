//! Callers at the unix socket, and what a caller hears there.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::exports::{Exports, MemoryExport};
use super::handshake::{self, ProcessHost};
use super::incoming::IncomingConnections;
use super::token_registry::TokenRegistry;
use crate::close_on_fork::CloseOnFork;
use crate::fuzzing::feed::known_token;
use crate::fuzzing::{Script, endpoint};
use crate::socket_io::send;
use crate::token::{Initiator, REPLY};

const ME: [u8; 16] = [7; 16];
/// Callers at once.
const MOST: usize = 6;

fn nothing() -> OwnedFd {
    File::open("/dev/null").expect("/dev/null").into()
}

/// This process as its callers find it, with something to lend under number 1 and something too long under 2.
fn host() -> ProcessHost {
    static LENDING: OnceLock<Arc<Exports>> = OnceLock::new();
    let exports = LENDING.get_or_init(|| {
        let exports = Arc::<Exports>::default();
        for bytes in [100, MemoryExport::MOST_BYTES + 1] {
            exports
                .export(Box::new(move || Ok(MemoryExport { bytes: vec![1; bytes], fds: vec![nothing()] })));
        }
        exports
    });
    let tokens = Arc::<TokenRegistry>::default();
    tokens.add(&known_token());
    ProcessHost {
        me: ME,
        memory: nothing(),
        doorbell: endpoint().doorbell(),
        exports: exports.clone(),
        tokens,
    }
}

/// Several at once, each with any words, in any pieces; those that have the token are heard further.
pub(crate) fn incoming_connections(script: &mut Script<'_>) {
    let mut incoming_connections = IncomingConnections::new(CloseOnFork::new(nothing()), host());
    let mut streams: Vec<UnixStream> = Vec::new();
    let mut claims: Vec<Option<Initiator>> = Vec::new();
    while let Some(what) = script.step() {
        match what % 8 {
            0 if streams.len() < MOST => {
                let Ok((ours, theirs)) = UnixStream::pair() else { return };
                let _ = theirs.set_nonblocking(true);
                let _ = ours.set_nonblocking(true);
                incoming_connections.admit(ours.into(), Instant::now());
                streams.push(theirs);
                claims.push(None);
            }
            1 | 2 => {
                let greeting = handshake::test_greeting(&ME, script.number(), &known_token());
                let Ok(claim) = Initiator::new(&known_token(), &greeting) else { return };
                if let Some(at) = say(script, &streams, claim.greeting()) {
                    claims[at] = Some(claim);
                }
            }
            3 => {
                let words = script.take(60);
                let _ = say(script, &streams, words);
            }
            4 => {
                let Some(at) = script.below(MOST).checked_rem(streams.len()) else { continue };
                let mut heard = [0; 200];
                let got = streams[at].read(&mut heard).unwrap_or(0);
                if got == REPLY
                    && let (Some(claim), Some(reply)) = (&claims[at], heard.first_chunk())
                    && let Ok(proof) = claim.prove(reply)
                {
                    let _ = send(&streams[at], &[IoSlice::new(&proof)]);
                }
            }
            5 => {
                if let Some(at) = script.below(MOST).checked_rem(streams.len()) {
                    streams.swap_remove(at);
                    claims.swap_remove(at);
                }
            }
            _ => {
                let count = incoming_connections.fds(Instant::now()).count();
                let ready: Vec<bool> = (0..count).map(|at| at > 0 && script.below(4) > 0).collect();
                incoming_connections.serve_ready(ready.into_iter(), Instant::now());
            }
        }
    }
}

/// The words, one of them changed, or the beginning of them; over which connection.
fn say(script: &mut Script<'_>, streams: &[UnixStream], words: &[u8]) -> Option<usize> {
    let at = script.below(MOST).checked_rem(streams.len())?;
    let mut words = words.to_vec();
    if script.below(8) == 0 && !words.is_empty() {
        let at = script.below(words.len());
        words[at] = script.byte();
    }
    if script.below(4) == 0 {
        words.truncate(script.byte().into());
    }
    let _ = send(&streams[at], &[IoSlice::new(&words)]);
    Some(at)
}

/// What another process says to a caller that wants its memory, or what it lends.
pub(crate) fn handshake_reply(script: &mut Script<'_>) {
    let Ok((ours, theirs)) = UnixStream::pair() else { return };
    let (memory, fds) = (script.yes(), script.below(4));
    let mut words = handshake::test_greeting(&ME, 0, &known_token())[..44].to_vec();
    if script.below(4) == 0 {
        let at = script.below(words.len());
        words[at] = script.byte();
    }
    // Who speaks comes first in an answer.
    words.copy_within(28..44, 12);
    if !memory {
        words.push(script.byte());
        words.extend((script.number() as u32).to_le_bytes());
    }
    words.extend(script.take(4000));
    let fds: Vec<OwnedFd> = (0..fds).map(|_| nothing()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let _ = rustix::net::sendmsg(&theirs, &[IoSlice::new(&words)], &mut control, SendFlags::NOSIGNAL);
    drop(theirs);
    match memory {
        true => drop(handshake::receive_memory(ours, None, &ME)),
        false => drop(handshake::receive_export(&ours, &ME)),
    }
}
