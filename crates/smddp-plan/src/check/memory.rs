//! One rank's memory in one operation, and who touched it last.

use std::collections::HashMap;

use super::clock::{Clock, Moment};
use super::shape::Operation;
use super::value::{NOTHING, Value, Values};
use crate::ir::Buffer;

/// One segment of one block.
#[derive(Clone, Debug)]
struct Piece {
    value: Value,
    /// Still what the caller gave us.
    input: bool,
    written: Moment,
    /// Readers of messages that are this piece itself, and who have yet to read.
    lent: usize,
}

/// Why memory may not be used like that.
pub(super) enum Misuse {
    Unwritten,
    Clobbered,
    /// Others have yet to read it.
    Lent,
    /// By the lane with this number in the clock.
    Unordered(usize),
}

#[derive(Debug)]
pub(super) struct Memory {
    /// First piece of block `b`, by buffer; `usize::MAX` where it does not exist.
    first: [Vec<usize>; 3],
    pieces: Vec<Piece>,
    /// Last read of piece `p` by the rank's lane `l`, at `p * lanes + l`.
    reads: Vec<Moment>,
    lanes: usize,
    /// When other ranks have read a piece where it lies.
    borrowed: HashMap<usize, Vec<Moment>>,
}

impl Memory {
    pub(super) fn new(op: &Operation<'_>, rank: usize, values: &mut Values) -> Self {
        let mut memory = Self {
            first: Default::default(),
            pieces: Vec::new(),
            reads: Vec::new(),
            lanes: op.programs[rank].lanes.len(),
            borrowed: HashMap::new(),
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
                    let piece = Piece { value, input, written: Moment::NEVER, lent: 0 };
                    memory.pieces.resize(first + op.segments(rank, buffer, block), piece);
                    first
                };
                memory.first[buffer as usize].push(first);
            }
        }
        memory.reads = vec![Moment::NEVER; memory.pieces.len() * memory.lanes];
        memory
    }

    fn at(&self, buffer: Buffer, block: usize, segment: usize) -> usize {
        self.first[buffer as usize][block] + segment
    }

    /// Whether the two blocks are the same memory.
    pub(super) fn same(&self, a: (Buffer, usize), b: (Buffer, usize)) -> bool {
        self.first[a.0 as usize][a.1] == self.first[b.0 as usize][b.1]
    }

    /// Reads as lane `lane`, at `now`.
    pub(super) fn read(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        lane: usize,
        now: Moment,
        clock: &Clock,
    ) -> Result<Value, Misuse> {
        let at = self.at(buffer, block, segment);
        let piece = &self.pieces[at];
        if !clock.knows(piece.written) {
            return Err(Misuse::Unordered(piece.written.lane));
        }
        if piece.value == NOTHING {
            return Err(Misuse::Unwritten);
        }
        if buffer == Buffer::In && !piece.input {
            return Err(Misuse::Clobbered);
        }
        self.reads[at * self.lanes + lane] = now;
        Ok(piece.value)
    }

    /// Writes as the lane of `now`.
    pub(super) fn write(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        value: Value,
        now: Moment,
        clock: &Clock,
    ) -> Result<(), Misuse> {
        let at = self.at(buffer, block, segment);
        let mut borrowed = self.borrowed.get(&at).into_iter().flatten();
        if self.pieces[at].lent > 0 || borrowed.any(|&used| !clock.knows(used)) {
            return Err(Misuse::Lent);
        }
        let reads = &self.reads[at * self.lanes..(at + 1) * self.lanes];
        let uses = reads.iter().chain(std::iter::once(&self.pieces[at].written));
        if let Some(other) = uses.into_iter().find(|&&used| !clock.knows(used)) {
            return Err(Misuse::Unordered(other.lane));
        }
        self.pieces[at] = Piece { value, input: false, written: now, lent: 0 };
        Ok(())
    }

    /// A message of so many readers is this piece itself, if that is what it holds.
    pub(super) fn lend(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        value: Value,
        readers: usize,
    ) -> bool {
        let at = self.at(buffer, block, segment);
        self.pieces[at].lent += readers;
        self.pieces[at].value == value
    }

    /// One of them has it behind it; `read`: it took this piece.
    pub(super) fn returned(
        &mut self,
        (buffer, block, segment): (Buffer, usize, usize),
        read: Option<Moment>,
    ) {
        let at = self.at(buffer, block, segment);
        self.pieces[at].lent -= 1;
        if let Some(read) = read {
            self.borrowed.entry(at).or_default().push(read);
        }
    }

    /// What is there in the end.
    pub(super) fn result(&self, block: usize, segment: usize) -> Value {
        let piece = &self.pieces[self.at(Buffer::Out, block, segment)];
        piece.value
    }
}
