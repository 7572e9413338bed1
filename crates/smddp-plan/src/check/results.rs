//! Verification of the final state of an operation.

use super::clock::{Clock, VectorTime};
use super::error::{Element, Error};
use super::memory::Memory;
use super::shape::Operation;
use super::value::{NOTHING, Values};
use crate::ir::{Buffer, Collective};

/// Checks every segment of every output block.
pub(super) fn check(
    op: &Operation<'_>,
    operation: usize,
    memory: &[Memory],
    values: &Values,
    rounded: bool,
) -> Result<(), Error> {
    let canonical = op.declares_canonical();
    let same_bits = rounded && matches!(op.collective, Collective::AllGather | Collective::AllReduce);
    for rank in 0..op.size() {
        for block in (0..op.size()).filter(|&b| op.exists(rank, Buffer::Out, b)) {
            for segment in 0..op.segments(rank, Buffer::Out, block) {
                let element = Element { operation, rank, block, segment };
                let value = memory[rank].result(block, segment);
                if value == NOTHING {
                    return Err(Error::NotWritten { element });
                }
                let info = values.get(value);
                let expected = match op.collective {
                    Collective::AllToAll => op.block_id(block, rank),
                    _ => block,
                };
                if info.block != expected {
                    return Err(Error::WrongBlock { element, expected, found: info.block });
                }
                // Without a reduction a block has one contributor, the only rank with that input.
                let reduces = op.collective.reduces();
                if reduces && let Some(contributor) = values.missing(value, op.size()) {
                    return Err(Error::MissingContributor { element, contributor });
                }
                if info.finished != reduces {
                    return Err(Error::NotFinished { element });
                }
                if canonical && info.subtree != Some((0, op.size())) {
                    return Err(Error::NotCanonical { element });
                }
                // In place a rank rounds its own block of an all_gather where it is.
                let by_reference = !reduces && op.shared(rank, block);
                if same_bits && !info.rounded && !by_reference {
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

/// Checks that each rank left the barrier after all ranks entered it.
pub(super) fn barrier(operation: usize, began: &[VectorTime], ended: &[Clock]) -> Result<(), Error> {
    for (rank, clock) in ended.iter().enumerate() {
        if let Some(before) = began.iter().position(|&time| !clock.includes(time)) {
            return Err(Error::BarrierLeaks { operation, rank, before });
        }
    }
    Ok(())
}
