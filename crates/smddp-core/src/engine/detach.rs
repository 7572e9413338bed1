//! Detaching interrupted calls: the operation continues with private copies of its buffers, and the caller may
//! reuse its own.

use std::sync::Arc;

use super::Engine;
use crate::call::numbered;
use crate::engine::operation::Operation;
use crate::error::Error;
use crate::exec::host;
use crate::exec::relocation::{self, Relocation};
use crate::sync::completion::Completion;

impl Engine {
    /// Returns the completion of collective `seq`, creating it if there is none. `None`: the collective is over.
    pub(crate) fn work_of(&mut self, seq: u64) -> Option<Arc<Completion>> {
        let op = self.queue.iter_mut().find(|op| op.seq == seq)?;
        Some(op.work.get_or_insert_with(|| Arc::new(Completion::new(None))).clone())
    }

    /// Moves collective `seq`, if it is pending, to private memory that its completion holds until the end. Fails
    /// if other ranks read the buffers directly, a pending call still writes the input, or memory for the copies is
    /// insufficient. The error ends the group.
    pub(crate) fn detach(&mut self, seq: u64) -> Result<(), Error> {
        let Some(at) = self.queue.iter().position(|op| op.seq == seq) else { return Ok(()) };
        let mut earlier = self.queue.range(..at).filter(|op| op.device.is_none());
        let op = &self.queue[at];
        let writes = |op: &Operation, earlier: &Operation| {
            relocation::writes_input((&earlier.bound, &earlier.execution), (&op.bound, &op.execution))
        };
        let unready = earlier.any(|earlier| writes(op, earlier));
        let op = &mut self.queue[at];
        // Device buffers are used in the order of the device's streams.
        if op.device.is_some() {
            return Ok(());
        }
        let Operation { collective, bound, execution, begun, work, .. } = &mut **op;
        let refused = |reason: &str| Error::Closed {
            group: self.name.clone(),
            reason: format!("{} was interrupted by a signal, and {reason}", numbered(*collective, seq)),
        };
        if *begun && host::is_read_by_peers(bound, execution, &self.group) {
            return Err(refused("other ranks were reading its buffers"));
        }
        if unready {
            return Err(refused("a call before it, which is pending, writes its input"));
        }
        host::copy_input(execution);
        let relocation = Relocation::new(bound, execution)
            .map_err(|bytes| refused(&format!("a copy of its {bytes} bytes does not fit in memory")))?;
        relocation.apply(execution);
        // SAFETY: the copies are as large as the buffers. The operation's completion holds them until it ends.
        unsafe { self.group.relocate(&|address| relocation.address(address)) };
        work.get_or_insert_with(|| Arc::new(Completion::new(None))).detach(Box::new(relocation));
        Ok(())
    }
}
