//! Atomic types whose loads never acquire.

crate::weak::words!(store: |order| order, load: |_| Ordering::Relaxed, fence: Some);

pub(crate) use crate::layout;
pub(crate) use crate::weak::error;

#[path = "../../crates/smddp-transport/src/process/order.rs"]
pub(crate) mod order;
#[path = "../../crates/smddp-core/src/work.rs"]
pub(crate) mod work;
#[path = "../../crates/smddp-core/src/turns.rs"]
pub(crate) mod turns;
