//! Handshake in which both ends of a connection prove that they have the group's token. One state machine for unix
//! sockets, TCP and the bootstrap: bytes in, bytes out, without a socket and without a clock.
//!
//! ```text
//! initiator -> responder   greeting: names the protocol, the purpose, both ends and the token; then a nonce
//! responder -> initiator   reply: magic, protocol, its own nonce, MAC over a label, the greeting and that nonce
//! initiator -> responder   proof: MAC over another label, the greeting and the responder's nonce
//! responder -> initiator   verdict of the group, for the TCP connections of a group
//! ```
//!
//! Each MAC is HMAC-SHA-256 under the token. A replayed handshake fails, because each end uses a new nonce. A handshake
//! is valid for one listener, direction and purpose only, because the greeting names them.
//!
//! The owner of an end moves the bytes ([`crate::socket_io::exchange`]) and limits the time.

#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod initiator;
mod responder;
#[cfg(test)]
mod tests;

use std::io;

use serde::{Deserialize, Serialize};

use crate::token::random_secret;
pub use initiator::{Initiator, is_closed};
pub use responder::Responder;

/// Protocol version. Increase it with every change of the shared layout, the handshake or the bytes after the
/// handshake.
pub const PROTOCOL: u32 = 12;
/// First bytes of a greeting and of a reply. The protocol version follows them, in all versions.
const MAGIC: &[u8; 8] = b"smddp-hs";
/// Bytes at the beginning of [`MAGIC`] that all protocol versions have in common.
const COMMON_MAGIC: usize = 6;
/// Bytes of magic and protocol version.
const HEADER_BYTES: usize = 8 + 4;
/// Bytes of a nonce.
const NONCE_BYTES: usize = 32;
/// Bytes of an encoded [`Greeting`], padded with zeros to a whole greeting of 128 bytes. The encoding has at most 79
/// bytes: 1 + 10 for the purpose, 16 + 10 for each end, and 16 for the token id.
const CONTENTS_BYTES: usize = 84;
/// Bytes of a greeting: header, contents, nonce.
pub const GREETING_BYTES: usize = HEADER_BYTES + CONTENTS_BYTES + NONCE_BYTES;
/// Bytes of the responder's reply: header, nonce, MAC.
pub const REPLY_BYTES: usize = HEADER_BYTES + NONCE_BYTES + 32;
/// Bytes of the initiator's proof.
pub const PROOF_BYTES: usize = 32;

/// Labels of the MACs of both ends.
const RESPONDER: &[u8] = b"smddp listener";
const INITIATOR: &[u8] = b"smddp caller";

/// Unique id of a process, or of a listener for one group.
pub type ProcessUid = [u8; 16];

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Frames of this class.
    Frames(usize),
    /// Query of the number of operations that the rank has started in the group.
    Query,
    /// Detection of the end of the rank's group or process.
    Watch,
    /// Shared memory of a process.
    Memory,
    /// Memory export of a process, identified by this number.
    Export(u64),
    /// Exchange of rank information while a group is created.
    Bootstrap,
    /// Query of the state of a process and all of its groups, as JSON.
    Status,
    /// Deadlock probe for the process of the rank.
    Probe,
}

/// Listener that serves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// TCP socket of a process, for its groups.
    Groups,
    /// Unix socket of a process.
    Process,
    /// Sockets of a rank while its group is created.
    Bootstrap,
}

impl Purpose {
    fn listener(self) -> Listener {
        match self {
            Self::Frames(_) | Self::Query | Self::Watch | Self::Status | Self::Probe => Listener::Groups,
            Self::Memory | Self::Export(_) => Listener::Process,
            Self::Bootstrap => Listener::Bootstrap,
        }
    }

    /// Returns true if the responder confirms the connection with a verdict.
    fn has_verdict(self) -> bool {
        self.listener() == Listener::Groups
    }
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    /// Id of its process or listener; zero if it has none.
    pub id: ProcessUid,
    /// Its rank; zero for the end of a process.
    pub rank: usize,
}

