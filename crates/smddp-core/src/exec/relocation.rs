//! Private copies of an operation's buffers.

use smddp_plan::Buffer;

use crate::bind::BoundCall;
use crate::exec::walk::Execution;
use crate::kernels;

/// Copies of an operation's buffers. Overlapping buffers share a copy, so a call in place stays in place.
pub(crate) struct Relocation {
    /// Ascending and disjoint.
    regions: Vec<Region>,
}

struct Region {
    start: usize,
    end: usize,
    /// The element type gives an alignment for every dtype.
    copy: Vec<u128>,
}

impl Region {
    /// Offset from an address of this region to its copy, for wrapping addition.
    fn offset(&self) -> usize {
        (self.copy.as_ptr() as usize).wrapping_sub(self.start)
    }
}

impl Relocation {
    /// Copies the buffers of the operation. On error returns the number of bytes that could not be allocated.
    pub(crate) fn new(bound: &BoundCall, execution: &Execution) -> Result<Self, usize> {
        let mut ranges: Vec<_> =
            [Buffer::In, Buffer::Out].map(|buffer| ranges(bound, execution, buffer)).concat();
        ranges.sort_unstable();
        let mut regions: Vec<Region> = Vec::new();
        for (start, end) in ranges {
            match regions.last_mut() {
                Some(last) if start < last.end => last.end = last.end.max(end),
                _ => regions.push(Region { start, end, copy: Vec::new() }),
            }
        }
        for region in &mut regions {
            let bytes = region.end - region.start;
            let length = bytes.div_ceil(size_of::<u128>());
            region.copy.try_reserve_exact(length).map_err(|_| bytes)?;
            region.copy.resize(length, 0);
            // SAFETY: the operation is pending, so its caller keeps the buffers valid. Only this thread, which drives
            // the group, writes to them. The copy is new and holds `bytes`.
            unsafe {
                kernels::copy(region.copy.as_mut_ptr().cast(), region.start as *const u8, bytes, false)
            };
        }
        Ok(Self { regions })
    }

    /// Redirects the operation to the copies.
    pub(crate) fn apply(&self, execution: &mut Execution) {
        for (table, list) in execution.lists.iter_mut().enumerate() {
            match list {
                Some(list) => list.iter_mut().for_each(|address| *address = self.moved(*address)),
                None => execution.bases[table] = self.moved(execution.bases[table]),
            }
        }
    }

    /// Returns the corresponding address in the copy. Addresses outside of the buffers are returned unchanged.
    pub(crate) fn address(&self, address: *mut u8) -> *mut u8 {
        let moved = self.moved(address.expose_provenance());
        std::ptr::with_exposed_provenance_mut(moved)
    }

    fn moved(&self, address: usize) -> usize {
        let region = self.regions.iter().find(|region| (region.start..region.end).contains(&address));
        region.map_or(address, |region| address.wrapping_add(region.offset()))
    }
}

/// Returns true if `writer`, a pending operation, writes memory that the caller gave as input of `reader`.
pub(crate) fn writes_input(writer: (&BoundCall, &Execution), reader: (&BoundCall, &Execution)) -> bool {
    let inputs = match &reader.1.input_copy {
        Some(copy) => copy.pieces.iter().map(|&(start, bytes)| (start, start + bytes)).collect(),
        None => ranges(reader.0, reader.1, Buffer::In),
    };
    let outputs = ranges(writer.0, writer.1, Buffer::Out);
    inputs.iter().any(|input| outputs.iter().any(|output| input.0 < output.1 && output.0 < input.1))
}

/// Address ranges of a buffer: one for a flat buffer, else one for each block.
fn ranges(bound: &BoundCall, execution: &Execution, buffer: Buffer) -> Vec<(usize, usize)> {
    let table = buffer as usize;
    // The rank has no such buffer.
    if execution.lists[table].is_none() && execution.bases[table] == 0 {
        return Vec::new();
    }
    let blocks = (0..bound.lengths[table].len()).map(|block| {
        let start = execution.address(bound, buffer, block, 0);
        (start, start + bound.length(buffer, block))
    });
    let blocks = blocks.filter(|(start, end)| start < end);
    if execution.lists[table].is_some() {
        return blocks.collect();
    }
    // Starts at the base address, which then belongs to the region.
    let end = blocks.map(|(_, end)| end).max();
    end.map(|end| (execution.bases[table], end)).into_iter().collect()
}
