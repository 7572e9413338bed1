//! What was started and is to be waited for, by the number that goes from `SmddpStart` to `SmddpWait`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smddp_core::{PerProcess, Work};

use crate::bucket::Bucket;
use crate::pack::Place;

/// A collective under way and where its results will be.
pub(crate) struct Pending {
    pub(crate) work: Work,
    pub(crate) bucket: Arc<Bucket>,
    pub(crate) places: Vec<Place>,
}

static NEXT: AtomicI64 = AtomicI64::new(1);
static PENDING: PerProcess<Mutex<HashMap<i64, Pending>>> = PerProcess::new();

pub(crate) fn issue(pending: Pending) -> i64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    PENDING.get().lock().unwrap_or_else(PoisonError::into_inner).insert(number, pending);
    number
}

pub(crate) fn redeem(number: i64) -> Option<Pending> {
    PENDING.get().lock().unwrap_or_else(PoisonError::into_inner).remove(&number)
}

/// The calls go on; who started them does not wait for them any more.
pub(crate) fn forget() {
    let forgotten = std::mem::take(&mut *PENDING.get().lock().unwrap_or_else(PoisonError::into_inner));
    drop(forgotten);
}
