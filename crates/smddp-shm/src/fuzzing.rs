//! Fuzz target support: two ranks of this process, and the shared memory that the second one may write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smddp_process::Endpoint;
use smddp_process::layout::*;
use smddp_process::pool::{Region, ReleaseCondition};

use super::channels::LocalChannels;
use super::prepare::Prepared;

mod target;

pub use target::shm;

/// Bytes of the second rank's region.
const REGION_BYTES: usize = 256 << 10;
/// Offsets of a message ring and of message fragments in that region.
const RING: usize = 128 << 10;
const FRAGMENTS: usize = 160 << 10;

struct Immediate;

impl ReleaseCondition for Immediate {
    fn released(&self) -> bool {
        true
    }
}

/// Shared memory of the second rank.
pub struct PeerMemory {
    endpoint: Arc<Endpoint>,
    block: usize,
    nonce: u64,
    /// Region of its channels and messages until `drop`, and its offset.
    region: Option<Region>,
    at: usize,
    /// Number of announced messages.
    messages: u64,
    /// Its channels, which do nothing but leave the group.
    _link: LocalChannels,
}

/// Creates both ranks. `invalid_block`: offset of a control block that does not exist, in the second rank's address.
pub fn pair(invalid_block: Option<u64>) -> Option<(LocalChannels, PeerMemory)> {
    let [first, second] = [0, 1].map(|rank| Prepared::new(rank, 2, 4 << 20).ok());
    let (first, second) = (first?, second?);
    let mut addresses = vec![first.address().clone(), second.address().clone()];
    let (block, nonce) = (addresses[1].block as usize, addresses[1].nonce);
    let link = second.connect(addresses.clone()).ok()?;
    addresses[1].block = invalid_block.unwrap_or(block as u64);
    let first = first.connect(addresses).ok()?;
    let (endpoint, _) = first.home()?;
    let region = endpoint.pool.acquire(&endpoint.memory, nonce ^ 1, REGION_BYTES, REGION_BYTES)?;
    let at = region.offset();
    let memory = PeerMemory { endpoint, block, nonce, region: Some(region), at, messages: 0, _link: link };
    Some((first, memory))
}

impl PeerMemory {
    fn flag(&self, at: usize) -> &AtomicU64 {
        self.endpoint.memory.flag64(at)
    }

    /// Selects a flag that the second rank writes.
    pub fn pick(&self, field: u8, index: u8, seq: u64) -> &AtomicU64 {
        let (index, header) = (usize::from(index), |seq| self.block + header_at(2, seq));
        self.flag(match field % 12 {
            0 => self.block + [NONCE, STATE, DONE, ABORT_REPORT][index % 4],
            1 => self.block + ABORT_REPORT + 8 * (index % 128),
            2 => self.block + MESSAGE_RINGS,
            3 | 4 => header(seq) + [TAG, CALL, COUNT, STAGE][index % 4],
            5 => header(seq + 1) + [TAG, CALL, COUNT, STAGE][index % 4],
            6 | 7 => self.at + index / 8 % 4 * ENTRY + index % 8 * 8,
            8 => self.at + 4 * ENTRY + index % 16 * LINE,
            9 | 10 => self.at + RING + index * 8 % RING_BYTES,
            _ => self.at + FRAGMENTS + index % 2 * LINE,
        })
    }

    /// Returns an offset that is valid in some field.
    pub fn staged(&self, index: usize) -> u64 {
        let at = [self.at, 0, self.block, RING, FRAGMENTS, self.at + FRAGMENTS];
        (at[index % at.len()] + index / at.len() * LINE) as u64
    }

    /// Writes a valid header of operation `seq`, with channels whose slots have `slot_bytes` bytes.
    pub fn header(&self, seq: u64, slot_bytes: u64, bytes: u64) {
        let header = self.block + header_at(2, seq);
        for channel in 0..4 {
            let entry = self.at + channel * ENTRY;
            let lines = 4 * ENTRY + 2 * channel * LINE;
            for (at, value) in [lines as u64, GRAIN as u64, slot_bytes, 2, bytes].into_iter().enumerate() {
                self.flag(entry + 8 * at).store(value, Ordering::Relaxed);
            }
            self.flag(self.at + lines).store(5, Ordering::Relaxed);
        }
        for (at, value) in [(CALL, 1), (COUNT, 1), (STAGE, self.at as u64)] {
            self.flag(header + at).store(value, Ordering::Relaxed);
        }
        self.flag(header + TAG).store(seq + 1, Ordering::Release);
    }

    /// Announces a valid message of `bytes` bytes.
    pub fn message(&mut self, bytes: u64, slot_bytes: u64) {
        let ring = self.at + RING;
        let at = ring + LINE * (1 + (self.messages % RING_ENTRIES) as usize);
        let fragments = (self.at + FRAGMENTS) as u64;
        self.flag(fragments as usize).store(5, Ordering::Relaxed);
        for (i, value) in [1, 2, bytes, fragments, slot_bytes, 2].into_iter().enumerate() {
            self.flag(at + 8 + 8 * i).store(value, Ordering::Relaxed);
        }
        self.messages += 1;
        self.flag(at).store(self.messages, Ordering::Release);
        self.flag(self.block + MESSAGE_RINGS).store(ring as u64, Ordering::Release);
    }

    /// Returns true if the shared memory contains these bytes.
    pub fn within(&self, at: *const u8, bytes: usize) -> bool {
        // Messages with an odd slot size start at any offset.
        let (start, len) = (self.endpoint.memory.at(0, 0) as usize, self.endpoint.memory.len());
        (at as usize).checked_sub(start).is_some_and(|offset| offset <= len && bytes <= len - offset)
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        let memory = &self.endpoint.memory;
        if let Some(region) = self.region.take() {
            self.endpoint.pool.retire(memory, self.nonce ^ 1, region, Arc::new(Immediate));
        }
        self.endpoint.pool.disown(memory, self.nonce ^ 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_bytes_are_within_the_shared_memory_up_to_its_end() {
        let (_first, peer) = pair(None).unwrap();
        let (start, len) = (peer.endpoint.memory.at(0, 0).cast_const(), peer.endpoint.memory.len());
        for (offset, bytes, within) in
            [(33, 33, true), (len - 1, 1, true), (len, 0, true), (len - 1, 2, false), (len + 1, 0, false)]
        {
            assert_eq!(peer.within(start.wrapping_add(offset), bytes), within, "{bytes} bytes at {offset}");
        }
        assert!(!peer.within(start.wrapping_sub(1), 1));
    }
}
