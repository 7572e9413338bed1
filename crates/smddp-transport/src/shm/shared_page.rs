//! The board: what the ranks of a node share besides messages. A page of words each, in their control blocks, and things that
//! are handed over on request, over their unix sockets.
//!
//! Devices signal each other through the words and learn of each other's memory through what is lent. What the words
//! and the things mean is the core's.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::local_ranks::{LocalRank, Ranks};
use crate::process::layout::{PAGE, shared_page_at};
use crate::process::{Endpoint, Exporter, MemoryExport};
use crate::token::Token;

/// One rank's view of it.
pub struct SharedPage {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) token: Arc<Token>,
    pub(super) ranks: Arc<Ranks>,
    pub(super) layout: usize,
    pub(super) kept: Arc<AtomicBool>,
    /// Places in this node, by rank of the group.
    pub(super) places: Vec<Option<usize>>,
}

impl SharedPage {
    /// Bytes of a rank's page.
    pub const PAGE: usize = PAGE;

    fn remote(&self, rank: usize) -> Option<&LocalRank> {
        self.ranks.remotes.get((*self.places.get(rank)?)?)
    }

    /// The page of `rank`: whole pages of the kernel's, zero at first, to be reached as atomics of eight bytes; `None` for a rank of
    /// another node. It lives as long as this board.
    pub fn page(&self, rank: usize) -> Option<*mut u8> {
        let remote = self.remote(rank)?;
        Some(remote.memory().at(remote.block + shared_page_at(self.layout), PAGE))
    }

    /// Devices know the pages from now on: they are not used for anything else, though the group may end.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// What ranks of this node may ask for under the number that comes back.
    pub fn lend(&self, maker: Exporter) -> u64 {
        self.endpoint.exports.export(maker)
    }

    pub fn withdraw(&self, token: u64) {
        self.endpoint.exports.withdraw(token);
    }

    /// Asks `rank` for what it lends. Waits for its process, a few seconds at most.
    pub fn borrow(&self, rank: usize, token: u64) -> io::Result<MemoryExport> {
        let remote = self.remote(rank).ok_or_else(|| io::Error::other("it is on another node"))?;
        match remote.peer {
            // A thread of this process.
            None => self.endpoint.exports.create(token),
            Some(_) => self.endpoint.import(&remote.rank_info.process, &self.token, token),
        }
    }
}
