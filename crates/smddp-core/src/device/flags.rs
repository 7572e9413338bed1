//! The words by which streams and hosts tell each other how far they are.
//!
//! A site of a group has three lines in each rank's page, which all ranks of the node reach, and two words of its own.
//! Every word only grows, until a failure releases all who wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smddp_cuda::{Address, Device, Result};
use smddp_transport::SharedPage;

use super::MAX_SITES;

const LINE_BYTES: u64 = 64;
/// Written by a rank's stream: a number for each place in its order that others wait for.
const PROGRESS: u64 = 0;
/// Written by a rank's stream: operations whose reads of others' memory are over.
const READS: u64 = LINE_BYTES;
/// Written by a rank's host: operations whose write of `READS` is enqueued.
const ENQUEUED: u64 = 2 * LINE_BYTES;
const SITE_LINES: u64 = 4;
const _: () = assert!(MAX_SITES as u64 * SITE_LINES * LINE_BYTES <= SharedPage::PAGE as u64);

/// Releases whoever waits for any number: CUDA compares the signed difference, so all ones would not.
pub(crate) const RELEASED: u64 = 1 << 62;

/// One rank's lines, as this process's host and device reach them.
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

/// The pages of a node's ranks, known to the devices of this process: registered once, for all of a group's sites.
pub(crate) struct FlagPages {
    device: Arc<Device>,
    /// Keeps the pages.
    _shared_page: Arc<SharedPage>,
    /// By rank: as the host and as devices reach it; `None` for ranks of other nodes.
    mapped: Vec<Option<(*mut u8, Address)>>,
}

// SAFETY: the addresses are of memory that the board keeps; it is reached as atomics only.
unsafe impl Send for FlagPages {}
// SAFETY: as above.
unsafe impl Sync for FlagPages {}

impl FlagPages {
    pub(crate) fn new(device: Arc<Device>, shared_page: Arc<SharedPage>, size: usize) -> Result<Self> {
        shared_page.keep();
        let mut pages = Self { device, mapped: vec![None; size], _shared_page: shared_page.clone() };
        for rank in 0..size {
            let Some(page) = shared_page.page(rank) else { continue };
            // SAFETY: a whole page that lives as long as the board, which this value keeps.
            let address = unsafe { pages.device.register(page, SharedPage::PAGE)? };
            pages.mapped[rank] = Some((page, address));
        }
        Ok(pages)
    }
}

impl Drop for FlagPages {
    fn drop(&mut self) {
        for (page, _) in self.mapped.iter().flatten() {
            // SAFETY: registered by `new`, once; the streams that used it are empty, which whoever drops this has seen to.
            unsafe { self.device.unregister(*page) };
        }
    }
}

/// The words of one site.
pub(crate) struct DeviceFlags {
    device: Arc<Device>,
    pages: Option<Arc<FlagPages>>,
    /// By rank; `None` for ranks of other nodes.
    rank_flags: Vec<Option<RankFlags>>,
    own: *mut u8,
    me: usize,
}

// SAFETY: the addresses are of memory that `pages` and this value keep; it is reached as atomics through the device.
unsafe impl Send for DeviceFlags {}
// SAFETY: as above.
unsafe impl Sync for DeviceFlags {}

impl DeviceFlags {
    /// `pages`: those of the node, where its ranks signal each other.
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
        // SAFETY: our own page, fresh, of two words at least; nobody else knows it yet.
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

    /// Written by the stream: places in its order that this host waits for.
    pub(crate) fn passed(&self) -> Address {
        self.own as u64
    }

    /// Written by the stream: operations that are over here.
    pub(crate) fn done(&self) -> Address {
        self.own as u64 + LINE_BYTES
    }

    pub(crate) fn load(&self, flag: Address) -> u64 {
        // SAFETY: all words that this type gives lie in pages that it keeps, and are reached as atomics only.
        unsafe { self.device.load(flag) }
    }

    /// Whether a word has reached a number; what was written before it did is visible then.
    pub(crate) fn reached(&self, flag: Address, number: u64) -> bool {
        // SAFETY: as in `load`.
        unsafe { self.device.has_reached(flag, number) }
    }

    pub(crate) fn store(&self, flag: Address, value: u64) {
        // SAFETY: as in `load`.
        unsafe { self.device.store(flag, value) };
    }

    /// Lets every site's stream go on that waits for a word of this group. Streams may write smaller numbers after it, so
    /// it is done again until this rank's stream is empty.
    pub(crate) fn release(&self) {
        for flag in self.rank_flags.iter().flatten().flat_map(|rank_flags| rank_flags.stream_flags()) {
            if self.load(flag) < RELEASED {
                self.store(flag, RELEASED);
            }
        }
    }

    /// Whether somebody released everything. It orders nothing, and is no reason to believe that anything else is over.
    pub(crate) fn released(&self) -> bool {
        let is_released = |flag: Address| {
            // SAFETY: as in `load`; these lie in the pages of the board, which are plain memory of this process.
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
        // SAFETY: allocated by `new`; whoever drops the words is the last to use them.
        unsafe { self.device.free_host(self.own) };
    }
}
