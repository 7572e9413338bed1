//! Executor for host memory.
//!
//! The SAFETY comments rely on this: input and output of a call are disjoint, or share memory in one of the forms
//! that the plans support in place. `Call::needs_input_copy` detects every other form, and such an operation reads a
//! private copy of its input. `call::check` rejects outputs that overlap each other.

mod compressed;

use smddp_base::Mismatch;
use smddp_group::{Group, RecvTarget};
use smddp_plan::{Association, Buffer};
use smddp_shm::ZeroCopySource;

use self::compressed::CompressedHost;
use crate::bind::{BlockRun, BoundCall, IncomingMessage, Reduce, ZeroCopyCandidate};
use crate::exec::walk::{Execution, Progress, StepExecutor, StepResult, walk, with_buffer};
use crate::kernels;
use crate::kernels::helpers::split_work;

/// Advances operation `seq` until it is done or has to wait.
pub(crate) fn advance(
    seq: u64,
    begun: &mut bool,
    bound: &BoundCall,
    execution: &mut Execution,
    group: &mut Group,
) -> Result<Progress, Mismatch> {
    let mut moved = false;
    if !*begun {
        copy_input(execution);
        let symmetric = group.info().has_symmetric();
        if bound.zero_copy.depends_on_overlap(symmetric) {
            execution.in_place = execution.overlaps(bound);
        }
        let sources = if bound.zero_copy.has_candidates(symmetric) {
            zero_copy_sources(bound, execution)
        } else {
            Vec::new()
        };
        let targets = recv_targets(bound, execution);
        // SAFETY: targets are in the buffers of the call, which are valid until the operation ends or the buffers are released.
        if !unsafe { group.begin(seq, bound.fingerprint, &bound.routed, &sources, targets) } {
            return Ok(Progress::Blocked);
        }
        *begun = true;
        moved = true;
    }
    let mut host = Host { bound, execution, group };
    let (done, ran) = match &bound.compression {
        None => walk(bound, &mut host)?,
        Some(compression) => walk(bound, &mut CompressedHost { host, compression })?,
    };
    if done && group.settle()? {
        execution.internode_bytes = group.end();
        return Ok(Progress::Done);
    }
    Ok(Progress::moved(moved || ran))
}

/// Copies the input to the operation's private copy, if it reads one. This must wait until the operation starts,
/// because earlier calls may write the input.
pub(crate) fn copy_input(execution: &mut Execution) {
    let Some(copy) = execution.input_copy.take() else { return };
    let (dtype, mut to) = (execution.dtype, execution.bases[Buffer::In as usize] as *mut u8);
    for &(from, bytes) in &copy.pieces {
        let from = from as *const u8;
        // SAFETY: the caller's blocks are valid until the operation is over. `reserve_input_copy` in `engine::prepare`
        // reserved memory of the operation at `to` for all blocks, so the ranges cannot overlap. Only this thread
        // drives the operation.
        unsafe {
            match copy.factor {
                Some(factor) => drop(kernels::premultiply(dtype, to, from, bytes / dtype.size(), factor)),
                None => kernels::copy(to, from, bytes, false),
            }
        }
        to = to.wrapping_add(bytes);
    }
}

/// Returns the output of a completed call whose output is one flat buffer.
pub(crate) fn flat_output<'a>(bound: &BoundCall, execution: &'a Execution) -> &'a [u8] {
    let at = execution.bases[Buffer::Out as usize];
    if bound.bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's output of `bound.bytes` bytes is valid until the operation is over, and nothing writes to it
    // after the last step.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), bound.bytes) }
}

/// Flips a bit of the output.
#[cfg(test)]
pub(crate) fn flip_output_bit(bound: &BoundCall, execution: &Execution, bit: usize) {
    assert!(bit < 8 * bound.bytes);
    let at = std::ptr::with_exposed_provenance_mut::<u8>(execution.bases[Buffer::Out as usize] + bit / 8);
    // SAFETY: as in `flat_output`; only this thread accesses the output.
    unsafe { *at ^= 1 << (bit % 8) };
}

/// Zero-copy sources of the operation: messages that peers read from the user buffers.
fn zero_copy_sources(bound: &BoundCall, execution: &Execution) -> Vec<ZeroCopySource> {
    let flat = |run: &BlockRun| {
        run.blocks == 1 || !matches!(execution.lists.get(run.buffer as usize), Some(Some(_)))
    };
    bound
        .zero_copy
        .candidates(execution.in_place)
        .filter(|candidate| flat(&candidate.run))
        .map(|&ZeroCopyCandidate { channel, run, single_copy, .. }| ZeroCopySource {
            channel,
            at: execution.address(bound, run.buffer, run.block, 0) as *const u8,
            stride: bound.channel_layout.send_channels[channel].slot_bytes,
            single_copy,
        })
        .collect()
}

