//! Memory of one rank in one operation, and the last accesses to it.

use std::collections::HashMap;

use super::clock::{Clock, VectorTime};
use super::shape::Operation;
use super::value::{NOTHING, Value, Values};
use crate::ir::Buffer;

/// One segment of one block.
#[derive(Clone, Debug)]
struct Piece {
    value: Value,
    /// True while it has the input of the caller.
    input: bool,
    written: VectorTime,
    /// Number of readers that have not yet read a message by reference to this piece.
    pending_readers: usize,
}

/// Violation of a memory rule.
pub(super) enum MemoryViolation {
    Unwritten,
    Clobbered,
    /// Other ranks have not read it yet.
    StillReferenced,
    /// By the pipeline with this number in the clock.
    Unordered(usize),
}

#[derive(Debug)]
pub(super) struct Memory {
    /// First piece of block `b`, by buffer; `usize::MAX` if it does not exist.
    first: [Vec<usize>; 3],
    pieces: Vec<Piece>,
    /// Last read of piece `p` by pipeline `l` of the rank, at `p * pipelines + l`.
    reads: Vec<VectorTime>,
    pipelines: usize,
    /// Reads of a piece by other ranks, by reference.
    remote_reads: HashMap<usize, Vec<VectorTime>>,
}

impl Memory {
    pub(super) fn new(op: &Operation<'_>, rank: usize, values: &mut Values) -> Self {
        let mut memory = Self {
            first: Default::default(),
            pieces: Vec::new(),
            reads: Vec::new(),
            pipelines: op.programs[rank].pipelines.len(),
            remote_reads: HashMap::new(),
        };
        for buffer in [Buffer::In, Buffer::Out, Buffer::Scratch] {
            let blocks = match buffer {
                Buffer::Scratch => op.programs[rank].scratch_blocks,
                _ => op.size(),
            };
            for block in 0..blocks {
                let first = if !op.exists(rank, buffer, block) {
                    usize::MAX
                } else if buffer == Buffer::Out && op.shared(rank, block) {
                    memory.first[Buffer::In as usize][block]
                } else {
                    let input = buffer == Buffer::In;
                    let value =
                        if input { values.input(rank, op.block_id(rank, block), op.size()) } else { NOTHING };
                    let first = memory.pieces.len();
                    let piece = Piece { value, input, written: VectorTime::NEVER, pending_readers: 0 };
                    memory.pieces.resize(first + op.segments(rank, buffer, block), piece);
                    first
                };
                memory.first[buffer as usize].push(first);
            }
        }
        memory.reads = vec![VectorTime::NEVER; memory.pieces.len() * memory.pipelines];
        memory
    }

    fn at(&self, buffer: Buffer, block: usize, segment: usize) -> usize {
        self.first[buffer as usize][block] + segment
    }

    /// Returns true if the two blocks are the same memory.
    pub(super) fn same(&self, a: (Buffer, usize), b: (Buffer, usize)) -> bool {
        self.first[a.0 as usize][a.1] == self.first[b.0 as usize][b.1]
    }

    /// Reads as pipeline `pipeline`, at `now`.
    pub(super) fn read(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        pipeline: usize,
        now: VectorTime,
        clock: &Clock,
    ) -> Result<Value, MemoryViolation> {
        let at = self.at(buffer, block, segment);
        let piece = &self.pieces[at];
        if !clock.includes(piece.written) {
            return Err(MemoryViolation::Unordered(piece.written.pipeline));
        }
        if piece.value == NOTHING {
            return Err(MemoryViolation::Unwritten);
        }
        if buffer == Buffer::In && !piece.input {
            return Err(MemoryViolation::Clobbered);
        }
        self.reads[at * self.pipelines + pipeline] = now;
        Ok(piece.value)
    }

    /// Writes as the pipeline of `now`.
    pub(super) fn write(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        value: Value,
        now: VectorTime,
        clock: &Clock,
    ) -> Result<(), MemoryViolation> {
        let at = self.at(buffer, block, segment);
        let mut remote_reads = self.remote_reads.get(&at).into_iter().flatten();
        if self.pieces[at].pending_readers > 0 || remote_reads.any(|&used| !clock.includes(used)) {
            return Err(MemoryViolation::StillReferenced);
        }
        let reads = &self.reads[at * self.pipelines..(at + 1) * self.pipelines];
        let uses = reads.iter().chain(std::iter::once(&self.pieces[at].written));
        if let Some(other) = uses.into_iter().find(|&&used| !clock.includes(used)) {
            return Err(MemoryViolation::Unordered(other.pipeline));
        }
        self.pieces[at] = Piece { value, input: false, written: now, pending_readers: 0 };
        Ok(())
    }

    /// Registers a message by reference with this number of readers. Returns true if the piece holds its
    /// value.
    pub(super) fn send_by_reference(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        value: Value,
        readers: usize,
    ) -> bool {
        let at = self.at(buffer, block, segment);
        self.pieces[at].pending_readers += readers;
        self.pieces[at].value == value
    }

    /// Ends a message by reference for one reader. `read` is set if the reader took this piece.
    pub(super) fn end_reference(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        read: Option<VectorTime>,
    ) {
        let at = self.at(buffer, block, segment);
        self.pieces[at].pending_readers -= 1;
        if let Some(read) = read {
            self.remote_reads.entry(at).or_default().push(read);
        }
    }

    /// Returns the final value of an output segment.
    pub(super) fn result(&self, block: usize, segment: usize) -> Value {
        let piece = &self.pieces[self.at(Buffer::Out, block, segment)];
        piece.value
    }
}
