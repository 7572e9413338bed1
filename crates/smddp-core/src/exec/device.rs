//! The executor for device memory: it enqueues instead of moving.

mod messages;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use smddp_cuda::{Address, MAX_SOURCES, Wait};
use smddp_plan::{Algorithm, Buffer, Collective, Format};
use smddp_transport::{Group, Mismatch};

use self::messages::{RecvChannel, SendChannel};
use crate::bind::{Bound, Incoming, Reduce, Run};
use crate::call::types::RedOp;
use crate::device::completion::DeviceCompletion;
use crate::device::reduction::{self, Manner, Pieces};
use crate::device::site::Site;
use crate::device::site_handle::{PooledEvent, SiteHandle};
use crate::exec::walk::{Execution, Mover, Outcome, Progress, walk};

/// Why an operation cannot go on.
#[derive(Debug)]
pub(crate) enum Trouble {
    Mismatch(Mismatch),
    /// The device.
    Device(String),
    /// Another rank does not hand over its memory, which may be because it is dead.
    Peer(String),
}

impl std::convert::From<Mismatch> for Trouble {
    fn from(mismatch: Mismatch) -> Self {
        Self::Mismatch(mismatch)
    }
}

impl std::convert::From<smddp_cuda::Error> for Trouble {
    fn from(error: smddp_cuda::Error) -> Self {
        Self::Device(error.to_string())
    }
}

/// Bytes of a call whose copies are a kernel's: a launch takes the host less time than one copy, however many it makes.
const FEW: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Running,
    /// All is enqueued but the waits for those who read this rank's memory.
    Ending,
}

/// A message on its way to the group.
struct OutgoingMessage {
    channel: usize,
    slot: usize,
    /// What it is one segment of.
    run: Run,
    segment: usize,
    /// The stream has filled the slot when it has passed this number.
    filled: u64,
}

/// What an operation on device memory has besides what every operation has.
pub(crate) struct DeviceOp {
    pub(crate) handle: Arc<SiteHandle>,
    pub(crate) number: u64,
    pub(crate) end: Arc<OnceLock<PooledEvent>>,
    /// Where the caller's stream stood.
    after: Option<PooledEvent>,
    redop: RedOp,
    /// The input overlaps the output in a form that no plan supports in place.
    pub(crate) overlaps: bool,
    stage: Stage,
    /// The input is there when this rank's progress word has reached it.
    ready: u64,
    /// (channel, bytes) of messages in cells that nobody sees yet.
    unpublished: Vec<(usize, usize)>,
    outbox: VecDeque<OutgoingMessage>,
    pub(crate) slabs: Vec<usize>,
}

impl DeviceOp {
    pub(crate) fn new(handle: Arc<SiteHandle>, after: PooledEvent, redop: RedOp) -> Self {
        Self {
            handle,
            number: 0,
            end: Arc::default(),
            after: Some(after),
            redop,
            overlaps: false,
            stage: Stage::Opening,
            ready: 0,
            unpublished: Vec::new(),
            outbox: VecDeque::new(),
            slabs: Vec::new(),
        }
    }

    /// What the call's handle keeps; the number is known by then.
    pub(crate) fn completion(&self) -> DeviceCompletion {
        DeviceCompletion { handle: self.handle.clone(), number: self.number, end: self.end.clone() }
    }
}

/// Goes on with operation `seq` until all is enqueued, or something is missing.
pub(crate) fn advance(
    (seq, collective): (u64, Collective),
    begun: &mut bool,
    op: &mut DeviceOp,
    bound: &Bound,
    execution: &mut Execution,
    group: &mut Group,
    site: &mut Site,
) -> Result<Progress, Trouble> {
    Turn { op, collective, bound, execution, group, site }.advance(seq, begun)
}

struct Turn<'a> {
    op: &'a mut DeviceOp,
    collective: Collective,
    bound: &'a Bound,
    execution: &'a mut Execution,
    group: &'a mut Group,
    site: &'a mut Site,
}

