//! One segment of one step: its wait conditions, and its effects on memory and slots.

use super::super::MessageModes;
use super::super::clock::{Clock, VectorTime};
use super::super::error::{Error, Position};
use super::super::memory::{Memory, MemoryViolation};
use super::super::shape::Operation;
use super::super::value::{NOTHING, Value, Values, WrongOperand};
use super::{Flow, Rank, Replay, Run, Track};
use crate::ir::{Association, Buffer, Collective, Source, Span, Step};

impl Replay<'_> {
    /// Executes one segment of one step. Returns `false` if it must wait.
    pub(super) fn step(&mut self, t: usize, now: usize, at: Position, step: &Step) -> Result<bool, Error> {
        let Self { depth, values, tracks, clocks, pool, modes, inputs, produced } = self;
        let MessageModes { rounded, by_reference } = *modes;
        let Track { runs, ranks, .. } = &mut tracks[t];
        let Run { op, memory, flows, .. } = &mut runs[now];
        let (depth, me, segment, op) = (*depth, at.rank, at.segment, *op);
        let base = ranks[me].pipeline;
        let pipeline = base + at.pipeline;

        // Checks that all messages and the slot are available.
        let sources = || step.sources().iter().filter(|f| op.has(f.rank, f.message, segment));
        let incoming = |from: &Source, flows: &[Vec<Flow>]| {
            let k = flows[from.rank][from.channel].read[from.reader];
            (from.channel * depth + k % depth, k)
        };
        for from in sources() {
            let (slot, k) = incoming(from, flows);
            if ranks[from.rank].slots[slot].message != Some((now, k)) {
                return Ok(false);
            }
        }
        let outgoing =
            step.published().filter(|&(_, span)| op.has(me, span, segment)).map(|(channel, span)| {
                let k = flows[me][channel].sent;
                (channel, span, channel * depth + k % depth, k)
            });
        if let Some((_, _, slot, _)) = outgoing
            && ranks[me].slots[slot].unread > 0
        {
            return Ok(false);
        }

        // Merges the clocks of other ranks first, then executes the step.
        for from in sources() {
            let slot = &ranks[from.rank].slots[incoming(from, flows).0];
            if slot.span != Some(from.message) || slot.segment != segment {
                let found = slot.span.unwrap_or(Span::TOKEN);
                return Err(Error::Message { at, expected: from.message, found, segment: slot.segment });
            }
            clocks[pipeline].join(&slot.written);
        }
        if let Some((_, _, slot, _)) = outgoing {
            clocks[pipeline].join(&ranks[me].slots[slot].released);
        }
        let time = clocks[pipeline].tick(pipeline);
        let clock = &clocks[pipeline];
        // Messages by reference are read in the memory of their writers.
        let by_reference = |rank: usize, channel: usize| {
            by_reference.is_some_and(|by_reference| by_reference(rank, channel))
        };
        for from in sources().filter(|from| by_reference(from.rank, from.channel)) {
            for i in 0..from.message.blocks {
                let (buffer, block) = (from.message.buffer, from.message.block + i);
                if op.segments(from.rank, buffer, block) > segment {
                    let taken = (from.take.0..from.take.0 + from.take.1).contains(&i);
                    memory[from.rank].end_reference((buffer, block, segment), taken.then_some(time));
                }
            }
        }
        let taken = |from: &Source, i: usize, ranks: &[Rank], values: &mut Values| {
            if !op.has(from.rank, from.message, segment) {
                return NOTHING;
            }
            let value = ranks[from.rank].slots[incoming(from, flows).0].values[from.take.0 + i];
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
        match step {
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
                    let value = taken(from, i, ranks, values);
                    access.write(*to, i, value)?;
                    produced.push(value);
                }
            }
            Step::Reduce { from, own, to, finish, association, .. } => {
                let blocks = own.map_or_else(|| from[0].take.1, |(_, span)| span.blocks);
                for i in 0..blocks {
                    inputs.clear();
                    for from in from {
                        inputs.push(taken(from, i, ranks, values));
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

        // Releases the messages that were read, and publishes the message that was written.
        for from in sources() {
            let slot = &mut ranks[from.rank].slots[incoming(from, flows).0];
            slot.unread -= 1;
            if slot.unread == 0 {
                pool.clear(&mut slot.written);
            }
            if slot.writes_left > 0 {
                pool.merge(&mut slot.released, clock);
            }
            flows[from.rank][from.channel].read[from.reader] += 1;
        }
        if let Some((channel, span, slot, k)) = outgoing {
            for (i, &value) in produced.iter().enumerate() {
                let there = op.segments(me, span.buffer, span.block + i) > segment;
                if there != (value != NOTHING) {
                    return Err(Error::Sizes { at });
                }
            }
            for (i, &value) in produced.iter().enumerate().filter(|_| by_reference(me, channel)) {
                let (segment_of, readers) =
                    ((span.buffer, span.block + i, segment), flows[me][channel].read.len());
                if value != NOTHING && !memory[me].send_by_reference(segment_of, value, readers) {
                    return Err(Error::Malformed {
                        at,
                        reason: "a message by reference whose memory has another value",
                    });
                }
            }
            let flow = &mut flows[me][channel];
            flow.sent += 1;
            let slot = &mut ranks[me].slots[slot];
            slot.message = Some((now, k));
            slot.unread = flow.read.len();
            slot.span = Some(span);
            slot.segment = segment;
            std::mem::swap(&mut slot.values, produced);
            slot.writes_left -= 1;
            pool.merge(&mut slot.written, clock);
            pool.clear(&mut slot.released);
        }
        Ok(true)
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
