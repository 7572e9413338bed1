//! One segment of one step: what it waits for, and what it does to memory and cells.

use super::super::Ways;
use super::super::clock::{Clock, Moment};
use super::super::error::{Error, Position};
use super::super::memory::{Memory, Misuse};
use super::super::shape::Operation;
use super::super::value::{NOTHING, Unfit, Value, Values};
use super::{Flow, Rank, Replay, Run, Track};
use crate::ir::{Association, Buffer, Collective, Source, Span, Step};

impl Replay<'_> {
    /// One segment of one step, or `false` where it must wait.
    pub(super) fn step(&mut self, t: usize, now: usize, at: Position, step: &Step) -> Result<bool, Error> {
        let Self { depth, values, tracks, clocks, spare, ways, inputs, made } = self;
        let Ways { rounded, stays } = *ways;
        let Track { runs, ranks, .. } = &mut tracks[t];
        let Run { op, memory, flows, .. } = &mut runs[now];
        let (depth, me, segment, op) = (*depth, at.rank, at.segment, *op);
        let base = ranks[me].lane;
        let lane = base + at.lane;

        // Is everything there?
        let sources = || step.sources().iter().filter(|f| op.has(f.rank, f.message, segment));
        let incoming = |from: &Source, flows: &[Vec<Flow>]| {
            let k = flows[from.rank][from.channel].read[from.reader];
            (from.channel * depth + k % depth, k)
        };
        for from in sources() {
            let (cell, k) = incoming(from, flows);
            if ranks[from.rank].cells[cell].message != Some((now, k)) {
                return Ok(false);
            }
        }
        let outgoing =
            step.published().filter(|&(_, span)| op.has(me, span, segment)).map(|(channel, span)| {
                let k = flows[me][channel].sent;
                (channel, span, channel * depth + k % depth, k)
            });
        if let Some((_, _, cell, _)) = outgoing
            && ranks[me].cells[cell].unread > 0
        {
            return Ok(false);
        }

        // It happens: first what I learn from others, then what I do.
        for from in sources() {
            let cell = &ranks[from.rank].cells[incoming(from, flows).0];
            if cell.span != Some(from.message) || cell.segment != segment {
                let found = cell.span.unwrap_or(Span::TOKEN);
                return Err(Error::Message { at, expected: from.message, found, segment: cell.segment });
            }
            clocks[lane].join(&cell.written);
        }
        if let Some((_, _, cell, _)) = outgoing {
            clocks[lane].join(&ranks[me].cells[cell].released);
        }
        let moment = clocks[lane].tick(lane);
        let clock = &clocks[lane];
        // Messages that are their writers' memory are read there.
        let stays = |rank: usize, channel: usize| stays.is_some_and(|stays| stays(rank, channel));
        for from in sources().filter(|from| stays(from.rank, from.channel)) {
            for i in 0..from.message.blocks {
                let (buffer, block) = (from.message.buffer, from.message.block + i);
                if op.segments(from.rank, buffer, block) > segment {
                    let taken = (from.take.0..from.take.0 + from.take.1).contains(&i);
                    memory[from.rank].returned((buffer, block, segment), taken.then_some(moment));
                }
            }
        }
        let taken = |from: &Source, i: usize, ranks: &[Rank], values: &mut Values| {
            if !op.has(from.rank, from.message, segment) {
                return NOTHING;
            }
            let value = ranks[from.rank].cells[incoming(from, flows).0].values[from.take.0 + i];
            let crosses = rounded.is_some_and(|nodes| !nodes.share_node(from.rank, me));
            if crosses { values.round(value) } else { value }
        };
        // Where all ranks are to have what one rank has or makes.
        let rounds =
            rounded.filter(|_| matches!(op.collective, Collective::AllGather | Collective::AllReduce));
        let given = |value: Value, source: Span, finish: bool, values: &mut Values| match rounds {
            Some(_) if finish || !op.collective.reduces() && source.buffer == Buffer::In => {
                values.round(value)
            }
            _ => value,
        };
        let mut hands = Hands { op: &op, memory: &mut memory[me], at, base, moment, clock };
        made.clear();
        match step {
            Step::Send { source, tee, .. } => {
                for i in 0..source.blocks {
                    let value = given(hands.read(*source, i)?, *source, false, values);
                    if let Some(tee) = tee
                        && !hands.same(*source, *tee, i)
                    {
                        hands.write(*tee, i, value)?;
                    }
                    made.push(value);
                }
            }
            Step::Receive { from, to, .. } => {
                for i in 0..to.blocks {
                    let value = taken(from, i, ranks, values);
                    hands.write(*to, i, value)?;
                    made.push(value);
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
                        inputs.insert(*position, hands.read(*span, i)?);
                    }
                    let value = hands.combine(values, inputs, association, *finish)?;
                    let value = given(value, Span::TOKEN, *finish, values);
                    if let Some(to) = to {
                        hands.write(*to, i, value)?;
                    }
                    made.push(value);
                }
            }
            Step::Copy { source, to, finish } => {
                for i in 0..source.blocks {
                    let mut value = hands.read(*source, i)?;
                    if *finish {
                        value = hands.combine(values, &[value], &Association::InOrder, true)?;
                    }
                    value = given(value, *source, *finish, values);
                    if *finish || !hands.same(*source, *to, i) {
                        hands.write(*to, i, value)?;
                    }
                }
            }
        }

        // Give back what was read, publish what was written.
        for from in sources() {
            let cell = &mut ranks[from.rank].cells[incoming(from, flows).0];
            cell.unread -= 1;
            if cell.unread == 0 {
                spare.forget(&mut cell.written);
            }
            if cell.to_come > 0 {
                spare.keep(&mut cell.released, clock);
            }
            flows[from.rank][from.channel].read[from.reader] += 1;
        }
        if let Some((channel, span, cell, k)) = outgoing {
            for (i, &value) in made.iter().enumerate() {
                let there = op.segments(me, span.buffer, span.block + i) > segment;
                if there != (value != NOTHING) {
                    return Err(Error::Sizes { at });
                }
            }
            for (i, &value) in made.iter().enumerate().filter(|_| stays(me, channel)) {
                let (place, readers) =
                    ((span.buffer, span.block + i, segment), flows[me][channel].read.len());
                if value != NOTHING && !memory[me].lend(place, value, readers) {
                    return Err(Error::Malformed { at, what: "a message by reference that is not kept" });
                }
            }
            let flow = &mut flows[me][channel];
            flow.sent += 1;
            let cell = &mut ranks[me].cells[cell];
            cell.message = Some((now, k));
            cell.unread = flow.read.len();
            cell.span = Some(span);
            cell.segment = segment;
            std::mem::swap(&mut cell.values, made);
            cell.to_come -= 1;
            spare.keep(&mut cell.written, clock);
            spare.forget(&mut cell.released);
        }
        Ok(true)
    }
}

