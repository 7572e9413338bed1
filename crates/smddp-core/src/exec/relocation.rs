//! Private copies of an operation's buffers.

use smddp_plan::Buffer;

use crate::bind::BoundCall;
use crate::exec::walk::Execution;
use crate::kernels;

/// The buffers of an operation, copied. Buffers that overlap share a copy, so a call in place stays in place.
pub(crate) struct Relocation {
    /// Ascending and disjoint.
    regions: Vec<Region>,
}

struct Region {
    start: usize,
    end: usize,
    /// Aligned for every element type.
    copy: Vec<u128>,
}

impl Region {
    /// Offset from an address of this region to its copy, for wrapping addition.
    fn offset(&self) -> usize {
        (self.copy.as_ptr() as usize).wrapping_sub(self.start)
    }
}

impl Relocation {
    /// Copies the buffers of the operation. The error is the number of bytes that could not be allocated.
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
            // SAFETY: the operation is not over, so its caller keeps the buffers valid, and this thread, which drives the
            // group, alone writes to them. The copy has room for `bytes` and is new.
            unsafe {
                kernels::copy(region.copy.as_mut_ptr().cast(), region.start as *const u8, bytes, false)
            };
        }
        Ok(Self { regions })
    }

    /// Has the operation use the copies.
    pub(crate) fn apply(&self, execution: &mut Execution) {
        for (table, list) in execution.lists.iter_mut().enumerate() {
            match list {
                Some(list) => list.iter_mut().for_each(|address| *address = self.moved(*address)),
                None => execution.bases[table] = self.moved(execution.bases[table]),
            }
        }
    }

    /// The same place in the copy; addresses outside of the buffers stay as they are.
    pub(crate) fn address(&self, address: *mut u8) -> *mut u8 {
        let moved = self.moved(address.expose_provenance());
        std::ptr::with_exposed_provenance_mut(moved)
    }

    fn moved(&self, address: usize) -> usize {
        let region = self.regions.iter().find(|region| (region.start..region.end).contains(&address));
        region.map_or(address, |region| address.wrapping_add(region.offset()))
    }
}

/// True if `writer`, an operation that is not over, writes memory that the caller gave as input of `reader`.
pub(crate) fn writes_input(writer: (&BoundCall, &Execution), reader: (&BoundCall, &Execution)) -> bool {
    let inputs = match &reader.1.input_copy {
        Some(copy) => copy.pieces.iter().map(|&(start, bytes)| (start, start + bytes)).collect(),
        None => ranges(reader.0, reader.1, Buffer::In),
    };
    let outputs = ranges(writer.0, writer.1, Buffer::Out);
    inputs.iter().any(|input| outputs.iter().any(|output| input.0 < output.1 && output.0 < input.1))
}

/// Address ranges of a buffer: one if its blocks are in a row, else one for each block.
fn ranges(bound: &BoundCall, execution: &Execution, buffer: Buffer) -> Vec<(usize, usize)> {
    let table = buffer as usize;
    // This rank has no such buffer.
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
    // From the base on, which is an address of the region then.
    let end = blocks.map(|(_, end)| end).max();
    end.map(|end| (execution.bases[table], end)).into_iter().collect()
}
