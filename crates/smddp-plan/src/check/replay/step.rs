//! One segment of one step: its wait conditions, and its effects on memory and slots.

use super::super::MessageModes;
use super::super::clock::{Clock, ClockPool, VectorTime};
use super::super::error::{Error, Position};
use super::super::memory::{Memory, MemoryViolation};
use super::super::shape::Operation;
use super::super::value::{NOTHING, Value, Values, WrongOperand};
use super::{Flow, Rank, Replay, Run, Track};
use crate::ir::{Association, Buffer, Collective, Source, Span, Step};

impl Replay<'_> {
    /// Executes one segment of one step. Returns `false` if it must wait.
    pub(super) fn step(&mut self, t: usize, now: usize, at: Position, step: &Step) -> Result<bool, Error> {
        let Track { runs, ranks, .. } = &mut self.tracks[t];
        let Run { op, memory, flows, .. } = &mut runs[now];
        let base = ranks[at.rank].pipeline;
        let depth = self.depth;
        let outgoing = step.published().filter(|&(_, span)| op.has(at.rank, span, at.segment));
        let outgoing = outgoing.map(|(channel, span)| {
            let k = flows[at.rank][channel].sent;
            (channel, span, channel * depth + k % depth, k)
        });
        let mut segment = Segment {
            depth,
            modes: self.modes,
            op: *op,
            now,
            at,
            base,
            step,
            outgoing,
            memory,
            flows,
            ranks,
            values: &mut self.values,
            clocks: &mut self.clocks,
            pool: &mut self.pool,
            inputs: &mut self.inputs,
            produced: &mut self.produced,
        };
        if !segment.is_ready() {
            return Ok(false);
        }
        let time = segment.join_clocks()?;
        segment.end_references(time);
        segment.execute(time)?;
        segment.release();
        segment.publish()?;
        Ok(true)
    }
}

/// One segment of one step, with the state that it reads and changes.
struct Segment<'r, 'a> {
    depth: usize,
    modes: MessageModes<'a>,
    op: Operation<'a>,
    /// Number of the operation in its track.
    now: usize,
    at: Position,
    /// Number of the rank's pipeline 0 in the clocks.
    base: usize,
    step: &'r Step,
    /// Channel, span, slot and number of the message that the step writes in this segment.
    outgoing: Option<(usize, Span, usize, usize)>,
    memory: &'r mut [Memory],
    flows: &'r mut [Vec<Flow>],
    ranks: &'r mut [Rank],
    values: &'r mut Values,
    clocks: &'r mut [Clock],
    pool: &'r mut ClockPool,
    inputs: &'r mut Vec<Value>,
    produced: &'r mut Vec<Value>,
}

/// Returns the slot of the next message from a source, and the number of the message.
fn incoming(from: &Source, flows: &[Vec<Flow>], depth: usize) -> (usize, usize) {
    let k = flows[from.rank][from.channel].read[from.reader];
    (from.channel * depth + k % depth, k)
}