/// Returns true if peers may be reading the user buffers of the operation.
pub(crate) fn is_read_by_peers(bound: &BoundCall, execution: &Execution, group: &Group) -> bool {
    bound.zero_copy.has_candidates(group.info().has_symmetric())
        && !zero_copy_sources(bound, execution).is_empty()
}

/// Receive targets of messages that bypass the staging slots.
fn recv_targets(bound: &BoundCall, execution: &Execution) -> impl Iterator<Item = RecvTarget> {
    bound.zero_copy.receives_in_place(execution.in_place).iter().filter_map(|&(channel, to)| {
        let flat = !matches!(execution.lists.get(to.buffer as usize), Some(Some(_)));
        let bytes = match to.contiguous {
            _ if to.blocks == 1 => bound.length(to.buffer, to.block),
            Some((_, bytes)) if flat => bytes,
            _ => return None,
        };
        let at = execution.address(bound, to.buffer, to.block, 0) as *mut u8;
        Some(RecvTarget { channel, at, bytes, stride: bound.choice.segment })
    })
}

/// Moves the bytes with the calling thread.
struct Host<'a> {
    bound: &'a BoundCall,
    execution: &'a mut Execution,
    group: &'a mut Group,
}

/// Address of a staging slot.
type SlotAddress = *mut u8;

