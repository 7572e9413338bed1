//! One collective from its call to its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_plan::Collective;

use crate::bind::Bound;
use crate::call::lossless::is_lossless;
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::exec::device::DeviceOp;
use crate::exec::walk::Execution;
use crate::failure::error_text::PendingCall;
use crate::sync::completion::Completion;

/// Key of a repeated call. Calls with equal keys differ in buffer addresses alone, so the checks and the binding of the first
/// serve the second.
#[derive(PartialEq)]
pub(crate) struct CallShape {
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    root: usize,
    /// Elements of input and output, where there is one.
    counts: [Option<usize>; 2],
    exact: bool,
}

impl CallShape {
    /// `None`: of buffers in several pieces, or of a factor that is the caller's, nothing is kept.
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
            exact: is_lossless(),
        })
    }
}

/// Bytes of its own that an operation may have to be kept for a call that may come again.
const MAX_REUSABLE_BYTES: usize = 64 << 10;

/// One operation under way.
pub(crate) struct Operation {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) bound: Arc<Bound>,
    pub(crate) execution: Execution,
    /// The program's Scratch; aligned for every element type.
    pub(crate) scratch: Vec<u128>,
    /// Room for the input's copy, see [`crate::exec::walk::InputCopy`]; empty, since only its capacity is used.
    pub(crate) input_copy: Vec<u128>,
    /// The call in progress copies its input because it overlaps the output.
    pub(crate) overlaps: bool,
    pub(crate) begun: bool,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Option<Instant>,
    pub(crate) work: Option<Arc<Completion>>,
    /// What a call is like that may take it over as it is.
    pub(crate) shape: Option<CallShape>,
    /// Its buffers are a device's.
    pub(crate) device: Option<Box<DeviceOp>>,
}

impl Operation {
    /// Yet to be filled.
    pub(crate) fn new(bound: Arc<Bound>) -> Self {
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
        }
    }

    pub(crate) fn pending_call(&self) -> PendingCall {
        let Self { collective, seq, timeout, .. } = *self;
        PendingCall { collective, seq, fingerprint: self.bound.fingerprint, timeout }
    }

    /// Whether it is worth its memory until its call comes again.
    pub(crate) fn is_reusable(&self) -> bool {
        let own = self.scratch.capacity() + self.input_copy.capacity();
        self.shape.is_some() && own * size_of::<u128>() <= MAX_REUSABLE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use smddp_plan::{Counts, Memory, Topology};
    use smddp_transport::Routes;

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::key::Key;
    use crate::config::Config;

    fn of(call: &Call<'_>) -> Operation {
        let topology = Topology::single(2);
        let reach = Arc::new(Routes::local(0, 2));
        let assumed = GroupFacts::assumed("");
        let facts = GroupFacts {
            rank: 0,
            topology,
            slot: 0,
            reach,
            assumed,
            network: OnceLock::new(),
            canonical: OnceLock::new(),
        };
        let key = Key::of(call, Counts::Whole(3), (Memory::Host, 0));
        let bound = bind(&key, &facts, &Config::default()).unwrap();
        Operation { shape: CallShape::of(call), ..Operation::new(Arc::new(bound)) }
    }

    #[test]
    fn an_operation_is_kept_unless_it_has_large_buffers_or_its_call_is_not_told_by_counts() {
        let (collective, dtype) = (Collective::AllReduce, DType::F32);
        let flat = Blocks::Flat { ptr: std::ptr::null_mut(), count: 3 };
        let call = |redop, input| Call { collective, dtype, redop, root: 0, input, output: flat };
        let plain = call(RedOp::Sum, flat);
        assert!(of(&plain).is_reusable());
        assert!(!of(&call(RedOp::PremulSum(1.0), flat)).is_reusable(), "a factor is the caller's");
        let parts = [(std::ptr::null_mut(), 3)];
        assert!(!of(&call(RedOp::Sum, Blocks::List { parts: &parts })).is_reusable(), "addresses of its own");
        // Empty again, and as large as before.
        let large = || Vec::with_capacity(MAX_REUSABLE_BYTES / size_of::<u128>() + 1);
        assert!(!Operation { scratch: large(), ..of(&plain) }.is_reusable());
        assert!(!Operation { input_copy: large(), ..of(&plain) }.is_reusable());
    }
}
