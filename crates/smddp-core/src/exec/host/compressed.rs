//! Executor for calls with compression between nodes: 32-bit floats are encoded when they leave the node, and decoded
//! on arrival.
//!
//! Inside a node, elements are sent unchanged. If all ranks receive the same data, the rank that owns or computes it
//! first rounds it, also in its own buffer. Encoding it again is then exact.

use std::mem::MaybeUninit;

use smddp_base::Mismatch;
use smddp_group::Group;

use super::{Host, SlotAddress};
use crate::bind::{BlockRun, Compression, IncomingMessage, Reduce};
use crate::exec::walk::{Execution, StepExecutor, StepResult, with_buffer};
use crate::kernels::{copy, copy_tee, decode, encode, round};

const FLOAT_BYTES: usize = size_of::<f32>();
/// Elements reduced at a time, so that they fit in the first-level cache. A multiple of the group of every format.
const CHUNK: usize = 1024;

pub(super) struct CompressedHost<'a, 'b> {
    pub(super) host: Host<'a>,
    pub(super) compression: &'b Compression,
}

impl StepExecutor for CompressedHost<'_, '_> {
    type Error = Mismatch;
    type Slot = (usize, SlotAddress);

    fn execution(&mut self) -> &mut Execution {
        self.host.execution
    }

    fn group(&mut self) -> &mut Group {
        self.host.group
    }

    fn slot(
        &mut self,
        channel: usize,
        run: BlockRun,
        segment: usize,
    ) -> StepResult<Self, Option<Self::Slot>> {
        self.host.slot(channel, run, segment)
    }

    fn send(
        &mut self,
        (channel, slot): Self::Slot,
        source: BlockRun,
        tee: Option<BlockRun>,
        segment: usize,
    ) -> StepResult<Self> {
        let Compression { format, .. } = *self.compression;
        let (remote, rounds) = (self.compression.sends[channel], self.compression.rounds(source));
        let mut at = 0;
        for i in 0..source.blocks {
            let bytes = self.host.bound.segment_bytes(source.buffer, source.block + i, segment);
            let from = self.host.address(source, source.block + i, segment) as *const u8;
            let dst = tee.map(|tee| self.host.address(tee, tee.block + i, segment) as *mut u8);
            let (to, n) = (slot.wrapping_add(at), bytes / FLOAT_BYTES);
            // SAFETY: the slot belongs to this operation and holds the message (bind sized it). `from` and `dst` are
            // in the buffers of the call, which only this thread accesses until the operation is over. They are equal
            // or do not overlap.
            unsafe {
                match (remote, rounds) {
                    (true, _) => encode(format, to, from, n),
                    (false, true) => round(format, to, from, n),
                    (false, false) => copy(to, from, bytes, false),
                }
                match dst {
                    Some(dst) if rounds => round(format, dst, from, n),
                    Some(dst) if dst.cast_const() != from => {
                        copy(dst, from, bytes, self.host.execution.stream);
                    }
                    _ => {}
                }
            }
            at += self.compression.size(remote, bytes);
        }
        self.host.group.publish(channel, at);
        Ok(())
    }

