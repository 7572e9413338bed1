//! The executor for device memory: it follows a bound program as the other one does, and enqueues instead of moving.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use smddp_cuda::{Address, MAX_SOURCES, Wait};
use smddp_plan::{Algorithm, Buffer, Collective};
use smddp_transport::{Group, Mismatch};

use super::flight::Landing;
use super::reduction::{self, Manner, Pieces};
use super::site::{Lobby, Mark, Site};
use crate::bind::{Act, Bound, From, Run};
use crate::call::reduces;
use crate::exec::{Op, Progress, State, walk};
use crate::types::RedOp;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Running,
    /// All is enqueued but the waits for those who read this rank's memory.
    Ending,
}

/// A message on its way to the link.
struct Parcel {
    channel: usize,
    slot: usize,
    bytes: usize,
    /// The stream has filled the slot when it has passed this number.
    filled: u64,
}

/// What an operation on device memory has besides what every operation has.
pub(crate) struct DeviceOp {
    pub(crate) lobby: Arc<Lobby>,
    pub(crate) number: u64,
    pub(crate) end: Arc<OnceLock<Mark>>,
    /// Where the caller's stream stood.
    after: Option<Mark>,
    redop: RedOp,
    stage: Stage,
    /// The input is there when this rank's progress word has reached it.
    ready: u64,
    outbox: VecDeque<Parcel>,
    pub(crate) slabs: Vec<usize>,
}

impl DeviceOp {
    pub(crate) fn new(lobby: Arc<Lobby>, after: Mark, redop: RedOp) -> Self {
        Self {
            lobby,
            number: 0,
            end: Arc::default(),
            after: Some(after),
            redop,
            stage: Stage::Opening,
            ready: 0,
            outbox: VecDeque::new(),
            slabs: Vec::new(),
        }
    }

    /// What the call's handle keeps; the number is known by then.
    pub(crate) fn landing(&self) -> Landing {
        Landing { lobby: self.lobby.clone(), number: self.number, end: self.end.clone() }
    }
}

/// Goes on until all is enqueued, or something is missing.
pub(crate) fn advance(op: &mut Op, link: &mut Group, site: &mut Site) -> Result<Progress, Trouble> {
    let Some(mut device) = op.device.take() else { return Ok(Progress::Blocked) };
    let bound = op.bound.clone();
    let mut turn =
        Turn { op: &mut device, collective: op.collective, bound: &bound, state: &mut op.state, link, site };
    let outcome = turn.advance(op.seq, &mut op.begun);
    op.device = Some(device);
    outcome
}

/// Where a message is written to.
enum Outlet {
    /// Words in a cell: the reader copies from this rank's memory.
    Near(*mut u8),
    Far(usize),
}

/// Where a message lies.
enum Inlet {
    Near(Near),
    /// A slot that this message fills from its beginning.
    Far(usize),
}

/// Words of a message by reference.
struct Near {
    rank: usize,
    /// The data is there when its writer's progress word has reached it.
    ready: u64,
    /// 0: a message without bytes.
    token: u64,
    offset: u64,
    /// The pieces lie one behind the other, as in a cell; else each block lies in the writer's buffer.
    packed: bool,
}

struct Turn<'a> {
    op: &'a mut DeviceOp,
    collective: Collective,
    bound: &'a Bound,
    state: &'a mut State,
    link: &'a mut Group,
    site: &'a mut Site,
}

