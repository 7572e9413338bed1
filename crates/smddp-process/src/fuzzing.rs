//! Fuzzing of the unix socket of a process, as listener and as initiator.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use smddp_base::CloseOnFork;
use smddp_net::fuzzing::Script;
use smddp_net::fuzzing::known_token;
use smddp_net::handshake::{HandshakeEnd, Initiator, Party, Purpose};
use smddp_net::socket_io::{exchange, send};

use super::exports::{Exports, MemoryExport};
use super::incoming::IncomingConnections;
use super::memory_request::{self, ProcessHost};
use super::token_registry::TokenRegistry;
use crate::Endpoint;

/// Bytes of the staging pool's cap.
const STAGING: usize = 4 << 20;

/// Returns this process's endpoint, which all inputs share.
pub fn endpoint() -> Arc<Endpoint> {
    static ENDPOINT: OnceLock<Arc<Endpoint>> = OnceLock::new();
    ENDPOINT.get_or_init(|| Endpoint::get(STAGING).expect("shared memory")).clone()
}

const OWN_ID: [u8; 16] = [7; 16];
/// Connections at a time.
const MAX_CONNECTIONS: usize = 6;

fn null() -> OwnedFd {
    File::open("/dev/null").expect("/dev/null").into()
}

/// Returns a host with a valid export under number 1 and an oversized export under number 2.
fn host() -> ProcessHost {
    static EXPORTS: OnceLock<Arc<Exports>> = OnceLock::new();
    let exports = EXPORTS.get_or_init(|| {
        let exports = Arc::<Exports>::default();
        for length in [100, MemoryExport::MOST_BYTES + 1] {
            exports.export(Box::new(move || Ok(MemoryExport { bytes: vec![1; length], fds: vec![null()] })));
        }
        exports
    });
    let tokens = Arc::<TokenRegistry>::default();
    tokens.add(&known_token());
    ProcessHost {
        me: OWN_ID,
        memory: null(),
        doorbell: endpoint().doorbell(),
        exports: exports.clone(),
        tokens,
    }
}

/// Drives several connections with arbitrary greetings in arbitrary fragments. Valid greetings are followed by a
/// valid proof.
pub fn incoming_connections(script: &mut Script<'_>) {
    let mut incoming_connections = IncomingConnections::new(CloseOnFork::new(null()), host());
    let mut streams: Vec<UnixStream> = Vec::new();
    let mut initiators: Vec<Option<Initiator>> = Vec::new();
    while let Some(action) = script.step() {
        match action % 8 {
            0 if streams.len() < MAX_CONNECTIONS => {
                let Ok((ours, theirs)) = UnixStream::pair() else { return };
                let _ = theirs.set_nonblocking(true);
                let _ = ours.set_nonblocking(true);
                incoming_connections.add(ours.into(), Instant::now());
                streams.push(theirs);
                initiators.push(None);
            }
            1 | 2 => {
                let purpose = match script.number() {
                    0 => Purpose::Memory,
                    number => Purpose::Export(number),
                };
                let to = Party { id: OWN_ID, rank: 0 };
                let Ok(mut initiator) = Initiator::new(&known_token(), purpose, Party::default(), to) else {
                    return;
                };
                let greeting = initiator.output().to_vec();
                if let Some(at) = send_mutated(script, &streams, &greeting) {
                    initiator.sent(greeting.len());
                    initiators[at] = Some(initiator);
                }
            }
            3 => {
                let bytes = script.take(60);
                let _ = send_mutated(script, &streams, bytes);
            }
            4 => {
                let Some(at) = script.below(MAX_CONNECTIONS).checked_rem(streams.len()) else { continue };
                if let Some(initiator) = &mut initiators[at] {
                    let _ = exchange(&streams[at], initiator);
                }
            }
            5 => {
                if let Some(at) = script.below(MAX_CONNECTIONS).checked_rem(streams.len()) {
                    streams.swap_remove(at);
                    initiators.swap_remove(at);
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

/// Sends the bytes over one of the connections, possibly with a changed byte or truncated. Returns the index of the
/// connection.
fn send_mutated(script: &mut Script<'_>, streams: &[UnixStream], bytes: &[u8]) -> Option<usize> {
    let at = script.below(MAX_CONNECTIONS).checked_rem(streams.len())?;
    let mut bytes = bytes.to_vec();
    if script.below(8) == 0 && !bytes.is_empty() {
        let at = script.below(bytes.len());
        bytes[at] = script.byte();
    }
    if script.below(4) == 0 {
        bytes.truncate(script.byte().into());
    }
    let _ = send(&streams[at], &[IoSlice::new(&bytes)]);
    Some(at)
}

/// Receives arbitrary replies to a request for the memory or an export.
pub fn memory_reply(script: &mut Script<'_>) {
    let Ok((ours, theirs)) = UnixStream::pair() else { return };
    let (memory, fds) = (script.yes(), script.below(4));
    let mut bytes = vec![script.byte()];
    if !memory {
        bytes.extend((script.number() as u32).to_le_bytes());
    }
    bytes.extend(script.take(4000));
    let fds: Vec<OwnedFd> = (0..fds).map(|_| null()).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let _ = rustix::net::sendmsg(&theirs, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    drop(theirs);
    match memory {
        true => drop(memory_request::receive_memory(ours, None)),
        false => drop(memory_request::receive_export(&ours)),
    }
}
