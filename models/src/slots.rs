//! Models of slots (written, published, read, released and reused) and of the memory of a finished operation.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::order::Counter;
            use crate::$over::sync::AtomicU64;

            struct Channel {
                published: AtomicU64,
                read: AtomicU64,
                slots: Vec<UnsafeCell<u64>>,
            }

            /// Sends `messages` through `depth` slots.
            pub(super) fn channel(depth: u64, messages: u64) {
                crate::model(move || {
                    let channel = Arc::new(Channel {
                        published: AtomicU64::new(0),
                        read: AtomicU64::new(0),
                        slots: (0..depth).map(|_| UnsafeCell::new(0)).collect(),
                    });
                    let reader = channel.clone();
                    let reading = thread::spawn(move || {
                        for taken in 0..messages {
                            while Counter(&reader.published).read() <= taken {
                                thread::yield_now();
                            }
                            // SAFETY: the slot is published and not yet released.
                            let found = reader.slots[(taken % depth) as usize].with(|slot| unsafe { *slot });
                            assert_eq!(found, taken + 1);
                            Counter(&reader.read).publish(taken + 1);
                        }
                    });
                    for sent in 0..messages {
                        while sent - Counter(&channel.read).read() >= depth {
                            thread::yield_now();
                        }
                        // SAFETY: the slot is free, because its last message was read.
                        channel.slots[(sent % depth) as usize].with_mut(|slot| unsafe { *slot = sent + 1 });
                        Counter(&channel.published).publish(sent + 1);
                    }
                    reading.join().unwrap();
                });
            }

            pub(super) fn memory_reuse() {
                crate::model(|| {
                    let memory = Arc::new((UnsafeCell::new(1), [AtomicU64::new(0), AtomicU64::new(0)]));
                    let readers: Vec<_> = (0..2)
                        .map(|reader| {
                            let memory = memory.clone();
                            thread::spawn(move || {
                                // SAFETY: the operation is not finished for this reader.
                                assert_eq!(memory.0.with(|region| unsafe { *region }), 1);
                                Counter(&memory.1[reader]).publish(1);
                            })
                        })
                        .collect();
                    if memory.1.iter().all(|done| Counter(done).read() >= 1) {
                        // SAFETY: all other ranks have finished the operation.
                        memory.0.with_mut(|region| unsafe { *region = 2 });
                    }
                    readers.into_iter().for_each(|reader| reader.join().unwrap());
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);
models!(loads_relaxed);

#[test]
fn slot_is_read_whole_and_reused_only_after_its_release() {
    crate::fails("stores_relaxed::channel", || stores_relaxed::channel(1, 2));
    crate::fails("loads_relaxed::channel", || loads_relaxed::channel(1, 2));
    right::channel(1, 3);
    right::channel(2, 3);
}

#[test]
fn memory_of_an_operation_is_reused_only_after_all_ranks_finished() {
    crate::fails("stores_relaxed::memory_reuse", stores_relaxed::memory_reuse);
    crate::fails("loads_relaxed::memory_reuse", loads_relaxed::memory_reuse);
    right::memory_reuse();
}