    fn receive(
        &mut self,
        (from, message): (&IncomingMessage, *const u8),
        to: BlockRun,
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self, bool> {
        let Compression { format, .. } = *self.compression;
        let compressed_in = self.compression.receives[from.recv_channel];
        let compressed_out = forward_slot.is_some_and(|(channel, _)| self.compression.sends[channel]);
        let slot = forward_slot.map(|(_, slot)| slot);
        let stream = self.host.execution.stream;
        let (mut source_offset, mut sent_bytes) = (self.host.bound.skipped_bytes(from, segment), 0);
        for block in to.range() {
            let bytes = self.host.bound.segment_bytes(to.buffer, block, segment);
            let dst = self.host.address(to, block, segment) as *mut u8;
            let (piece, n) = (message.wrapping_add(source_offset), bytes / FLOAT_BYTES);
            let slot = slot.map(|slot| slot.wrapping_add(sent_bytes));
            // SAFETY: the message is valid until it is released and holds these elements in this form (the sizes of
            // sender and receiver were compared). `dst` is in the buffers of the call; the slot belongs to this
            // operation. None overlap.
            unsafe {
                match (compressed_in, slot) {
                    (false, None) => copy(dst, piece, bytes, stream),
                    (false, Some(slot)) if !compressed_out => copy_tee(slot, dst, piece, bytes, stream),
                    (false, Some(slot)) => {
                        copy(dst, piece, bytes, stream);
                        encode(format, slot, piece, n);
                    }
                    (true, None) => decode(format, dst, piece, n),
                    (true, Some(slot)) => {
                        decode(format, dst, piece, n);
                        match compressed_out {
                            true => copy(slot, piece, format.bytes(n), false),
                            false => copy(slot, dst, bytes, false),
                        }
                    }
                }
            }
            source_offset += self.compression.size(compressed_in, bytes);
            sent_bytes += self.compression.size(compressed_out, bytes);
        }
        if let Some((channel, _)) = forward_slot {
            self.host.group.publish(channel, sent_bytes);
        }
        Ok(true)
    }

    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self> {
        if segment >= step.result.segments {
            return Ok(());
        }
        let own = step.own.map_or(messages.len(), |(at, _)| at);
        let inputs = messages.len() + usize::from(step.own.is_some());
        let sent_bytes = with_buffer(inputs, (std::ptr::null(), false), |sources| {
            for (i, (message, from)) in messages.iter().zip(&step.from).enumerate() {
                let first = message.wrapping_add(self.host.bound.skipped_bytes(from, segment));
                sources[i + usize::from(i >= own)] = (first, self.compression.receives[from.recv_channel]);
            }
            let mut sent_bytes = 0;
            for i in 0..step.result.blocks {
                if let Some((at, run)) = step.own {
                    sources[at] = (self.host.address(run, run.block + i, segment) as *const u8, false);
                }
                let out = self.host.address(step.result, step.result.block + i, segment) as *mut u8;
                let bytes = self.host.bound.segment_bytes(step.result.buffer, step.result.block + i, segment);
                let to = forward_slot
                    .map(|(channel, slot)| (slot.wrapping_add(sent_bytes), self.compression.sends[channel]));
                self.combine(step, sources, step.keep.then_some(out), to, bytes / FLOAT_BYTES);
                // In every message, the next block follows this one.
                for (source, compressed) in sources.iter_mut() {
                    *source = source.wrapping_add(self.compression.size(*compressed, bytes));
                }
                sent_bytes += self.compression.size(to.is_some_and(|(_, remote)| remote), bytes);
            }
            sent_bytes
        });
        if let Some((channel, _)) = forward_slot {
            self.host.group.publish(channel, sent_bytes);
        }
        Ok(())
    }

    fn copy(&mut self, source: BlockRun, to: BlockRun, finish: bool, segment: usize) -> StepResult<Self> {
        if !self.compression.rounds(source) {
            return self.host.copy(source, to, finish, segment);
        }
        for (block, dst) in source.range().zip(to.range()) {
            let n = self.host.bound.segment_bytes(source.buffer, block, segment) / FLOAT_BYTES;
            let from = self.host.address(source, block, segment) as *const u8;
            let dst = self.host.address(to, dst, segment) as *mut u8;
            // SAFETY: both ranges are in the buffers of the call. They are equal or do not overlap.
            unsafe { round(self.compression.format, dst, from, n) };
        }
        Ok(())
    }
}

impl CompressedHost<'_, '_> {
    /// Reduces one block, from sources that may be compressed, to `out` and to a slot that may be compressed.
    fn combine(
        &self,
        step: &Reduce,
        sources: &[(*const u8, bool)],
        out: Option<*mut u8>,
        forward_slot: Option<(SlotAddress, bool)>,
        n: usize,
    ) {
        let Some(kernel) = self.host.bound.kernel else { return };
        let format = self.compression.format;
        let scale = if step.finish { self.host.execution.scale } else { None };
        let rounds = step.finish && self.compression.rounds_results;
        let mut scratch = [const { MaybeUninit::<[f32; CHUNK]>::uninit() }; 2];
        let [sum, decoded] = scratch.each_mut().map(|scratch| scratch.as_mut_ptr().cast::<u8>());
        let none = std::ptr::null_mut();
        for first in (0..n).step_by(CHUNK) {
            let count = CHUNK.min(n - first);
            // SAFETY: every source holds `n` elements in its form: messages until they are released, own blocks in
            // the buffers of the call. The call's output and the operation's slot do, too. `sum` and `decoded` hold a
            // chunk. A chunk starts at a whole group of the format. The output may equal one of the sources, which
            // has been read when the output is written.
            unsafe {
                let plain = |&(source, compressed): &(*const u8, bool), scratch: *mut u8| {
                    if compressed {
                        decode(format, scratch, source.wrapping_add(format.bytes(first)), count);
                        return scratch.cast_const();
                    }
                    source.wrapping_add(FLOAT_BYTES * first)
                };
                let mut left = plain(&sources[0], sum);
                if sources.len() == 1 {
                    kernel.run(sum, none, &[left], count, scale, false);
                }
                for (i, source) in sources.iter().enumerate().skip(1) {
                    let scale = scale.filter(|_| i + 1 == sources.len());
                    kernel.run(sum, none, &[left, plain(source, decoded)], count, scale, false);
                    left = sum;
                }
                if rounds {
                    round(format, sum, sum, count);
                }
                if let Some(out) = out {
                    copy(out.wrapping_add(FLOAT_BYTES * first), sum, FLOAT_BYTES * count, false);
                }
                match forward_slot {
                    Some((slot, true)) => encode(format, slot.wrapping_add(format.bytes(first)), sum, count),
                    Some((slot, false)) => {
                        copy(slot.wrapping_add(FLOAT_BYTES * first), sum, FLOAT_BYTES * count, false)
                    }
                    None => {}
                }
            }
        }
    }
}
