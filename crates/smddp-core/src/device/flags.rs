//! Flags for progress signals between streams and hosts.
//!
//! A site of a group has three cache lines in the page of each rank, which all ranks of the node map. It also has two
//! private flags. Every flag only increases, until a failure releases all waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smddp_cuda::{Address, Device, Result};
use smddp_shm::SharedPage;

use super::MAX_SITES;

const LINE_BYTES: u64 = 64;
/// Written by the rank's stream: marks in its order that peers wait for.
const PROGRESS: u64 = 0;
/// Written by the rank's stream: number of the last operation whose reads of peer memory are complete.
const READS: u64 = LINE_BYTES;
/// Written by the rank's host: number of the last operation whose write of `READS` is enqueued.
const ENQUEUED: u64 = 2 * LINE_BYTES;
const SITE_LINES: u64 = 4;
const _: () = assert!(MAX_SITES as u64 * SITE_LINES * LINE_BYTES <= SharedPage::PAGE as u64);

/// Satisfies every wait. CUDA compares the signed difference, so a value of all ones would not.
pub(crate) const RELEASED: u64 = 1 << 62;

/// Addresses of one rank's flags, for the host and the devices of this process.
#[derive(Clone, Copy)]
pub(crate) struct RankFlags {
    host: Address,
    device: Address,
}

impl RankFlags {
    pub(crate) fn progress(self) -> Address {
        self.device + PROGRESS
    }
    pub(crate) fn reads(self) -> Address {
        self.device + READS
    }
    pub(crate) fn enqueued(self) -> Address {
        self.host + ENQUEUED
    }
    fn stream_flags(self) -> [Address; 2] {
        [self.host + PROGRESS, self.host + READS]
    }
}

/// Pages of the ranks of a node, registered once with the devices of this process for all sites of a group.
pub(crate) struct FlagPages {
    device: Arc<Device>,
    /// Keeps the pages mapped.
    _shared_page: Arc<SharedPage>,
    /// By rank: host address and device address; `None` for ranks of other nodes.
    mapped: Vec<Option<(*mut u8, Address)>>,
}

// SAFETY: the addresses point to memory that `_shared_page` keeps, which is accessed with atomics only.
unsafe impl Send for FlagPages {}
// SAFETY: as above.
unsafe impl Sync for FlagPages {}

impl FlagPages {
    pub(crate) fn new(device: Arc<Device>, shared_page: Arc<SharedPage>, size: usize) -> Result<Self> {
        shared_page.retain();
        let mut pages = Self { device, mapped: vec![None; size], _shared_page: shared_page.clone() };
        for rank in 0..size {
            let Some(page) = shared_page.page(rank) else { continue };
            // SAFETY: a whole page that lives as long as the shared page, which this value keeps.
            let address = unsafe { pages.device.register(page, SharedPage::PAGE)? };
            pages.mapped[rank] = Some((page, address));
        }
        Ok(pages)
    }
}

impl Drop for FlagPages {
    fn drop(&mut self) {
        for (page, _) in self.mapped.iter().flatten() {
            // SAFETY: registered once, in `new`. The owner drops this only when the streams that used it are empty.
            unsafe { self.device.unregister(*page) };
        }
    }
}

/// The flags of one site.
pub(crate) struct DeviceFlags {
    device: Arc<Device>,
    pages: Option<Arc<FlagPages>>,
    /// By rank; `None` for ranks of other nodes.
    rank_flags: Vec<Option<RankFlags>>,
    own: *mut u8,
    me: usize,
}

// SAFETY: the addresses point to memory that `pages` and this value keep, which is accessed with atomics of the
// device.
unsafe impl Send for DeviceFlags {}
// SAFETY: as above.
unsafe impl Sync for DeviceFlags {}

impl DeviceFlags {
    /// `pages`: pages of the node, if its ranks signal each other.
    pub(crate) fn new(
        device: Arc<Device>,
        pages: Option<Arc<FlagPages>>,
        (me, size): (usize, usize),
        site: usize,
    ) -> Result<Self> {
        let own = device.allocate_host(SharedPage::PAGE)?;
        let offset = site as u64 * SITE_LINES * LINE_BYTES;
        let mut rank_flags = vec![None; size];
        if let Some(pages) = &pages {
            for (rank_flags, mapped) in rank_flags.iter_mut().zip(&pages.mapped) {
                *rank_flags = mapped.map(|(page, address)| RankFlags {
                    host: page as u64 + offset,
                    device: address + offset,
                });
            }
        }
        let flags = Self { device, pages, rank_flags, own, me };
        // SAFETY: a new page of at least two flags, which nothing else accesses yet.
        unsafe {
            flags.device.store(flags.passed(), 0);
            flags.device.store(flags.done(), 0);
        }
        Ok(flags)
    }

    pub(crate) fn pages(&self) -> Option<Arc<FlagPages>> {
        self.pages.clone()
    }

    pub(crate) fn rank(&self, rank: usize) -> Option<RankFlags> {
        self.rank_flags[rank]
    }

    pub(crate) fn own_rank(&self) -> Option<RankFlags> {
        self.rank_flags[self.me]
    }

    /// Written by the stream: marks in its order that this host waits for.
    pub(crate) fn passed(&self) -> Address {
        self.own as u64
    }

    /// Written by the stream: number of the last operation that is complete on this rank.
    pub(crate) fn done(&self) -> Address {
        self.own as u64 + LINE_BYTES
    }

    pub(crate) fn load(&self, flag: Address) -> u64 {
        // SAFETY: all flags that this type returns are in pages that it keeps, and are accessed with atomics only.
        unsafe { self.device.load(flag) }
    }

    /// Returns true if a flag has reached a number. Everything written before that write is visible then.
    pub(crate) fn reached(&self, flag: Address, number: u64) -> bool {
        // SAFETY: as in `load`.
        unsafe { self.device.has_reached(flag, number) }
    }

    pub(crate) fn store(&self, flag: Address, value: u64) {
        // SAFETY: as in `load`.
        unsafe { self.device.store(flag, value) };
    }

    /// Satisfies all waits for flags of this group, on every site. Streams may write smaller numbers afterwards, so
    /// this must be repeated until this rank's stream is empty.
    pub(crate) fn release(&self) {
        for flag in self.rank_flags.iter().flatten().flat_map(|rank_flags| rank_flags.stream_flags()) {
            if self.load(flag) < RELEASED {
                self.store(flag, RELEASED);
            }
        }
    }

    /// Returns true if a failure released all waits. Gives no ordering and does not imply that any work is complete.
    pub(crate) fn released(&self) -> bool {
        let is_released = |flag: Address| {
            // SAFETY: as in `load`. These flags are in the shared pages, which are ordinary memory of this process.
            let flag = unsafe { AtomicU64::from_ptr(flag as *mut u64) };
            flag.load(Ordering::Relaxed) >= RELEASED
        };
        self.rank_flags
            .iter()
            .flatten()
            .any(|rank_flags| rank_flags.stream_flags().into_iter().any(is_released))
    }
}

impl Drop for DeviceFlags {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. The owner drops this when nothing else uses it.
        unsafe { self.device.free_host(self.own) };
    }
}
