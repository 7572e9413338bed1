//! Start of an operation on a device: its order after the caller's stream, and the preparation of its input.

use smddp_cuda::{Address, MAX_SOURCES};
use smddp_plan::{Algorithm, Buffer, Collective, Format};

use super::{DeviceExecutor, ExecError};
use crate::call::types::RedOp;
use crate::device::reduction;

/// Maximum bytes of a call that a kernel copies. One launch costs the host less time than one driver copy, for any
/// number of copies.
const MAX_KERNEL_COPY_BYTES: usize = 256 << 10;

impl DeviceExecutor<'_> {
    /// Orders the operation after the earlier work of the caller's stream.
    pub(super) fn open(&mut self) -> Result<(), ExecError> {
        self.check_targets()?;
        self.site.is_small = self.bound.bytes <= MAX_KERNEL_COPY_BYTES
            && self.is_on_device(Buffer::In)
            && self.is_on_device(Buffer::Out);
        if let Some(after) = self.op.after.take() {
            self.site.after(after.event())?;
        }
        if self.bound.scratch > 0 {
            self.execution.bases[2] = self.slab(self.bound.scratch)? as usize;
        }
        self.prepare_input()?;
        if self.bound.by_reference[0].contains(&true) {
            self.op.ready_at = self.site.mark()?;
        }
        Ok(())
    }

    /// Checks that a reduction's output is memory of the device: a kernel that writes anywhere else breaks the
    /// context. Copies accept any memory, and exports check the memory that peers read.
    fn check_targets(&mut self) -> Result<(), ExecError> {
        let out = Buffer::Out as usize;
        // Ranks without a result have no output buffer.
        let placed = self.execution.bases[out] != 0 || self.execution.lists[out].is_some();
        if !self.collective.reduces() || !placed {
            return Ok(());
        }
        if let Some(block) = self.bound.lengths[out].iter().position(|&bytes| bytes > 0) {
            let at = self.execution.address(self.bound, Buffer::Out, block, 0);
            self.site.handle.device.region(at as Address)?;
        }
        Ok(())
    }

    /// Returns true if all blocks of a buffer are memory of the call's device.
    fn is_on_device(&self, buffer: Buffer) -> bool {
        let device = &self.site.handle.device;
        let is_owned = |base: usize| base == 0 || device.owns(base as Address);
        match &self.execution.lists[buffer as usize] {
            Some(blocks) => blocks.iter().all(|&block| is_owned(block)),
            None => is_owned(self.execution.bases[buffer as usize]),
        }
    }

    /// Copies the input if it is premultiplied, or if it would be overwritten while peers read it. That is so if it
    /// overlaps the output in a form that no plan supports. It is also so for calls in place, except with the mesh:
    /// the mesh overwrites a block only with the result of its last reader.
    fn prepare_input(&mut self) -> Result<(), ExecError> {
        if let Some(compression) =
            self.bound.compression.as_ref().filter(|compression| compression.rounds_inputs)
        {
            return self.round_input(compression.format);
        }
        let factor = match self.op.redop {
            RedOp::PremulSum(factor) if self.collective.reduces() => Some(factor),
            _ => None,
        };
        let ordered =
            self.bound.choice.algorithm == Algorithm::Mesh && self.bound.lengths[0].len() <= MAX_SOURCES;
        let overwrites = match self.collective {
            Collective::AllToAll => true,
            collective => collective.reduces() && !ordered,
        };
        let local = self.bound.by_reference[0].contains(&true);
        if factor.is_none() && !self.op.overlaps && !(local && overwrites && self.in_place()) {
            return Ok(());
        }
        // An input buffer that holds only this rank's block starts with that block.
        let blocks = match self.collective {
            Collective::AllGather | Collective::Gather => self.group.info().rank..self.group.info().rank + 1,
            _ => 0..self.bound.lengths[0].len(),
        };
        let base = self.slab(self.bound.lengths[0][blocks.clone()].iter().sum())?;
        for block in blocks {
            let from = self.execution.address(self.bound, Buffer::In, block, 0) as Address;
            let to = base + self.bound.offsets[0][block] as u64;
            let bytes = self.bound.lengths[0][block];
            match factor {
                Some(factor) if bytes > 0 => {
                    let reduction_kind = self.reduction_kind()?;
                    reduction::premultiply(self.site, reduction_kind, from, to, bytes, factor)?;
                }
                _ => self.site.copy(to, from, bytes),
            }
        }
        self.site.flush()?;
        self.execution.bases[0] = base as usize;
        self.execution.lists[0] = None;
        Ok(())
    }

    /// Rounds an all_gather's own block to the wire format, in memory of this site, so that all ranks get equal bits.
    fn round_input(&mut self, format: Format) -> Result<(), ExecError> {
        let block = self.group.info().rank;
        let bytes = self.bound.length(Buffer::In, block);
        if bytes > 0 {
            let from = self.execution.address(self.bound, Buffer::In, block, 0) as Address;
            let rounded = self.slab(bytes)?;
            reduction::round(self.site, format, from, rounded, bytes)?;
            self.execution.bases[0] = rounded as usize - self.bound.offsets[0][block];
            self.execution.lists[0] = None;
        }
        Ok(())
    }

    fn in_place(&self) -> bool {
        let ranges = |buffer: Buffer| -> Vec<(usize, usize)> {
            let lengths = &self.bound.lengths[buffer as usize];
            let at = |block| self.execution.address(self.bound, buffer, block, 0);
            (0..lengths.len()).filter(|&b| lengths[b] > 0).map(|b| (at(b), at(b) + lengths[b])).collect()
        };
        let outputs = ranges(Buffer::Out);
        ranges(Buffer::In).iter().any(|i| outputs.iter().any(|o| i.0 < o.1 && o.0 < i.1))
    }
}
