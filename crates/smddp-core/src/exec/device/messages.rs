//! Messages of device memory: by reference, or through pinned memory.

use smddp_cuda::Address;
use smddp_plan::Buffer;

use super::{DeviceExecutor, ExecError, OutgoingMessage};
use crate::bind::{BlockRun, BoundCall, Compression, DESCRIPTOR, IncomingMessage};
use crate::device::reduction::Pieces;
use crate::kernels::{decode, encode};

/// Target of an outgoing message.
pub(super) enum SendTarget {
    /// A descriptor in this staging slot: the reader copies from this rank's memory.
    Descriptor(*mut u8),
    Slot(usize),
}

/// Location of an incoming message.
pub(super) enum MessageSource {
    ByReference(MessageDescriptor),
    /// A pinned slot, filled by this message from its beginning.
    Slot(usize),
}

/// Content of a message by reference.
pub(super) struct MessageDescriptor {
    rank: usize,
    /// Value of the sender's progress flag once the data is ready.
    ready_at: u64,
    /// Export token of the region; 0 for a message without bytes.
    token: u64,
    offset: u64,
    /// True if the pieces are contiguous; false if each block is at its place in the sender's buffer.
    packed: bool,
}

/// Copies one segment of a run from a pinned slot to a staging slot (`leaves`), or back. In staging slots it may be
/// compressed. Returns its bytes there.
///
/// # Safety
///
/// The segment is at `from`, and `to` has memory for it. Nothing else uses either range during the call.
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
        let in_slot = compression.map_or(bytes, |compression| compression.size(true, bytes));
        // SAFETY: the caller's contract. Compressed data consists of 32-bit floats.
        unsafe {
            match compression {
                Some(compression) if leaves => encode(compression.format, to, from, bytes / size_of::<f32>()),
                Some(compression) => decode(compression.format, to, from, bytes / size_of::<f32>()),
                None => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
        let (taken, sent_bytes) = if leaves { (bytes, in_slot) } else { (in_slot, bytes) };
        (from, to) = (from.wrapping_add(taken), to.wrapping_add(sent_bytes));
        all += in_slot;
    }
    all
}

impl DeviceExecutor<'_> {
    /// Sends one segment of `run`, which is in the buffers of the call.
    pub(super) fn message(
        &mut self,
        (channel, send_channel): (usize, SendTarget),
        run: BlockRun,
        segment: usize,
    ) -> Result<(), ExecError> {
        let bytes = self.bound.message_bytes(run, segment);
        match send_channel {
            SendTarget::Descriptor(slot) => {
                let (ready_at, place) = self.export_run(run, segment, bytes)?;
                self.publish_descriptor(channel, slot, ready_at, place, bytes)?;
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

    /// Exports one segment of `run`. Returns (value of the progress flag, (token, offset, packed)). Memory that
    /// cannot be exported, and blocks that are not adjacent, are copied to a slab first.
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
        let is_contiguous = run.range().all(|block| {
            let found = self.execution.address(self.bound, run.buffer, block, 0);
            let follows = found == next;
            next = found + self.bound.length(run.buffer, block);
            follows
        });
        if is_contiguous
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
            ExecError::Device("memory of this device cannot be exported to other processes".to_owned())
        })?;
        Ok((token, offset, true))
    }

    /// Publishes a message by reference. Small calls publish all messages of one pass together, so that the flag
    /// write and this stream's own waits take one driver call.
    pub(super) fn publish_descriptor(
        &mut self,
        channel: usize,
        slot: *mut u8,
        ready_at: u64,
        (token, offset, packed): (u64, u64, bool),
        bytes: usize,
    ) -> Result<(), ExecError> {
        let flags = [ready_at, token, offset, u64::from(packed)];
        for (i, flag) in flags.into_iter().enumerate() {
            // SAFETY: a slot of DESCRIPTOR bytes that belongs to this operation until it is published.
            unsafe { slot.cast::<u64>().add(i).write_unaligned(flag) };
        }
        self.op.unpublished.push((channel, bytes.min(DESCRIPTOR)));
        if self.site.is_small { Ok(()) } else { self.publish() }
    }

    /// Reads the descriptor of a message, or copies the message to a pinned slot. Returns `None` if no pinned slot is
    /// free.
    pub(super) fn take_message(
        &mut self,
        from: &IncomingMessage,
        message: *const u8,
        segment: usize,
        needed: bool,
    ) -> Result<Option<MessageSource>, ExecError> {
        if self.bound.by_reference[1][from.recv_channel] {
            // SAFETY: the message has DESCRIPTOR bytes and is valid until it is released.
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
        // SAFETY: the message holds these elements (the sizes of both ranks were compared) and is valid until it is
        // released. No stream uses the slot.
        unsafe { copy_message(self.bound, compression, (from.message, segment), false, (message, at)) };
        Ok(Some(MessageSource::Slot(slot)))
    }

    /// Returns the pieces of the first `blocks` taken blocks of a message. Orders the stream after their data.
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
        let taken = from.skipped_blocks..from.skipped_blocks + blocks;
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
                let stride = |block: usize| if local.packed { piece(block) } else { length(block) };
                // The offset comes from another process and is not trusted.
                let outside = || {
                    let (rank, offset) = (local.rank, local.offset);
                    ExecError::Peer(format!(
                        "rank {rank} sent offset {offset}, which is outside of its exported memory"
                    ))
                };
                let mut at = (0..from.skipped_blocks).map(stride).sum::<usize>();
                taken
                    .map(|block| {
                        let bytes = piece(block);
                        let found = local.offset.checked_add((at + step) as u64);
                        let found = found.and_then(|offset| mapping.pieces(offset, bytes));
                        at += stride(block);
                        found.ok_or_else(outside)
                    })
                    .collect()
            }
        }
    }
}
