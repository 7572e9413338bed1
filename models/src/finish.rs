//! End of a call: a thread that observes it also observes the output, every waiter wakes, and each callback runs once.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use std::time::Duration;

            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::sync::atomic::{AtomicUsize, Ordering};
            use loom::thread;

            use crate::$over::completion::Shared;

            struct Call {
                shared: Shared,
                output: UnsafeCell<u64>,
            }

            impl Call {
                fn new() -> Arc<Self> {
                    Arc::new(Self { shared: Shared::new(None), output: UnsafeCell::new(0) })
                }

                fn finish(&self) {
                    // SAFETY: the call is not over, so the output is the driver's.
                    self.output.with_mut(|output| unsafe { *output = 5 });
                    self.shared.finish(Ok(()));
                }
            }

            pub(super) fn waited_for() {
                crate::model(|| {
                    let call = Call::new();
                    let driver = call.clone();
                    let driving = thread::spawn(move || driver.finish());
                    while !call.shared.is_done() {
                        // No deadline: only a notification ends the wait.
                        call.shared.sleep(Duration::MAX, false);
                    }
                    // SAFETY: the call is over, so the output is its caller's.
                    assert_eq!(call.output.with(|output| unsafe { *output }), 5);
                    driving.join().unwrap();
                });
            }

            pub(super) fn waited_for_on_a_device() {
                crate::model(|| {
                    let call = Call::new();
                    let driver = call.clone();
                    let driving = thread::spawn(move || driver.shared.enqueued());
                    call.shared.sleep(Duration::MAX, true);
                    driving.join().unwrap();
                    assert!(!call.shared.is_done());
                });
            }

            pub(super) fn called_back() {
                crate::model(|| {
                    let call = Call::new();
                    let calls = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
                    let driver = call.clone();
                    let driving = thread::spawn(move || {
                        driver.shared.enqueued();
                        driver.finish();
                    });
                    for which in 0..2 {
                        let calls = calls.clone();
                        let callback = Box::new(move || {
                            calls[which].fetch_add(1, Ordering::Relaxed);
                        });
                        match which {
                            0 => call.shared.on_done(callback),
                            _ => call.shared.on_enqueued(callback),
                        }
                    }
                    driving.join().unwrap();
                    let found = [0, 1].map(|which| calls[which].load(Ordering::Relaxed));
                    assert_eq!(found, [1, 1]);
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);

#[test]
fn a_waiter_of_a_call_wakes_and_sees_its_output() {
    crate::fails("stores_relaxed::waited_for", stores_relaxed::waited_for);
    right::waited_for();
}

#[test]
fn a_waiter_for_a_call_on_a_device_wakes_when_it_is_enqueued() {
    right::waited_for_on_a_device();
}

#[test]
fn a_callback_comes_once_however_late_it_is_asked_for() {
    right::called_back();
}
