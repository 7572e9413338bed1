//! Overlap of a call's input and output.

use smddp_plan::Collective;

use crate::call::{Blocks, Call, name_of};
use crate::error::{Error, Result};

/// Address of the first byte and the one past the last byte.
type Range = (usize, usize);

fn range(ptr: *mut u8, count: usize, element: usize) -> Range {
    let start = ptr as usize;
    (start, start.saturating_add(count.saturating_mul(element)))
}

/// Returns true if two ranges overlap. An empty range overlaps nothing.
fn overlap(a: Range, b: Range) -> bool {
    a.0.max(b.0) < a.1.min(b.1)
}

/// Returns the non-empty ranges of one side of a call, each with its index.
fn ranges(blocks: Blocks<'_>, element: usize) -> Vec<(Range, usize)> {
    let mut found = match blocks {
        Blocks::None => Vec::new(),
        Blocks::Flat { ptr, count } => vec![(range(ptr, count, element), 0)],
        Blocks::Cut { ptr, counts } => vec![(range(ptr, counts.iter().sum(), element), 0)],
        Blocks::List { parts } => {
            let part = |(index, &(ptr, count))| (range(ptr, count, element), index);
            parts.iter().enumerate().map(part).collect()
        }
    };
    found.retain(|(range, _)| range.0 < range.1);
    found
}

impl Call<'_> {
    /// Returns true if the input overlaps the output in a form that the plans do not support in place (see [`Call`]). The call has passed `call::check`. Constant time unless blocks are given as a list.
    #[inline]
    pub(crate) fn needs_input_copy(&self, rank: usize, size: usize) -> bool {
        use Collective::{
            AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
        };
        debug_assert!(rank < size);
        if self.collective.has_root() && self.root != rank {
            return false;
        }
        // The side with one block, the other side, and the index of that side's block which may have the same
        // address.
        let (one, other, index) = match self.collective {
            AllReduce | Broadcast | Reduce => (self.input, self.output, 0),
            AllGather | Gather => (self.input, self.output, rank),
            ReduceScatter | Scatter => (self.output, self.input, rank),
            AllToAll => return self.sides_overlap(),
            Barrier => return false,
        };
        let element = self.dtype.size();
        let Blocks::Flat { ptr, count } = one else { return false };
        let one = range(ptr, count, element);
        let differs = |whole: Range, before: usize| {
            overlap(one, whole) && one.0 != whole.0.saturating_add(before.saturating_mul(element))
        };
        match other {
            Blocks::None => false,
            Blocks::Flat { ptr, count: all } => differs(range(ptr, all, element), index * count),
            Blocks::Cut { ptr, counts } => {
                differs(range(ptr, counts.iter().sum(), element), counts[..index].iter().sum())
            }
            Blocks::List { parts } => parts.iter().enumerate().any(|(at, &(ptr, count))| {
                let part = range(ptr, count, element);
                overlap(one, part) && !(at == index && part.0 == one.0)
            }),
        }
    }

    /// Returns true if any block of the input overlaps any block of the output. The outputs are disjoint.
    fn sides_overlap(&self) -> bool {
        let element = self.dtype.size();
        if let (Blocks::Flat { ptr: from, count }, Blocks::Flat { ptr: to, count: room }) =
            (self.input, self.output)
        {
            return overlap(range(from, count, element), range(to, room, element));
        }
        let mut outputs = ranges(self.output, element);
        outputs.sort_unstable();
        ranges(self.input, element).iter().any(|&(input, _)| {
            let first = outputs.partition_point(|(output, _)| output.1 <= input.0);
            outputs.get(first).is_some_and(|&(output, _)| overlap(input, output))
        })
    }

    /// Rejects outputs that overlap each other, for which no result is defined.
    pub(crate) fn check_outputs(&self) -> Result<()> {
        if !matches!(self.output, Blocks::List { .. }) {
            return Ok(());
        }
        let mut outputs = ranges(self.output, self.dtype.size());
        outputs.sort_unstable();
        let found = outputs.windows(2).find(|pair| overlap(pair[0].0, pair[1].0));
        let Some(&[(a, first), (b, second)]) = found else { return Ok(()) };
        Err(Error::Invalid(format!(
            "{}: entries {} and {} of the output list overlap ({} bytes at {:#x} and {} bytes at {:#x}); give each block separate \
             memory",
            name_of(self.collective),
            first.min(second),
            first.max(second),
            a.1 - a.0,
            a.0,
            b.1 - b.0,
            b.0,
        )))
    }

    /// Returns address and bytes of the input's blocks in their order.
    pub(crate) fn input_pieces(&self) -> Vec<(usize, usize)> {
        ranges(self.input, self.dtype.size())
            .into_iter()
            .map(|((start, end), _)| (start, end - start))
            .collect()
    }
}
