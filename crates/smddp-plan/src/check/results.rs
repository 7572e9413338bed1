//! What an operation must have achieved in the end.

use super::clock::{Clock, Moment};
use super::error::{Element, Error};
use super::memory::Memory;
use super::shape::Operation;
use super::value::{NOTHING, Values};
use crate::ir::{Buffer, Collective};

/// Every segment of every output block holds what it should.
pub(super) fn check(
    op: &Operation<'_>,
    operation: usize,
    memory: &[Memory],
    values: &Values,
    rounded: bool,
) -> Result<(), Error> {
    let canonical = op.says_canonical();
    let alike = rounded && matches!(op.collective, Collective::AllGather | Collective::AllReduce);
    for rank in 0..op.size() {
        for block in (0..op.size()).filter(|&b| op.exists(rank, Buffer::Out, b)) {
            for segment in 0..op.segments(rank, Buffer::Out, block) {
                let element = Element { operation, rank, block, segment };
                let value = memory[rank].result(block, segment);
                if value == NOTHING {
                    return Err(Error::NotWritten { element });
                }
                let known = values.get(value);
                let expected = match op.collective {
                    Collective::AllToAll => op.block_id(block, rank),
                    _ => block,
                };
                if known.block != expected {
                    return Err(Error::WrongBlock { element, expected, found: known.block });
                }
                // Where nothing is reduced a block has one contributor, who alone has it as input.
                let reduces = op.collective.reduces();
                if reduces && let Some(contributor) = values.missing(value, op.size()) {
                    return Err(Error::MissingContributor { element, contributor });
                }
                if known.finished != reduces {
                    return Err(Error::NotFinished { element });
                }
                if canonical && known.subtree != Some((0, op.size())) {
                    return Err(Error::NotCanonical { element });
                }
                // In place a rank's own block of an all_gather is rounded where it lies.
                let stays = !reduces && op.shared(rank, block);
                if alike && !known.rounded && !stays {
                    return Err(Error::NotRounded { element });
                }
                if op.collective == Collective::AllReduce && value != memory[0].result(block, segment) {
                    return Err(Error::OrdersDiffer { element, other: 0 });
                }
            }
        }
    }
    Ok(())
}

/// Whoever has left knows that all had come.
pub(super) fn barrier(operation: usize, began: &[Moment], ended: &[Clock]) -> Result<(), Error> {
    for (rank, clock) in ended.iter().enumerate() {
        if let Some(before) = began.iter().position(|&moment| !clock.knows(moment)) {
            return Err(Error::BarrierLeaks { operation, rank, before });
        }
    }
    Ok(())
}
