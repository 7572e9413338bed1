//! A call as the user makes it, and its check before anything moves.

use smddp_plan::{Collective, Counts};

use crate::error::{Error, Result};
use crate::types::{DType, RedOp};

/// Where a call's elements are. Counts are elements, never bytes.
#[derive(Clone, Copy, Debug)]
pub enum Blocks<'a> {
    /// Nothing on this rank (output of gather on a leaf, input of scatter on a leaf, barrier).
    None,
    /// `count` elements in a row, cut in N equal blocks where the collective has N blocks.
    Flat { ptr: *mut u8, count: usize },
    /// In a row, cut in blocks of these counts.
    Cut { ptr: *mut u8, counts: &'a [usize] },
    /// Blocks that lie anywhere: (address, elements).
    List { parts: &'a [(*mut u8, usize)] },
}

/// One collective call. In place means that a block of input and output has the same address; any other overlap
/// is the caller's error.
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
    pub collective: Collective,
    pub dtype: DType,
    pub redop: RedOp,
    pub root: usize,
    pub input: Blocks<'a>,
    pub output: Blocks<'a>,
}

pub use smddp_plan::tune::collective_name as name_of;

pub(crate) const fn reduces(collective: Collective) -> bool {
    matches!(collective, Collective::ReduceScatter | Collective::AllReduce | Collective::Reduce)
}

pub(crate) const fn rooted(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
    )
}

impl Blocks<'_> {
    /// Elements per block, for a buffer of `n` blocks.
    fn counts(&self, n: usize, what: &Side) -> Result<Counts> {
        let list: Vec<usize> = match self {
            Blocks::None => return Err(Error::Invalid(format!("{what}: no buffer given"))),
            Blocks::Flat { count, .. } => {
                if count % n != 0 {
                    return Err(Error::Invalid(format!(
                        "{what} has {count} elements, which {n} ranks do not divide"
                    )));
                }
                return Ok(Counts::Even(count / n));
            }
            Blocks::Cut { counts, .. } => counts.to_vec(),
            Blocks::List { parts } => parts.iter().map(|p| p.1).collect(),
        };
        if list.len() != n {
            return Err(Error::Invalid(format!("{what} has {} blocks for {n} ranks", list.len())));
        }
        Ok(if list.iter().all(|&c| c == list[0]) { Counts::Even(list[0]) } else { Counts::Uneven(list) })
    }
}

fn flat(blocks: &Blocks<'_>, what: &Side) -> Result<usize> {
    match blocks {
        Blocks::Flat { count, .. } => Ok(*count),
        other => Err(Error::Invalid(format!("{what} must be one flat buffer, not {other:?}"))),
    }
}

/// "all_gather: input".
struct Side {
    name: &'static str,
    side: &'static str,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.side)
    }
}

/// Checks a call against the group; says how it is cut.
pub(crate) fn check(call: &Call<'_>, rank: usize, size: usize) -> Result<Counts> {
    let name = name_of(call.collective);
    if rooted(call.collective) && call.root >= size {
        return Err(Error::Invalid(format!(
            "{name}: root {} is not a rank of this group of {size}",
            call.root
        )));
    }
    // True times 0.3 is not a bool.
    if call.dtype == DType::Bool && matches!(call.redop, RedOp::PremulSum(_)) && reduces(call.collective) {
        return Err(Error::Invalid(format!(
            "{name}: {} of {} is not defined",
            call.redop.name(),
            call.dtype.name()
        )));
    }
    // Told only when something is wrong: this runs in every call.
    let input = Side { name, side: "input" };
    let output = Side { name, side: "output" };
    let same = |have: usize, want: usize, what: &Side, of: &str| {
        if have == want {
            Ok(())
        } else {
            Err(Error::Invalid(format!("{what} has {have} elements, {of} asks for {want}")))
        }
    };
    let block = |counts: &Counts, i: usize| match counts {
        Counts::Even(c) => *c,
        Counts::Uneven(list) => list[i],
        Counts::Whole(_) | Counts::Pairs(..) => 0,
    };
    let at_root = call.root == rank;
    Ok(match call.collective {
        Collective::AllGather => {
            let counts = call.output.counts(size, &output)?;
            same(
                flat(&call.input, &input)?,
                block(&counts, rank),
                &input,
                "this rank's block of the output",
            )?;
            counts
        }
        Collective::ReduceScatter => {
            let counts = call.input.counts(size, &input)?;
            same(
                flat(&call.output, &output)?,
                block(&counts, rank),
                &output,
                "this rank's block of the input",
            )?;
            counts
        }
        Collective::AllReduce => {
            let count = flat(&call.output, &output)?;
            same(flat(&call.input, &input)?, count, &input, "the output")?;
            Counts::Whole(count)
        }
        Collective::Broadcast => {
            let count = flat(&call.output, &output)?;
            if at_root {
                same(flat(&call.input, &input)?, count, &input, "the output")?;
            }
            Counts::Whole(count)
        }
        Collective::Reduce => {
            let count = flat(&call.input, &input)?;
            if at_root {
                same(flat(&call.output, &output)?, count, &output, "the input")?;
            }
            Counts::Whole(count)
        }
        Collective::Gather => {
            let count = flat(&call.input, &input)?;
            if at_root {
                let counts = call.output.counts(size, &output)?;
                even(&counts, name)?;
                same(count, block(&counts, rank), &input, "this rank's block of the output")?;
            }
            Counts::Even(count)
        }
        Collective::Scatter => {
            let count = flat(&call.output, &output)?;
            if at_root {
                let counts = call.input.counts(size, &input)?;
                even(&counts, name)?;
                same(count, block(&counts, rank), &output, "this rank's block of the input")?;
            }
            Counts::Even(count)
        }
        Collective::AllToAll => {
            match (call.input.counts(size, &input)?, call.output.counts(size, &output)?) {
                // A cut or a list is uneven by intent: other ranks may have other sizes even where mine are equal.
                (Counts::Even(a), Counts::Even(b))
                    if a == b
                        && matches!(
                            (call.input, call.output),
                            (Blocks::Flat { .. }, Blocks::Flat { .. })
                        ) =>
                {
                    Counts::Even(a)
                }
                (a, b) => {
                    let all = |c: &Counts| (0..size).map(|i| block(c, i)).collect::<Vec<_>>();
                    let (send, receive) = (all(&a), all(&b));
                    same(send[rank], receive[rank], &input, "this rank's own block of the output")?;
                    Counts::Pairs(send, receive)
                }
            }
        }
        Collective::Barrier => Counts::Even(0),
    })
}

fn even(counts: &Counts, name: &str) -> Result<()> {
    match counts {
        Counts::Uneven(list) => {
            Err(Error::Invalid(format!("{name}: all blocks must have the same size, not {list:?} elements")))
        }
        _ => Ok(()),
    }
}
