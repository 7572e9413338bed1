//! The board of ranks that share memory: pages in their control blocks, things lent over their unix sockets.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::layout::{PAGE, board_at};
use super::ranks::{Ranks, Remote};
use crate::board::{Board, Lent, Maker};
use crate::joint::Reach;
use crate::process::endpoint::Endpoint;

pub(super) struct ShmBoard {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) ranks: Arc<Ranks>,
    pub(super) layout: usize,
    pub(super) kept: Arc<AtomicBool>,
    pub(super) reach: Arc<Reach>,
}

impl ShmBoard {
    fn remote(&self, rank: usize) -> Option<&Remote> {
        self.ranks.remotes.get(self.reach.local(rank)?)
    }
}

impl Board for ShmBoard {
    fn page(&self, rank: usize) -> Option<*mut u8> {
        let remote = self.remote(rank)?;
        Some(remote.memory().at(remote.block + board_at(self.layout), PAGE))
    }

    fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    fn lend(&self, maker: Maker) -> u64 {
        self.endpoint.lending.lend(maker)
    }

    fn withdraw(&self, token: u64) {
        self.endpoint.lending.withdraw(token);
    }

    fn borrow(&self, rank: usize, token: u64) -> io::Result<Lent> {
        let remote = self.remote(rank).ok_or_else(|| io::Error::other("it is on another node"))?;
        match remote.peer {
            // A thread of this process.
            None => self.endpoint.lending.make(token),
            Some(_) => self.endpoint.borrow(&remote.card, token),
        }
    }
}
