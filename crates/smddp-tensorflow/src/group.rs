//! The group that the ops of this process use.

use std::sync::Mutex;

use smddp_core::{Communicator, PerProcess, lock};

use crate::kernel::Failure;
use crate::ticket;

static GROUP: PerProcess<Mutex<Option<Communicator>>> = PerProcess::new();

/// Sets the group of the ops. With `None` the ops fail. Calls that were started on the previous group are discarded.
pub fn set_group(group: Option<Communicator>) {
    *lock(GROUP.get()) = group;
    ticket::discard_all();
}

pub(crate) fn group() -> Result<Communicator, Failure> {
    let group = lock(GROUP.get()).clone();
    group.ok_or_else(|| {
        Failure::precondition(
            "smddp is not initialized: call smdistributed.dataparallel.tensorflow.init() before the first step (a forked child \
             does not inherit the group)",
        )
    })
}
