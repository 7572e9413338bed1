//! Models of the end of a call: a thread that observes it also observes the output, every waiter wakes, and
//! each callback runs once.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use std::time::Duration;

            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::sync::atomic::{AtomicUsize, Ordering};
            use loom::thread;

            use crate::$over::completion::Completion;

            struct Call {
                shared: Completion,
                output: UnsafeCell<u64>,
            }

            impl Call {
                fn new() -> Arc<Self> {
                    Arc::new(Self { shared: Completion::new(None), output: UnsafeCell::new(0) })
                }

                fn finish(&self) {
                    // SAFETY: the call is not finished, so the driver owns the output.
                    self.output.with_mut(|output| unsafe { *output = 5 });
                    self.shared.finish(Ok(()));
                }
            }

            pub(super) fn wait_for_completion() {
                crate::model(|| {
                    let call = Call::new();
                    let driver = call.clone();
                    let driving = thread::spawn(move || driver.finish());
                    while !call.shared.is_done() {
                        // Without a deadline, only a notification ends the wait.
                        call.shared.sleep(Duration::MAX, false);
                    }
                    // SAFETY: the call is finished, so the caller owns the output.
                    assert_eq!(call.output.with(|output| unsafe { *output }), 5);
                    driving.join().unwrap();
                });
            }

            pub(super) fn wait_for_enqueue() {
                crate::model(|| {
                    let call = Call::new();
                    let driver = call.clone();
                    let driving = thread::spawn(move || driver.shared.enqueued());
                    call.shared.sleep(Duration::MAX, true);
                    driving.join().unwrap();
                    assert!(!call.shared.is_done());
                });
            }

            pub(super) fn callbacks() {
                crate::model(|| {
                    let call = Call::new();
                    let calls = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
                    let driver = call.clone();
                    let driving = thread::spawn(move || {
                        driver.shared.enqueued();
                        driver.finish();
                    });
                    for index in 0..2 {
                        let calls = calls.clone();
                        let callback = Box::new(move || {
                            calls[index].fetch_add(1, Ordering::Relaxed);
                        });
                        match index {
                            0 => call.shared.on_done(callback),
                            _ => call.shared.on_enqueued(callback),
                        }
                    }
                    driving.join().unwrap();
                    let found = [0, 1].map(|index| calls[index].load(Ordering::Relaxed));
                    assert_eq!(found, [1, 1]);
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);

#[test]
fn waiter_wakes_and_observes_the_output() {
    crate::fails("stores_relaxed::wait_for_completion", stores_relaxed::wait_for_completion);
    right::wait_for_completion();
}

#[test]
fn waiter_of_a_device_call_wakes_when_it_is_enqueued() {
    right::wait_for_enqueue();
}

#[test]
fn callback_runs_once_even_if_registered_late() {
    right::callbacks();
}
