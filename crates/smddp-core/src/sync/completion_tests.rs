//! Tests of [`crate::sync::completion`]. They are not in its file, which the models compile as well.

use std::time::{Duration, Instant};

use crate::sync::completion::Completion;

#[test]
fn waiting_for_a_call_on_a_device_returns_if_it_is_enqueued_already() {
    let shared = Completion::new(None);
    shared.enqueued();
    let begun = Instant::now();
    shared.sleep(Duration::from_secs(60), true);
    assert!(begun.elapsed() < Duration::from_secs(30));
    // The same call is not done.
    shared.sleep(Duration::from_millis(1), false);
    assert!(!shared.is_done());
}