impl Turn<'_> {
    fn advance(&mut self, seq: u64, begun: &mut bool) -> Result<Progress, Trouble> {
        let mut moved = false;
        if self.op.stage == Stage::Opening {
            if !self.group.begin(seq, self.bound.fingerprint, &self.bound.wired, &[]) {
                return Ok(Progress::Blocked);
            }
            *begun = true;
            self.open()?;
            self.op.stage = Stage::Running;
            moved = true;
        }
        if self.op.stage == Stage::Running {
            moved |= self.pump();
            let walked = walk(self.bound, self);
            // Whatever this rank found: its call may be what differs, and messages tell the others so.
            self.publish()?;
            let (done, ran) = walked?;
            moved |= ran;
            if done || !self.site.few {
                self.site.flush()?;
            }
            if !done || !self.op.outbox.is_empty() || !self.group.settle()? {
                return Ok(Progress::moved(moved));
            }
            self.announce()?;
            self.group.end();
            self.op.stage = Stage::Ending;
        }
        if self.op.end.get().is_some() || self.end(None)? {
            return Ok(Progress::Done);
        }
        Ok(Progress::moved(moved))
    }

    /// Hands on messages whose data is there when this rank's progress word says so, now that its write is enqueued.
    pub(super) fn publish(&mut self) -> Result<(), Trouble> {
        if !self.op.unpublished.is_empty() {
            self.site.flush_words()?;
            for (channel, bytes) in self.op.unpublished.drain(..) {
                self.group.publish(channel, bytes);
            }
        }
        Ok(())
    }

    /// After what the caller's stream did before.
    fn open(&mut self) -> Result<(), Trouble> {
        self.check_targets()?;
        self.site.few = self.bound.bytes <= FEW && self.owns(Buffer::In) && self.owns(Buffer::Out);
        if let Some(after) = self.op.after.take() {
            self.site.after(after.event())?;
        }
        if self.bound.scratch > 0 {
            self.execution.bases[2] = self.slab(self.bound.scratch)? as usize;
        }
        self.stage_input()?;
        if self.bound.local[0].contains(&true) {
            self.op.ready = self.site.mark()?;
        }
        Ok(())
    }

    /// Copies take memory that is no device's, too, and what is read is looked up when it is shown to others. A kernel that
    /// writes there breaks the context.
    fn check_targets(&mut self) -> Result<(), Trouble> {
        let out = Buffer::Out as usize;
        // Ranks that get no result have no place for it.
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

    /// Whether all there is of one of the caller's buffers is memory of the call's device.
    fn owns(&self, buffer: Buffer) -> bool {
        let device = &self.site.handle.device;
        let whole = |base: usize| base == 0 || device.owns(base as Address);
        match &self.execution.lists[buffer as usize] {
            Some(blocks) => blocks.iter().all(|&block| whole(block)),
            None => whole(self.execution.bases[buffer as usize]),
        }
    }

    fn slab(&mut self, bytes: usize) -> Result<Address, Trouble> {
        let (index, at) = self.site.slab(bytes)?;
        self.op.slabs.push(index);
        Ok(at)
    }

    /// Copies the input where it is to be multiplied first, or would be overwritten under its readers. That is so where it overlaps the
    /// output in a form that no plan supports, and where another algorithm than the mesh works in place: the mesh overwrites a block
    /// only with the result of its last reader.
    fn stage_input(&mut self) -> Result<(), Trouble> {
        if let Some(coding) = self.bound.coding.as_ref().filter(|coding| coding.rounds_inputs) {
            return self.round_input(coding.format);
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
        let local = self.bound.local[0].contains(&true);
        if factor.is_none() && !self.op.overlaps && !(local && overwrites && self.in_place()) {
            return Ok(());
        }
        // An input that is only this rank's block has it at its beginning.
        let blocks = match self.collective {
            Collective::AllGather | Collective::Gather => self.group.rank()..self.group.rank() + 1,
            _ => 0..self.bound.lengths[0].len(),
        };
        let base = self.slab(self.bound.lengths[0][blocks.clone()].iter().sum())?;
        for block in blocks {
            let from = self.execution.address(self.bound, Buffer::In, block, 0) as Address;
            let to = base + self.bound.offsets[0][block] as u64;
            let bytes = self.bound.lengths[0][block];
            match factor {
                Some(factor) if bytes > 0 => {
                    let manner = self.manner()?;
                    reduction::premultiply(self.site, manner, from, to, bytes, factor)?;
                }
                _ => self.site.copy(to, from, bytes),
            }
        }
        self.site.flush()?;
        self.execution.bases[0] = base as usize;
        self.execution.lists[0] = None;
        Ok(())
    }

    /// An all_gather's own block as all ranks are to have it, in memory of the group's own.
    fn round_input(&mut self, format: Format) -> Result<(), Trouble> {
        let block = self.group.rank();
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

    /// Hands messages whose slots are filled to the group.
    fn pump(&mut self) -> bool {
        let mut moved = false;
        let mut waiting: Vec<usize> = Vec::new();
        let mut index = 0;
        while let Some(outgoing) = self.op.outbox.get(index) {
            if !self.site.has_passed(outgoing.filled) {
                break;
            }
            let cell =
                if waiting.contains(&outgoing.channel) { None } else { self.group.cell(outgoing.channel) };
            let Some(cell) = cell else {
                waiting.push(outgoing.channel);
                index += 1;
                continue;
            };
            let &OutgoingMessage { channel, run, segment, .. } = outgoing;
            let slot = self.site.bounce().address(outgoing.slot);
            let bytes = self.bound.message(run, segment);
            self.site.handle.device.host_touches(slot as Address, bytes, false);
            let coding = self.bound.coding.as_ref().filter(|coding| coding.outs[channel]);
            // SAFETY: the stream has filled the slot and nobody writes it before it is free; the cell is ours and holds
            // the message (bind sized it).
            let given = unsafe { messages::carry(self.bound, coding, (run, segment), true, (slot, cell)) };
            self.group.publish(channel, given);
            self.site.bounce().free(outgoing.slot);
            self.op.outbox.remove(index);
            moved = true;
        }
        moved
    }

    /// How the call's elements are reduced. Binding refuses what no kernel does, so there is one.
    fn manner(&self) -> Result<Manner, Trouble> {
        let (dtype, redop) = (self.execution.dtype, self.op.redop);
        Manner::new(dtype, redop)
            .ok_or_else(|| Trouble::Device(format!("no kernel for {} of {}", redop.name(), dtype.name())))
    }

    /// A step that reads what others wrote comes after it.
    fn order(&mut self, reads: Buffer) -> Result<(), Trouble> {
        if reads != Buffer::In {
            self.site.flush()?;
        }
        Ok(())
    }

    fn pieces(&self, run: Run, segment: usize) -> Vec<(Address, usize)> {
        let address = |block| self.execution.address(self.bound, run.buffer, block, segment) as Address;
        run.range().map(|block| (address(block), self.bound.piece(run.buffer, block, segment))).collect()
    }

    /// Copies what lies in pieces to where it lies in a row.
    fn pack(&mut self, mut to: Address, pieces: impl IntoIterator<Item = (Address, usize)>) {
        for (from, bytes) in pieces {
            self.site.copy(to, from, bytes);
            to += bytes as u64;
        }
    }

    /// The slot of a message is free when the stream has passed what was enqueued.
    fn passed(&mut self, recv_channel: &RecvChannel) -> Result<(), Trouble> {
        if let RecvChannel::Far(slot) = recv_channel {
            let number = self.site.host_mark()?;
            self.site.bounce().free_at(*slot, number);
        }
        Ok(())
    }

    /// The arithmetic of a reduce step, and its message.
    fn combine(
        &mut self,
        step: &Reduce,
        recv_channels: &[(&Incoming, RecvChannel)],
        onward: Option<(usize, SendChannel)>,
        segment: usize,
    ) -> Result<(), Trouble> {
        let result = step.result;
        let manner = self.manner()?;
        let divide = if step.finish { self.execution.scale } else { None };
        let coding = self.bound.coding.as_ref().filter(|coding| step.finish && coding.rounds_results);
        let rounded = coding.map(|coding| coding.format);
        let bytes = self.bound.message(result, segment);
        // By block: what each source has of it, in the order of the reduction.
        let mut blocks: Vec<Vec<Pieces>> = vec![Vec::new(); result.blocks];
        for (f, recv_channel) in recv_channels {
            for (block, pieces) in
                self.sources(recv_channel, f, segment, result.blocks)?.into_iter().enumerate()
            {
                blocks[block].push(pieces);
            }
        }
        if let Some((position, run)) = step.own {
            for (block, piece) in self.pieces(run, segment).into_iter().enumerate() {
                let pieces = &mut blocks[block];
                pieces.insert(position.min(pieces.len()), vec![piece]);
            }
        }
        // Before a launch, which takes longer.
        self.publish()?;
        let kept = self.pieces(result, segment);
        // A result that is not kept goes straight to where it is sent from.
        let mut packed = match (step.keep, &onward) {
            (false, Some((_, SendChannel::Far(slot)))) => Some(self.site.bounce().address(*slot) as Address),
            (false, Some((_, SendChannel::LocalChannels(_)))) => Some(self.slab(bytes)?),
            _ => None,
        };
        let first = packed;
        for (sources, (kept, bytes)) in blocks.iter().zip(kept) {
            let target = packed.unwrap_or(kept);
            if bytes > 0 {
                reduction::reduce(self.site, manner, sources, target, bytes, divide)?;
                if let Some(format) = rounded {
                    reduction::round(self.site, format, target, target, bytes)?;
                }
            }
            packed = packed.map(|at| at + bytes as u64);
        }
        match (onward, first) {
            (Some(onward), None) => self.message(onward, result, segment)?,
            (Some((channel, SendChannel::Far(slot))), Some(_)) => {
                self.post(channel, slot, result, segment)?
            }
            (Some((channel, SendChannel::LocalChannels(cell))), Some(slab)) => {
                let ready = self.site.mark()?;
                let place = if bytes == 0 { (0, 0, false) } else { self.show_slab(slab, bytes)? };
                self.describe(channel, cell, ready, place, bytes)?;
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Tells those whose memory this rank reads when it is through with it. Where they are as far, that is the end.
    fn announce(&mut self) -> Result<(), Trouble> {
        let Some(mine) = self.site.words().mine() else { return Ok(()) };
        let reads = (mine.reads(), self.op.number);
        if !self.end(Some(reads))? {
            self.site.flush()?;
            self.site.write(reads.0, reads.1)?;
        }
        // Not before the write is enqueued: a stream waits only for what is.
        self.site.words().store(mine.enqueued(), self.op.number);
        Ok(())
    }

    /// The operation is over when all who read this rank's memory are through: false while their reads are not even enqueued.
    /// `reads`: what is still to be told of this rank's.
    fn end(&mut self, reads: Option<(Address, u64)>) -> Result<bool, Trouble> {
        let local = |channel: &usize| {
            self.bound.local[0][*channel] && self.bound.channel_layout.send_channels[*channel].bytes > 0
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
            let Some(lines) = self.site.words().of(reader) else { continue };
            if !self.site.words().reached(lines.enqueued(), number) {
                return Ok(false);
            }
            waits.push(Wait { word: lines.reads(), value: number });
        }
        let handle = self.op.handle.clone();
        self.site.finish(reads, &waits, (handle.done_word(), number))?;
        let _ = self.op.end.set(handle.mark(handle.stream)?);
        Ok(true)
    }
}

impl Mover for Turn<'_> {
    type Trouble = Trouble;
    /// A channel, and where its next message is written to.
    type Room = (usize, SendChannel);

    fn execution(&mut self) -> &mut Execution {
        self.execution
    }

    fn group(&mut self) -> &mut Group {
        self.group
    }

    fn room(&mut self, channel: usize, run: Run, segment: usize) -> Outcome<Self, Option<Self::Room>> {
        if self.bound.local[0][channel] {
            if self.op.unpublished.iter().any(|message| message.0 == channel) {
                self.publish()?;
            }
            return Ok(self.group.cell(channel).map(|cell| (channel, SendChannel::LocalChannels(cell))));
        }
        let bytes = self.bound.message(run, segment);
        let none = !self.op.outbox.iter().any(|outgoing| outgoing.channel == channel);
        Ok(self.site.slot(bytes, none)?.map(|slot| (channel, SendChannel::Far(slot))))
    }

    fn send(&mut self, to: Self::Room, source: Run, tee: Option<Run>, segment: usize) -> Outcome<Self> {
        if let Some(tee) = tee {
            self.copy(source, tee, false, segment)?;
        }
        self.message(to, source, segment)
    }

    fn receive(
        &mut self,
        (from, message): (&Incoming, *const u8),
        to: Run,
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self, bool> {
        let Some(recv_channel) = self.take(from, message, segment, false)? else {
            if let Some((_, SendChannel::Far(slot))) = onward {
                self.site.bounce().free(slot);
            }
            return Ok(false);
        };
        let sources = self.sources(&recv_channel, from, segment, to.blocks)?;
        for ((to, _), source) in self.pieces(to, segment).into_iter().zip(sources) {
            self.pack(to, source);
        }
        self.passed(&recv_channel)?;
        if let Some(onward) = onward {
            self.message(onward, to, segment)?;
        }
        Ok(true)
    }

    fn reduce(
        &mut self,
        step: &Reduce,
        messages: &[*const u8],
        onward: Option<Self::Room>,
        segment: usize,
    ) -> Outcome<Self> {
        let mut recv_channels = Vec::with_capacity(messages.len());
        for (from, &message) in step.from.iter().zip(messages).filter(|(_, message)| !message.is_null()) {
            let recv_channel = self.take(from, message, segment, true)?;
            // A slot that is needed is made.
            let recv_channel =
                recv_channel.ok_or_else(|| Trouble::Device("no pinned memory for a message".to_owned()))?;
            recv_channels.push((from, recv_channel));
        }
        if segment < step.result.segments {
            self.combine(step, &recv_channels, onward, segment)?;
        }
        recv_channels.iter().try_for_each(|(_, recv_channel)| self.passed(recv_channel))
    }

    fn copy(&mut self, source: Run, to: Run, finish: bool, segment: usize) -> Outcome<Self> {
        self.order(source.buffer)?;
        let divide = self.execution.scale.filter(|n| finish && *n > 1);
        for ((from, bytes), (to, _)) in self.pieces(source, segment).into_iter().zip(self.pieces(to, segment))
        {
            if divide.is_some() {
                let manner = self.manner()?;
                reduction::reduce(self.site, manner, &[vec![(from, bytes)]], to, bytes, divide)?;
            } else {
                self.site.copy(to, from, bytes);
            }
        }
        Ok(())
    }
}
