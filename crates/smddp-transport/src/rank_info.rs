//! The card: what a rank tells the others of its group, by whatever store.

use serde::{Deserialize, Serialize};

use crate::fabric;
use crate::net::tcp::TcpAddress;
use crate::process::{PROTOCOL, ProcessAddress, outer_uid};
use crate::token::Token;

/// How a rank is reached from other nodes; errors say why it is not.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TransportOffer {
    /// And whether the address is a loopback one.
    pub(crate) tcp: Result<(TcpAddress, bool), String>,
    pub(crate) fabric: Result<fabric::FabricAddress, String>,
}

impl TransportOffer {
    pub(crate) fn none(reason: &str) -> Self {
        Self { tcp: Err(reason.to_owned()), fabric: Err(reason.to_owned()) }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankInfo {
    magic: [u8; 8],
    pub protocol: u32,
    pub version: String,
    /// Settings that all ranks must share, as (name, value).
    pub settings: Vec<(String, String)>,
    pub rank: u32,
    pub size: u32,
    pub host: String,
    /// Kernel boot and network namespace: what abstract sockets and shared memory depend on.
    pub boot: String,
    pub netns: u64,
    pub pid: u32,
    /// As the parent of its user namespace numbers it.
    pub uid: u32,
    pub(crate) process: ProcessAddress,
    /// Its control block in there.
    pub(crate) block: u64,
    pub(crate) nonce: u64,
    /// Ranks with different names here do not share memory.
    pub(crate) node: String,
    pub(crate) offer: TransportOffer,
    /// What the layer above tells the other ranks.
    pub note: Vec<u8>,
    /// What all ranks of the group share and strangers lack: made by rank 0. On a card that travels by whatever they trust; over
    /// connections it never does.
    pub(crate) token: Option<Token>,
}

const MAGIC: [u8; 8] = *b"smddp\0\0\x01";

/// A card that is none, or one of another make.
#[derive(Debug, thiserror::Error)]
pub enum RankInfoError {
    #[error("not an smddp card ({0} bytes)")]
    NotACard(usize),
}

/// The name of this host; reads no file.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The identifier of this boot. Without /proc the host's name has its place, so that two hosts differ.
fn boot_of(found: Option<String>) -> String {
    let found = found.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    found.unwrap_or_else(|| format!("unknown boot of {}", host_name()))
}

impl RankInfo {
    pub(crate) fn new(
        rank: usize,
        size: usize,
        settings: Vec<(String, String)>,
        process: ProcessAddress,
        (block, nonce): (u64, u64),
    ) -> Self {
        Self {
            magic: MAGIC,
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings,
            rank: rank as u32,
            size: size as u32,
            host: host_name(),
            boot: boot_of(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()),
            netns: std::fs::metadata("/proc/self/ns/net")
                .map(|m| std::os::unix::fs::MetadataExt::ino(&m))
                .unwrap_or(0),
            pid: std::process::id(),
            uid: outer_uid(),
            process,
            block,
            nonce,
            node: String::new(),
            offer: TransportOffer::none("a group of one rank"),
            note: Vec::new(),
            token: None,
        }
    }

    /// The card without what strangers must not learn.
    pub(crate) fn told_openly(&self) -> Vec<u8> {
        Self { token: None, ..self.clone() }.to_bytes()
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).unwrap_or_default()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RankInfoError> {
        match postcard::from_bytes::<Self>(bytes) {
            Ok(rank_info) if rank_info.magic == MAGIC => Ok(rank_info),
            _ => Err(RankInfoError::NotACard(bytes.len())),
        }
    }

    /// "rank 3 (host h1, pid 812)".
    pub(crate) fn name(&self) -> String {
        format!("rank {} (host {}, pid {})", self.rank, self.host, self.pid)
    }
}