impl<'r, 'a> Segment<'r, 'a> {
    /// Returns the sources whose messages have this segment.
    fn sources(&self) -> impl Iterator<Item = &'r Source> + use<'r, 'a> {
        let (op, segment) = (self.op, self.at.segment);
        self.step.sources().iter().filter(move |from| op.has(from.rank, from.message, segment))
    }

    /// Returns true if all messages and the slot are available.
    fn is_ready(&self) -> bool {
        let arrived = |from: &Source| {
            let (slot, k) = incoming(from, self.flows, self.depth);
            self.ranks[from.rank].slots[slot].message == Some((self.now, k))
        };
        self.sources().all(arrived)
            && self.outgoing.is_none_or(|(_, _, slot, _)| self.ranks[self.at.rank].slots[slot].unread == 0)
    }

    /// Merges the clocks of the writers and of the slot's last readers. Returns the time of the step.
    fn join_clocks(&mut self) -> Result<VectorTime, Error> {
        let pipeline = self.base + self.at.pipeline;
        for from in self.sources() {
            let slot = &self.ranks[from.rank].slots[incoming(from, self.flows, self.depth).0];
            if slot.span != Some(from.message) || slot.segment != self.at.segment {
                let found = slot.span.unwrap_or(Span::TOKEN);
                let (at, segment) = (self.at, slot.segment);
                return Err(Error::Message { at, expected: from.message, found, segment });
            }
            self.clocks[pipeline].join(&slot.written);
        }
        if let Some((_, _, slot, _)) = self.outgoing {
            self.clocks[pipeline].join(&self.ranks[self.at.rank].slots[slot].released);
        }
        Ok(self.clocks[pipeline].tick(pipeline))
    }

    fn is_by_reference(&self, rank: usize, channel: usize) -> bool {
        self.modes.by_reference.is_some_and(|by_reference| by_reference(rank, channel))
    }

    /// Reads messages by reference in the memory of their writers.
    fn end_references(&mut self, time: VectorTime) {
        let segment = self.at.segment;
        for from in self.sources() {
            if !self.is_by_reference(from.rank, from.channel) {
                continue;
            }
            for i in 0..from.message.blocks {
                let (buffer, block) = (from.message.buffer, from.message.block + i);
                if self.op.segments(from.rank, buffer, block) > segment {
                    let taken = (from.take.0..from.take.0 + from.take.1).contains(&i);
                    self.memory[from.rank].end_reference((buffer, block, segment), taken.then_some(time));
                }
            }
        }
    }

    /// Executes the step: `produced` are the values of the message that it writes.
    fn execute(&mut self, time: VectorTime) -> Result<(), Error> {
        let Self { depth, at, op, base, ref mut memory, ref flows, ref ranks, .. } = *self;
        let (inputs, produced, values) = (&mut *self.inputs, &mut *self.produced, &mut *self.values);
        let (me, rounded) = (at.rank, self.modes.rounded);
        let clock = &self.clocks[base + at.pipeline];
        let taken = |from: &Source, i: usize, values: &mut Values| {
            if !op.has(from.rank, from.message, at.segment) {
                return NOTHING;
            }
            let value = ranks[from.rank].slots[incoming(from, flows, depth).0].values[from.take.0 + i];
            let crosses = rounded.is_some_and(|nodes| !nodes.share_node(from.rank, me));
            if crosses { values.round(value) } else { value }
        };
        // Collectives in which all ranks must have the same value.
        let rounds =
            rounded.filter(|_| matches!(op.collective, Collective::AllGather | Collective::AllReduce));
        let given = |value: Value, source: Span, finish: bool, values: &mut Values| match rounds {
            Some(_) if finish || !op.collective.reduces() && source.buffer == Buffer::In => {
                values.round(value)
            }
            _ => value,
        };
        let mut access = MemoryAccess { op: &op, memory: &mut memory[me], at, base, time, clock };
        produced.clear();
        match self.step {
            Step::Send { source, tee, .. } => {
                for i in 0..source.blocks {
                    let value = given(access.read(*source, i)?, *source, false, values);
                    if let Some(tee) = tee
                        && !access.same(*source, *tee, i)
                    {
                        access.write(*tee, i, value)?;
                    }
                    produced.push(value);
                }
            }
            Step::Receive { from, to, .. } => {
                for i in 0..to.blocks {
                    let value = taken(from, i, values);
                    access.write(*to, i, value)?;
                    produced.push(value);
                }
            }
            Step::Reduce { from, own, to, finish, association, .. } => {
                let blocks = own.map_or_else(|| from[0].take.1, |(_, span)| span.blocks);
                for i in 0..blocks {
                    inputs.clear();
                    for from in from {
                        inputs.push(taken(from, i, values));
                    }
                    if let Some((position, span)) = own {
                        inputs.insert(*position, access.read(*span, i)?);
                    }
                    let value = access.combine(values, inputs, association, *finish)?;
                    let value = given(value, Span::TOKEN, *finish, values);
                    if let Some(to) = to {
                        access.write(*to, i, value)?;
                    }
                    produced.push(value);
                }
            }
            Step::Copy { source, to, finish } => {
                for i in 0..source.blocks {
                    let mut value = access.read(*source, i)?;
                    if *finish {
                        value = access.combine(values, &[value], &Association::InOrder, true)?;
                    }
                    value = given(value, *source, *finish, values);
                    if *finish || !access.same(*source, *to, i) {
                        access.write(*to, i, value)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Releases the messages that were read.
    fn release(&mut self) {
        let clock = &self.clocks[self.base + self.at.pipeline];
        for from in self.sources() {
            let slot = &mut self.ranks[from.rank].slots[incoming(from, self.flows, self.depth).0];
            slot.unread -= 1;
            if slot.unread == 0 {
                self.pool.clear(&mut slot.written);
            }
            if slot.writes_left > 0 {
                self.pool.merge(&mut slot.released, clock);
            }
            self.flows[from.rank][from.channel].read[from.reader] += 1;
        }
    }

    /// Publishes the message that was written.
    fn publish(&mut self) -> Result<(), Error> {
        let Some((channel, span, slot, k)) = self.outgoing else { return Ok(()) };
        let (at, me, segment) = (self.at, self.at.rank, self.at.segment);
        for (i, &value) in self.produced.iter().enumerate() {
            let there = self.op.segments(me, span.buffer, span.block + i) > segment;
            if there != (value != NOTHING) {
                return Err(Error::Sizes { at });
            }
        }
        if self.is_by_reference(me, channel) {
            let readers = self.flows[me][channel].read.len();
            for (i, &value) in self.produced.iter().enumerate() {
                let place = (span.buffer, span.block + i, segment);
                if value != NOTHING && !self.memory[me].send_by_reference(place, value, readers) {
                    return Err(Error::Malformed {
                        at,
                        reason: "a message by reference whose memory has another value",
                    });
                }
            }
        }
        let flow = &mut self.flows[me][channel];
        flow.sent += 1;
        let slot = &mut self.ranks[me].slots[slot];
        slot.message = Some((self.now, k));
        slot.unread = flow.read.len();
        slot.span = Some(span);
        slot.segment = segment;
        std::mem::swap(&mut slot.values, self.produced);
        slot.writes_left -= 1;
        self.pool.merge(&mut slot.written, &self.clocks[self.base + at.pipeline]);
        self.pool.clear(&mut slot.released);
        Ok(())
    }
}

/// Memory access of a step to its rank, for one segment.
struct MemoryAccess<'b, 'a> {
    op: &'b Operation<'a>,
    memory: &'b mut Memory,
    at: Position,
    base: usize,
    time: VectorTime,
    clock: &'b Clock,
}

impl MemoryAccess<'_, '_> {
    fn has(&self, span: Span, i: usize) -> bool {
        self.op.segments(self.at.rank, span.buffer, span.block + i) > self.at.segment
    }

    fn same(&self, a: Span, b: Span, i: usize) -> bool {
        self.memory.same((a.buffer, a.block + i), (b.buffer, b.block + i))
    }

    fn error(&self, violation: MemoryViolation, buffer: Buffer, block: usize) -> Error {
        let at = self.at;
        match violation {
            MemoryViolation::Unwritten => Error::ReadBeforeWrite { at, buffer, block },
            MemoryViolation::Clobbered => Error::Clobbered { at, block },
            MemoryViolation::StillReferenced => Error::StillReferenced { at, buffer, block },
            MemoryViolation::Unordered(pipeline) => {
                Error::Unordered { at, buffer, block, other: pipeline - self.base }
            }
        }
    }

    /// Returns the value of block `i` of the span; [`NOTHING`] if it has no such segment.
    fn read(&mut self, span: Span, i: usize) -> Result<Value, Error> {
        if !self.has(span, i) {
            return Ok(NOTHING);
        }
        let (buffer, block) = (span.buffer, span.block + i);
        self.memory
            .read((buffer, block, self.at.segment), self.at.pipeline, self.time, self.clock)
            .map_err(|violation| self.error(violation, buffer, block))
    }

    fn write(&mut self, span: Span, i: usize, value: Value) -> Result<(), Error> {
        if self.has(span, i) != (value != NOTHING) {
            return Err(Error::Sizes { at: self.at });
        }
        if value == NOTHING {
            return Ok(());
        }
        let (buffer, block) = (span.buffer, span.block + i);
        self.memory
            .write((buffer, block, self.at.segment), value, self.time, self.clock)
            .map_err(|violation| self.error(violation, buffer, block))
    }

    fn combine(
        &self,
        values: &mut Values,
        inputs: &[Value],
        association: &Association,
        finish: bool,
    ) -> Result<Value, Error> {
        let at = self.at;
        let missing = inputs.iter().filter(|&&v| v == NOTHING).count();
        if missing == inputs.len() {
            return Ok(NOTHING);
        }
        if missing > 0 {
            return Err(Error::Sizes { at });
        }
        let combined = values.reduce(inputs, association, self.op.size());
        combined.and_then(|v| if finish { values.finish(v, self.op.size()) } else { Ok(v) }).map_err(
            |operand_error| match operand_error {
                WrongOperand::Twice(contributor) => Error::DoubleContributor { at, contributor },
                WrongOperand::Mixed(first, second) => Error::MixedBlocks { at, first, second },
                WrongOperand::Finished => Error::WrongFinish { at },
                WrongOperand::Tree(inputs) => Error::Association { at, inputs },
            },
        )
    }
}
