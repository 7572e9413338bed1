//! Registration of the memory of large payloads: in parts, on first use.
//!
//! A device pins registered memory. The staging memory grows on use up to its limit and has reserved space behind it, so most of it
//! never needs to be pinned.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use smddp_process::Endpoint;

use super::rail::{Rail, Registered};

/// Staging memory of the process, shared by all its groups.
pub struct RegisteredStaging {
    base: *mut u8,
    bytes: usize,
    /// Registered parts begin at multiples of this size in bytes and are twice as long. A payload of at most this size is
    /// therefore inside the part in which it begins.
    pub(crate) grain: usize,
    /// (offset, bytes) of each part, with its registration on each rail.
    parts: HashMap<(usize, usize), Vec<Registered>>,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address range that `_keep` keeps mapped; this type never dereferences it.
unsafe impl Send for RegisteredStaging {}

/// Default of `RegisteredStaging::grain`, in bytes.
const GRAIN: usize = 16 << 20;

/// Position of a byte range in a registered part.
pub(crate) struct RegisteredPart<'a> {
    /// Offset from the start of the part, in bytes.
    pub(crate) offset: usize,
    pub(crate) rails: &'a [Registered],
}

impl RegisteredStaging {
    /// All memory that slots may be allocated in.
    pub fn of(endpoint: &Endpoint) -> Self {
        let (memory, bytes) = (&endpoint.memory, endpoint.memory.len());
        endpoint.pool.pin(memory);
        Self::new(memory.at(0, bytes), bytes, memory.clone())
    }

    /// `keep` keeps the memory mapped at its address.
    pub(crate) fn new(base: *mut u8, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, bytes, grain: GRAIN, parts: HashMap::new(), _keep: keep }
    }

    #[cfg(test)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Returns the offset of these bytes from the start of the memory; `None`: they are outside.
    pub(crate) fn offset(&self, at: *const u8, bytes: usize) -> Option<usize> {
        let offset = (at as usize).checked_sub(self.base as usize)?;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }

    /// Returns the address of an offset from the start of the memory.
    pub(crate) fn address(&self, offset: usize) -> *mut u8 {
        self.base.wrapping_add(offset)
    }

    /// Returns the part that contains these bytes, and registers it on all rails on first use.
    pub(crate) fn part(
        &mut self,
        rails: &mut [Box<dyn Rail>],
        offset: usize,
        bytes: usize,
    ) -> Result<RegisteredPart<'_>, String> {
        let first = offset / self.grain * self.grain;
        let fits = offset - first + bytes <= 2 * self.grain;
        // A payload larger than the grain gets its own part.
        let (first, length) = if fits { (first, 2 * self.grain) } else { (offset, bytes) };
        let length = length.min(self.bytes - first);
        if !self.parts.contains_key(&(first, length)) {
            let known = rails
                .iter_mut()
                // SAFETY: `_keep` keeps the memory, and the endpoint drops this after its rails.
                .map(|rail| unsafe { rail.register(self.base.wrapping_add(first), length) })
                .collect::<Result<Vec<_>, _>>()?;
            self.parts.insert((first, length), known);
        }
        let rails = self.parts.get(&(first, length)).map_or(&[][..], Vec::as_slice);
        Ok(RegisteredPart { offset: offset - first, rails })
    }
}