/// Contents of a greeting, without its nonce. The proofs of both ends cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Purpose of the connection.
    pub purpose: Purpose,
    /// Initiator.
    pub from: Party,
    /// Responder.
    pub to: Party,
    /// Public id of the token ([`crate::Token`]).
    pub token: [u8; 16],
}

impl Greeting {
    /// Encodes the greeting with a new nonce.
    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut contents = [0; CONTENTS_BYTES];
        postcard::to_slice(self, &mut contents).map_err(io::Error::other)?;
        Ok([&header()[..], &contents, &random_secret()?].concat())
    }

    /// Decodes a complete greeting of this protocol version.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; GREETING_BYTES] = bytes.first_chunk()?;
        let contents = &bytes[HEADER_BYTES..GREETING_BYTES - NONCE_BYTES];
        postcard::take_from_bytes(contents).ok().map(|(greeting, _)| greeting)
    }
}

/// Verdict of the responder after the proof: the connection is accepted. Before this byte the listener may close a
/// connection because too many are incoming; that does not mean that a process ended.
pub const ACCEPTED: u8 = 2;
/// Verdict: the connection is rejected, for example because the rank already has one.
pub const REJECTED: u8 = 3;
/// Verdict: this end of the group is closed. Liveness connections receive it later, when the group closes. A process
/// that dies sends nothing.
pub const CLOSED: u8 = 1;

/// One end of a handshake. Its owner sends [`HandshakeEnd::output`] first, and then reads [`HandshakeEnd::missing`]
/// bytes. Bytes beyond them belong to the data after the handshake.
pub trait HandshakeEnd {
    /// Returns the bytes to send now.
    fn output(&self) -> &[u8];
    /// Records that this many bytes of the output were sent.
    fn sent(&mut self, bytes: usize);
    /// Returns the number of bytes to receive after the output was sent; 0 if the handshake waits for its owner or is
    /// complete.
    fn missing(&self) -> usize;
    /// Takes received bytes, at most the missing ones.
    ///
    /// # Errors
    /// The peer is not authenticated ([`is_unauthenticated`]), or did not accept the connection.
    fn input(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// Appends received bytes to a message of `all` bytes.
fn append(message: &mut Vec<u8>, bytes: &[u8], all: usize) -> io::Result<()> {
    if message.len() + bytes.len() > all {
        return Err(surplus());
    }
    message.extend_from_slice(bytes);
    Ok(())
}

fn surplus() -> io::Error {
    unauthenticated("the peer sent more bytes than the handshake allows")
}

/// Returns the first bytes of a greeting or reply.
fn header() -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..MAGIC.len()].copy_from_slice(MAGIC);
    header[MAGIC.len()..].copy_from_slice(&PROTOCOL.to_le_bytes());
    header
}

/// Checks the beginning of a greeting or reply, of which an arbitrary part has arrived.
fn check_header(bytes: &[u8]) -> io::Result<()> {
    let version = bytes.get(MAGIC.len()..).and_then(<[u8]>::first_chunk).copied().map(u32::from_le_bytes);
    let compared = if version == Some(PROTOCOL) { MAGIC.len() } else { bytes.len().min(COMMON_MAGIC) };
    if bytes[..compared] != MAGIC[..compared] {
        return Err(unauthenticated(
            "the peer is not an smddp process: its first bytes are not those of the handshake",
        ));
    }
    match version {
        None | Some(PROTOCOL) => Ok(()),
        Some(version) => Err(unauthenticated(&format!(
            "the versions of smddp differ: handshake protocol {PROTOCOL} here, {version} there; install one version on all hosts"
        ))),
    }
}

/// Returns an error after which a retry is pointless.
pub fn unauthenticated(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Returns true if a handshake failed because of the process at the other end.
pub fn is_unauthenticated(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}
