//! Parsing of recorded calls, and the replayed call with substitutes for unrecorded values.

use smddp_core::{Collective, DType, RedOp};

use crate::calls::{BlockSizes, PlannedCall};
use crate::op::Op;

/// A parsed recorded call. The bytes are the recorder's value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    pub collective: Collective,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
    pub elements: usize,
    /// Hash of unrecorded values: block sizes or the factor.
    pub hash: Option<String>,
    pub on_device: bool,
    /// Sizes differ for each pair of ranks, and only the total of each sender is recorded.
    pub pairs: bool,
    pub bytes: usize,
}

impl Spec {
    /// Parses "all_reduce(10 elements of float32, sum)". An unknown form is an error.
    pub(crate) fn parse(call: &str, bytes: usize) -> Result<Spec, String> {
        let invalid = || format!("unknown call {call}");
        let (name, rest) = call.split_once('(').ok_or_else(invalid)?;
        let (inside, behind) = rest.split_once(')').ok_or_else(invalid)?;
        let op = Op::ALL.into_iter().find(|op| op.name() == name).ok_or_else(invalid)?;
        let collective = op.collective().ok_or_else(invalid)?;
        let mut parts = inside.split(", ");
        let (elements, dtype) =
            parts.next().and_then(|part| part.split_once(" elements of ")).ok_or_else(invalid)?;
        let dtype = DType::ALL.into_iter().find(|known| known.name() == dtype).ok_or_else(invalid)?;
        let mut spec = Spec {
            collective,
            dtype,
            redop: RedOp::Sum,
            root: 0,
            elements: elements.parse().map_err(|_| invalid())?,
            hash: None,
            on_device: behind.contains("CUDA"),
            pairs: false,
            bytes,
        };
        spec.pairs = spec.may_be_pairs() && bytes > 0;
        for part in parts {
            let redop =
                (0..).map_while(|code| RedOp::from_code(code, 1.0)).find(|redop| redop.name() == part);
            if let Some(redop) = redop {
                spec.redop = redop;
            } else if let Some(root) = part.strip_prefix("root ") {
                spec.root = root.parse().map_err(|_| invalid())?;
            } else if let Some((_, hash)) = part.split_once(" #") {
                spec.hash = Some(hash.to_owned());
            } else if part != "as SMDDP_WIRE_FORMAT says" {
                // The settings of the replay determine the wire format.
                return Err(invalid());
            }
        }
        Ok(spec)
    }

    fn has_factor(&self) -> bool {
        matches!(self.redop, RedOp::PremulSum(_))
    }

    /// Returns true if sizes may differ for each pair. For a rank that sends nothing, the bytes of other ranks determine it.
    pub(crate) fn may_be_pairs(&self) -> bool {
        self.collective == Collective::AllToAll && self.elements == 0
    }

    /// Returns true if the blocks differ and only their sum is recorded. With a factor this is unknown.
    pub(crate) fn is_uneven(&self) -> bool {
        self.hash.is_some() && !self.has_factor()
    }

    /// Describes the value of this call that is substituted.
    pub(crate) fn substituted(&self) -> Option<&'static str> {
        match self {
            _ if self.pairs => Some("sizes for each pair of ranks are not recorded: divided evenly"),
            _ if self.is_uneven() => {
                Some("sizes of uneven blocks are not recorded, only their sum: new sizes")
            }
            _ if self.has_factor() => Some("the factor of premul_sum is not recorded: a new factor"),
            _ => None,
        }
    }

    /// Returns the replayed call of rank `rank` of `size`. `sent`: total bytes that each rank sends, if sizes differ for each
    /// pair. `which`: index of this rank's hash among the hashes of all ranks, so that different values differ in the replay too.
    pub(crate) fn plan(&self, rank: usize, size: usize, sent: &[usize], which: usize) -> PlannedCall {
        use Collective as C;
        let element = self.dtype.size();
        // The element count in the header may be too small for the real count.
        let whole = self.bytes / element;
        let block = if self.hash.is_some() { whole / size } else { self.elements };
        let here = self.root == rank;
        let at_root = |part: BlockSizes| if here { part } else { BlockSizes::None };
        let cut = |block: usize| match self.is_uneven() {
            true => (
                BlockSizes::Flat(uneven(whole, size, which)[rank]),
                BlockSizes::Cut(uneven(whole, size, which)),
            ),
            false => (BlockSizes::Flat(block), BlockSizes::Flat(block * size)),
        };
        let (input, output) = match self.collective {
            C::AllGather => cut(block),
            C::ReduceScatter => {
                let (mine, all) = cut(block);
                (all, mine)
            }
            C::AllReduce => (BlockSizes::Flat(whole), BlockSizes::Flat(whole)),
            C::Broadcast => (at_root(BlockSizes::Flat(whole)), BlockSizes::Flat(whole)),
            C::Reduce => (BlockSizes::Flat(whole), at_root(BlockSizes::Flat(whole))),
            C::Gather => (BlockSizes::Flat(block), at_root(BlockSizes::Flat(block * size))),
            C::Scatter => (at_root(BlockSizes::Flat(block * size)), BlockSizes::Flat(block)),
            C::AllToAll if self.pairs => {
                let share = |from: usize, to: usize| even_part(sent[from] / element, size, to);
                let row = (0..size).map(|to| share(rank, to)).collect();
                (BlockSizes::Cut(row), BlockSizes::Cut((0..size).map(|from| share(from, rank)).collect()))
            }
            C::AllToAll => (BlockSizes::Flat(block * size), BlockSizes::Flat(block * size)),
            C::Barrier => (BlockSizes::None, BlockSizes::None),
        };
        let redop = if self.has_factor() { RedOp::PremulSum(1.0 / (which + 1) as f64) } else { self.redop };
        let in_place = matches!(self.collective, C::AllReduce | C::Broadcast | C::Reduce);
        let (collective, dtype, root) = (self.collective, self.dtype, self.root);
        PlannedCall { collective, dtype, redop, root, input, output, in_place }
    }
}

