//! Static checks of programs.

use std::collections::BTreeMap;

use super::error::{Error, Position};
use super::shape::{Operation, Sizes};
use crate::ir::{Buffer, Collective, Program, Source, Span, Step};

/// Checks all programs of an operation against the rules of the IR.
pub(super) fn check(op: &Operation<'_>, operation: usize) -> Result<(), Error> {
    let size = op.size();
    let sizes_fit = match op.sizes {
        Sizes::Blocks(blocks) => {
            blocks.len() == size
                && (op.collective != Collective::AllToAll || blocks.windows(2).all(|w| w[0] == w[1]))
        }
        Sizes::Pairs(pairs) => {
            op.collective == Collective::AllToAll
                && pairs.len() == size
                && pairs.iter().all(|row| row.len() == size)
        }
    };
    if !sizes_fit || op.root >= size.max(1) {
        return Err(Error::Malformed {
            at: Position { operation, ..Position::default() },
            reason: "sizes or root do not fit the group",
        });
    }
    for (rank, program) in op.programs.iter().enumerate() {
        let at = Position { operation, rank, ..Position::default() };
        channels(op, program, at)?;
        let mut writers: Vec<Option<(usize, usize)>> = vec![None; program.channels.len()];
        let mut readers = BTreeMap::new();
        for (pipeline, steps) in program.pipelines.iter().enumerate() {
            for (step, timed) in steps.iter().enumerate() {
                let at = Position { pipeline, step, ..at };
                let malformed = |reason| Err(Error::Malformed { at, reason });
                spans(op, at, &timed.step)?;
                if let Some((channel, _)) = timed.step.published() {
                    let Some(writer) = writers.get_mut(channel) else {
                        return malformed("writes a channel that does not exist");
                    };
                    match *writer.get_or_insert((pipeline, timed.lag)) {
                        (l, _) if l != pipeline => return malformed("two pipelines write one channel"),
                        (_, lag) if lag != timed.lag => {
                            return malformed("messages of different lags on one channel");
                        }
                        _ => {}
                    }
                }
                for (i, from) in timed.step.sources().iter().enumerate() {
                    source(op, at, from)?;
                    let flow = (from.rank, from.channel);
                    if timed.step.sources()[..i].iter().any(|f| (f.rank, f.channel) == flow) {
                        return malformed("reads one channel twice in a step");
                    }
                    if *readers.entry(flow).or_insert(pipeline) != pipeline {
                        return malformed("two pipelines read one channel");
                    }
                }
            }
        }
    }
    Ok(())
}

fn channels(op: &Operation<'_>, program: &Program, at: Position) -> Result<(), Error> {
    for channel in &program.channels {
        let readers = &channel.readers;
        if !readers.windows(2).all(|w| w[0] < w[1])
            || readers.iter().any(|&r| r >= op.size() || r == at.rank)
            || readers.is_empty()
        {
            return Err(Error::Malformed { at, reason: "readers must be other ranks in ascending order" });
        }
    }
    Ok(())
}

fn source(op: &Operation<'_>, at: Position, from: &Source) -> Result<(), Error> {
    let malformed = |reason| Err(Error::Malformed { at, reason });
    let Some(channel) = op.programs.get(from.rank).and_then(|p| p.channels.get(from.channel)) else {
        return malformed("reads a channel that does not exist");
    };
    if channel.readers.get(from.reader) != Some(&at.rank) {
        return malformed("has the wrong reader index for the channel");
    }
    if from.take.0 + from.take.1 > from.message.blocks {
        return malformed("takes blocks that are not in the message");
    }
    exists(op, Position { rank: from.rank, ..at }, from.message)
        .or_else(|_| malformed("expects a message of blocks that its writer does not have"))
}

fn exists(op: &Operation<'_>, at: Position, span: Span) -> Result<(), Error> {
    match (span.block..span.block + span.blocks).all(|b| op.exists(at.rank, span.buffer, b)) {
        true => Ok(()),
        false => Err(Error::Malformed { at, reason: "uses blocks that the rank does not have" }),
    }
}

/// Checks that spans exist, that their lengths match, and that no step writes In.
fn spans(op: &Operation<'_>, at: Position, step: &Step) -> Result<(), Error> {
    let malformed = |reason| Err(Error::Malformed { at, reason });
    let (reads, writes) = match step {
        Step::Send { source, tee, .. } => (vec![*source], *tee),
        Step::Receive { from, to, .. } => (vec![Span { blocks: from.take.1, ..*to }], Some(*to)),
        Step::Reduce { from, own, to, send, .. } => {
            if to.is_none() && send.is_none() {
                return malformed("a reduction without a destination");
            }
            if own.is_some_and(|(position, _)| position > from.len()) {
                return malformed("the position of the local input is out of range");
            }
            let Some(blocks) = own.map(|(_, o)| o.blocks).or(from.first().map(|f| f.take.1)) else {
                return malformed("a reduction without inputs");
            };
            if from.iter().any(|f| f.take.1 != blocks) || to.is_some_and(|t| t.blocks != blocks) {
                return malformed("spans of different lengths");
            }
            (own.iter().map(|o| o.1).collect(), *to)
        }
        Step::Copy { source, to, .. } => (vec![*source], Some(*to)),
    };
    for span in reads.iter().chain(&writes) {
        exists(op, at, *span)?;
    }
    if let (Some(read), Some(write)) = (reads.first(), writes)
        && read.blocks != write.blocks
    {
        return malformed("spans of different lengths");
    }
    let overlap = |r: &Span, w: Span| {
        r.buffer == w.buffer && *r != w && r.block < w.block + w.blocks && w.block < r.block + r.blocks
    };
    if let (Some(read), Some(write), false) = (reads.first(), writes, matches!(step, Step::Receive { .. }))
        && overlap(read, write)
    {
        return malformed("reads and writes overlapping spans that are not equal");
    }
    if writes.is_some_and(|w| w.buffer == Buffer::In && w.blocks > 0) {
        return malformed("writes the input");
    }
    Ok(())
}
