//! What can be wrong with a plan.

use crate::ir::{Buffer, Span};
use std::fmt;

/// Where in a plan: operations are counted over all sequences given, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    pub operation: usize,
    pub rank: usize,
    pub lane: usize,
    pub step: usize,
    pub segment: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, rank, lane, step, segment } = self;
        write!(f, "operation {operation}, rank {rank}, lane {lane}, step {step}, segment {segment}")
    }
}

/// A segment of a block of Out, after the operation.
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

/// Why a plan was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The program breaks a rule that can be seen without running it. `at.segment` is 0.
    #[error("{at}: {what}")]
    Malformed { at: Position, what: &'static str },
    #[error("{at}: reads {buffer:?} block {block} before it is written")]
    ReadBeforeWrite { at: Position, buffer: Buffer, block: usize },
    /// In place: the input is gone, Out was written where it lay.
    #[error("{at}: input block {block} was overwritten by an output that shares its memory")]
    Clobbered { at: Position, block: usize },
    /// Another lane uses the block and nothing orders the two.
    #[error("{at}: {buffer:?} block {block} is used by lane {other} without an order between the two")]
    Unordered { at: Position, buffer: Buffer, block: usize, other: usize },
    #[error("{at}: rank {contributor} contributes twice to a reduction")]
    DoubleContributor { at: Position, contributor: usize },
    #[error("{at}: reduces parts of different blocks ({first} and {second})")]
    MixedBlocks { at: Position, first: usize, second: usize },
    /// The blocks combined or copied do not have the same number of segments.
    #[error("{at}: blocks of different sizes meet")]
    Sizes { at: Position },
    #[error("{at}: expected message {expected:?}, the writer sent segment {segment} of {found:?}")]
    Message { at: Position, expected: Span, found: Span, segment: usize },
    /// `finish` on a partial result or on a finished one, or a finished one reduced again.
    #[error("{at}: finishes what is not complete, or what is finished already")]
    WrongFinish { at: Position },
    #[error("{element}: never written")]
    NotWritten { element: Element },
    #[error("{element}: holds block {found}, not {expected}")]
    WrongBlock { element: Element, expected: usize, found: usize },
    #[error("{element}: rank {contributor} is missing")]
    MissingContributor { element: Element, contributor: usize },
    #[error("{element}: complete but not finished (or finished and not a reduction)")]
    NotFinished { element: Element },
    #[error("{element}: reduced in another order than at rank {other}")]
    OrdersDiffer { element: Element, other: usize },
    #[error("{element}: reduced in another order than that of the tree, as the plan says")]
    NotCanonical { element: Element },
    #[error("{at}: writes block {block} of {buffer:?} while other ranks may still read it there")]
    Lent { at: Position, buffer: Buffer, block: usize },
    #[error("{element}: other ranks have it as it came out of the format of a link, this one as it was made")]
    NotRounded { element: Element },
    #[error("{at}: combines {inputs} inputs by a tree of another form")]
    Association { at: Position, inputs: usize },
    #[error(
        "operation {operation}: {messages} messages of rank {writer}'s channel {channel} are never read by rank {reader}"
    )]
    Unread { operation: usize, writer: usize, channel: usize, reader: usize, messages: usize },
    #[error("operation {operation}: rank {rank} leaves the barrier before rank {before} has come")]
    BarrierLeaks { operation: usize, rank: usize, before: usize },
    #[error("deadlock with {depth} cells a channel; first of {} that wait: {}", waiting.len(), waiting[0])]
    Deadlock { depth: usize, waiting: Vec<Position> },
}