/// Returns different block sizes with this sum. Each `which` gives a different list.
fn uneven(whole: usize, size: usize, which: usize) -> Vec<usize> {
    let of = size * (size + 1) / 2;
    let mut blocks: Vec<usize> = (0..size).map(|rank| whole * (rank + 1) / of).collect();
    let last = size - 1;
    blocks[last] = whole - blocks[..last].iter().sum::<usize>();
    if which > 0 && last > 0 && blocks[last] > 0 {
        blocks[last] -= 1;
        blocks[(which - 1) % last] += 1;
    }
    blocks
}

fn even_part(whole: usize, size: usize, which: usize) -> usize {
    whole / size + usize::from(which < whole % size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(call: &str, bytes: usize) -> Spec {
        Spec::parse(call, bytes).unwrap()
    }

    #[test]
    fn recorded_calls_are_parsed() {
        let sum = spec("all_reduce(10 elements of bfloat16, avg)", 20);
        assert_eq!((sum.collective, sum.dtype, sum.redop), (Collective::AllReduce, DType::BF16, RedOp::Avg));
        let rooted = spec("broadcast(77 elements of int64, root 3) on CUDA", 616);
        assert_eq!((rooted.root, rooted.elements, rooted.on_device), (3, 77, true));
        let named = spec("reduce_scatter(6 elements of float32, sum, blocks of sizes #f8e93d94)", 24);
        assert_eq!((named.hash.as_deref(), named.substituted().is_some()), (Some("f8e93d94"), true));
        let coded = spec("all_reduce(20000 elements of float32, sum, as SMDDP_WIRE_FORMAT says)", 80_000);
        assert_eq!((coded.elements, coded.redop), (20_000, RedOp::Sum));
        assert!(spec("all_to_all(0 elements of float32)", 24).pairs);
        for call in ["an unknown call (0x7)", "all_reduce(x elements of float32)", "hum(1 elements of int8)"]
        {
            assert!(Spec::parse(call, 4).is_err(), "{call}");
        }
    }

    #[test]
    fn substituted_sizes_match_on_all_ranks() {
        let gather = spec("all_gather(6 elements of float32, blocks of sizes #f8e93d94)", 24);
        let all: Vec<PlannedCall> = (0..3).map(|rank| gather.plan(rank, 3, &[], 0)).collect();
        assert_eq!(all.iter().map(|plan| plan.input.elements()).sum::<usize>(), 6);
        assert!(all.iter().all(|plan| plan.output == all[0].output));
        assert_ne!(gather.plan(0, 3, &[], 1).output, all[0].output);
        let pairs = spec("all_to_all(0 elements of float32)", 24);
        let sent = [24, 28, 0];
        let of = |part: &BlockSizes, at: usize| {
            if let BlockSizes::Cut(counts) = part { counts[at] } else { usize::MAX }
        };
        for from in 0..3 {
            for to in 0..3 {
                let (out, into) = (pairs.plan(from, 3, &sent, 0), pairs.plan(to, 3, &sent, 0));
                assert_eq!(of(&out.input, to), of(&into.output, from));
            }
        }
    }

    #[test]
    fn different_sizes_differ_in_the_replay_and_keep_their_sum() {
        for (whole, size) in [(1, 2), (6, 3), (1000, 7)] {
            for which in 0..size {
                let blocks = uneven(whole, size, which);
                assert_eq!(blocks.iter().sum::<usize>(), whole);
                assert!(which == 0 || blocks != uneven(whole, size, 0), "{whole} {size} {which}");
            }
        }
    }
}
