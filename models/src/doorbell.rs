//! Models of the doorbell: every waiting thread observes every publication. Spurious wake-ups do not occur, so a lost
//! wake-up is a deadlock.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::sync::{Arc, Condvar, Mutex};
            use loom::thread;

            use crate::$over::order::{Counter, Doorbell};
            use crate::$over::sync::{AtomicU32, AtomicU64, Ordering};

            /// Model of the kernel: threads that wait for the futex to change, and a descriptor that a
            /// notification writes.
            struct Process {
                flags: [AtomicU32; 3],
                futex: (Mutex<()>, Condvar),
                event: (Mutex<bool>, Condvar),
                published: [AtomicU64; 2],
            }

            impl Process {
                fn new() -> Arc<Self> {
                    Arc::new(Self {
                        flags: [0; 3].map(AtomicU32::new),
                        futex: (Mutex::new(()), Condvar::new()),
                        event: (Mutex::new(false), Condvar::new()),
                        published: [0; 2].map(AtomicU64::new),
                    })
                }

                fn doorbell(&self) -> Doorbell<'_> {
                    let [flag, sleepers, pollers] = &self.flags;
                    Doorbell { flag, sleepers, pollers }
                }

                fn wait(&self, ticket: u32) {
                    let waiting = self.futex.0.lock().unwrap();
                    if self.flags[0].load(Ordering::Relaxed) == ticket {
                        drop(self.futex.1.wait(waiting).unwrap());
                    }
                }

                fn poll(&self) {
                    let mut notified = self.event.0.lock().unwrap();
                    while !*notified {
                        notified = self.event.1.wait(notified).unwrap();
                    }
                    *notified = false;
                }

                fn publish(&self, index: usize) {
                    Counter(&self.published[index]).publish(1);
                    Doorbell::publish_fence();
                    if self.doorbell().has_waiters() {
                        let wake = |_: &AtomicU32| {
                            let _waiting = self.futex.0.lock().unwrap();
                            self.futex.1.notify_all();
                        };
                        self.doorbell().notify(wake, || {
                            *self.event.0.lock().unwrap() = true;
                            self.event.1.notify_all();
                        });
                    }
                }

                /// Sleeps until the counter `index` is published.
                fn until(&self, index: usize, polls: bool) {
                    loop {
                        let doorbell = self.doorbell();
                        let ticket = doorbell.prepare_wait();
                        let published = Counter(&self.published[index]).read() == 1;
                        if !published {
                            match polls {
                                true => doorbell.poll(ticket, || self.poll()),
                                false => self.wait(ticket),
                            }
                        }
                        doorbell.cancel_wait();
                        if published {
                            return;
                        }
                    }
                }
            }

            /// Incorrect order: polls before it announces the sleep.
            pub(super) fn polls_first() {
                crate::model(|| {
                    let process = Process::new();
                    let publisher = process.clone();
                    let publishing = thread::spawn(move || publisher.publish(0));
                    if Counter(&process.published[0]).read() == 0 {
                        let ticket = process.doorbell().prepare_wait();
                        process.wait(ticket);
                        process.doorbell().cancel_wait();
                    }
                    publishing.join().unwrap();
                });
            }

            pub(super) fn one(polls: bool) {
                crate::model(move || {
                    let process = Process::new();
                    let publisher = process.clone();
                    let publishing = thread::spawn(move || publisher.publish(0));
                    process.until(0, polls);
                    publishing.join().unwrap();
                });
            }

            /// Two ranks publish, and one thread waits for both.
            pub(super) fn two() {
                crate::model(|| {
                    let process = Process::new();
                    let publishers = [0, 1].map(|index| {
                        let publisher = process.clone();
                        thread::spawn(move || publisher.publish(index))
                    });
                    process.until(0, false);
                    process.until(1, false);
                    publishers.into_iter().for_each(|publisher| publisher.join().unwrap());
                });
            }

            /// Two threads of a process sleep, one on the futex and one on the descriptor.
            pub(super) fn sleepers() {
                crate::model(|| {
                    let process = Process::new();
                    let sleeper = process.clone();
                    let sleeping = thread::spawn(move || sleeper.until(0, true));
                    let publisher = process.clone();
                    let publishing = thread::spawn(move || publisher.publish(0));
                    process.until(0, false);
                    sleeping.join().unwrap();
                    publishing.join().unwrap();
                });
            }
        }
    };
}

models!(right);
models!(unfenced);

#[test]
fn waiting_threads_observe_every_publication() {
    crate::fails("unfenced::one", || unfenced::one(false));
    crate::fails("right::looks_first", right::polls_first);
    right::one(false);
    right::two();
}

#[test]
fn polling_threads_observe_every_publication() {
    crate::fails("unfenced::one", || unfenced::one(true));
    right::one(true);
    right::sleepers();
}
