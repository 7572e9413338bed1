//! What may be used between ranks, as the settings say.

use std::path::PathBuf;
use std::time::Duration;

use crate::net::interface::{AddressFamily, InterfaceFilter};

/// What may be used between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterNode {
    /// EFA where every rank has it, our own sockets where none has.
    Auto,
    Nothing,
    Tcp,
    Fabric,
}

/// What may be used, as the settings say.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// Cap of the staging pool in bytes.
    pub staging: usize,
    /// Whether ranks of one host may share memory at all.
    pub shm: bool,
    /// Ranks that name different nodes do not share memory.
    pub node: Option<String>,
    pub interface: InterfaceFilter,
    pub family: AddressFamily,
    /// A host that answers nothing for so long is gone.
    pub peer_timeout: Duration,
    pub inter_node: InterNode,
    /// What goes between nodes is sealed.
    pub encrypts: bool,
    /// `SMDDP_LIBFABRIC` and `SMDDP_FABRIC_PROVIDER`.
    pub library: Option<PathBuf>,
    pub provider: Option<String>,
    /// This rank's number on its host, and how many there are, where the launcher tells.
    pub local: Option<(usize, usize)>,
    /// Any other way between nodes than this is an error: "tcp", "fabric", or a provider.
    pub require: Option<String>,
}