impl StepExecutor for Host<'_> {
    type Error = Mismatch;
    /// A channel and its slot.
    type Slot = (usize, SlotAddress);

    fn execution(&mut self) -> &mut Execution {
        self.execution
    }

    fn group(&mut self) -> &mut Group {
        self.group
    }

    #[inline]
    fn slot(&mut self, channel: usize, _: BlockRun, _: usize) -> StepResult<Self, Option<Self::Slot>> {
        Ok(self.group.send_slot(channel).map(|slot| (channel, slot)))
    }

    fn send(
        &mut self,
        (channel, slot): Self::Slot,
        source: BlockRun,
        tee: Option<BlockRun>,
        segment: usize,
    ) -> StepResult<Self> {
        if self.bound.zero_copy.sends_in_place(channel, self.execution.in_place)
            && let Some((from, bytes)) = self.contiguous_segment(source, segment)
        {
            self.store_tee(tee, (from, bytes), segment);
            // SAFETY: the caller's buffers are valid and unchanged until the operation ends or they are released.
            unsafe { self.group.publish_in_place(channel, from as *const u8, bytes) };
            return Ok(());
        }
        let has_distant_readers = self.group.has_distant_readers();
        let contiguous = match tee {
            None => self.contiguous(source).map(|(from, bytes)| (from, from, bytes)),
            Some(tee) => self
                .contiguous(source)
                .zip(self.contiguous(tee))
                .map(|((from, bytes), (dst, _))| (from, dst, bytes)),
        };
        let mut at = 0;
        if let Some((from, bytes)) =
            self.contiguous_segment(source, segment).filter(|(from, _)| *from == slot as usize)
        {
            // The message already is in its slot.
            self.store_tee(tee, (from, bytes), segment);
            at = bytes;
        } else if let Some((from, dst, bytes)) = contiguous {
            self.write_slot(has_distant_readers, slot, from, dst, bytes);
            at = bytes;
        } else {
            for i in 0..source.blocks {
                let bytes = self.bound.segment_bytes(source.buffer, source.block + i, segment);
                let from = self.address(source, source.block + i, segment);
                let dst = tee.map_or(from, |tee| self.address(tee, tee.block + i, segment));
                self.write_slot(has_distant_readers, slot.wrapping_add(at), from, dst, bytes);
                at += bytes;
            }
        }
        self.group.publish(channel, at);
        Ok(())
    }

    fn receive(
        &mut self,
        (from, message): (&IncomingMessage, *const u8),
        to: BlockRun,
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self, bool> {
        let (skip, stream) = (self.bound.skipped_bytes(from, segment), self.execution.stream);
        // The forwarded message leaves from its target, or from a slot.
        let place = forward_slot.and_then(|(channel, _)| {
            let in_place = self.bound.zero_copy.sends_in_place(channel, self.execution.in_place);
            self.contiguous_segment(to, segment).filter(|_| in_place)
        });
        let slot = forward_slot.filter(|_| place.is_none()).map(|(_, slot)| slot);
        let mut taken = 0;
        self.pieces(to, segment, |dst, bytes| {
            let (dst, piece) = (dst as *mut u8, message.wrapping_add(skip + taken));
            // SAFETY: the message is valid until it is released and holds these bytes (the sizes of sender and
            // receiver were compared). `dst` is in the buffers of the call; the slot belongs to this operation. A
            // message that bypassed the staging slots already is at `dst`.
            unsafe {
                match slot {
                    Some(slot) if dst.cast_const() == piece => {
                        kernels::copy(slot.wrapping_add(taken), piece, bytes, false);
                    }
                    Some(slot) => kernels::copy_tee(slot.wrapping_add(taken), dst, piece, bytes, stream),
                    None if dst.cast_const() == piece => {}
                    None => kernels::copy(dst, piece, bytes, stream),
                }
            }
            taken += bytes;
        });
        match (forward_slot, place) {
            (Some((channel, _)), Some((at, _))) => {
                // SAFETY: as in `send`; this operation does not write the block again.
                unsafe { self.group.publish_in_place(channel, at as *const u8, taken) };
            }
            (Some((channel, _)), None) => self.group.publish(channel, taken),
            (None, _) => {}
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
        if segment < step.result.segments {
            let bytes = self.combine(step, messages, forward_slot.map(|(_, slot)| slot), segment);
            if let Some((channel, _)) = forward_slot {
                self.group.publish(channel, bytes);
            }
        }
        Ok(())
    }

    fn copy(&mut self, source: BlockRun, to: BlockRun, finish: bool, segment: usize) -> StepResult<Self> {
        let scale = self.execution.scale.filter(|&n| finish && n > 1);
        for (block, dst) in source.range().zip(to.range()) {
            let bytes = self.bound.segment_bytes(source.buffer, block, segment);
            let from = self.address(source, block, segment) as *const u8;
            let dst = self.address(to, dst, segment) as *mut u8;
            match self.bound.kernel {
                // SAFETY: both ranges are in the buffers of the call. They are equal or do not overlap.
                Some(kernel) if scale.is_some() => unsafe {
                    let count = bytes / self.execution.dtype.size();
                    kernel.run(dst, std::ptr::null_mut(), &[from], count, scale, false);
                },
                _ if dst.cast_const() == from => {}
                // SAFETY: as above.
                _ => unsafe { kernels::copy(dst, from, bytes, self.execution.stream) },
            }
        }
        Ok(())
    }
}

impl Host<'_> {
    fn address(&self, run: BlockRun, block: usize, segment: usize) -> usize {
        self.execution.address(self.bound, run.buffer, block, segment)
    }

    /// Address and bytes of a run, if it is contiguous.
    fn contiguous(&self, run: BlockRun) -> Option<(usize, usize)> {
        let (offset, bytes) = run.contiguous?;
        let table = run.buffer as usize;
        match self.execution.lists.get(table) {
            Some(Some(_)) => None,
            _ => Some((self.execution.bases[table] + offset, bytes)),
        }
    }

    /// Address and bytes of one segment of a run, if it is contiguous.
    fn contiguous_segment(&self, run: BlockRun, segment: usize) -> Option<(usize, usize)> {
        let block = || {
            let bytes = self.bound.segment_bytes(run.buffer, run.block, segment);
            (self.address(run, run.block, segment), bytes)
        };
        self.contiguous(run).or_else(|| (run.blocks == 1).then(block))
    }

    /// Copies one segment, `bytes` at `from`, to `tee`.
    fn store_tee(&self, tee: Option<BlockRun>, (from, bytes): (usize, usize), segment: usize) {
        let Some(tee) = tee else { return };
        let mut done = 0;
        self.pieces(tee, segment, |dst, piece| {
            let (source, piece) = (from + done, piece.min(bytes - done));
            if dst != source {
                // SAFETY: both ranges are in the buffers of the call, do not overlap, and are accessed only by this
                // thread until the operation is over.
                unsafe { kernels::copy(dst as *mut u8, source as *const u8, piece, self.execution.stream) };
            }
            done += piece;
        });
    }

    /// Calls `each` with address and bytes of the pieces of one segment of a run.
    fn pieces(&self, run: BlockRun, segment: usize, mut each: impl FnMut(usize, usize)) {
        if let Some((address, bytes)) = self.contiguous(run) {
            return each(address, bytes);
        }
        for block in run.range() {
            each(self.address(run, block, segment), self.bound.segment_bytes(run.buffer, block, segment));
        }
    }

    /// Copies one piece to a slot, and to `dst` unless it is there already.
    fn write_slot(&self, remote: bool, slot: SlotAddress, from: usize, dst: usize, bytes: usize) {
        let (source, out) = (from as *const u8, dst as *mut u8);
        let (past_caches, stream) = (remote && bytes >= MIN_STREAM_BYTES, self.execution.stream);
        // SAFETY: the slot belongs to this operation and holds the message (bind sized it). `from` and `dst` are in
        // the buffers of the call, which only this thread accesses until the operation is over.
        unsafe {
            if dst == from || past_caches {
                kernels::copy(slot, source, bytes, past_caches);
                if dst != from {
                    kernels::copy(out, source, bytes, stream);
                }
            } else {
                kernels::copy_tee(slot, out, source, bytes, stream);
            }
        }
    }

    /// Reduces one segment; returns the bytes of the result.
    fn combine(
        &self,
        step: &Reduce,
        messages: &[*const u8],
        slot: Option<SlotAddress>,
        segment: usize,
    ) -> usize {
        let own = step.own.map_or(messages.len(), |(at, _)| at);
        with_buffer(messages.len() + usize::from(step.own.is_some()), std::ptr::null(), |sources| {
            for (i, (message, from)) in messages.iter().zip(&step.from).enumerate() {
                sources[i + usize::from(i >= own)] =
                    message.wrapping_add(self.bound.skipped_bytes(from, segment));
            }
            // (output, own input, bytes) if the blocks are contiguous.
            let contiguous =
                match (self.contiguous(step.result), step.own.map(|(_, run)| self.contiguous(run))) {
                    (Some((out, bytes)), None) => Some((out, 0, bytes)),
                    (Some((out, bytes)), Some(Some((own_input, _)))) => Some((out, own_input, bytes)),
                    _ => None,
                };
            if let Some((out, own_input, bytes)) = contiguous {
                self.reduce_block(step, sources, own_input, out, slot, bytes);
                return bytes;
            }
            let mut packed = 0;
            for i in 0..step.result.blocks {
                let out = self.address(step.result, step.result.block + i, segment);
                let own_input = step.own.map_or(0, |(_, run)| self.address(run, run.block + i, segment));
                let bytes = self.bound.segment_bytes(step.result.buffer, step.result.block + i, segment);
                self.reduce_block(
                    step,
                    sources,
                    own_input,
                    out,
                    slot.map(|slot| slot.wrapping_add(packed)),
                    bytes,
                );
                // In every message, the next block follows this one.
                sources.iter_mut().for_each(|source| *source = source.wrapping_add(bytes));
                packed += bytes;
            }
            packed
        })
    }

    /// Reduces one block. `own_input`: address of this rank's own source, which is inserted at its position.
    fn reduce_block(
        &self,
        step: &Reduce,
        sources: &mut [*const u8],
        own_input: usize,
        out: usize,
        slot: Option<SlotAddress>,
        bytes: usize,
    ) {
        let Some(kernel) = self.bound.kernel else { return };
        if let Some((at, _)) = step.own {
            sources[at] = own_input as *const u8;
        }
        let (out, none) = (out as *mut u8, std::ptr::null_mut());
        let scale = if step.finish { self.execution.scale } else { None };
        let (size, stream) = (self.execution.dtype.size(), self.execution.stream);
        let past_caches = self.group.has_distant_readers() && bytes >= MIN_STREAM_BYTES;
        let (first, second, stream) = match slot {
            None => (out, none, stream),
            Some(slot) if slot == out => (out, none, stream),
            Some(slot) if !step.keep => (slot, none, past_caches),
            Some(slot) if past_caches => (slot, out, true),
            Some(slot) => (out, slot, stream),
        };
        // SAFETY: every source holds `bytes` bytes: messages until they are released, own blocks in the buffers of
        // the call. The destinations are the call's output and the operation's own slot. A destination equals one of
        // the sources (in place) or overlaps none. Parts have no element in common.
        unsafe {
            split_work(bytes, |at, bytes| {
                let first = first.wrapping_add(at);
                let second = if second.is_null() { second } else { second.wrapping_add(at) };
                with_buffer(sources.len(), std::ptr::null(), |parts| {
                    parts
                        .iter_mut()
                        .zip(sources.iter())
                        .for_each(|(part, source)| *part = source.wrapping_add(at));
                    let count = bytes / size;
                    match &step.association {
                        Association::InOrder => kernel.run(first, second, parts, count, scale, stream),
                        Association::Tree(joins) => {
                            kernel.run_tree((first, second), (parts, joins), (count, size), scale, stream);
                        }
                    }
                });
            });
        }
    }
}

/// Minimum bytes of a non-temporal store to a slot, for readers that share no cache with this rank.
const MIN_STREAM_BYTES: usize = 8 << 10;
