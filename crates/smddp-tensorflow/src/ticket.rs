//! Started calls, by the number that `SmddpStart` passes to `SmddpWait`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use smddp_core::{PerProcess, Work, lock};

use crate::bucket::Bucket;
use crate::pack::PackedRange;

/// A pending collective and the location of its results.
pub(crate) struct PendingOp {
    pub(crate) work: Work,
    pub(crate) bucket: Arc<Bucket>,
    pub(crate) ranges: Vec<PackedRange>,
}

static NEXT: AtomicI64 = AtomicI64::new(1);
static PENDING: PerProcess<Mutex<HashMap<i64, PendingOp>>> = PerProcess::new();

pub(crate) fn issue(pending: PendingOp) -> i64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(PENDING.get()).insert(number, pending);
    number
}

pub(crate) fn redeem(number: i64) -> Option<PendingOp> {
    lock(PENDING.get()).remove(&number)
}

/// Drops all handles. The calls continue, and `SmddpWait` fails for them.
pub(crate) fn discard_all() {
    let discarded = std::mem::take(&mut *lock(PENDING.get()));
    drop(discarded);
}
