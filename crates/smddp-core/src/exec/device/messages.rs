//! Messages of device memory: by reference, or through pinned memory.

use smddp_cuda::Address;
use smddp_plan::Buffer;

use super::{OutgoingMessage, Trouble, Turn};
use crate::bind::{Bound, Coding, DESCRIPTOR, Incoming, Run};
use crate::device::reduction::Pieces;
use crate::kernels::{decode, encode};

/// Where a message is written to.
pub(super) enum SendChannel {
    /// Words in a cell: the reader copies from this rank's memory.
    LocalChannels(*mut u8),
    Far(usize),
}

/// Where a message lies.
pub(super) enum RecvChannel {
    LocalChannels(LocalChannels),
    /// A slot that this message fills from its beginning.
    Far(usize),
}

/// Words of a message by reference.
pub(super) struct LocalChannels {
    rank: usize,
    /// The data is there when its writer's progress word has reached it.
    ready: u64,
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
pub(super) unsafe fn carry(
    bound: &Bound,
    coding: Option<&Coding>,
    (run, segment): (Run, usize),
    leaves: bool,
    (mut from, mut to): (*const u8, *mut u8),
) -> usize {
    let mut all = 0;
    for block in run.range() {
        let bytes = bound.piece(run.buffer, block, segment);
        let in_cell = coding.map_or(bytes, |coding| coding.size(true, bytes));
        // SAFETY: the caller's promise; what is coded is 32-bit floats.
        unsafe {
            match coding {
                Some(coding) if leaves => encode(coding.format, to, from, bytes / size_of::<f32>()),
                Some(coding) => decode(coding.format, to, from, bytes / size_of::<f32>()),
                None => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
        let (taken, given) = if leaves { (bytes, in_cell) } else { (in_cell, bytes) };
        (from, to) = (from.wrapping_add(taken), to.wrapping_add(given));
        all += in_cell;
    }
    all
}

impl Turn<'_> {
    /// A message of one segment of `run`, which lies in the call's buffers.
    pub(super) fn message(
        &mut self,
        (channel, send_channel): (usize, SendChannel),
        run: Run,
        segment: usize,
    ) -> Result<(), Trouble> {
        let bytes = self.bound.message(run, segment);
        match send_channel {
            SendChannel::LocalChannels(cell) => {
                let (ready, place) = self.show(run, segment, bytes)?;
                self.describe(channel, cell, ready, place, bytes)?;
            }
            SendChannel::Far(slot) => {
                self.order(run.buffer)?;
                let at = self.site.bounce().address(slot) as Address;
                self.pack(at, self.pieces(run, segment));
                self.post(channel, slot, run, segment)?;
            }
        }
        Ok(())
    }

    pub(super) fn post(
        &mut self,
        channel: usize,
        slot: usize,
        run: Run,
        segment: usize,
    ) -> Result<(), Trouble> {
        let filled = self.site.host_mark()?;
        self.op.outbox.push_back(OutgoingMessage { channel, slot, run, segment, filled });
        Ok(())
    }

    /// (when the data is there, (number, offset, packed)): where readers find one segment of `run`. Memory that they cannot
    /// have, or blocks that do not follow each other, are copied to where they can.
    fn show(&mut self, run: Run, segment: usize, bytes: usize) -> Result<(u64, (u64, u64, bool)), Trouble> {
        let ready =
            |turn: &mut Self| if run.buffer == Buffer::In { Ok(turn.op.ready) } else { turn.site.mark() };
        if bytes == 0 {
            return Ok((ready(self)?, (0, 0, false)));
        }
        let first = self.execution.address(self.bound, run.buffer, run.block, 0);
        let mut next = first;
        let in_a_row = run.range().all(|block| {
            let found = self.execution.address(self.bound, run.buffer, block, 0);
            let follows = found == next;
            next = found + self.bound.length(run.buffer, block);
            follows
        });
        if in_a_row && let Some((token, offset)) = self.site.regions().lend(first as Address, next - first)? {
            return Ok((ready(self)?, (token, offset, false)));
        }
        self.order(run.buffer)?;
        let slab = self.slab(bytes)?;
        self.pack(slab, self.pieces(run, segment));
        Ok((self.site.mark()?, self.show_slab(slab, bytes)?))
    }

    pub(super) fn show_slab(&mut self, slab: Address, bytes: usize) -> Result<(u64, u64, bool), Trouble> {
        let (token, offset) = self.site.regions().lend(slab, bytes)?.ok_or_else(|| {
            Trouble::Device("this device's own memory cannot be had by other processes".to_owned())
        })?;
        Ok((token, offset, true))
    }

    /// Publishes a message by reference; that of a small call when the others of the same turn are, so that the write it waits for
    /// and this stream's own waits are one call of the driver.
    pub(super) fn describe(
        &mut self,
        channel: usize,
        cell: *mut u8,
        ready: u64,
        (token, offset, packed): (u64, u64, bool),
        bytes: usize,
    ) -> Result<(), Trouble> {
        let words = [ready, token, offset, u64::from(packed)];
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: a cell of DESCRIPTOR bytes, ours until it is published.
            unsafe { cell.cast::<u64>().add(i).write_unaligned(word) };
        }
        self.op.unpublished.push((channel, bytes.min(DESCRIPTOR)));
        if self.site.few { Ok(()) } else { self.publish() }
    }

    /// What a message says, or its bytes in a slot: `None` where there is no slot.
    pub(super) fn take(
        &mut self,
        from: &Incoming,
        message: *const u8,
        segment: usize,
        needed: bool,
    ) -> Result<Option<RecvChannel>, Trouble> {
        if self.bound.local[1][from.recv_channel] {
            // SAFETY: the message is DESCRIPTOR bytes and stays where it is until it is released.
            let word = |i: usize| unsafe { message.cast::<u64>().add(i).read_unaligned() };
            let rank = self.bound.channel_layout.recv_channels[from.recv_channel].rank;
            let local =
                LocalChannels { rank, ready: word(0), token: word(1), offset: word(2), packed: word(3) != 0 };
            return Ok(Some(RecvChannel::LocalChannels(local)));
        }
        let bytes = self.bound.message(from.message, segment);
        let free = needed || !self.site.bounce().moving();
        let Some(slot) = self.site.slot(bytes, free)? else { return Ok(None) };
        let at = self.site.bounce().address(slot);
        self.site.handle.device.host_touches(at as Address, bytes, true);
        let coding = self.bound.coding.as_ref().filter(|coding| coding.ins[from.recv_channel]);
        // SAFETY: the message holds these elements (both ranks' sizes were held against each other) and stays until it is
        // released; no stream uses the slot.
        unsafe { carry(self.bound, coding, (from.message, segment), false, (message, at)) };
        Ok(Some(RecvChannel::Far(slot)))
    }

    /// Where the first `blocks` blocks that are taken of a message lie; the stream waits until they do.
    pub(super) fn sources(
        &mut self,
        recv_channel: &RecvChannel,
        from: &Incoming,
        segment: usize,
        blocks: usize,
    ) -> Result<Vec<Pieces>, Trouble> {
        let run = from.message;
        let length = |block: usize| self.bound.length(run.buffer, run.block + block);
        let piece = |block: usize| self.bound.piece(run.buffer, run.block + block, segment);
        let taken = from.before..from.before + blocks;
        match recv_channel {
            RecvChannel::Far(slot) => {
                let base = self.site.bounce().address(*slot) as Address;
                let mut at = base + self.bound.skipped(from, segment) as u64;
                Ok(taken
                    .map(|block| {
                        let bytes = piece(block);
                        at += bytes as u64;
                        vec![(at - bytes as u64, bytes)]
                    })
                    .collect())
            }
            RecvChannel::LocalChannels(local) => {
                self.site.await_progress(local.rank, local.ready);
                if local.token == 0 || blocks == 0 {
                    return Ok(vec![Vec::new(); blocks]);
                }
                let number = self.op.number;
                let mapping = self.site.borrow(local.rank, local.token, number).map_err(Trouble::Peer)?;
                let step = if local.packed { 0 } else { segment * self.bound.choice.segment };
                let whole = |block: usize| if local.packed { piece(block) } else { length(block) };
                // The offset is another process's word.
                let outside = || {
                    let (rank, offset) = (local.rank, local.offset);
                    Trouble::Peer(format!("rank {rank} names memory at {offset}, outside of what it lends"))
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
