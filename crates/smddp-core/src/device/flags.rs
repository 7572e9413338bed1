//! The words by which streams and hosts tell each other how far they are.
//!
//! A site of a group has three lines in each rank's page, which all ranks of the node reach, and two words of its own.
//! Every word only grows, until a failure releases all who wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smddp_cuda::{Address, Device, Result};
use smddp_transport::SharedPage;

use super::MOST_SITES;

const LINE: u64 = 64;
/// Written by a rank's stream: a number for each place in its order that others wait for.
const PROGRESS: u64 = 0;
/// Written by a rank's stream: operations whose reads of others' memory are over.
const READS: u64 = LINE;
/// Written by a rank's host: operations whose write of `READS` is enqueued.
const ENQUEUED: u64 = 2 * LINE;
const LINES: u64 = 4;
const _: () = assert!(MOST_SITES as u64 * LINES * LINE <= SharedPage::PAGE as u64);

/// Releases whoever waits for any number: CUDA compares the signed difference, so all ones would not.
pub(crate) const POISON: u64 = 1 << 62;

/// One rank's lines, as this process's host and device reach them.
#[derive(Clone, Copy)]
pub(crate) struct Lines {
    host: Address,
    device: Address,
}

impl Lines {
    pub(crate) fn progress(self) -> Address {
        self.device + PROGRESS
    }
    pub(crate) fn reads(self) -> Address {
        self.device + READS
    }
    pub(crate) fn enqueued(self) -> Address {
        self.host + ENQUEUED
    }
    fn stream_words(self) -> [Address; 2] {
        [self.host + PROGRESS, self.host + READS]
    }
}

/// The pages of a node's ranks, known to the devices of this process: registered once, for all of a group's sites.
pub(crate) struct Pages {
    device: Arc<Device>,
    /// Keeps the pages.
    _board: Arc<SharedPage>,
    /// By rank: as the host and as devices reach it; `None` for ranks of other nodes.
    known: Vec<Option<(*mut u8, Address)>>,
}

// SAFETY: the addresses are of memory that the board keeps; it is reached as atomics only.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub(crate) fn new(device: Arc<Device>, shared_page: Arc<SharedPage>, size: usize) -> Result<Self> {
        shared_page.retain();
        let mut pages = Self { device, known: vec![None; size], _board: shared_page.clone() };
        for rank in 0..size {
            let Some(page) = shared_page.page(rank) else { continue };
            // SAFETY: a whole page that lives as long as the board, which this value keeps.
            let address = unsafe { pages.device.register(page, SharedPage::PAGE)? };
            pages.known[rank] = Some((page, address));
        }
        Ok(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for (page, _) in self.known.iter().flatten() {
            // SAFETY: registered by `new`, once; the streams that used it are empty, which whoever drops this has seen to.
            unsafe { self.device.unregister(*page) };
        }
    }
}

/// The words of one site.
pub(crate) struct Words {
    device: Arc<Device>,
    pages: Option<Arc<Pages>>,
    /// By rank; `None` for ranks of other nodes.
    lines: Vec<Option<Lines>>,
    own: *mut u8,
    me: usize,
}

// SAFETY: the addresses are of memory that `pages` and this value keep; it is reached as atomics through the device.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// `pages`: those of the node, where its ranks signal each other.
    pub(crate) fn new(
        device: Arc<Device>,
        pages: Option<Arc<Pages>>,
        (me, size): (usize, usize),
        site: usize,
    ) -> Result<Self> {
        let own = device.allocate_host(SharedPage::PAGE)?;
        let offset = site as u64 * LINES * LINE;
        let mut lines = vec![None; size];
        if let Some(pages) = &pages {
            for (lines, known) in lines.iter_mut().zip(&pages.known) {
                *lines = known
                    .map(|(page, address)| Lines { host: page as u64 + offset, device: address + offset });
            }
        }
        let words = Self { device, pages, lines, own, me };
        // SAFETY: our own page, fresh, of two words at least; nobody else knows it yet.
        unsafe {
            words.device.store(words.passed(), 0);
            words.device.store(words.done(), 0);
        }
        Ok(words)
    }

    pub(crate) fn pages(&self) -> Option<Arc<Pages>> {
        self.pages.clone()
    }

    pub(crate) fn of(&self, rank: usize) -> Option<Lines> {
        self.lines[rank]
    }

    pub(crate) fn mine(&self) -> Option<Lines> {
        self.lines[self.me]
    }

    /// Written by the stream: places in its order that this host waits for.
    pub(crate) fn passed(&self) -> Address {
        self.own as u64
    }

    /// Written by the stream: operations that are over here.
    pub(crate) fn done(&self) -> Address {
        self.own as u64 + LINE
    }

    pub(crate) fn load(&self, word: Address) -> u64 {
        // SAFETY: all words that this type gives lie in pages that it keeps, and are reached as atomics only.
        unsafe { self.device.load(word) }
    }

    /// Whether a word has reached a number; what was written before it did is visible then.
    pub(crate) fn reached(&self, word: Address, number: u64) -> bool {
        // SAFETY: as in `load`.
        unsafe { self.device.has_reached(word, number) }
    }

    pub(crate) fn store(&self, word: Address, value: u64) {
        // SAFETY: as in `load`.
        unsafe { self.device.store(word, value) };
    }

    /// Lets every site's stream go on that waits for a word of this group. Streams may write smaller numbers after it, so
    /// it is done again until this rank's stream is empty.
    pub(crate) fn release(&self) {
        for word in self.lines.iter().flatten().flat_map(|lines| lines.stream_words()) {
            if self.load(word) < POISON {
                self.store(word, POISON);
            }
        }
    }

    /// Whether somebody released everything. It orders nothing, and is no reason to believe that anything else is over.
    pub(crate) fn released(&self) -> bool {
        let poisoned = |word: Address| {
            // SAFETY: as in `load`; these lie in the pages of the board, which are plain memory of this process.
            let word = unsafe { AtomicU64::from_ptr(word as *mut u64) };
            word.load(Ordering::Relaxed) >= POISON
        };
        self.lines.iter().flatten().any(|lines| lines.stream_words().into_iter().any(poisoned))
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; whoever drops the words is the last to use them.
        unsafe { self.device.free_host(self.own) };
    }
}
