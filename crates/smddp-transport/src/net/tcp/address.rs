//! Hello of a connection: both ranks, the purpose and the protocol version. A nonce follows it, and then each end's
//! proof that it has the group's token.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::net::frame::CLASSES;
use crate::process::{PROTOCOL, ProcessUid};
use crate::token::Token;

/// Address of a rank: the socket address of its process, and the id of the group's listener there, which is not secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    pub(crate) socket: SocketAddr,
    pub(crate) listener_id: ProcessUid,
}

/// Identity of a connecting rank, and its group's token.
#[derive(Clone, Debug)]
pub(crate) struct Credential {
    pub(crate) rank: usize,
    pub(crate) token: Arc<Token>,
    /// The connection is encrypted in both directions.
    pub(crate) encrypts: bool,
}

/// Size of a hello, in bytes.
pub(crate) const HELLO: usize = 40;
const MAGIC: &[u8; 8] = b"smddp-tc";

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Frames of this class.
    Frames(usize),
    /// Query of the number of operations that the rank has started in the group.
    Query,
    /// Detection of the end of the rank's group or process.
    Watch,
}

const QUERY: u32 = u32::MAX;
const WATCH: u32 = u32::MAX - 1;

/// First bytes of a connection: both ends and the purpose. The proofs of both ends cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Id of the group's listener in the accepting process.
    pub(crate) listener_id: ProcessUid,
    /// Rank that opens the connection.
    pub(crate) from: usize,
    /// Rank that accepts it.
    pub(crate) to: usize,
    pub(crate) purpose: Purpose,
}

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.from as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.listener_id);
        let purpose = match self.purpose {
            Purpose::Frames(class) => class as u32,
            Purpose::Query => QUERY,
            Purpose::Watch => WATCH,
        };
        bytes[32..36].copy_from_slice(&purpose.to_le_bytes());
        bytes[36..40].copy_from_slice(&(self.to as u32).to_le_bytes());
        bytes
    }
}

/// Verdict of the listener after the handshake: the connection is accepted. Before this byte the listener may close a
/// connection because too many are incoming; that does not mean that a process ended.
pub(crate) const ACCEPTED: u8 = 2;
/// Verdict: the connection is rejected, for example because the rank already has one.
pub(crate) const REJECTED: u8 = 3;
/// Verdict: this end of the group is closed. Liveness connections receive it later, when the group closes. A process
/// that dies sends nothing.
pub(crate) const CLOSED: u8 = 1;

/// Returns true if the bytes may be the beginning of a hello.
pub(super) fn has_greeting_prefix(bytes: &[u8]) -> bool {
    let expected = [&MAGIC[..], &PROTOCOL.to_le_bytes()].concat();
    let both = bytes.len().min(expected.len());
    bytes[..both] == expected[..both]
}

/// Decodes a hello. Returns `None` for another protocol or version, which needs no reply: the ranks compared versions
/// when they created the group.
pub(super) fn parse(bytes: &[u8; HELLO]) -> Option<Hello> {
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if &bytes[..8] != MAGIC || number(8) != PROTOCOL {
        return None;
    }
    let mut listener_id = ProcessUid::default();
    listener_id.copy_from_slice(&bytes[16..32]);
    let purpose = match number(32) {
        QUERY => Purpose::Query,
        WATCH => Purpose::Watch,
        class if (class as usize) < CLASSES => Purpose::Frames(class as usize),
        _ => return None,
    };
    Some(Hello { listener_id, from: number(12) as usize, to: number(36) as usize, purpose })
}
