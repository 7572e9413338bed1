//! Two ranks of this process, and the words that the second one may write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::channels::LocalChannels;
use super::prepare::Prepared;
use crate::process::endpoint::Endpoint;
use crate::process::layout::*;
use crate::process::pool::{Region, ReleaseCondition};

/// Bytes of the second rank's own memory.
const OWN: usize = 256 << 10;
/// Where in it a ring of messages lies, and the pieces of messages.
const RING: usize = 128 << 10;
const PIECES: usize = 160 << 10;

struct AtOnce;

impl ReleaseCondition for AtOnce {
    fn released(&self) -> bool {
        true
    }
}

pub(crate) struct Words {
    endpoint: Arc<Endpoint>,
    block: usize,
    nonce: u64,
    region: Region,
    /// Announced messages.
    messages: u64,
    /// Its end, which does nothing but leave.
    _link: LocalChannels,
}

/// `odd`: the second rank's card has a block where there is none.
pub(crate) fn pair(odd: Option<u64>) -> Option<(LocalChannels, Words)> {
    let [first, second] = [0, 1].map(|rank| Prepared::new(rank, 2, 4 << 20, Vec::new()).ok());
    let (first, second) = (first?, second?);
    let mut rank_infos = vec![first.rank_info().clone(), second.rank_info().clone()];
    let (block, nonce) = (rank_infos[1].block as usize, rank_infos[1].nonce);
    let link = second.connect(rank_infos.clone()).ok()?;
    rank_infos[1].block = odd.unwrap_or(block as u64);
    let first = first.connect(rank_infos).ok()?;
    let (endpoint, _) = first.home()?;
    let region = endpoint.pool.acquire(&endpoint.memory, nonce ^ 1, OWN, OWN)?;
    let words = Words { endpoint, block, nonce, region, messages: 0, _link: link };
    Some((first, words))
}

impl Words {
    fn word(&self, at: usize) -> &AtomicU64 {
        self.endpoint.memory.flag64(at)
    }

    /// Some word that the second rank writes.
    pub(crate) fn pick(&self, what: u8, which: u8, seq: u64) -> &AtomicU64 {
        let (which, slot) = (usize::from(which), |seq| self.block + slot_at(2, seq));
        self.word(match what % 12 {
            0 => self.block + [NONCE, STATE, DONE, ABORT_REPORT][which % 4],
            1 => self.block + ABORT_REPORT + 8 * (which % 128),
            2 => self.block + MESSAGE_RINGS,
            3 | 4 => slot(seq) + [TAG, CALL, COUNT, STAGE][which % 4],
            5 => slot(seq + 1) + [TAG, CALL, COUNT, STAGE][which % 4],
            6 | 7 => self.region.offset + which / 8 % 4 * ENTRY + which % 8 * 8,
            8 => self.region.offset + 4 * ENTRY + which % 16 * LINE,
            9 | 10 => self.region.offset + RING + which * 8 % RING_BYTES,
            _ => self.region.offset + PIECES + which % 2 * LINE,
        })
    }

    /// An offset that makes sense somewhere.
    pub(crate) fn staged(&self, which: usize) -> u64 {
        let at = [self.region.offset, 0, self.block, RING, PIECES, self.region.offset + PIECES];
        (at[which % at.len()] + which / at.len() * LINE) as u64
    }

    /// A header as a rank that keeps to the rules would write it, with channels of such cells.
    pub(crate) fn header(&self, seq: u64, cell: u64, bytes: u64) {
        let slot = self.block + slot_at(2, seq);
        for channel in 0..4 {
            let entry = self.region.offset + channel * ENTRY;
            let lines = 4 * ENTRY + 2 * channel * LINE;
            for (at, value) in [lines as u64, GRAIN as u64, cell, 2, bytes].into_iter().enumerate() {
                self.word(entry + 8 * at).store(value, Ordering::Relaxed);
            }
            self.word(self.region.offset + lines).store(5, Ordering::Relaxed);
        }
        for (at, value) in [(CALL, 1), (COUNT, 1), (STAGE, self.region.offset as u64)] {
            self.word(slot + at).store(value, Ordering::Relaxed);
        }
        self.word(slot + TAG).store(seq + 1, Ordering::Release);
    }

    /// The same for a message of P2P.
    pub(crate) fn letter(&mut self, bytes: u64, cell: u64) {
        let ring = self.region.offset + RING;
        let at = ring + LINE * (1 + (self.messages % RING_ENTRIES) as usize);
        let pieces = (self.region.offset + PIECES) as u64;
        self.word(pieces as usize).store(5, Ordering::Relaxed);
        for (i, value) in [1, 2, bytes, pieces, cell, 2].into_iter().enumerate() {
            self.word(at + 8 + 8 * i).store(value, Ordering::Relaxed);
        }
        self.messages += 1;
        self.word(at).store(self.messages, Ordering::Release);
        self.word(self.block + MESSAGE_RINGS).store(ring as u64, Ordering::Release);
    }

    /// Whether the shared memory has these bytes.
    pub(crate) fn within(&self, at: *const u8, bytes: usize) -> bool {
        crate::net::fabric::registration::RegisteredStaging::of(&self.endpoint).offset(at, bytes).is_some()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let (memory, region) = (&self.endpoint.memory, self.region);
        self.endpoint.pool.retire(memory, self.nonce ^ 1, region, Arc::new(AtOnce));
        self.endpoint.pool.disown(memory, self.nonce ^ 1);
    }
}
