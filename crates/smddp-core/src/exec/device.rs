//! Executor for device memory. It enqueues copies and kernels instead of moving bytes itself.

mod messages;
mod open;
mod operation;

use std::iter;

use smddp_base::Mismatch;
use smddp_cuda::{Address, Wait};
use smddp_group::Group;
use smddp_plan::{Buffer, Collective};

use self::messages::{MessageSource, SendTarget};
pub(crate) use self::operation::DeviceOp;
use self::operation::{OutgoingMessage, Stage};
use crate::bind::{BlockRun, BoundCall, IncomingMessage, Reduce};
use crate::device::reduction::{self, Pieces, ReductionKind};
use crate::device::site::DeviceSite;
use crate::exec::walk::{Execution, Progress, StepExecutor, StepResult, walk};

/// Error that stops an operation.
#[derive(Debug)]
pub(crate) enum ExecError {
    Mismatch(Mismatch),
    /// An error of the CUDA driver.
    Device(String),
    /// A peer does not export its memory, possibly because it is dead.
    Peer(String),
}

impl std::convert::From<Mismatch> for ExecError {
    fn from(mismatch: Mismatch) -> Self {
        Self::Mismatch(mismatch)
    }
}

impl std::convert::From<smddp_cuda::Error> for ExecError {
    fn from(error: smddp_cuda::Error) -> Self {
        Self::Device(error.to_string())
    }
}

/// Advances operation `seq` until all its work is enqueued or it has to wait.
pub(crate) fn advance(
    (seq, collective): (u64, Collective),
    begun: &mut bool,
    op: &mut DeviceOp,
    bound: &BoundCall,
    execution: &mut Execution,
    group: &mut Group,
    site: &mut DeviceSite,
) -> Result<Progress, ExecError> {
    DeviceExecutor { op, collective, bound, execution, group, site }.advance(seq, begun)
}

struct DeviceExecutor<'a> {
    op: &'a mut DeviceOp,
    collective: Collective,
    bound: &'a BoundCall,
    execution: &'a mut Execution,
    group: &'a mut Group,
    site: &'a mut DeviceSite,
}

