//! Addresses of ranks, and the identity under which a rank connects to them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
pub use smddp_net::handshake::Purpose;
use smddp_net::handshake::{Initiator, Party, ProcessUid};
use smddp_net::token::Token;

/// Address of a rank: the socket address of its process, and the id of the group's listener there, which is not secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpAddress {
    /// Address and port of the process.
    pub socket: SocketAddr,
    /// Id of the group's listener.
    pub listener_id: ProcessUid,
}

/// Identity of a connecting rank, and its group's token.
#[derive(Clone, Debug)]
pub struct Credential {
    /// Rank in the group.
    pub rank: usize,
    /// Token of the group.
    pub token: Arc<Token>,
    /// The connection is encrypted in both directions.
    pub encrypts: bool,
}

impl Credential {
    /// Starts the handshake of a connection to rank `to`.
    ///
    /// # Errors
    /// The kernel returns no random bytes.
    pub fn initiator(&self, (to, address): (usize, &TcpAddress), purpose: Purpose) -> io::Result<Initiator> {
        let from = Party { id: ProcessUid::default(), rank: self.rank };
        Initiator::new(&self.token, purpose, from, Party { id: address.listener_id, rank: to })
    }
}
