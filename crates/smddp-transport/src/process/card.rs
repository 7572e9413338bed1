//! The card: what a rank tells the others of its group, by whatever store.

use serde::{Deserialize, Serialize};

use crate::joint::Offer;

pub(crate) type Id = [u8; 16];

/// Changes with every change of the shared layout or of the handshake.
pub const PROTOCOL: u32 = 5;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Card {
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
    pub uid: u32,
    pub(crate) endpoint: Id,
    pub(crate) socket: Vec<u8>,
    pub(crate) memory: u64,
    pub(crate) block: u64,
    pub(crate) nonce: u64,
    /// Ranks with different names here do not share memory.
    pub(crate) node: String,
    /// How other nodes reach this rank.
    pub(crate) offer: Offer,
    /// What the layer above tells the other ranks.
    pub note: Vec<u8>,
}

const MAGIC: [u8; 8] = *b"smddp\0\0\x01";

/// A card that is none, or one of another make.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("not an smddp card ({0} bytes)")]
    NotACard(usize),
}

impl Card {
    #[expect(clippy::too_many_arguments, reason = "a record; built in one place")]
    pub(crate) fn new(
        rank: usize,
        size: usize,
        settings: Vec<(String, String)>,
        endpoint: Id,
        socket: Vec<u8>,
        memory: u64,
        block: u64,
        nonce: u64,
    ) -> Self {
        Self {
            magic: MAGIC,
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings,
            rank: rank as u32,
            size: size as u32,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            netns: std::fs::metadata("/proc/self/ns/net")
                .map(|m| std::os::unix::fs::MetadataExt::ino(&m))
                .unwrap_or(0),
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            endpoint,
            socket,
            memory,
            block,
            nonce,
            node: String::new(),
            offer: Offer::none("a group of one rank"),
            note: Vec::new(),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).unwrap_or_default()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CardError> {
        match postcard::from_bytes::<Self>(bytes) {
            Ok(card) if card.magic == MAGIC => Ok(card),
            _ => Err(CardError::NotACard(bytes.len())),
        }
    }
}
