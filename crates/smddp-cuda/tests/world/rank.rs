//! Common test helpers: ranks and their shared words.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

use smddp_cuda::{Address, Copy, Device, Stream, Wait};

use crate::world::{World, open_device, upload};

pub(crate) const BYTES: usize = 256;

/// A page of words in host memory, which several ranks register.
pub(crate) struct Page(*mut u8);

// SAFETY: an address; the words are only used as atomics.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    const LAYOUT: Layout = match Layout::from_size_align(4096, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("a page"),
    };

    pub(crate) fn new() -> Self {
        // SAFETY: the layout is not empty.
        Self(unsafe { alloc_zeroed(Self::LAYOUT) })
    }

    pub(crate) fn memory(&self) -> *mut u8 {
        self.0
    }

    pub(crate) fn word(&self, k: usize) -> Address {
        self.0 as Address + 8 * k as Address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.0, Self::LAYOUT) }
    }
}

/// A process with one device and one stream.
pub(crate) struct Rank {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
}

impl Rank {
    pub(crate) fn new(world: &World) -> Self {
        world.process();
        let device = open_device(0);
        let stream = device.create_stream().unwrap();
        Self { device, stream }
    }

    pub(crate) fn with(world: &World, page: &Page) -> Self {
        let rank = Self::new(world);
        // SAFETY: the page remains allocated until the test ends.
        unsafe { rank.device.register(page.memory(), 4096) }.unwrap();
        rank
    }

    pub(crate) fn memory(&self, fill: u8) -> Address {
        let address = self.device.allocate(BYTES).unwrap();
        upload(&self.device, address, &[fill; BYTES]);
        address
    }

    /// Imports another rank's memory and returns its address in this rank.
    pub(crate) fn import(&self, other: &Rank, address: Address) -> Address {
        let region = other.device.region(address).unwrap();
        let smddp_cuda::Export::Legacy(handle) = other.device.export(&region).unwrap() else {
            panic!("a handle")
        };
        let import = smddp_cuda::Import::Legacy(&handle);
        self.device.import(import, region.bytes).unwrap().base + (address - region.base)
    }

    pub(crate) fn copy(&self, from: Address, to: Address) {
        self.copy_on(self.stream, from, to);
    }

    pub(crate) fn copy_on(&self, stream: Stream, from: Address, to: Address) {
        // SAFETY: the world checks the lifetimes.
        unsafe { self.device.copy(stream, &[Copy { to, from, bytes: BYTES }]) }.unwrap();
    }

    pub(crate) fn write(&self, word: Address, value: u64) {
        // SAFETY: as in `copy_on`.
        unsafe { self.device.write_word(self.stream, word, value) }.unwrap();
    }

    pub(crate) fn wait(&self, word: Address, value: u64) {
        // SAFETY: as in `copy_on`.
        unsafe { self.device.wait_words(self.stream, &[Wait { word, value }]) }.unwrap();
    }

    pub(crate) fn synchronize(&self) {
        self.device.synchronize(self.stream).unwrap();
    }
}
