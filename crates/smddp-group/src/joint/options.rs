//! Transport options from the settings.

use std::path::PathBuf;
use std::time::Duration;

use smddp_net::interface::{AddressFamily, InterfaceFilter};

/// Transport between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterNode {
    /// EFA if every rank has it, TCP sockets if no rank has it.
    Auto,
    /// No transport: all ranks must share memory.
    Nothing,
    /// TCP sockets.
    Tcp,
    /// Libfabric, with the provider in [`TransportOptions::provider`].
    Fabric,
}

/// Options of a group's transports.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// Cap of the staging pool in bytes.
    pub staging: usize,
    /// Allows ranks of one host to share memory.
    pub shm: bool,
    /// Node name. Ranks with different node names do not share memory.
    pub node: Option<String>,
    /// Network interfaces that the user named.
    pub interface: InterfaceFilter,
    /// Address family of the addresses between nodes.
    pub family: AddressFamily,
    /// Time without a reply after which a host counts as lost.
    pub peer_timeout: Duration,
    /// Transport between nodes.
    pub inter_node: InterNode,
    /// Encrypts the data between nodes.
    pub encrypts: bool,
    /// Adds checksums to the frames between nodes (`SMDDP_AUDIT=wire`).
    pub checksums: bool,
    /// Path of libfabric (`SMDDP_LIBFABRIC`).
    pub library: Option<PathBuf>,
    /// Provider of libfabric. `None`: efa.
    pub provider: Option<String>,
    /// Opens a fabric endpoint for this group alone, for ranks that are threads of one process. Otherwise all groups of the
    /// process share an endpoint.
    pub separate_endpoint: bool,
    /// This rank's index on its host and the number of ranks there, if the launcher sets them.
    pub local: Option<(usize, usize)>,
}
