//! What a choice is made for: a call, the group it is made in, and the settings in force.

use crate::algorithms::Algorithm;
use crate::format::{Format, Formats};
use crate::ir::{Ask, Collective, Span};
use crate::topology::Topology;
use crate::tune::{Place, Table};

use super::Network;

/// Elements of each block; what the plan is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// N blocks of this many elements each.
    Even(usize),
    /// One buffer of so many elements, cut in N as evenly as alignment allows.
    Whole(usize),
    /// Known to all ranks.
    Uneven(Vec<usize>),
    /// all_to_all: what I send to each, what I get from each.
    Pairs(Vec<usize>, Vec<usize>),
}

impl Counts {
    /// Of a buffer of `elements` that nccl-tests would call so large: what the blocks cannot share evenly is left out.
    pub fn of_buffer(collective: Collective, elements: usize, size: usize) -> Self {
        match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => Self::Whole(elements),
            Collective::Barrier => Self::Even(0),
            _ => Self::Even(elements / size),
        }
    }

    /// Elements of each of the N blocks that come in.
    pub fn blocks(&self, size: usize, element: usize) -> Vec<usize> {
        match self {
            Self::Even(count) => vec![*count; size],
            Self::Whole(count) => cut(*count, size, element),
            Self::Uneven(list) | Self::Pairs(list, _) => list.clone(),
        }
    }

    pub const fn are_pairs(&self) -> bool {
        matches!(self, Self::Pairs(..))
    }
}

/// Elements of each of the N blocks of a buffer of `count`: cut on cache lines, so the last ones may be empty.
fn cut(count: usize, size: usize, element: usize) -> Vec<usize> {
    let grain = (64 / element).max(1);
    let each = count.div_ceil(size).next_multiple_of(grain);
    (0..size).map(|block| count.saturating_sub(block * each).min(each)).collect()
}

/// Where a call's buffers are, as far as the choice depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Memory {
    #[default]
    Host,
    /// On a device; all messages go through pinned memory of the host.
    Bounced,
    /// On a device; ranks of a node read each other's memory.
    Reference,
}

impl Memory {
    /// As tables tell it.
    pub(super) const fn place(self) -> Place {
        match self {
            Self::Host => Place::Host,
            Self::Bounced | Self::Reference => Place::Cuda,
        }
    }
}

/// The shape of a call, as far as the choice may depend on it (never on the call's own timing).
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub collective: Collective,
    /// Bytes of an element.
    pub element: usize,
    /// 16-bit floats. Their reductions round once only: by no algorithm that rounds at every hop.
    pub half: bool,
    /// 32-bit floats, which may travel in fewer bits between nodes.
    pub single: bool,
    pub counts: Counts,
    pub memory: Memory,
}

/// The group, as far as the choice may depend on it. Ranks of a group must agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group<'a> {
    pub topology: &'a Topology,
    /// Greatest payload of a slot (publish needs the whole message to fit); 0 where there are none.
    pub slot: usize,
    /// May be measured, as long as all ranks have the same: the algorithm of a reducing collective does not
    /// depend on it, its segment does.
    pub network: Network,
}

/// What the user says about plans. Ranks of a group must agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings<'a> {
    /// Wherever it does the collective.
    pub algorithm: Option<Algorithm>,
    /// By collective and size.
    pub tune: Option<&'a Table>,
    pub segment: Option<usize>,
    /// Staging that the process may use for one operation.
    pub staging: usize,
    /// Reductions combine in one order, whatever else is chosen.
    pub canonical: bool,
    /// How 32-bit floats travel between nodes.
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

/// Shape, group and settings as the models take them: in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    pub(super) collective: Collective,
    pub(super) size: usize,
    /// Bytes of the whole buffer, as nccl-tests counts (for all_gather the gathered output, ...).
    pub(super) bytes: usize,
    /// Bytes of the largest block.
    pub(super) block: usize,
    /// Blocks that have bytes at all.
    pub(super) filled: usize,
    /// Where each block begins, and the last one ends.
    pub(super) starts: &'a [usize],
    /// Blocks differ in size between pairs (all_to_all).
    pub(super) uneven_pairs: bool,
    pub(super) rounds_per_hop_forbidden: bool,
    pub(super) canonical: bool,
    /// What goes between nodes has a format.
    pub(super) format: Option<Format>,
    pub(super) memory: Memory,
    pub(super) slot: usize,
    pub(super) staging: usize,
    pub(super) network: Network,
    pub(super) topology: &'a Topology,
}

/// Buffers from which fewer bytes on a link are worth what it costs to make them of more.
const WORTH_CODING: usize = 64 << 10;

/// What pairs are taken for: they are known to two ranks only, so the choice must not depend on them.
const PAIR: usize = 1 << 20;

impl<'a> Case<'a> {
    /// `starts`: where each block begins, and the last one ends.
    pub(super) fn new(
        shape: &Shape,
        starts: &'a [usize],
        group: &Group<'a>,
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
            rounds_per_hop_forbidden: shape.half && shape.collective.reduces(),
            canonical: settings.canonical,
            format,
            memory: shape.memory,
            slot: group.slot,
            staging: settings.staging,
            network: group.network,
            topology: group.topology,
        }
    }

    /// Bytes of a message of these blocks; `None` where there is none for want of bytes.
    pub(super) fn moves(&self, span: Span) -> Option<usize> {
        if span.blocks == 0 {
            return Some(0);
        }
        if self.uneven_pairs {
            return Some(span.blocks * PAIR);
        }
        // Scratch begins again after the last block.
        let before = |block: usize| block / self.size * self.bytes + self.starts[block % self.size];
        let bytes = before(span.block + span.blocks) - before(span.block);
        (bytes > 0).then_some(bytes)
    }

    /// Bytes of the one message of `publish`, at the rank that has most.
    pub(super) fn whole_message(&self) -> usize {
        match self.collective {
            Collective::AllGather | Collective::Gather => self.block,
            Collective::Barrier => 0,
            _ => self.bytes,
        }
    }

    pub(super) fn fits(&self, slot: usize) -> bool {
        !self.uneven_pairs && self.whole_message() <= slot
    }

    pub(super) fn fits_slot(&self) -> bool {
        self.fits(self.slot)
    }

    /// Returns whether `algorithm` meets the rounding rules: no repeated rounding of 16-bit reductions, and with compression a
    /// single rank reduces each element. Several ranks would each keep their own contribution unrounded and get different bits.
    pub(super) fn allows(&self, algorithm: Algorithm) -> bool {
        let one_reduces = algorithm.is_hierarchical() && algorithm != Algorithm::HierPublish;
        !(self.rounds_per_hop_forbidden && algorithm.rounds_per_hop())
            && (one_reduces || self.format.is_none())
    }

    /// The question to any planner, for rank 0 and root 0.
    pub(super) fn ask(&self) -> Ask {
        let Self { collective, size, uneven_pairs, canonical, .. } = *self;
        Ask { collective, rank: 0, size, root: 0, uneven_pairs, canonical }
    }
}
