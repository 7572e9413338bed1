//! Input of a choice: a call, its group, and the settings in force.

use crate::algorithms::Algorithm;
use crate::format::{Format, Formats};
use crate::ir::{Collective, PlanRequest, Span};
use crate::topology::Topology;
use crate::tune::{MemoryKind, Table};

use super::Network;

/// Elements of each block, as the plan is bound to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// N blocks of this many elements each.
    Even(usize),
    /// One buffer of this many elements, divided into N blocks as evenly as alignment allows.
    Whole(usize),
    /// Elements of each block, the same on all ranks.
    Uneven(Vec<usize>),
    /// all_to_all: elements sent to each rank, elements received from each rank.
    Pairs(Vec<usize>, Vec<usize>),
}

impl Counts {
    /// Returns the counts of a buffer of `elements` as nccl-tests sizes it; a remainder of the division into
    /// blocks is omitted.
    pub fn of_buffer(collective: Collective, elements: usize, size: usize) -> Self {
        match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => Self::Whole(elements),
            Collective::Barrier => Self::Even(0),
            _ => Self::Even(elements / size),
        }
    }

    /// Returns the elements of each of the N input blocks.
    pub fn blocks(&self, size: usize, element: usize) -> Vec<usize> {
        match self {
            Self::Even(count) => vec![*count; size],
            Self::Whole(count) => divide(*count, size, element),
            Self::Uneven(list) | Self::Pairs(list, _) => list.clone(),
        }
    }

    /// Returns true for the sizes of an uneven all_to_all.
    pub const fn are_pairs(&self) -> bool {
        matches!(self, Self::Pairs(..))
    }
}

/// Divides a buffer of `count` elements into N blocks on cache lines; the last blocks may be empty.
fn divide(count: usize, size: usize, element: usize) -> Vec<usize> {
    let grain = (64 / element).max(1);
    let each = count.div_ceil(size).next_multiple_of(grain);
    (0..size).map(|block| count.saturating_sub(block * each).min(each)).collect()
}

/// Location of the buffers of a call, in the detail that the choice needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Memory {
    /// In host memory.
    #[default]
    Host,
    /// On a device; all messages pass through pinned host memory.
    Bounced,
    /// On a device; ranks of a node read each other's memory.
    Reference,
}

impl Memory {
    /// Returns the memory kind used in tuning tables.
    pub(super) const fn kind(self) -> MemoryKind {
        match self {
            Self::Host => MemoryKind::Host,
            Self::Bounced | Self::Reference => MemoryKind::Cuda,
        }
    }
}

/// Shape of a call: all of its properties that the choice may depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Collective of the call.
    pub collective: Collective,
    /// Bytes of an element.
    pub element: usize,
    /// True for 16-bit floats. Their reductions must round once, which excludes algorithms that round at
    /// every hop.
    pub half: bool,
    /// True for 32-bit floats, which may be compressed between nodes.
    pub single: bool,
    /// Elements of the blocks.
    pub counts: Counts,
    /// Location of the buffers.
    pub memory: Memory,
}

/// Properties of a group that the choice may depend on. Ranks of a group must agree on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupShape<'a> {
    /// Nodes of the ranks.
    pub topology: &'a Topology,
    /// Maximum payload of a header in bytes (publish needs the whole message to fit); 0 if headers carry none.
    pub inline_bytes: usize,
    /// May be measured if all ranks have the same values. The algorithm of a reducing collective does not
    /// depend on it; its segment size does.
    pub network: Network,
}

/// User settings for plans. Ranks of a group must agree on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings<'a> {
    /// Algorithm for every collective that it supports.
    pub algorithm: Option<Algorithm>,
    /// Algorithms by collective and size.
    pub tune: Option<&'a Table>,
    /// Bytes of a segment. `None`: by the cost model.
    pub segment: Option<usize>,
    /// Staging bytes that the process may use for one operation.
    pub staging: usize,
    /// Requires one combination order for reductions, independent of other choices.
    pub canonical: bool,
    /// Formats of 32-bit floats between nodes.
    pub formats: Formats,
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Self {
            algorithm: None,
            tune: None,
            segment: None,
            staging: 64 << 20,
            canonical: false,
            formats: Formats::default(),
        }
    }
}

