//! The shape of one operation: which blocks exist where, how many segments they have, what shares memory.

use crate::ir::{Association, Buffer, Collective, Program, Span, Step};

/// Segments of each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Block `b` has the same size wherever it appears. In all_to_all: of what any rank sends to rank `b`, so
    /// all are equal.
    Blocks(Vec<usize>),
    /// all_to_all: what rank `s` sends to rank `d` is `[s][d]`.
    Pairs(Vec<Vec<usize>>),
}

/// One operation: the programs of all ranks, and what they are to achieve.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    pub collective: Collective,
    /// 0 where the collective has none.
    pub root: usize,
    /// One for each rank.
    pub programs: &'a [Program],
    pub sizes: &'a Sizes,
    /// In and Out share memory, as far as the collective allows it (all_to_all does not).
    pub in_place: bool,
}

impl Operation<'_> {
    pub(super) fn size(&self) -> usize {
        self.programs.len()
    }

    /// Whether it promises the order of the canonical tree.
    pub(super) fn says_canonical(&self) -> bool {
        let tree = |step: &Step| matches!(step, Step::Reduce { association: Association::Tree(_), .. });
        self.programs.iter().flat_map(|program| &program.lanes).flatten().any(|timed| tree(&timed.step))
    }

    /// Whether `rank` has that block at all.
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

    /// Segments of a block that exists (of `rank`'s, as `rank` names it).
    pub(super) fn segments(&self, rank: usize, buffer: Buffer, block: usize) -> usize {
        match (self.sizes, buffer) {
            // Scratch begins again after the last block; a division each time is dear.
            (Sizes::Blocks(blocks), _) => {
                blocks[if block < blocks.len() { block } else { block % blocks.len() }]
            }
            (Sizes::Pairs(pairs), Buffer::Out) => pairs[block][rank],
            (Sizes::Pairs(pairs), _) => pairs[rank][block % self.size()],
        }
    }

    /// Whether a step on that span of `rank`'s has something to do for `segment`.
    pub(super) fn has(&self, rank: usize, span: Span, segment: usize) -> bool {
        if span.blocks == 0 {
            return segment == 0;
        }
        (span.block..span.block + span.blocks).any(|b| self.segments(rank, span.buffer, b) > segment)
    }

    /// What the contribution in In block `block` of `rank` is a part of: a number for the block, the same at all
    /// ranks.
    pub(super) fn block_id(&self, rank: usize, block: usize) -> usize {
        if self.collective == Collective::AllToAll { rank * self.size() + block } else { block }
    }

    /// Whether block `block` of In and of Out are the same memory at `rank`.
    pub(super) fn shared(&self, rank: usize, block: usize) -> bool {
        self.in_place
            && self.collective != Collective::AllToAll
            && self.exists(rank, Buffer::In, block)
            && self.exists(rank, Buffer::Out, block)
    }

    /// Most segments of any block, at least one (a token has one).
    pub(super) fn most_segments(&self) -> usize {
        let most = match self.sizes {
            Sizes::Blocks(blocks) => blocks.iter().max().copied(),
            Sizes::Pairs(pairs) => pairs.iter().flatten().max().copied(),
        };
        most.unwrap_or(0).max(1)
    }
}
