//! State of one collective from its call to its completion.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_plan::Collective;

use crate::bind::BoundCall;
use crate::call::fingerprint::{self, LEAVING_CALL};
use crate::call::lossless::is_lossless;
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call, numbered};
use crate::engine::audit::Audit;
use crate::exec::device::DeviceOp;
use crate::exec::walk::Execution;
use crate::failure::pending::PendingCall;
use crate::sync::completion::Completion;

/// Key of a repeated call. Calls with equal keys differ in buffer addresses only, so one check and one binding
/// serve all of them.
#[derive(PartialEq)]
pub(crate) struct CallShape {
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    root: usize,
    /// Elements of input and output; `None` for an absent buffer.
    counts: [Option<usize>; 2],
    lossless: bool,
}

impl CallShape {
    /// Returns `None` for buffers in several pieces and for reductions with a factor: these calls are not kept.
    pub(crate) fn of(call: &Call<'_>) -> Option<Self> {
        let count = |blocks| match blocks {
            Blocks::None => Some(None),
            Blocks::Flat { count, .. } => Some(Some(count)),
            Blocks::Cut { .. } | Blocks::List { .. } => None,
        };
        let Call { collective, dtype, redop, root, input, output } = *call;
        let counts = [count(input)?, count(output)?];
        (!matches!(redop, RedOp::PremulSum(_))).then_some(Self {
            collective,
            dtype,
            redop,
            root,
            counts,
            lossless: is_lossless(),
        })
    }
}

/// Largest private memory, in bytes, of an operation that is kept for a repeated call.
const MAX_REUSABLE_BYTES: usize = 64 << 10;

/// A collective in progress.
pub(crate) struct Operation {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) bound: Arc<BoundCall>,
    pub(crate) execution: Execution,
    /// Scratch memory of the plan, aligned for every element type.
    pub(crate) scratch: Vec<u128>,
    /// Memory for a copy of the input, see [`crate::exec::walk::InputCopy`]. Always empty; only its capacity is
    /// used.
    pub(crate) input_copy: Vec<u128>,
    /// True if this call copies its input because it overlaps the output.
    pub(crate) overlaps: bool,
    pub(crate) begun: bool,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Option<Instant>,
    pub(crate) work: Option<Arc<Completion>>,
    /// Key of calls that may reuse this operation.
    pub(crate) shape: Option<CallShape>,
    /// State on a device, if the buffers are in device memory.
    pub(crate) device: Option<Box<DeviceOp>>,
    /// Part in the comparison of results.
    pub(crate) audit: Option<Audit>,
}

impl Operation {
    /// Creates an empty operation.
    pub(crate) fn new(bound: Arc<BoundCall>) -> Self {
        Self {
            collective: Collective::Barrier,
            seq: 0,
            bound,
            execution: Execution::default(),
            scratch: Vec::new(),
            input_copy: Vec::new(),
            overlaps: false,
            begun: false,
            timeout: Duration::ZERO,
            submitted: None,
            work: None,
            shape: None,
            device: None,
            audit: None,
        }
    }

    /// Returns the name of the operation for errors: "all_gather #7", or the call by which the rank leaves.
    pub(crate) fn name(&self) -> String {
        match self.is_leaving() {
            true => LEAVING_CALL.to_owned(),
            false => numbered(self.collective, self.seq),
        }
    }

    /// Returns the operation as the failure monitor evaluates it; `since`: time from which its deadline counts.
    pub(crate) fn pending_call(&self, since: Instant) -> PendingCall {
        let Self { collective, seq, timeout, begun, .. } = *self;
        PendingCall { collective, seq, fingerprint: self.bound.fingerprint, since, timeout, begun }
    }

    /// Returns true if this is the call by which the rank leaves the group.
    pub(crate) fn is_leaving(&self) -> bool {
        fingerprint::is_leaving(self.bound.fingerprint)
    }

    /// Returns true if the operation is small enough to keep for a repeated call.
    pub(crate) fn is_reusable(&self) -> bool {
        let own = self.scratch.capacity() + self.input_copy.capacity();
        self.shape.is_some() && own * size_of::<u128>() <= MAX_REUSABLE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use smddp_group::Routes;
    use smddp_plan::{Counts, Memory, Topology};

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::key::Key;
    use crate::config::Config;

    fn of(call: &Call<'_>) -> Operation {
        let topology = Topology::single(2);
        let routes = Arc::new(Routes::local(0, 2));
        let assumed = GroupFacts::assumed("");
        let facts = GroupFacts {
            rank: 0,
            topology,
            inline_bytes: 0,
            routes,
            assumed,
            network: OnceLock::new(),
            canonical: OnceLock::new(),
        };
        let key = Key::of(call, Counts::Whole(3), (Memory::Host, 0));
        let bound = bind(&key, &facts, &Config::default()).unwrap();
        Operation { shape: CallShape::of(call), ..Operation::new(Arc::new(bound)) }
    }

    #[test]
    fn only_small_operations_with_a_simple_shape_are_reusable() {
        let (collective, dtype) = (Collective::AllReduce, DType::F32);
        let flat = Blocks::Flat { ptr: std::ptr::null_mut(), count: 3 };
        let call = |redop, input| Call { collective, dtype, redop, root: 0, input, output: flat };
        let plain = call(RedOp::Sum, flat);
        assert!(of(&plain).is_reusable());
        assert!(
            !of(&call(RedOp::PremulSum(1.0), flat)).is_reusable(),
            "a reduction factor is not part of the shape"
        );
        let parts = [(std::ptr::null_mut(), 3)];
        assert!(
            !of(&call(RedOp::Sum, Blocks::List { parts: &parts })).is_reusable(),
            "blocks are given as a list"
        );
        // Empty, with a capacity above the limit.
        let large = || Vec::with_capacity(MAX_REUSABLE_BYTES / size_of::<u128>() + 1);
        assert!(!Operation { scratch: large(), ..of(&plain) }.is_reusable());
        assert!(!Operation { input_copy: large(), ..of(&plain) }.is_reusable());
    }
}
