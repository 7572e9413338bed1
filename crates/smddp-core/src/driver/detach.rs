//! Interrupted calls: the operation goes on with private copies of its buffers, and the caller's buffers are its own again.

use std::sync::Arc;

use super::Driver;
use crate::call::numbered;
use crate::error::Error;
use crate::exec;
use crate::op::Operation;
use crate::relocation::Relocation;
use crate::work::Shared;

impl Driver {
    /// Moves collective `seq`, if it is not over, to private memory, which its work holds until the end. Fails where that is
    /// impossible: other ranks read the buffers themselves, or there is no memory for the copies. The error ends the group.
    pub(crate) fn detach(&mut self, seq: u64) -> Result<(), Error> {
        let Some(op) = self.queue.iter_mut().find(|op| op.seq == seq) else { return Ok(()) };
        // Buffers of a device are used in the order of its streams.
        if op.device.is_some() {
            return Ok(());
        }
        let Operation { collective, bound, execution, begun, work, .. } = &mut **op;
        let refused = |why: &str| Error::Closed {
            group: self.name.clone(),
            why: format!("{} was interrupted by a signal, and {why}", numbered(*collective, seq)),
        };
        if *begun && exec::is_read_by_peers(bound, execution, &self.group) {
            return Err(refused("other ranks were reading its buffers"));
        }
        let relocation = Relocation::new(bound, execution)
            .map_err(|bytes| refused(&format!("there is no memory for a copy of its {bytes} bytes")))?;
        relocation.apply(execution);
        self.group.relocate(&|address| relocation.address(address));
        let work = work.get_or_insert_with(|| Arc::new(Shared::new(None)));
        work.detach(Box::new(relocation));
        Ok(())
    }
}
