//! Iteration over the types, ops, roots and sizes of the command line.

use smddp_core::{DType, RedOp};

use crate::buffers::Buffer;
use crate::calls::{BenchGroup, Case};
use crate::cli::Cli;
use crate::error::Result;
use crate::op::{Elements, Op};
use crate::ranks::Ranks;
use crate::row::{Measure, Row};
use crate::types::{DTYPES, REDOPS, has};

/// The call of one row.
pub(crate) struct CaseSpec {
    pub case: Case,
    pub shape: Elements,
    pub dtype: &'static str,
    pub redop: &'static str,
}

impl CaseSpec {
    /// Returns the row with both halves.
    pub(crate) fn row(&self, group: &BenchGroup, [out_of_place, in_place]: [Measure; 2]) -> Row {
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
            path: op.collective().map(|collective| group.comm().path(collective, dtype, bytes)),
            osu: None,
        }
    }
}

/// Calls `f` for each case, with two buffers of sufficient size.
pub(crate) fn each(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    f: &mut dyn FnMut(&CaseSpec, &mut Buffer, &mut Buffer) -> Result<()>,
) -> Result<()> {
    for (dtype_name, dtype) in dtypes(op, cli) {
        let element = dtype.size();
        let shapes: Vec<Elements> =
            sizes(op, cli, dtype).iter().map(|bytes| op.shape(bytes / element, ranks.group.size())).collect();
        let most = |of: fn(&Elements) -> usize| shapes.iter().map(of).max().unwrap_or(0) * element;
        let before = cli.unalign * element;
        let allocate = Buffer::allocate(cli.register);
        let mut input = allocate(before + most(|s| s.send))?;
        let mut output = allocate(before + most(|s| s.send.max(s.receive)))?;
        for (redop_name, redop) in redops(op, cli, dtype) {
            for root in roots(op, cli, ranks.smallest) {
                let case = Case { op, dtype, redop, root };
                for &shape in &shapes {
                    let spec = CaseSpec { case, shape, dtype: dtype_name, redop: redop_name };
                    f(&spec, &mut input, &mut output)?;
                }
            }
        }
    }
    Ok(())
}

/// Returns the number of cases.
pub(crate) fn count(ranks: Ranks<'_>, op: Op, cli: &Cli) -> usize {
    let of = |dtype| redops(op, cli, dtype).len() * sizes(op, cli, dtype).len();
    let calls: usize = dtypes(op, cli).into_iter().map(|(_, dtype)| of(dtype)).sum();
    calls * roots(op, cli, ranks.smallest).len()
}

fn sizes(op: Op, cli: &Cli, dtype: DType) -> Vec<usize> {
    if op == Op::Barrier { vec![0] } else { cli.sizes(dtype.size()) }
}

fn dtypes(op: Op, cli: &Cli) -> Vec<(&'static str, DType)> {
    if op == Op::Barrier { vec![("none", DType::U8)] } else { cli.dtype.of(&DTYPES) }
}

/// Returns the ops for one type. `all` selects the ops that the type supports.
fn redops(op: Op, cli: &Cli, dtype: DType) -> Vec<(&'static str, RedOp)> {
    if !op.reduces() {
        return vec![("none", RedOp::Sum)];
    }
    let selected = cli.redop.of(&REDOPS);
    // `-d all` selects the types that support the op. The command line rejects an explicit unsupported pair.
    selected.into_iter().filter(|(_, op)| has(dtype, *op)).collect()
}

fn roots(op: Op, cli: &Cli, ranks: usize) -> Vec<usize> {
    match (op.has_root(), usize::try_from(cli.root)) {
        (false, _) => vec![0],
        (true, Ok(root)) => vec![root],
        (true, Err(_)) => (0..ranks).collect(),
    }
}
