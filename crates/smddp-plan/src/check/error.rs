//! Errors of the checker.

use crate::ir::{Buffer, Span};
use std::fmt;

/// Position in a plan. Operations are numbered over all given sequences, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    pub operation: usize,
    pub rank: usize,
    pub pipeline: usize,
    pub step: usize,
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
    pub operation: usize,
    pub rank: usize,
    pub block: usize,
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
    Malformed { at: Position, reason: &'static str },
    #[error("{at}: reads {buffer:?} block {block} before it is written")]
    ReadBeforeWrite { at: Position, buffer: Buffer, block: usize },
    /// In place: the input was lost because an output with the same memory was written.
    #[error("{at}: input block {block} was overwritten by an output that shares its memory")]
    Clobbered { at: Position, block: usize },
    /// Another pipeline uses the block, and nothing orders the two accesses.
    #[error("{at}: {buffer:?} block {block} is used by pipeline {other} without an order between the two")]
    Unordered { at: Position, buffer: Buffer, block: usize, other: usize },
    #[error("{at}: rank {contributor} contributes twice to a reduction")]
    DoubleContributor { at: Position, contributor: usize },
    #[error("{at}: reduces parts of different blocks ({first} and {second})")]
    MixedBlocks { at: Position, first: usize, second: usize },
    /// Combined or copied blocks differ in their number of segments.
    #[error("{at}: combines or copies blocks of different sizes")]
    Sizes { at: Position },
    #[error("{at}: expected message {expected:?}, the writer sent segment {segment} of {found:?}")]
    Message { at: Position, expected: Span, found: Span, segment: usize },
    /// `finish` on a partial or finished result, or a finished result reduced again.
    #[error("{at}: finishes an incomplete or already finished result")]
    WrongFinish { at: Position },
    #[error("{element}: never written")]
    NotWritten { element: Element },
    #[error("{element}: holds block {found}, not {expected}")]
    WrongBlock { element: Element, expected: usize, found: usize },
    #[error("{element}: rank {contributor} is missing")]
    MissingContributor { element: Element, contributor: usize },
    #[error("{element}: complete but not finished (or finished and not a reduction)")]
    NotFinished { element: Element },
    #[error("{element}: reduced in a different order than at rank {other}")]
    OrdersDiffer { element: Element, other: usize },
    #[error("{element}: not reduced in the canonical tree order that the plan declares")]
    NotCanonical { element: Element },
    #[error("{at}: writes block {block} of {buffer:?} while other ranks may still read it there")]
    StillReferenced { at: Position, buffer: Buffer, block: usize },
    #[error(
        "{element}: other ranks have the value rounded to the link format, this rank has the unrounded value"
    )]
    NotRounded { element: Element },
    #[error("{at}: combines {inputs} inputs by a tree of a different shape")]
    Association { at: Position, inputs: usize },
    #[error(
        "operation {operation}: rank {reader} never reads {messages} messages of channel {channel} of rank {writer}"
    )]
    Unread { operation: usize, writer: usize, channel: usize, reader: usize, messages: usize },
    #[error("operation {operation}: rank {rank} leaves the barrier before rank {before} enters it")]
    BarrierLeaks { operation: usize, rank: usize, before: usize },
    #[error("deadlock with {depth} slots per channel; first of {} waiting steps: {}", waiting.len(), waiting[0])]
    Deadlock { depth: usize, waiting: Vec<Position> },
}