/// A step's hold on its rank's memory, for one segment.
struct Hands<'b, 'a> {
    op: &'b Operation<'a>,
    memory: &'b mut Memory,
    at: Position,
    base: usize,
    moment: Moment,
    clock: &'b Clock,
}

impl Hands<'_, '_> {
    fn has(&self, span: Span, i: usize) -> bool {
        self.op.segments(self.at.rank, span.buffer, span.block + i) > self.at.segment
    }

    fn same(&self, a: Span, b: Span, i: usize) -> bool {
        self.memory.same((a.buffer, a.block + i), (b.buffer, b.block + i))
    }

    fn error(&self, misuse: Misuse, buffer: Buffer, block: usize) -> Error {
        let at = self.at;
        match misuse {
            Misuse::Unwritten => Error::ReadBeforeWrite { at, buffer, block },
            Misuse::Clobbered => Error::Clobbered { at, block },
            Misuse::Lent => Error::Lent { at, buffer, block },
            Misuse::Unordered(lane) => Error::Unordered { at, buffer, block, other: lane - self.base },
        }
    }

    /// Block `i` of the span; [`NOTHING`] where it has no such segment.
    fn read(&mut self, span: Span, i: usize) -> Result<Value, Error> {
        if !self.has(span, i) {
            return Ok(NOTHING);
        }
        let (buffer, block) = (span.buffer, span.block + i);
        self.memory
            .read((buffer, block, self.at.segment), self.at.lane, self.moment, self.clock)
            .map_err(|misuse| self.error(misuse, buffer, block))
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
            .write((buffer, block, self.at.segment), value, self.moment, self.clock)
            .map_err(|misuse| self.error(misuse, buffer, block))
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
            |unfit| match unfit {
                Unfit::Twice(contributor) => Error::DoubleContributor { at, contributor },
                Unfit::Mixed(first, second) => Error::MixedBlocks { at, first, second },
                Unfit::Finished => Error::WrongFinish { at },
                Unfit::Tree(inputs) => Error::Association { at, inputs },
            },
        )
    }
}
