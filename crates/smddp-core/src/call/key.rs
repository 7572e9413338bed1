//! Key of a call's binding.

use smddp_plan::{Collective, Counts, Memory, Shape};

use crate::call::Call;
use crate::call::lossless::is_lossless;
use crate::call::types::{DType, RedOp};

/// Mark of an all_gather that is a part of a sparse all_reduce: its fingerprint differs from other all_gathers.
pub(crate) const SPARSE: RedOp = RedOp::Bxor;

/// Properties that determine the binding of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// Code of the reduction. Of an all_gather: `RedOp::Sum`, or `SPARSE` for a part of a sparse all_reduce. Of other
    /// collectives: 0.
    pub(crate) redop: u8,
    /// Bits of the factor by which each rank multiplies its input; 0 without a factor.
    pub(crate) factor: u64,
    pub(crate) root: usize,
    pub(crate) counts: Counts,
    /// Memory kind of the buffers. `site`: number of the device in the group, equal on all ranks; 0 for host
    /// memory.
    pub(crate) memory: Memory,
    pub(crate) site: usize,
    /// Elements are not compressed, regardless of the settings.
    pub(crate) lossless: bool,
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
        Self { collective, dtype, redop, factor, root, counts, memory, site, lossless: is_lossless() }
    }

    /// Returns the properties that the choice of a plan may depend on.
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
