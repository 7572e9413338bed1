//! Shared pages and memory exports of the ranks of a node.
//!
//! Each rank has a page of flags in its control block, through which devices signal each other. Ranks hand over exported memory
//! handles on request, over their unix sockets. The core defines the meaning of the flags and of the exports.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smddp_net::token::Token;
use smddp_process::layout::{PAGE, shared_page_at};
use smddp_process::{Endpoint, Exporter, MemoryExport};

use super::local_ranks::{LocalRank, LocalRanks};

/// One rank's view of the shared pages.
pub struct SharedPage {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) token: Arc<Token>,
    pub(super) ranks: Arc<LocalRanks>,
    pub(super) layout: usize,
    pub(super) retained_pages: Arc<AtomicBool>,
    /// Node index of each rank of the group; `None` for a rank of another node.
    pub(super) places: Vec<Option<usize>>,
}

impl SharedPage {
    /// Size of a rank's page in bytes.
    pub const PAGE: usize = PAGE;

    fn peer(&self, rank: usize) -> Option<&LocalRank> {
        self.ranks.peers.get((*self.places.get(rank)?)?)
    }

    /// Returns the page of `rank`; `None` for a rank of another node. It consists of whole kernel pages, is zero at first, must be
    /// accessed as eight-byte atomics, and lives as long as `self`.
    pub fn page(&self, rank: usize) -> Option<*mut u8> {
        let peer = self.peer(rank)?;
        Some(peer.memory().at(peer.block + shared_page_at(self.layout), PAGE))
    }

    /// Keeps the pages reserved after the group has ended, because devices know their addresses.
    pub fn retain(&self) {
        self.retained_pages.store(true, Ordering::Release);
    }

    /// Exports what `exporter` returns to the ranks of this node. Returns the token under which they import it.
    pub fn export(&self, exporter: Exporter) -> u64 {
        self.endpoint.exports.export(exporter)
    }

    /// Withdraws the export with this token. Later imports of it fail.
    pub fn withdraw(&self, token: u64) {
        self.endpoint.exports.withdraw(token);
    }

    /// Imports an export of `rank`. Waits a few seconds at most for its process.
    ///
    /// # Errors
    /// The rank is on another node, its process has ended, or it has no such export.
    pub fn import(&self, rank: usize, token: u64) -> io::Result<MemoryExport> {
        let peer = self.peer(rank).ok_or_else(|| io::Error::other("it is on another node"))?;
        match peer.process {
            // A thread of this process.
            None => self.endpoint.exports.create(token),
            Some(_) => self.endpoint.import(&peer.address.process, &self.token, token),
        }
    }
}