/// Shape, group and settings in bytes, for the cost models.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    pub(super) collective: Collective,
    pub(super) size: usize,
    /// Bytes of the whole buffer as nccl-tests counts them (the gathered output for all_gather).
    pub(super) bytes: usize,
    /// Bytes of the largest block.
    pub(super) block: usize,
    /// Number of blocks that are not empty.
    pub(super) filled: usize,
    /// Start of each block, and the end of the last.
    pub(super) starts: &'a [usize],
    /// True if blocks differ in size between pairs (all_to_all).
    pub(super) uneven_pairs: bool,
    pub(super) single_rounding: bool,
    pub(super) canonical: bool,
    /// Format of elements between nodes.
    pub(super) format: Option<Format>,
    pub(super) memory: Memory,
    pub(super) inline_bytes: usize,
    pub(super) staging: usize,
    pub(super) network: Network,
    pub(super) topology: &'a Topology,
}

/// Minimum buffer size in bytes for compression; below it the conversion costs more than it saves.
const WORTH_CODING: usize = 64 << 10;

/// Assumed bytes of a pair. Only two ranks have the size of a pair, so the choice must not depend on it.
const PAIR: usize = 1 << 20;

impl<'a> Case<'a> {
    /// Creates a case. `starts` has the start of each block, and the end of the last.
    pub(super) fn new(
        shape: &Shape,
        starts: &'a [usize],
        group: &GroupShape<'a>,
        settings: &Settings<'_>,
    ) -> Self {
        let size = group.topology.size();
        let pairs = shape.counts.are_pairs();
        let bytes = if pairs { size * PAIR } else { starts.last().copied().unwrap_or(0) };
        let format = settings.formats.of(shape.collective).filter(|_| {
            let may = shape.single && !settings.canonical;
            may && group.topology.nodes() > 1 && bytes >= WORTH_CODING
        });
        let lengths = || starts.windows(2).map(|ends| ends[1] - ends[0]);
        Self {
            collective: shape.collective,
            size,
            bytes,
            block: if pairs { PAIR } else { lengths().max().unwrap_or(0) },
            filled: if pairs { size } else { lengths().filter(|&bytes| bytes > 0).count() },
            starts,
            uneven_pairs: pairs,
            single_rounding: shape.half && shape.collective.reduces(),
            canonical: settings.canonical,
            format,
            memory: shape.memory,
            inline_bytes: group.inline_bytes,
            staging: settings.staging,
            network: group.network,
            topology: group.topology,
        }
    }

    /// Returns the bytes of a message of these blocks; `None` if the message is empty and not sent.
    pub(super) fn moves(&self, span: Span) -> Option<usize> {
        if span.blocks == 0 {
            return Some(0);
        }
        if self.uneven_pairs {
            return Some(span.blocks * PAIR);
        }
        // Block numbers of Scratch wrap around after the last block.
        let before = |block: usize| block / self.size * self.bytes + self.starts[block % self.size];
        let bytes = before(span.block + span.blocks) - before(span.block);
        (bytes > 0).then_some(bytes)
    }

    /// Returns the bytes of the single message of `publish`, at the rank with the largest one.
    pub(super) fn whole_message(&self) -> usize {
        match self.collective {
            Collective::AllGather | Collective::Gather => self.block,
            Collective::Barrier => 0,
            _ => self.bytes,
        }
    }

    pub(super) fn fits(&self, inline_bytes: usize) -> bool {
        !self.uneven_pairs && self.whole_message() <= inline_bytes
    }

    pub(super) fn fits_inline(&self) -> bool {
        self.fits(self.inline_bytes)
    }

    /// Returns true if `algorithm` meets the rounding rules. 16-bit reductions must not round repeatedly.
    /// With compression a single rank must reduce each element: several ranks would each keep their own
    /// contribution unrounded and get different bits.
    pub(super) fn allows(&self, algorithm: Algorithm) -> bool {
        let one_reduces = algorithm.is_hierarchical() && algorithm != Algorithm::HierPublish;
        !(self.single_rounding && algorithm.rounds_per_hop()) && (one_reduces || self.format.is_none())
    }

    /// Returns the request to any planner, for rank 0 and root 0.
    pub(super) fn request(&self) -> PlanRequest {
        let Self { collective, size, uneven_pairs, canonical, .. } = *self;
        PlanRequest { collective, rank: 0, size, root: 0, uneven_pairs, canonical }
    }
}