impl Turn<'_> {
    fn advance(&mut self, seq: u64, begun: &mut bool) -> Result<Progress, Trouble> {
        let mut moved = false;
        if self.op.stage == Stage::Opening {
            if !self.link.begin(seq, self.bound.head, &self.bound.wired) {
                return Ok(Progress::Blocked);
            }
            *begun = true;
            self.open()?;
            self.op.stage = Stage::Running;
            moved = true;
        }
        if self.op.stage == Stage::Running {
            moved |= self.pump();
            let bound = self.bound;
            let (done, ran) = walk(bound, self, |turn| &mut turn.state.lanes, Turn::act)?;
            moved |= ran;
            self.site.flush()?;
            if !done || !self.op.outbox.is_empty() || !self.link.settle()? {
                return Ok(if moved { Progress::Moved } else { Progress::Blocked });
            }
            self.announce()?;
            self.link.end();
            self.op.stage = Stage::Ending;
        }
        if self.end()? {
            return Ok(Progress::Done);
        }
        Ok(if moved { Progress::Moved } else { Progress::Blocked })
    }

    /// After what the caller's stream did before.
    fn open(&mut self) -> Result<(), Trouble> {
        self.check_targets()?;
        if let Some(after) = self.op.after.take() {
            self.site.after(after.event())?;
        }
        if self.bound.scratch > 0 {
            self.state.bases[2] = self.slab(self.bound.scratch)? as usize;
        }
        self.stage_input()?;
        if self.bound.near[0].contains(&true) {
            self.op.ready = self.site.mark()?;
        }
        Ok(())
    }

    /// Copies take memory that is no device's, too, and what is read is looked up when it is shown to others. A kernel that
    /// writes there breaks the context.
    fn check_targets(&mut self) -> Result<(), Trouble> {
        let out = Bound::table(Buffer::Out);
        // Ranks that get no result have no place for it.
        let placed = self.state.bases[out] != 0 || self.state.lists[out].is_some();
        if !reduces(self.collective) || !placed {
            return Ok(());
        }
        if let Some(block) = self.bound.lengths[out].iter().position(|&bytes| bytes > 0) {
            let at = self.state.address(self.bound, Buffer::Out, block, 0);
            self.site.lobby.device.region(at as Address)?;
        }
        Ok(())
    }

    fn slab(&mut self, bytes: usize) -> Result<Address, Trouble> {
        let (index, at) = self.site.slab(bytes, self.op.number)?;
        self.op.slabs.push(index);
        Ok(at)
    }

    /// Takes a copy of the input where it is to be multiplied first, or would be overwritten under its readers: the
    /// mesh overwrites a block only with what its last reader made of it, other plans may be earlier.
    fn stage_input(&mut self) -> Result<(), Trouble> {
        let factor = match self.op.redop {
            RedOp::PremulSum(factor) if reduces(self.collective) => Some(factor),
            _ => None,
        };
        let ordered =
            self.bound.choice.algorithm == Algorithm::Mesh && self.bound.lengths[0].len() <= MAX_SOURCES;
        let overwrites = match self.collective {
            Collective::AllToAll => true,
            collective => reduces(collective) && !ordered,
        };
        let near = self.bound.near[0].contains(&true);
        if factor.is_none() && !(near && overwrites && self.in_place()) {
            return Ok(());
        }
        let lengths = &self.bound.lengths[0];
        let base = self.slab(lengths.iter().sum())?;
        for block in 0..lengths.len() {
            let from = self.state.address(self.bound, Buffer::In, block, 0) as Address;
            let to = base + self.bound.offsets[0][block] as u64;
            let bytes = self.bound.lengths[0][block];
            match factor {
                Some(factor) if bytes > 0 => {
                    let element = self.manner()?.element;
                    reduction::premultiply(self.site, element, from, to, bytes, factor)?;
                }
                _ => self.site.copy(to, from, bytes),
            }
        }
        self.site.flush()?;
        self.state.bases[0] = base as usize;
        self.state.lists[0] = None;
        Ok(())
    }

    fn in_place(&self) -> bool {
        let ranges = |buffer: Buffer| -> Vec<(usize, usize)> {
            let lengths = &self.bound.lengths[Bound::table(buffer)];
            let at = |block| self.state.address(self.bound, buffer, block, 0);
            (0..lengths.len()).filter(|&b| lengths[b] > 0).map(|b| (at(b), at(b) + lengths[b])).collect()
        };
        let outputs = ranges(Buffer::Out);
        ranges(Buffer::In).iter().any(|i| outputs.iter().any(|o| i.0 < o.1 && o.0 < i.1))
    }

    /// Hands messages whose slots are filled to the link.
    fn pump(&mut self) -> bool {
        let mut moved = false;
        let mut waiting: Vec<usize> = Vec::new();
        let mut index = 0;
        while let Some(parcel) = self.op.outbox.get(index) {
            if !self.site.has_passed(parcel.filled) {
                break;
            }
            let cell = if waiting.contains(&parcel.channel) { None } else { self.link.cell(parcel.channel) };
            let Some(cell) = cell else {
                waiting.push(parcel.channel);
                index += 1;
                continue;
            };
            let slot = self.site.bounce().address(parcel.slot);
            self.site.lobby.device.host_touches(slot as Address, parcel.bytes, false);
            // SAFETY: the stream has filled the slot and nobody writes it before it is free; the cell is ours and holds
            // the message (bind sized it).
            unsafe { std::ptr::copy_nonoverlapping(slot, cell, parcel.bytes) };
            self.link.publish(parcel.channel, parcel.bytes);
            self.site.bounce().free(parcel.slot);
            self.op.outbox.remove(index);
            moved = true;
        }
        moved
    }

    /// One step on one segment; false where it has to wait. Nothing is enqueued before all it needs is there.
    fn act(&mut self, act: &Act, segment: usize) -> Result<bool, Trouble> {
        match act {
            Act::Send { channel, source, tee } => {
                if segment >= source.segments {
                    return Ok(true);
                }
                let Some(outlet) = self.outlet(*channel, *source, segment)? else { return Ok(false) };
                if let Some(tee) = tee {
                    self.order(source.buffer)?;
                    for ((from, bytes), (to, _)) in
                        self.pieces(*source, segment).into_iter().zip(self.pieces(*tee, segment))
                    {
                        self.site.copy(to, from, bytes);
                    }
                }
                self.send(*channel, outlet, *source, segment)?;
            }
            Act::Receive { from, to, forward } => {
                if segment >= from.message.segments {
                    return Ok(true);
                }
                let Some(message) = self.link.message(from.inlet)? else { return Ok(false) };
                let forwarded = forward.filter(|_| segment < to.segments);
                let outlet = match forwarded {
                    Some(channel) => match self.outlet(channel, *to, segment)? {
                        Some(outlet) => Some((channel, outlet)),
                        None => return Ok(false),
                    },
                    None => None,
                };
                let pieces = self.pieces(*to, segment);
                let Some(inlet) = self.take(from, message, segment, false)? else {
                    if let Some((_, Outlet::Far(slot))) = outlet {
                        self.site.bounce().free(slot);
                    }
                    return Ok(false);
                };
                self.link.release(from.inlet);
                let sources = self.sources(&inlet, from, segment, to.blocks)?;
                for ((to, _), source) in pieces.into_iter().zip(sources) {
                    let mut at = to;
                    for (from, bytes) in source {
                        self.site.copy(at, from, bytes);
                        at += bytes as u64;
                    }
                }
                self.passed(&inlet)?;
                if let Some((channel, outlet)) = outlet {
                    self.send(channel, outlet, *to, segment)?;
                }
            }
            Act::Reduce { from, own, result, to, send, finish } => {
                return self.reduce(from, *own, *result, *to, *send, *finish, segment);
            }
            Act::Copy { source, to, finish } => {
                self.order(source.buffer)?;
                let divide = self.state.scale.filter(|n| *finish && *n > 1);
                for ((from, bytes), (to, _)) in
                    self.pieces(*source, segment).into_iter().zip(self.pieces(*to, segment))
                {
                    if divide.is_some() {
                        let manner = self.manner()?;
                        reduction::reduce(self.site, manner, &[vec![(from, bytes)]], to, bytes, divide)?;
                    } else {
                        self.site.copy(to, from, bytes);
                    }
                }
            }
        }
        Ok(true)
    }

    /// How the call's elements are reduced. Binding refuses what no kernel does, so there is one.
    fn manner(&self) -> Result<Manner, Trouble> {
        let (dtype, redop) = (self.state.dtype, self.op.redop);
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
        let mut pieces = Vec::with_capacity(run.blocks);
        for block in run.block..run.block + run.blocks {
            let bytes = self.bound.segment(self.bound.length(run.buffer, block), segment);
            pieces.push((self.state.address(self.bound, run.buffer, block, segment) as Address, bytes));
        }
        pieces
    }

    fn message_bytes(&self, run: Run, segment: usize) -> usize {
        let blocks = run.block..run.block + run.blocks;
        blocks.map(|block| self.bound.segment(self.bound.length(run.buffer, block), segment)).sum()
    }

    /// A place for the next message of a channel, if there is one.
    fn outlet(&mut self, channel: usize, run: Run, segment: usize) -> Result<Option<Outlet>, Trouble> {
        if self.bound.near[0][channel] {
            return Ok(self.link.cell(channel).map(Outlet::Near));
        }
        let bytes = self.message_bytes(run, segment);
        let none = !self.op.outbox.iter().any(|parcel| parcel.channel == channel);
        Ok(self.site.slot(bytes, none, self.op.number)?.map(Outlet::Far))
    }

    /// A message of one segment of `run`, which lies in the call's buffers.
    fn send(&mut self, channel: usize, outlet: Outlet, run: Run, segment: usize) -> Result<(), Trouble> {
        let bytes = self.message_bytes(run, segment);
        match outlet {
            Outlet::Near(cell) => {
                let (ready, place) = self.show(run, segment, bytes)?;
                self.describe(channel, cell, ready, place, bytes);
            }
            Outlet::Far(slot) => {
                self.order(run.buffer)?;
                let mut at = self.site.bounce().address(slot) as Address;
                for (from, bytes) in self.pieces(run, segment) {
                    self.site.copy(at, from, bytes);
                    at += bytes as u64;
                }
                self.post(channel, slot, bytes)?;
            }
        }
        Ok(())
    }

    fn post(&mut self, channel: usize, slot: usize, bytes: usize) -> Result<(), Trouble> {
        let filled = self.site.host_mark()?;
        self.op.outbox.push_back(Parcel { channel, slot, bytes, filled });
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
        let first = self.state.address(self.bound, run.buffer, run.block, 0);
        let mut next = first;
        let in_a_row = (run.block..run.block + run.blocks).all(|block| {
            let found = self.state.address(self.bound, run.buffer, block, 0);
            let follows = found == next;
            next = found + self.bound.length(run.buffer, block);
            follows
        });
        if in_a_row && let Some((token, offset)) = self.site.regions().lend(first as Address, next - first)? {
            return Ok((ready(self)?, (token, offset, false)));
        }
        self.order(run.buffer)?;
        let slab = self.slab(bytes)?;
        let mut at = slab;
        for (from, bytes) in self.pieces(run, segment) {
            self.site.copy(at, from, bytes);
            at += bytes as u64;
        }
        Ok((self.site.mark()?, self.show_slab(slab, bytes)?))
    }

    fn show_slab(&mut self, slab: Address, bytes: usize) -> Result<(u64, u64, bool), Trouble> {
        let (token, offset) = self.site.regions().lend(slab, bytes)?.ok_or_else(|| {
            Trouble::Device("this device's own memory cannot be had by other processes".to_owned())
        })?;
        Ok((token, offset, true))
    }

    /// Publishes a message by reference.
    fn describe(
        &mut self,
        channel: usize,
        cell: *mut u8,
        ready: u64,
        (token, offset, packed): (u64, u64, bool),
        bytes: usize,
    ) {
        let words = [ready, token, offset, u64::from(packed)];
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: a cell of DESCRIPTOR bytes, ours until it is published.
            unsafe { cell.cast::<u64>().add(i).write_unaligned(word) };
        }
        self.link.publish(channel, bytes.min(super::DESCRIPTOR));
    }

    /// What a message says, or its bytes in a slot: `None` where there is no slot.
    fn take(
        &mut self,
        from: &From,
        message: *const u8,
        segment: usize,
        needed: bool,
    ) -> Result<Option<Inlet>, Trouble> {
        if self.bound.near[1][from.inlet] {
            // SAFETY: the message is DESCRIPTOR bytes and stays where it is until it is released.
            let word = |i: usize| unsafe { message.cast::<u64>().add(i).read_unaligned() };
            let rank = self.bound.wiring.inlets[from.inlet].rank;
            let near = Near { rank, ready: word(0), token: word(1), offset: word(2), packed: word(3) != 0 };
            return Ok(Some(Inlet::Near(near)));
        }
        let bytes = self.message_bytes(from.message, segment);
        let free = needed || !self.site.bounce().moving();
        let Some(slot) = self.site.slot(bytes, free, self.op.number)? else { return Ok(None) };
        let at = self.site.bounce().address(slot);
        self.site.lobby.device.host_touches(at as Address, bytes, true);
        // SAFETY: the message holds these bytes (both ranks' sizes were held against each other) and stays until it is
        // released; no stream uses the slot.
        unsafe { std::ptr::copy_nonoverlapping(message, at, bytes) };
        Ok(Some(Inlet::Far(slot)))
    }

    /// Where the first `blocks` blocks that are taken of a message lie; the stream waits until they do.
    fn sources(
        &mut self,
        inlet: &Inlet,
        from: &From,
        segment: usize,
        blocks: usize,
    ) -> Result<Vec<Pieces>, Trouble> {
        let run = from.message;
        let length = |block: usize| self.bound.length(run.buffer, run.block + block);
        let taken = from.skip..from.skip + blocks;
        match inlet {
            Inlet::Far(slot) => {
                let base = self.site.bounce().address(*slot) as Address;
                let mut at = base + State::skipped(self.bound, from, segment) as u64;
                Ok(taken
                    .map(|block| {
                        let bytes = self.bound.segment(length(block), segment);
                        at += bytes as u64;
                        vec![(at - bytes as u64, bytes)]
                    })
                    .collect())
            }
            Inlet::Near(near) => {
                self.site.await_progress(near.rank, near.ready);
                if near.token == 0 || blocks == 0 {
                    return Ok(vec![Vec::new(); blocks]);
                }
                let number = self.op.number;
                let mapping = self.site.borrow(near.rank, near.token, number).map_err(Trouble::Peer)?;
                let step = if near.packed { 0 } else { segment * self.bound.choice.segment };
                let whole = |block: usize| {
                    if near.packed { self.bound.segment(length(block), segment) } else { length(block) }
                };
                // The offset is another process's word.
                let outside = || {
                    let (rank, offset) = (near.rank, near.offset);
                    Trouble::Peer(format!("rank {rank} names memory at {offset}, outside of what it lends"))
                };
                let mut at = (0..from.skip).map(whole).sum::<usize>();
                taken
                    .map(|block| {
                        let bytes = self.bound.segment(length(block), segment);
                        let found = near.offset.checked_add((at + step) as u64);
                        let found = found.and_then(|offset| mapping.pieces(offset, bytes));
                        at += whole(block);
                        found.ok_or_else(outside)
                    })
                    .collect()
            }
        }
    }

    /// The slot of a message is free when the stream has passed what was enqueued.
    fn passed(&mut self, inlet: &Inlet) -> Result<(), Trouble> {
        if let Inlet::Far(slot) = inlet {
            let number = self.site.host_mark()?;
            self.site.bounce().free_at(*slot, number);
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one step")]
    fn reduce(
        &mut self,
        from: &[From],
        own: Option<(usize, Run)>,
        result: Run,
        to: bool,
        send: Option<usize>,
        finish: bool,
        segment: usize,
    ) -> Result<bool, Trouble> {
        let mut messages = Vec::with_capacity(from.len());
        for f in from {
            if segment < f.message.segments {
                match self.link.message(f.inlet)? {
                    Some(message) => messages.push((f, message)),
                    None => return Ok(false),
                }
            }
        }
        let sending = send.filter(|_| segment < result.segments);
        let outlet = match sending {
            Some(channel) => match self.outlet(channel, result, segment)? {
                Some(outlet) => Some((channel, outlet)),
                None => return Ok(false),
            },
            None => None,
        };
        let mut inlets = Vec::with_capacity(messages.len());
        for (f, message) in messages {
            let inlet = self.take(f, message, segment, true)?;
            // A slot that is needed is made.
            let inlet = inlet.ok_or_else(|| Trouble::Device("no pinned memory for a message".to_owned()))?;
            self.link.release(f.inlet);
            inlets.push((f, inlet));
        }
        if segment < result.segments {
            self.combine(&inlets, own, result, to, outlet, finish, segment)?;
        }
        for (_, inlet) in &inlets {
            self.passed(inlet)?;
        }
        Ok(true)
    }

    /// The arithmetic of a reduce step, and its message.
    #[expect(clippy::too_many_arguments, reason = "the parts of one step")]
    fn combine(
        &mut self,
        inlets: &[(&From, Inlet)],
        own: Option<(usize, Run)>,
        result: Run,
        to: bool,
        outlet: Option<(usize, Outlet)>,
        finish: bool,
        segment: usize,
    ) -> Result<(), Trouble> {
        let manner = self.manner()?;
        let divide = if finish { self.state.scale } else { None };
        let bytes = self.message_bytes(result, segment);
        // By block: what each source has of it, in the order of the reduction.
        let mut blocks: Vec<Vec<Pieces>> = vec![Vec::new(); result.blocks];
        for (f, inlet) in inlets {
            for (block, pieces) in self.sources(inlet, f, segment, result.blocks)?.into_iter().enumerate() {
                blocks[block].push(pieces);
            }
        }
        if let Some((position, run)) = own {
            for (block, piece) in self.pieces(run, segment).into_iter().enumerate() {
                let pieces = &mut blocks[block];
                pieces.insert(position.min(pieces.len()), vec![piece]);
            }
        }
        let kept = self.pieces(result, segment);
        // A result that is not kept goes straight to where it is sent from.
        let mut packed = match (to, &outlet) {
            (false, Some((_, Outlet::Far(slot)))) => Some(self.site.bounce().address(*slot) as Address),
            (false, Some((_, Outlet::Near(_)))) => Some(self.slab(bytes)?),
            _ => None,
        };
        let first = packed;
        for (sources, (kept, bytes)) in blocks.iter().zip(kept) {
            let target = packed.unwrap_or(kept);
            if bytes > 0 {
                reduction::reduce(self.site, manner, sources, target, bytes, divide)?;
            }
            packed = packed.map(|at| at + bytes as u64);
        }
        match (outlet, first) {
            (Some((channel, outlet)), None) => self.send(channel, outlet, result, segment)?,
            (Some((channel, Outlet::Far(slot))), Some(_)) => self.post(channel, slot, bytes)?,
            (Some((channel, Outlet::Near(cell))), Some(slab)) => {
                let ready = self.site.mark()?;
                let place = if bytes == 0 { (0, 0, false) } else { self.show_slab(slab, bytes)? };
                self.describe(channel, cell, ready, place, bytes);
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Tells those whose memory this rank reads when it is through with it.
    fn announce(&mut self) -> Result<(), Trouble> {
        self.site.flush()?;
        if let Some(mine) = self.site.words().mine() {
            self.site.write(mine.reads(), self.op.number)?;
            self.site.words().store(mine.enqueued(), self.op.number);
        }
        Ok(())
    }

    /// The operation is over when all who read this rank's memory are through: false while their reads are not even enqueued.
    fn end(&mut self) -> Result<bool, Trouble> {
        let near =
            |channel: &usize| self.bound.near[0][*channel] && self.bound.wiring.outlets[*channel].bytes > 0;
        let mut readers: Vec<usize> = (0..self.bound.wiring.outlets.len())
            .filter(near)
            .flat_map(|channel| self.bound.wiring.outlets[channel].readers.iter().copied())
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
        waits.into_iter().for_each(|wait| self.site.await_word(wait));
        self.site.flush()?;
        let lobby = self.op.lobby.clone();
        self.site.write(lobby.done_word(), number)?;
        let _ = self.op.end.set(lobby.mark(lobby.stream)?);
        Ok(true)
    }
}
