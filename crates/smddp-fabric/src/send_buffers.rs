//! Registered message buffers of equal size.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use rustix::param::page_size;

use super::rail::{LocalMemory, Rail};

/// Page-aligned, process-private memory.
struct Chunk {
    base: *mut u8,
    layout: Layout,
}

impl Chunk {
    fn new(bytes: usize) -> Result<Self, String> {
        let layout = Layout::from_size_align(bytes.max(1), page_size()).map_err(|e| e.to_string())?;
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Ok(Self { base, layout })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and freed once; `Buffers` outlives the provider's use of it.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// Message buffers of one rail.
pub(crate) struct Buffers {
    bytes: usize,
    /// (memory, its descriptor at the rail)
    chunks: Vec<(Chunk, usize)>,
    free: Vec<u32>,
}

// SAFETY: the memory is not bound to a thread; the endpoint that owns it is behind a mutex.
unsafe impl Send for Buffers {}

/// Number of buffers per allocation.
const CHUNK: usize = 32;

impl Buffers {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes, chunks: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Returns a free buffer; allocates more if needed.
    pub(crate) fn take(&mut self, rail: &mut dyn Rail) -> Result<u32, String> {
        if let Some(free) = self.free.pop() {
            return Ok(free);
        }
        let chunk = Chunk::new(self.bytes * CHUNK)?;
        // SAFETY: the chunk is freed with this object, which the endpoint drops after its rails.
        let known = unsafe { rail.register(chunk.base, self.bytes * CHUNK) }?;
        let first = self.len() as u32;
        self.chunks.push((chunk, known.desc));
        self.free.extend((first + 1..first + CHUNK as u32).rev());
        Ok(first)
    }

    pub(crate) fn give(&mut self, buffer: u32) {
        self.free.push(buffer);
    }

    /// Returns the first `bytes` bytes of a buffer.
    pub(crate) fn local(&self, buffer: u32, bytes: usize) -> LocalMemory {
        let (chunk, desc) = &self.chunks[buffer as usize / CHUNK];
        let at = chunk.base.wrapping_add(buffer as usize % CHUNK * self.bytes);
        LocalMemory { at, bytes: bytes.min(self.bytes), desc: *desc }
    }
}
