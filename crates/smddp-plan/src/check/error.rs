//! Errors of the checker.

use crate::ir::{Buffer, Span};
use std::fmt;

/// Position in a plan. Operations are numbered over all given sequences, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// Number of the operation.
    pub operation: usize,
    /// Rank whose program has the step.
    pub rank: usize,
    /// Index among the pipelines of the program.
    pub pipeline: usize,
    /// Index among the steps of the pipeline.
    pub step: usize,
    /// Index of the segment.
    pub segment: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, rank, pipeline, step, segment } = self;
        write!(f, "operation {operation}, rank {rank}, pipeline {pipeline}, step {step}, segment {segment}")
    }
}

/// A segment of a block of Out after the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Element {
    /// Number of the operation.
    pub operation: usize,
    /// Rank that has the output.
    pub rank: usize,
    /// Number of the output block.
    pub block: usize,
    /// Index of the segment.
    pub segment: usize,
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, rank, block, segment } = self;
        write!(f, "operation {operation}, rank {rank}, output block {block}, segment {segment}")
    }
}

/// Reason why the checker rejects a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The program breaks a static rule. `at.segment` is 0.
    #[error("{at}: {reason}")]
    Malformed {
        /// Position of the step.
        at: Position,
        /// Rule that the program breaks.
        reason: &'static str,
    },
    /// A step reads memory that no step has written.
    #[error("{at}: reads {buffer:?} block {block} before it is written")]
    ReadBeforeWrite {
        /// Position of the read.
        at: Position,
        /// Buffer that it reads.
        buffer: Buffer,
        /// Block that it reads.
        block: usize,
    },
    /// In place: the input was lost because an output with the same memory was written.
    #[error("{at}: input block {block} was overwritten by an output that shares its memory")]
    Clobbered {
        /// Position of the read.
        at: Position,
        /// Input block that was lost.
        block: usize,
    },
    /// Another pipeline uses the block, and nothing orders the two accesses.
    #[error("{at}: {buffer:?} block {block} is used by pipeline {other} without an order between the two")]
    Unordered {
        /// Position of the access.
        at: Position,
        /// Buffer that both pipelines use.
        buffer: Buffer,
        /// Block that both pipelines use.
        block: usize,
        /// Index of the other pipeline.
        other: usize,
    },
    /// A reduction contains the contribution of a rank twice.
    #[error("{at}: rank {contributor} contributes twice to a reduction")]
    DoubleContributor {
        /// Position of the reduction.
        at: Position,
        /// Rank that contributes twice.
        contributor: usize,
    },
    /// A reduction combines parts of different blocks.
    #[error("{at}: reduces parts of different blocks ({first} and {second})")]
    MixedBlocks {
        /// Position of the reduction.
        at: Position,
        /// Block of the first input.
        first: usize,
        /// Block of the other input.
        second: usize,
    },
    /// Combined or copied blocks differ in their number of segments.
    #[error("{at}: combines or copies blocks of different sizes")]
    Sizes {
        /// Position of the step.
        at: Position,
    },
    /// A reader finds another message than it expects.
    #[error("{at}: expected message {expected:?}, the writer sent segment {segment} of {found:?}")]
    Message {
        /// Position of the read.
        at: Position,
        /// Span that the reader expects.
        expected: Span,
        /// Span that the writer sent.
        found: Span,
        /// Segment that the writer sent.
        segment: usize,
    },
    /// `finish` on a partial or finished result, or a finished result reduced again.
    #[error("{at}: finishes an incomplete or already finished result")]
    WrongFinish {
        /// Position of the step.
        at: Position,
    },
    /// No step writes an output.
    #[error("{element}: never written")]
    NotWritten {
        /// Output without a value.
        element: Element,
    },
    /// An output has the value of another block.
    #[error("{element}: holds block {found}, not {expected}")]
    WrongBlock {
        /// Output with that value.
        element: Element,
        /// Block that it should have.
        expected: usize,
        /// Block that it has.
        found: usize,
    },
    /// A result lacks the contribution of a rank.
    #[error("{element}: rank {contributor} is missing")]
    MissingContributor {
        /// Output with the result.
        element: Element,
        /// Rank whose contribution is missing.
        contributor: usize,
    },
    /// A reduction has no `finish`, or another collective has one.
    #[error("{element}: complete but not finished (or finished and not a reduction)")]
    NotFinished {
        /// Output with the result.
        element: Element,
    },
    /// Two ranks of an all_reduce combine in different orders.
    #[error("{element}: reduced in a different order than at rank {other}")]
    OrdersDiffer {
        /// Output with the result.
        element: Element,
        /// Rank with the other order.
        other: usize,
    },
    /// The order differs from the canonical tree, which the plan declares.
    #[error("{element}: not reduced in the canonical tree order that the plan declares")]
    NotCanonical {
        /// Output with the result.
        element: Element,
    },
    /// A step writes memory that other ranks may still read by reference.
    #[error("{at}: writes block {block} of {buffer:?} while other ranks may still read it there")]
    StillReferenced {
        /// Position of the write.
        at: Position,
        /// Buffer that it writes.
        buffer: Buffer,
        /// Block that it writes.
        block: usize,
    },
    /// Ranks have different values: one is rounded by a link, the other is not.
    #[error(
        "{element}: other ranks have the value rounded to the link format, this rank has the unrounded value"
    )]
    NotRounded {
        /// Output with the unrounded value.
        element: Element,
    },
    /// The tree of a reduction does not match its number of inputs.
    #[error("{at}: combines {inputs} inputs by a tree of a different shape")]
    Association {
        /// Position of the reduction.
        at: Position,
        /// Number of inputs.
        inputs: usize,
    },
    /// A reader leaves messages of a channel unread.
    #[error(
        "operation {operation}: rank {reader} never reads {messages} messages of channel {channel} of rank {writer}"
    )]
    Unread {
        /// Number of the operation.
        operation: usize,
        /// Rank that writes the channel.
        writer: usize,
        /// Index among the channels of the writer.
        channel: usize,
        /// Rank that does not read them.
        reader: usize,
        /// Number of unread messages.
        messages: usize,
    },
    /// A rank leaves a barrier before all ranks have entered it.
    #[error("operation {operation}: rank {rank} leaves the barrier before rank {before} enters it")]
    BarrierLeaks {
        /// Number of the operation.
        operation: usize,
        /// Rank that leaves too early.
        rank: usize,
        /// Rank that has not entered yet.
        before: usize,
    },
    /// All remaining steps wait for each other.
    #[error("deadlock with {depth} slots per channel; first of {} waiting steps: {}", waiting.len(), waiting[0])]
    Deadlock {
        /// Slots per channel.
        depth: usize,
        /// Positions of the waiting steps.
        waiting: Vec<Position>,
    },
}
