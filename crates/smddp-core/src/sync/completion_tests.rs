//! Tests of [`crate::sync::completion`], in a separate file because the models compile that one.

use std::time::{Duration, Instant};

use crate::sync::completion::Completion;

#[test]
fn enqueued_call_does_not_sleep() {
    let shared = Completion::new(None);
    shared.enqueued();
    let begun = Instant::now();
    shared.sleep(Duration::from_secs(60), true);
    assert!(begun.elapsed() < Duration::from_secs(30));
    // The call is enqueued but not done.
    shared.sleep(Duration::from_millis(1), false);
    assert!(!shared.is_done());
}
