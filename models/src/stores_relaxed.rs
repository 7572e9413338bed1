//! Atomic types whose stores never release.

crate::weak::atomics!(store: |_| Ordering::Relaxed, load: |order| order, fence: Some);

pub(crate) use self::sync::*;
pub(crate) use crate::layout;

#[path = "../../crates/smddp-core/src/sync/completion.rs"]
pub(crate) mod completion;
#[path = "../../crates/smddp-core/src/sync/job_gate.rs"]
pub(crate) mod job_gate;
#[path = "../../crates/smddp-process/src/order.rs"]
pub(crate) mod order;
#[path = "../../crates/smddp-core/src/sync/ownership.rs"]
pub(crate) mod ownership;
