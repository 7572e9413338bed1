//! Addresses of ranks, and the identity under which a rank connects to them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use crate::handshake::Purpose;
use crate::handshake::{Initiator, Party, ProcessUid};
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

impl Credential {
    /// Starts the handshake of a connection to rank `to`.
    pub(crate) fn initiator(
        &self,
        (to, address): (usize, &TcpAddress),
        purpose: Purpose,
    ) -> io::Result<Initiator> {
        let from = Party { id: ProcessUid::default(), rank: self.rank };
        Initiator::new(&self.token, purpose, from, Party { id: address.listener_id, rank: to })
    }
}
