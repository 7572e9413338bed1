//! The first bytes of a connection: who calls whom, and in which version. A nonce follows them, and each end's proof that it has
//! the group's token.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::net::frame::CLASSES;
use crate::process::{PROTOCOL, ProcessUid};
use crate::token::Token;

/// How a rank is reached: its process's address and the number of the group's door there, which is no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    pub(crate) socket: SocketAddr,
    pub(crate) group_listener: ProcessUid,
}

/// Who calls: that rank, under its group's token.
#[derive(Clone, Debug)]
pub(crate) struct Credential {
    pub(crate) rank: usize,
    pub(crate) token: Arc<Token>,
    /// What it says and hears is sealed.
    pub(crate) encrypts: bool,
}

pub(crate) const HELLO: usize = 40;
const MAGIC: &[u8; 8] = b"smddp-tc";

/// What a caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To send frames of this class.
    Frames(usize),
    /// To hear how many operations the group has begun there.
    Query,
    /// To notice the end of the group there, or of the process.
    Watch,
}

const QUERY: u32 = u32::MAX;
const WATCH: u32 = u32::MAX - 1;

/// Both ends of a connection and its purpose. Both ends' proofs cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The group's end at the listener.
    pub(crate) group_listener: ProcessUid,
    /// Rank of the caller.
    pub(crate) from: usize,
    /// Rank of the listener.
    pub(crate) to: usize,
    pub(crate) purpose: Purpose,
}

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.from as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.group_listener);
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

/// What a listener says to a caller that has shown who it is: its connection is taken up. Until then it may be hung up on
/// because there are too many callers, which is no sign of anybody's end.
pub(crate) const ACCEPTED: u8 = 2;
/// What it says instead: whoever it is, this connection is one too many.
pub(crate) const REJECTED: u8 = 3;
/// Or that, and to watchers later: this end of the group is closed. A process that dies says nothing.
pub(crate) const CLOSED: u8 = 1;

/// Whether these may be the first of such words.
pub(super) fn has_greeting_prefix(bytes: &[u8]) -> bool {
    let expected = [&MAGIC[..], &PROTOCOL.to_le_bytes()].concat();
    let both = bytes.len().min(expected.len());
    bytes[..both] == expected[..both]
}

/// Returns `None` for another protocol or version. Versions were compared when the group was made, so no reply is needed.
pub(super) fn parse(bytes: &[u8; HELLO]) -> Option<Hello> {
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if &bytes[..8] != MAGIC || number(8) != PROTOCOL {
        return None;
    }
    let mut group_listener = ProcessUid::default();
    group_listener.copy_from_slice(&bytes[16..32]);
    let purpose = match number(32) {
        QUERY => Purpose::Query,
        WATCH => Purpose::Watch,
        class if (class as usize) < CLASSES => Purpose::Frames(class as usize),
        _ => return None,
    };
    Some(Hello { group_listener, from: number(12) as usize, to: number(36) as usize, purpose })
}
