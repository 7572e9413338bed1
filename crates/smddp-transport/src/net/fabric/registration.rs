//! The memory that large payloads lie in, as the devices know it: in parts, from when they are first used.
//!
//! A device pins what it knows. The staging memory grows on use up to its cap and has room for reserves behind it, so
//! most of it never needs to be pinned.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use super::rail::{Rail, Registered};
use crate::process::Endpoint;

/// Memory that belongs to the process and serves all its groups.
pub(crate) struct RegisteredStaging {
    base: *mut u8,
    bytes: usize,
    /// Registered parts begin at multiples of this and are twice as long, so that every payload of at most this many
    /// bytes lies in the part in which it begins.
    pub(crate) grain: usize,
    /// (first byte, bytes) and what each rail says.
    parts: HashMap<(usize, usize), Vec<Registered>>,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address range that `keep` keeps mapped; it is never dereferenced through this.
unsafe impl Send for RegisteredStaging {}

impl Clone for RegisteredStaging {
    /// The same memory, unknown to any device.
    fn clone(&self) -> Self {
        let (base, bytes, grain) = (self.base, self.bytes, self.grain);
        Self { base, bytes, grain, parts: HashMap::new(), keep: self.keep.clone() }
    }
}

const GRAIN: usize = 16 << 20;

/// Bytes of a registered part.
pub(crate) struct RegisteredPart<'a> {
    /// How far into it.
    pub(crate) offset: usize,
    pub(crate) rails: &'a [Registered],
}

impl RegisteredStaging {
    /// All memory that cells may lie in.
    pub(crate) fn of(endpoint: &Endpoint) -> Self {
        let (memory, bytes) = (&endpoint.memory, endpoint.memory.len());
        endpoint.pool.pin(memory);
        Self::new(memory.at(0, bytes), bytes, memory.clone())
    }

    /// `keep` keeps the memory where it is.
    pub(crate) fn new(base: *mut u8, bytes: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, bytes, grain: GRAIN, parts: HashMap::new(), keep }
    }

    #[cfg(test)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// How far from the beginning these bytes lie.
    pub(crate) fn offset(&self, at: *const u8, bytes: usize) -> Option<usize> {
        let offset = (at as usize).checked_sub(self.base as usize)?;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }

    /// The part that these bytes lie in, which is made known to all rails if it is not yet.
    pub(crate) fn part(
        &mut self,
        rails: &mut [Box<dyn Rail>],
        offset: usize,
        bytes: usize,
    ) -> Result<RegisteredPart<'_>, String> {
        let first = offset / self.grain * self.grain;
        let fits = offset - first + bytes <= 2 * self.grain;
        // A payload larger than any so far has a part of its own.
        let (first, length) = if fits { (first, 2 * self.grain) } else { (offset, bytes) };
        let length = length.min(self.bytes - first);
        if !self.parts.contains_key(&(first, length)) {
            let known = rails
                .iter_mut()
                // SAFETY: `keep` keeps the memory, and the engine drops this after its rails.
                .map(|rail| unsafe { rail.register(self.base.wrapping_add(first), length) })
                .collect::<Result<Vec<_>, _>>()?;
            self.parts.insert((first, length), known);
        }
        let rails = self.parts.get(&(first, length)).map_or(&[][..], Vec::as_slice);
        Ok(RegisteredPart { offset: offset - first, rails })
    }
}
