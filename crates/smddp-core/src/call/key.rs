//! What the binding of a call depends on.

use smddp_plan::{Collective, Counts, Memory, Shape};

use crate::call::Call;
use crate::call::lossless::is_lossless;
use crate::call::types::{DType, RedOp};

/// Mark of an all_gather that is a part of a sparse all_reduce: its fingerprint differs from other all_gathers.
pub(crate) const SPARSE: RedOp = RedOp::Bxor;

/// What a binding depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// Code of the reduction. Of an all_gather: `RedOp::Sum`, or `SPARSE` for a part of a sparse all_reduce. Of other
    /// collectives: 0.
    pub(crate) redop: u8,
    /// Bits of what each rank multiplies its input by, 0 where it does not.
    pub(crate) factor: u64,
    pub(crate) root: usize,
    pub(crate) counts: Counts,
    /// Where the buffers are; on a device: its number in the group, the same on all ranks (else 0).
    pub(crate) memory: Memory,
    pub(crate) site: usize,
    /// Elements travel as they are, whatever the settings say.
    pub(crate) exact: bool,
}

impl Key {
    pub(crate) fn of(call: &Call<'_>, counts: Counts, (memory, site): (Memory, usize)) -> Self {
        let reducing = call.collective.reduces();
        let redop = match call.collective {
            Collective::AllGather if call.redop == SPARSE => SPARSE.code(),
            _ if reducing => call.redop.code(),
            _ => 0,
        };
        let factor = match call.redop {
            RedOp::PremulSum(factor) if reducing => factor.to_bits(),
            _ => 0,
        };
        let Call { collective, dtype, root, .. } = *call;
        Self { collective, dtype, redop, factor, root, counts, memory, site, exact: is_lossless() }
    }

    /// What the choice may depend on.
    pub(crate) fn shape(&self) -> Shape {
        Shape {
            collective: self.collective,
            element: self.dtype.size(),
            half: self.dtype.is_half(),
            single: self.dtype == DType::F32,
            counts: self.counts.clone(),
            memory: self.memory,
        }
    }
}
