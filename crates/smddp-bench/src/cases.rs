//! Every type, op, root and size that the command line asks for, in turn.

use smddp_core::{DType, RedOp};

use crate::buffers::Buffer;
use crate::calls::{Case, Team};
use crate::cli::Cli;
use crate::error::Result;
use crate::op::{Elements, Op};
use crate::ranks::Ranks;
use crate::row::{Measure, Row};
use crate::types::{DTYPES, REDOPS, has};

/// One row's call.
pub(crate) struct Asked {
    pub case: Case,
    pub shape: Elements,
    pub dtype: &'static str,
    pub redop: &'static str,
}

impl Asked {
    /// Its row, with both halves.
    pub(crate) fn row(&self, team: &Team, [out_of_place, in_place]: [Measure; 2]) -> Row {
        let Case { op, dtype, root, .. } = self.case;
        let bytes = self.shape.send.max(self.shape.receive) * dtype.size();
        Row {
            bytes,
            count: self.shape.count,
            dtype: self.dtype,
            redop: self.redop,
            root: if op.has_root() { root as i64 } else { -1 },
            out_of_place,
            in_place,
            path: op.collective().map(|collective| team.comm().path(collective, dtype, bytes)),
            osu: None,
        }
    }
}

/// Tells `f` each call, with two buffers that are large enough.
pub(crate) fn each(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    f: &mut dyn FnMut(&Asked, &mut Buffer, &mut Buffer) -> Result<()>,
) -> Result<()> {
    for (dtype_name, dtype) in dtypes(op, cli) {
        let element = dtype.size();
        let shapes: Vec<Elements> =
            sizes(op, cli, dtype).iter().map(|bytes| op.shape(bytes / element, ranks.team.size())).collect();
        let most = |of: fn(&Elements) -> usize| shapes.iter().map(of).max().unwrap_or(0) * element;
        let before = cli.unalign * element;
        let make = Buffer::maker(cli.register);
        let mut input = make(before + most(|s| s.send))?;
        let mut output = make(before + most(|s| s.send.max(s.receive)))?;
        for (redop_name, redop) in redops(op, cli, dtype) {
            for root in roots(op, cli, ranks.fewest) {
                let case = Case { op, dtype, redop, root };
                for &shape in &shapes {
                    let asked = Asked { case, shape, dtype: dtype_name, redop: redop_name };
                    f(&asked, &mut input, &mut output)?;
                }
            }
        }
    }
    Ok(())
}

/// How many these are.
pub(crate) fn count(ranks: Ranks<'_>, op: Op, cli: &Cli) -> usize {
    let of = |dtype| redops(op, cli, dtype).len() * sizes(op, cli, dtype).len();
    let calls: usize = dtypes(op, cli).into_iter().map(|(_, dtype)| of(dtype)).sum();
    calls * roots(op, cli, ranks.fewest).len()
}

fn sizes(op: Op, cli: &Cli, dtype: DType) -> Vec<usize> {
    if op == Op::Barrier { vec![0] } else { cli.sizes(dtype.size()) }
}

fn dtypes(op: Op, cli: &Cli) -> Vec<(&'static str, DType)> {
    if op == Op::Barrier { vec![("none", DType::U8)] } else { cli.dtype.of(&DTYPES) }
}

/// The ops for one type; of all ops those that the type has.
fn redops(op: Op, cli: &Cli, dtype: DType) -> Vec<(&'static str, RedOp)> {
    if !op.reduces() {
        return vec![("none", RedOp::Sum)];
    }
    let asked = cli.redop.of(&REDOPS);
    // Of all types those that have the op, too; one that was asked for with another is refused by the command line.
    asked.into_iter().filter(|(_, op)| has(dtype, *op)).collect()
}

fn roots(op: Op, cli: &Cli, ranks: usize) -> Vec<usize> {
    match (op.has_root(), usize::try_from(cli.root)) {
        (false, _) => vec![0],
        (true, Ok(root)) => vec![root],
        (true, Err(_)) => (0..ranks).collect(),
    }
}
