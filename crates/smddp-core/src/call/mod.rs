//! Collective calls as the user makes them, and their validation.

pub(crate) mod fingerprint;
pub(crate) mod key;
pub(crate) mod lossless;
pub(crate) mod message_label;
mod overlap;
pub mod types;

use smddp_plan::{Collective, Counts};

use crate::call::types::{DType, RedOp};
use crate::error::{Error, Result};

/// Buffers of one side of a call. Counts are elements, never bytes.
#[derive(Clone, Copy, Debug)]
pub enum Blocks<'a> {
    /// Nothing on this rank (output of gather on a leaf, input of scatter on a leaf, barrier).
    None,
    /// `count` contiguous elements, in N equal blocks if the collective has N blocks.
    Flat {
        /// Address of the first element.
        ptr: *mut u8,
        /// Number of elements.
        count: usize,
    },
    /// Contiguous blocks of these counts.
    Cut {
        /// Address of the first element.
        ptr: *mut u8,
        /// Number of elements of each block.
        counts: &'a [usize],
    },
    /// Blocks at arbitrary addresses: (address, elements).
    List {
        /// Address and number of elements of each block.
        parts: &'a [(*mut u8, usize)],
    },
}

/// One collective call.
///
/// Input and output may share memory in any way. The plans support the forms in place, in which one block has the same address on both
/// sides: the whole buffer (all_reduce, broadcast, reduce), this rank's block of the output (all_gather, gather) or of the input
/// (reduce_scatter, scatter). In every other form, and in every all_to_all whose sides overlap, the operation first copies the input
/// into private memory. Outputs that overlap each other are [`Error::Invalid`]: no order of writing gives both their results.
///
/// | collective | input | output |
/// |---|---|---|
/// | all_gather | `Flat(c)` | `Flat(N*c)`, `Cut`, `List` |
/// | reduce_scatter | `Flat(N*c)`, `Cut`, `List` | `Flat(c)` |
/// | all_reduce | `Flat(c)` | `Flat(c)` |
/// | broadcast | `Flat(c)` at the root | `Flat(c)` |
/// | reduce | `Flat(c)` | `Flat(c)` at the root |
/// | gather | `Flat(c)` | `Flat(N*c)`, `Cut`, `List` at the root |
/// | scatter | `Flat(N*c)`, `Cut`, `List` at the root | `Flat(c)` |
/// | all_to_all | `Flat(N*c)`, `Cut`, `List` | the same |
/// | barrier | `None` | `None` |
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Operation.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Reduction; ignored by collectives that do not reduce.
    pub redop: RedOp,
    /// Root rank; 0 for collectives without a root.
    pub root: usize,
    /// Input of this rank.
    pub input: Blocks<'a>,
    /// Output of this rank.
    pub output: Blocks<'a>,
}

impl Call<'_> {
    /// Returns the bytes of the larger side.
    pub(crate) fn bytes(&self) -> usize {
        let count = |blocks: Blocks<'_>| match blocks {
            Blocks::None => 0,
            Blocks::Flat { count, .. } => count,
            Blocks::Cut { counts, .. } => counts.iter().sum(),
            Blocks::List { parts } => parts.iter().map(|part| part.1).sum(),
        };
        count(self.input).max(count(self.output)).saturating_mul(self.dtype.size())
    }
}

pub use smddp_plan::tune::collective_name as name_of;

/// Returns the name of a call for errors: "all_gather #7".
pub(crate) fn numbered(collective: Collective, seq: u64) -> String {
    format!("{} #{seq}", name_of(collective))
}

/// One of a call's two sides, displayed in errors as "all_gather: input".
#[derive(Clone, Copy)]
struct Side<'a> {
    name: &'static str,
    side: &'static str,
    blocks: Blocks<'a>,
}

impl std::fmt::Display for Side<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.side)
    }
}

