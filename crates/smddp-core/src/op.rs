//! One collective from its call to its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_plan::Collective;

use crate::bind::Bound;
use crate::device::DeviceOp;
use crate::steps::Execution;
use crate::work::Shared;

/// One operation under way.
pub(crate) struct Operation {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) bound: Arc<Bound>,
    pub(crate) execution: Execution,
    /// The program's Scratch and the premultiplied input; aligned for every element type.
    pub(crate) scratch: Vec<u128>,
    pub(crate) scaled: Vec<u128>,
    pub(crate) begun: bool,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Option<Instant>,
    pub(crate) work: Option<Arc<Shared>>,
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
            scaled: Vec::new(),
            begun: false,
            timeout: Duration::ZERO,
            submitted: None,
            work: None,
            device: None,
        }
    }
}
