//! Messages of device memory: by reference, or through pinned memory.

use smddp_cuda::Address;
use smddp_plan::Buffer;

use super::{DeviceExecutor, ExecError, OutgoingMessage};
use crate::bind::{BlockRun, BoundCall, Compression, DESCRIPTOR, IncomingMessage};
use crate::device::reduction::Pieces;
use crate::kernels::{decode, encode};

/// Where a message is written to.
pub(super) enum SendTarget {
    /// Words in a cell: the reader copies from this rank's memory.
    Descriptor(*mut u8),
    Slot(usize),
}

/// Where a message lies.
pub(super) enum MessageSource {
    ByReference(MessageDescriptor),
    /// A slot that this message fills from its beginning.
    Slot(usize),
}

/// Words of a message by reference.
pub(super) struct MessageDescriptor {
    rank: usize,
    /// The data is there when its writer's progress word has reached it.
    ready_at: u64,
    /// 0: a message without bytes.
    token: u64,
    offset: u64,
    /// The pieces lie one behind the other, as in a cell; else each block lies in the writer's buffer.
    packed: bool,
}

/// Copies one segment of a run from a slot to a cell, where it leaves, or back, where it arrives. In cells it may be in a format. The
/// bytes of it there.
///
/// # Safety
/// It lies at `from`, there is room for it at `to`, and nobody else uses that meanwhile.
pub(super) unsafe fn copy_message(
    bound: &BoundCall,
    compression: Option<&Compression>,
    (run, segment): (BlockRun, usize),
    leaves: bool,
    (mut from, mut to): (*const u8, *mut u8),
) -> usize {
    let mut all = 0;
    for block in run.range() {
        let bytes = bound.segment_bytes(run.buffer, block, segment);
        let in_cell = compression.map_or(bytes, |compression| compression.size(true, bytes));
        // SAFETY: the caller's promise; what is coded is 32-bit floats.
        unsafe {
            match compression {
                Some(compression) if leaves => encode(compression.format, to, from, bytes / size_of::<f32>()),
                Some(compression) => decode(compression.format, to, from, bytes / size_of::<f32>()),
                None => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
        let (taken, sent_bytes) = if leaves { (bytes, in_cell) } else { (in_cell, bytes) };
        (from, to) = (from.wrapping_add(taken), to.wrapping_add(sent_bytes));
        all += in_cell;
    }
    all
}

impl DeviceExecutor<'_> {
    /// A message of one segment of `run`, which lies in the call's buffers.
    pub(super) fn message(
        &mut self,
        (channel, send_channel): (usize, SendTarget),
        run: BlockRun,
        segment: usize,
    ) -> Result<(), ExecError> {
        let bytes = self.bound.message_bytes(run, segment);
        match send_channel {
            SendTarget::Descriptor(cell) => {
                let (ready_at, place) = self.export_run(run, segment, bytes)?;
                self.publish_descriptor(channel, cell, ready_at, place, bytes)?;
            }
            SendTarget::Slot(slot) => {
                self.order_after_writes(run.buffer)?;
                let at = self.site.pinned_slots().address(slot) as Address;
                self.copy_packed(at, self.addresses(run, segment));
                self.enqueue_send(channel, slot, run, segment)?;
            }
        }
        Ok(())
    }

    pub(super) fn enqueue_send(
        &mut self,
        channel: usize,
        slot: usize,
        run: BlockRun,
        segment: usize,
    ) -> Result<(), ExecError> {
        let filled_at = self.site.host_mark()?;
        self.op.outbox.push_back(OutgoingMessage { channel, slot, run, segment, filled_at });
        Ok(())
    }

    /// (when the data is there, (number, offset, packed)): where readers find one segment of `run`. Memory that they cannot
    /// have, or blocks that do not follow each other, are copied to where they can.
    fn export_run(
        &mut self,
        run: BlockRun,
        segment: usize,
        bytes: usize,
    ) -> Result<(u64, (u64, u64, bool)), ExecError> {
        let ready_at = |executor: &mut Self| {
            if run.buffer == Buffer::In { Ok(executor.op.ready_at) } else { executor.site.mark() }
        };
        if bytes == 0 {
            return Ok((ready_at(self)?, (0, 0, false)));
        }
        let first = self.execution.address(self.bound, run.buffer, run.block, 0);
        let mut next = first;
        let in_a_row = run.range().all(|block| {
            let found = self.execution.address(self.bound, run.buffer, block, 0);
            let follows = found == next;
            next = found + self.bound.length(run.buffer, block);
            follows
        });
        if in_a_row
            && let Some((token, offset)) = self.site.regions().export(first as Address, next - first)?
        {
            return Ok((ready_at(self)?, (token, offset, false)));
        }
        self.order_after_writes(run.buffer)?;
        let slab = self.slab(bytes)?;
        self.copy_packed(slab, self.addresses(run, segment));
        Ok((self.site.mark()?, self.export_slab(slab, bytes)?))
    }

    pub(super) fn export_slab(&mut self, slab: Address, bytes: usize) -> Result<(u64, u64, bool), ExecError> {
        let (token, offset) = self.site.regions().export(slab, bytes)?.ok_or_else(|| {
            ExecError::Device("this device's own memory cannot be had by other processes".to_owned())
        })?;
        Ok((token, offset, true))
    }

    /// Publishes a message by reference; that of a small call when the others of the same turn are, so that the write it waits for
    /// and this stream's own waits are one call of the driver.
    pub(super) fn publish_descriptor(
        &mut self,
        channel: usize,
        cell: *mut u8,
        ready_at: u64,
        (token, offset, packed): (u64, u64, bool),
        bytes: usize,
    ) -> Result<(), ExecError> {
        let flags = [ready_at, token, offset, u64::from(packed)];
        for (i, flag) in flags.into_iter().enumerate() {
            // SAFETY: a cell of DESCRIPTOR bytes, ours until it is published.
            unsafe { cell.cast::<u64>().add(i).write_unaligned(flag) };
        }
        self.op.unpublished.push((channel, bytes.min(DESCRIPTOR)));
        if self.site.is_small { Ok(()) } else { self.publish() }
    }

    /// What a message says, or its bytes in a slot: `None` where there is no slot.
    pub(super) fn take_message(
        &mut self,
        from: &IncomingMessage,
        message: *const u8,
        segment: usize,
        needed: bool,
    ) -> Result<Option<MessageSource>, ExecError> {
        if self.bound.by_reference[1][from.recv_channel] {
            // SAFETY: the message is DESCRIPTOR bytes and stays where it is until it is released.
            let flag = |i: usize| unsafe { message.cast::<u64>().add(i).read_unaligned() };
            let rank = self.bound.channel_layout.recv_channels[from.recv_channel].rank;
            let local = MessageDescriptor {
                rank,
                ready_at: flag(0),
                token: flag(1),
                offset: flag(2),
                packed: flag(3) != 0,
            };
            return Ok(Some(MessageSource::ByReference(local)));
        }
        let bytes = self.bound.message_bytes(from.message, segment);
        let free = needed || !self.site.pinned_slots().has_pending_release();
        let Some(slot) = self.site.slot(bytes, free)? else { return Ok(None) };
        let at = self.site.pinned_slots().address(slot);
        self.site.handle.device.report_host_access(at as Address, bytes, true);
        let compression =
            self.bound.compression.as_ref().filter(|compression| compression.receives[from.recv_channel]);
        // SAFETY: the message holds these elements (both ranks' sizes were held against each other) and stays until it is
        // released; no stream uses the slot.
        unsafe { copy_message(self.bound, compression, (from.message, segment), false, (message, at)) };
        Ok(Some(MessageSource::Slot(slot)))
    }

    /// Where the first `blocks` blocks that are taken of a message lie; the stream waits until they do.
    pub(super) fn sources(
        &mut self,
        origin: &MessageSource,
        from: &IncomingMessage,
        segment: usize,
        blocks: usize,
    ) -> Result<Vec<Pieces>, ExecError> {
        let run = from.message;
        let length = |block: usize| self.bound.length(run.buffer, run.block + block);
        let piece = |block: usize| self.bound.segment_bytes(run.buffer, run.block + block, segment);
        let taken = from.before..from.before + blocks;
        match origin {
            MessageSource::Slot(slot) => {
                let base = self.site.pinned_slots().address(*slot) as Address;
                let mut at = base + self.bound.skipped_bytes(from, segment) as u64;
                Ok(taken
                    .map(|block| {
                        let bytes = piece(block);
                        at += bytes as u64;
                        vec![(at - bytes as u64, bytes)]
                    })
                    .collect())
            }
            MessageSource::ByReference(local) => {
                self.site.await_progress(local.rank, local.ready_at);
                if local.token == 0 || blocks == 0 {
                    return Ok(vec![Vec::new(); blocks]);
                }
                let number = self.op.number;
                let mapping = self.site.import(local.rank, local.token, number).map_err(ExecError::Peer)?;
                let step = if local.packed { 0 } else { segment * self.bound.choice.segment };
                let whole = |block: usize| if local.packed { piece(block) } else { length(block) };
                // The offset is another process's word.
                let outside = || {
                    let (rank, offset) = (local.rank, local.offset);
                    ExecError::Peer(format!("rank {rank} names memory at {offset}, outside of what it lends"))
                };
                let mut at = (0..from.before).map(whole).sum::<usize>();
                taken
                    .map(|block| {
                        let bytes = piece(block);
                        let found = local.offset.checked_add((at + step) as u64);
                        let found = found.and_then(|offset| mapping.pieces(offset, bytes));
                        at += whole(block);
                        found.ok_or_else(outside)
                    })
                    .collect()
            }
        }
    }
}
