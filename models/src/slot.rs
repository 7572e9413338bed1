//! A header and what lies beside it: told, read, taken over.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::layout::SLOTS;
            use crate::$over::order::{Count, Slot};
            use crate::$over::sync::AtomicU64;

            struct Memory {
                words: [AtomicU64; 4],
                done: AtomicU64,
                payload: UnsafeCell<u64>,
            }

            impl Memory {
                fn new(header: [u64; 4], done: u64) -> Arc<Self> {
                    let words = header.map(AtomicU64::new);
                    Arc::new(Self { words, done: AtomicU64::new(done), payload: UnsafeCell::new(0) })
                }

                fn slot(&self) -> Slot<'_> {
                    Slot(&self.words)
                }
            }

            pub(super) fn told() {
                crate::model(|| {
                    let memory = Memory::new([0; 4], 0);
                    let writer = memory.clone();
                    let writing = thread::spawn(move || {
                        writer.slot().write((7, 8, 9));
                        // SAFETY: nobody reads it before it is told.
                        writer.payload.with_mut(|payload| unsafe { *payload = 10 });
                        writer.slot().tell(0);
                    });
                    if let Some(header) = memory.slot().read(0) {
                        assert_eq!(header, (7, 8, 9));
                        // SAFETY: nobody writes it after it was told.
                        assert_eq!(memory.payload.with(|payload| unsafe { *payload }), 10);
                    }
                    writing.join().unwrap();
                });
            }

            pub(super) fn taken_over() {
                crate::model(|| {
                    // Operation 0 is told; its writer goes on to the one that takes the slot over.
                    let memory = Memory::new([1, 7, 7, 7], SLOTS - 1);
                    let writer = memory.clone();
                    let writing = thread::spawn(move || {
                        Count(&writer.done).tell(SLOTS);
                        writer.slot().write((8, 8, 8));
                        writer.slot().tell(SLOTS);
                    });
                    if let (_, Some(header)) = memory.slot().kept(0, Count(&memory.done)) {
                        assert_eq!(header, (7, 7), "of operation 0, and of no other");
                    }
                    writing.join().unwrap();
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);
models!(loads_relaxed);
models!(unfenced);

#[test]
fn whoever_sees_a_header_sees_all_of_it_and_the_payload() {
    crate::fails("stores_relaxed::told", stores_relaxed::told);
    crate::fails("loads_relaxed::told", loads_relaxed::told);
    right::told();
}

#[test]
fn a_slot_that_is_taken_over_is_not_taken_for_what_it_was() {
    crate::fails("unfenced::taken_over", unfenced::taken_over);
    crate::fails("loads_relaxed::taken_over", loads_relaxed::taken_over);
    right::taken_over();
}