impl Side<'_> {
    /// Elements per block, for a buffer of `n` blocks.
    fn counts(&self, n: usize) -> Result<Counts> {
        let list: Vec<usize> = match self.blocks {
            Blocks::None => return Err(Error::Invalid(format!("{self}: no buffer given"))),
            Blocks::Flat { count, .. } => {
                if count % n != 0 {
                    return Err(Error::Invalid(format!(
                        "{self} has {count} elements, which {n} ranks do not divide"
                    )));
                }
                return Ok(Counts::Even(count / n));
            }
            Blocks::Cut { counts, .. } => counts.to_vec(),
            Blocks::List { parts } => parts.iter().map(|p| p.1).collect(),
        };
        if list.len() != n {
            return Err(Error::Invalid(format!("{self} has {} blocks for {n} ranks", list.len())));
        }
        Ok(if list.iter().all(|&c| c == list[0]) { Counts::Even(list[0]) } else { Counts::Uneven(list) })
    }

    fn flat(&self) -> Result<usize> {
        match self.blocks {
            Blocks::Flat { count, .. } => Ok(count),
            other => Err(Error::Invalid(format!("{self} must be one flat buffer, not {other:?}"))),
        }
    }

    /// Checks that this side has as many elements as `part` of the other side requires.
    fn check_count(&self, actual: usize, expected: usize, part: &str, other: &Self) -> Result<()> {
        if actual == expected {
            return Ok(());
        }
        let other = other.side;
        Err(Error::Invalid(format!("{self} has {actual} elements, {part} {other} requires {expected}")))
    }
}

/// Validates a call for this group and returns the element counts of its blocks.
pub(crate) fn check(call: &Call<'_>, rank: usize, size: usize) -> Result<Counts> {
    let name = name_of(call.collective);
    if call.collective.has_root() && call.root >= size {
        return Err(Error::Invalid(format!(
            "{name}: root {} is not a rank of this group of {size}",
            call.root
        )));
    }
    let input = Side { name, side: "input", blocks: call.input };
    let output = Side { name, side: "output", blocks: call.output };
    let block = |counts: &Counts, i: usize| match counts {
        Counts::Even(c) => *c,
        Counts::Uneven(list) => list[i],
        Counts::Whole(_) | Counts::Pairs(..) => 0,
    };
    let rooted = call.collective.has_root();
    let has_both_sides = !rooted || call.root == rank;
    // `each`: the side that every rank has. Only the root may have the other one.
    let whole = |each: Side<'_>, other: Side<'_>| {
        let count = each.flat()?;
        if has_both_sides {
            other.check_count(other.flat()?, count, "the", &each)?;
        }
        Ok(Counts::Whole(count))
    };
    let blocks = |each: Side<'_>, other: Side<'_>| {
        if !has_both_sides {
            return Ok(Counts::Even(each.flat()?));
        }
        let counts = other.counts(size)?;
        if let (true, Counts::Uneven(list)) = (rooted, &counts) {
            return Err(Error::Invalid(format!(
                "{name}: all blocks must have the same size, not {list:?} elements"
            )));
        }
        each.check_count(each.flat()?, block(&counts, rank), "this rank's block of the", &other)?;
        Ok(counts)
    };
    if has_both_sides {
        call.check_outputs()?;
    }
    match call.collective {
        Collective::AllGather | Collective::Gather => blocks(input, output),
        Collective::ReduceScatter | Collective::Scatter => blocks(output, input),
        Collective::AllReduce | Collective::Broadcast => whole(output, input),
        Collective::Reduce => whole(input, output),
        Collective::AllToAll => match (input.counts(size)?, output.counts(size)?) {
            // `Cut` and `List` count as uneven: other ranks may have other sizes even if this rank's are equal.
            (Counts::Even(a), Counts::Even(b))
                if a == b
                    && matches!((call.input, call.output), (Blocks::Flat { .. }, Blocks::Flat { .. })) =>
            {
                Ok(Counts::Even(a))
            }
            (a, b) => {
                let all = |c: &Counts| (0..size).map(|i| block(c, i)).collect::<Vec<_>>();
                let (send, receive) = (all(&a), all(&b));
                input.check_count(send[rank], receive[rank], "this rank's own block of the", &output)?;
                Ok(Counts::Pairs(send, receive))
            }
        },
        Collective::Barrier => Ok(Counts::Even(0)),
    }
}