impl DeviceExecutor<'_> {
    fn advance(&mut self, seq: u64, begun: &mut bool) -> Result<Progress, ExecError> {
        let mut moved = false;
        if self.op.stage == Stage::Opening {
            // SAFETY: no memory.
            let begun_now = unsafe {
                self.group.begin(seq, self.bound.fingerprint, &self.bound.routed, &[], iter::empty())
            };
            if !begun_now {
                return Ok(Progress::Blocked);
            }
            *begun = true;
            self.open()?;
            self.op.stage = Stage::Running;
            moved = true;
        }
        if self.op.stage == Stage::Running {
            moved |= self.flush_outbox();
            let walked = walk(self.bound, self);
            // Publish also after a mismatch: the fingerprint in the messages lets the peers detect it, too.
            self.publish()?;
            let (done, ran) = walked?;
            moved |= ran;
            if done || !self.site.is_small {
                self.site.flush()?;
            }
            if !done || !self.op.outbox.is_empty() || !self.group.settle()? {
                return Ok(Progress::moved(moved));
            }
            self.publish_reads()?;
            self.execution.internode_bytes = self.group.end();
            self.op.stage = Stage::Ending;
        }
        if self.op.end.get().is_some() || self.finish(None)? {
            return Ok(Progress::Done);
        }
        Ok(Progress::moved(moved))
    }

    /// Publishes messages whose data depends on this rank's progress flag, after enqueuing the write of the flag.
    pub(super) fn publish(&mut self) -> Result<(), ExecError> {
        if !self.op.unpublished.is_empty() {
            self.site.flush_flags()?;
            for (channel, bytes) in self.op.unpublished.drain(..) {
                self.group.publish(channel, bytes);
            }
        }
        Ok(())
    }

    fn slab(&mut self, bytes: usize) -> Result<Address, ExecError> {
        let (index, at) = self.site.slab(bytes)?;
        self.op.slabs.push(index);
        Ok(at)
    }

    /// Copies messages from filled pinned slots to staging slots and publishes them.
    fn flush_outbox(&mut self) -> bool {
        let mut moved = false;
        let mut blocked: Vec<usize> = Vec::new();
        let mut index = 0;
        while let Some(outgoing) = self.op.outbox.get(index) {
            if !self.site.has_passed(outgoing.filled_at) {
                break;
            }
            let slot = if blocked.contains(&outgoing.channel) {
                None
            } else {
                self.group.send_slot(outgoing.channel)
            };
            let Some(slot) = slot else {
                blocked.push(outgoing.channel);
                index += 1;
                continue;
            };
            let &OutgoingMessage { channel, run, segment, .. } = outgoing;
            let pinned = self.site.pinned_slots().address(outgoing.slot);
            let bytes = self.bound.message_bytes(run, segment);
            self.site.handle.device.report_host_access(pinned as Address, bytes, false);
            let compression =
                self.bound.compression.as_ref().filter(|compression| compression.sends[channel]);
            // SAFETY: the stream has filled the pinned slot, and nothing writes it before it is freed. The slot belongs to
            // this operation and holds the message (bind sized it).
            let sent_bytes = unsafe {
                messages::copy_message(self.bound, compression, (run, segment), true, (pinned, slot))
            };
            self.group.publish(channel, sent_bytes);
            self.site.pinned_slots().free(outgoing.slot);
            self.op.outbox.remove(index);
            moved = true;
        }
        moved
    }

    /// Returns the reduction of the call. Binding rejects unsupported reductions, so an error is not expected.
    fn reduction_kind(&self) -> Result<ReductionKind, ExecError> {
        let (dtype, redop) = (self.execution.dtype, self.op.redop);
        ReductionKind::new(dtype, redop)
            .ok_or_else(|| ExecError::Device(format!("no kernel for {} of {}", redop.name(), dtype.name())))
    }

    /// Orders a step that reads Out or Scratch after the enqueued copies to them.
    fn order_after_writes(&mut self, reads: Buffer) -> Result<(), ExecError> {
        if reads != Buffer::In {
            self.site.flush()?;
        }
        Ok(())
    }

    fn addresses(&self, run: BlockRun, segment: usize) -> Vec<(Address, usize)> {
        let address = |block| self.execution.address(self.bound, run.buffer, block, segment) as Address;
        run.range()
            .map(|block| (address(block), self.bound.segment_bytes(run.buffer, block, segment)))
            .collect()
    }

    /// Copies pieces to contiguous memory.
    fn copy_packed(&mut self, mut to: Address, addresses: impl IntoIterator<Item = (Address, usize)>) {
        for (from, bytes) in addresses {
            self.site.copy(to, from, bytes);
            to += bytes as u64;
        }
    }

    /// Frees the pinned slot of a message once the stream has passed the enqueued work.
    fn release_slot(&mut self, origin: &MessageSource) -> Result<(), ExecError> {
        if let MessageSource::Slot(slot) = origin {
            let number = self.site.host_mark()?;
            self.site.pinned_slots().free_at(*slot, number);
        }
        Ok(())
    }

    /// Enqueues the arithmetic of a reduce step, and its message.
    fn combine(
        &mut self,
        step: &Reduce,
        received: &[(&IncomingMessage, MessageSource)],
        forward_slot: Option<(usize, SendTarget)>,
        segment: usize,
    ) -> Result<(), ExecError> {
        let result = step.result;
        let reduction_kind = self.reduction_kind()?;
        let divide = if step.finish { self.execution.scale } else { None };
        let compression =
            self.bound.compression.as_ref().filter(|compression| step.finish && compression.rounds_results);
        let rounded = compression.map(|compression| compression.format);
        let bytes = self.bound.message_bytes(result, segment);
        // By block: the pieces of each source, in the order of the reduction.
        let mut blocks: Vec<Vec<Pieces>> = vec![Vec::new(); result.blocks];
        for (f, origin) in received {
            for (block, addresses) in self.sources(origin, f, segment, result.blocks)?.into_iter().enumerate()
            {
                blocks[block].push(addresses);
            }
        }
        if let Some((position, run)) = step.own {
            for (block, piece) in self.addresses(run, segment).into_iter().enumerate() {
                let addresses = &mut blocks[block];
                addresses.insert(position.min(addresses.len()), vec![piece]);
            }
        }
        // Before the launch, which takes longer.
        self.publish()?;
        let targets = self.addresses(result, segment);
        // A result that is not stored in a buffer goes directly to the memory that it is sent from.
        let mut packed = match (step.keep, &forward_slot) {
            (false, Some((_, SendTarget::Slot(slot)))) => {
                Some(self.site.pinned_slots().address(*slot) as Address)
            }
            (false, Some((_, SendTarget::Descriptor(_)))) => Some(self.slab(bytes)?),
            _ => None,
        };
        let first = packed;
        for (sources, (output, bytes)) in blocks.iter().zip(targets) {
            let target = packed.unwrap_or(output);
            if bytes > 0 {
                reduction::reduce(self.site, reduction_kind, sources, target, bytes, divide)?;
                if let Some(format) = rounded {
                    reduction::round(self.site, format, target, target, bytes)?;
                }
            }
            packed = packed.map(|at| at + bytes as u64);
        }
        match (forward_slot, first) {
            (Some(forward_slot), None) => self.message(forward_slot, result, segment)?,
            (Some((channel, SendTarget::Slot(slot))), Some(_)) => {
                self.enqueue_send(channel, slot, result, segment)?
            }
            (Some((channel, SendTarget::Descriptor(slot))), Some(slab)) => {
                let ready_at = self.site.mark()?;
                let place = if bytes == 0 { (0, 0, false) } else { self.export_slab(slab, bytes)? };
                self.publish_descriptor(channel, slot, ready_at, place, bytes)?;
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Signals the peers whose memory this rank reads that its reads are complete. Also ends the operation if the peers
    /// that read this rank's memory have enqueued their reads.
    fn publish_reads(&mut self) -> Result<(), ExecError> {
        let Some(own) = self.site.flags().own_rank() else { return Ok(()) };
        let reads = (own.reads(), self.op.number);
        if !self.finish(Some(reads))? {
            self.site.flush()?;
            self.site.write(reads.0, reads.1)?;
        }
        // After the write is enqueued: a stream waits only for enqueued work.
        self.site.flags().store(own.enqueued(), self.op.number);
        Ok(())
    }

    /// Ends the operation after all peers have read this rank's memory. Returns false while reads of a peer are not
    /// even enqueued. `reads`: write of this rank's `reads` flag that is still to be enqueued.
    fn finish(&mut self, reads: Option<(Address, u64)>) -> Result<bool, ExecError> {
        let local = |channel: &usize| {
            self.bound.by_reference[0][*channel]
                && self.bound.channel_layout.send_channels[*channel].bytes > 0
        };
        let mut readers: Vec<usize> = (0..self.bound.channel_layout.send_channels.len())
            .filter(local)
            .flat_map(|channel| self.bound.channel_layout.send_channels[channel].readers.iter().copied())
            .collect();
        readers.sort_unstable();
        readers.dedup();
        let number = self.op.number;
        let mut waits = Vec::with_capacity(readers.len());
        for reader in readers {
            let Some(rank_flags) = self.site.flags().rank(reader) else { continue };
            if !self.site.flags().reached(rank_flags.enqueued(), number) {
                return Ok(false);
            }
            waits.push(Wait { word: rank_flags.reads(), value: number });
        }
        let handle = self.op.handle.clone();
        self.site.finish(reads, &waits, (handle.done_flag(), number))?;
        let _ = self.op.end.set(handle.mark(handle.stream)?);
        Ok(true)
    }
}

impl StepExecutor for DeviceExecutor<'_> {
    type Error = ExecError;
    /// A channel, and the target of its next message.
    type Slot = (usize, SendTarget);

    fn execution(&mut self) -> &mut Execution {
        self.execution
    }

    fn group(&mut self) -> &mut Group {
        self.group
    }

    fn slot(
        &mut self,
        channel: usize,
        run: BlockRun,
        segment: usize,
    ) -> StepResult<Self, Option<Self::Slot>> {
        if self.bound.by_reference[0][channel] {
            if self.op.unpublished.iter().any(|message| message.0 == channel) {
                self.publish()?;
            }
            return Ok(self.group.send_slot(channel).map(|slot| (channel, SendTarget::Descriptor(slot))));
        }
        let bytes = self.bound.message_bytes(run, segment);
        let none = !self.op.outbox.iter().any(|outgoing| outgoing.channel == channel);
        Ok(self.site.slot(bytes, none)?.map(|slot| (channel, SendTarget::Slot(slot))))
    }

    fn send(
        &mut self,
        to: Self::Slot,
        source: BlockRun,
        tee: Option<BlockRun>,
        segment: usize,
    ) -> StepResult<Self> {
        if let Some(tee) = tee {
            self.copy(source, tee, false, segment)?;
        }
        self.message(to, source, segment)
    }

    fn receive(
        &mut self,
        (from, message): (&IncomingMessage, *const u8),
        to: BlockRun,
        forward_slot: Option<Self::Slot>,
        segment: usize,
    ) -> StepResult<Self, bool> {
        let Some(origin) = self.take_message(from, message, segment, false)? else {
            if let Some((_, SendTarget::Slot(slot))) = forward_slot {
                self.site.pinned_slots().free(slot);
            }
            return Ok(false);
        };
        let sources = self.sources(&origin, from, segment, to.blocks)?;
        for ((to, _), source) in self.addresses(to, segment).into_iter().zip(sources) {
            self.copy_packed(to, source);
        }
        self.release_slot(&origin)?;
        if let Some(forward_slot) = forward_slot {
            self.message(forward_slot, to, segment)?;
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
        let mut received = Vec::with_capacity(messages.len());
        for (from, &message) in step.from.iter().zip(messages).filter(|(_, message)| !message.is_null()) {
            let origin = self.take_message(from, message, segment, true)?;
            // `needed` slots are allocated.
            let origin =
                origin.ok_or_else(|| ExecError::Device("no pinned slot for a message".to_owned()))?;
            received.push((from, origin));
        }
        if segment < step.result.segments {
            self.combine(step, &received, forward_slot, segment)?;
        }
        received.iter().try_for_each(|(_, origin)| self.release_slot(origin))
    }

    fn copy(&mut self, source: BlockRun, to: BlockRun, finish: bool, segment: usize) -> StepResult<Self> {
        self.order_after_writes(source.buffer)?;
        let divide = self.execution.scale.filter(|n| finish && *n > 1);
        for ((from, bytes), (to, _)) in
            self.addresses(source, segment).into_iter().zip(self.addresses(to, segment))
        {
            if divide.is_some() {
                let reduction_kind = self.reduction_kind()?;
                reduction::reduce(self.site, reduction_kind, &[vec![(from, bytes)]], to, bytes, divide)?;
            } else {
                self.site.copy(to, from, bytes);
            }
        }
        Ok(())
    }
}
