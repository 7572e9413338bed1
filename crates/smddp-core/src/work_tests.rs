//! Tests of [`crate::work`]. They are not in its file, which the models compile as well.

use std::time::{Duration, Instant};

use crate::work::Shared;

#[test]
fn a_sleep_until_a_call_is_on_a_device_ends_at_once_where_it_is() {
    let shared = Shared::new(None);
    shared.enqueued();
    let begun = Instant::now();
    shared.sleep(Duration::from_secs(60), true);
    assert!(begun.elapsed() < Duration::from_secs(30));
    // The same call is not done.
    shared.sleep(Duration::from_millis(1), false);
    assert!(!shared.is_done());
}
