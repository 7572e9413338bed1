//! Shape of one operation: existing blocks, their segments, and shared memory.

use crate::ir::{Association, Buffer, Collective, Program, Span, Step};

/// Segments of each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Block `b` has the same size in every buffer. In all_to_all it is the size of each block that rank `b`
    /// receives, so all are equal.
    Blocks(Vec<usize>),
    /// all_to_all: rank `s` sends `[s][d]` segments to rank `d`.
    Pairs(Vec<Vec<usize>>),
}

/// One operation: the programs of all ranks, and the collective that they implement.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// Collective that the programs implement.
    pub collective: Collective,
    /// 0 for collectives without a root.
    pub root: usize,
    /// One program per rank.
    pub programs: &'a [Program],
    /// Segments of the blocks.
    pub sizes: &'a Sizes,
    /// True if In and Out share memory where the collective allows it (all_to_all does not).
    pub in_place: bool,
}

impl Operation<'_> {
    pub(super) fn size(&self) -> usize {
        self.programs.len()
    }

    /// Returns true if the plan declares the order of the canonical tree.
    pub(super) fn declares_canonical(&self) -> bool {
        let tree = |step: &Step| matches!(step, Step::Reduce { association: Association::Tree(_), .. });
        self.programs.iter().flat_map(|program| &program.pipelines).flatten().any(|timed| tree(&timed.step))
    }

    /// Returns true if `rank` has that block.
    pub(super) fn exists(&self, rank: usize, buffer: Buffer, block: usize) -> bool {
        use Collective::*;
        let root = rank == self.root;
        let there = match (buffer, self.collective) {
            (Buffer::Scratch, _) => return block < self.programs[rank].scratch_blocks,
            (_, Barrier) => false,
            (Buffer::In, AllGather | Gather) => block == rank,
            (Buffer::In, Broadcast | Scatter) => root,
            (Buffer::In, _) => true,
            (Buffer::Out, ReduceScatter | Scatter) => block == rank,
            (Buffer::Out, Reduce | Gather) => root,
            (Buffer::Out, _) => true,
        };
        there && block < self.size()
    }

    /// Returns the segments of an existing block, with the block numbers of `rank`.
    pub(super) fn segments(&self, rank: usize, buffer: Buffer, block: usize) -> usize {
        match (self.sizes, buffer) {
            // Block numbers of Scratch wrap around after the last block. The branch avoids a division in the
            // common case.
            (Sizes::Blocks(blocks), _) => {
                blocks[if block < blocks.len() { block } else { block % blocks.len() }]
            }
            (Sizes::Pairs(pairs), Buffer::Out) => pairs[block][rank],
            (Sizes::Pairs(pairs), _) => pairs[rank][block % self.size()],
        }
    }

    /// Returns true if a step on that span of `rank` has work for `segment`.
    pub(super) fn has(&self, rank: usize, span: Span, segment: usize) -> bool {
        if span.blocks == 0 {
            return segment == 0;
        }
        (span.block..span.block + span.blocks).any(|b| self.segments(rank, span.buffer, b) > segment)
    }

    /// Returns the identity of the contribution in In block `block` of `rank`: a block number that is the
    /// same at all ranks.
    pub(super) fn block_id(&self, rank: usize, block: usize) -> usize {
        if self.collective == Collective::AllToAll { rank * self.size() + block } else { block }
    }

    /// Returns true if block `block` of In and of Out are the same memory at `rank`.
    pub(super) fn shared(&self, rank: usize, block: usize) -> bool {
        self.in_place
            && self.collective != Collective::AllToAll
            && self.exists(rank, Buffer::In, block)
            && self.exists(rank, Buffer::Out, block)
    }

    /// Returns the largest number of segments of any block, at least one (a token has one).
    pub(super) fn most_segments(&self) -> usize {
        let most = match self.sizes {
            Sizes::Blocks(blocks) => blocks.iter().max().copied(),
            Sizes::Pairs(pairs) => pairs.iter().flatten().max().copied(),
        };
        most.unwrap_or(0).max(1)
    }
}
