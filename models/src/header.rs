//! Models of a header and the payload next to it: publication, reading and reuse.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::layout::HEADERS;
            use crate::$over::order::{Counter, OperationHeader};
            use crate::$over::sync::AtomicU64;

            struct Memory {
                header: [AtomicU64; 4],
                done: AtomicU64,
                payload: UnsafeCell<u64>,
            }

            impl Memory {
                fn new(header: [u64; 4], done: u64) -> Arc<Self> {
                    let header = header.map(AtomicU64::new);
                    Arc::new(Self { header, done: AtomicU64::new(done), payload: UnsafeCell::new(0) })
                }

                fn header(&self) -> OperationHeader<'_> {
                    OperationHeader(&self.header)
                }
            }

            pub(super) fn publication() {
                crate::model(|| {
                    let memory = Memory::new([0; 4], 0);
                    let writer = memory.clone();
                    let writing = thread::spawn(move || {
                        writer.header().write((7, 8, 9));
                        // SAFETY: no thread reads the payload before the header is published.
                        writer.payload.with_mut(|payload| unsafe { *payload = 10 });
                        writer.header().publish(0);
                    });
                    if let Some(header) = memory.header().read(0) {
                        assert_eq!(header, (7, 8, 9));
                        // SAFETY: no thread writes the payload after the header is published.
                        assert_eq!(memory.payload.with(|payload| unsafe { *payload }), 10);
                    }
                    writing.join().unwrap();
                });
            }

            pub(super) fn reuse() {
                crate::model(|| {
                    // Operation 0 is published; its writer continues with the operation that reuses the header.
                    let memory = Memory::new([1, 7, 7, 7], HEADERS - 1);
                    let writer = memory.clone();
                    let writing = thread::spawn(move || {
                        Counter(&writer.done).publish(HEADERS);
                        writer.header().write((8, 8, 8));
                        writer.header().publish(HEADERS);
                    });
                    if let (_, Some(header)) = memory.header().read_if_current(0, Counter(&memory.done)) {
                        assert_eq!(header, (7, 7), "a header of another operation");
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
fn published_header_and_payload_are_observed_whole() {
    crate::fails("stores_relaxed::publication", stores_relaxed::publication);
    crate::fails("loads_relaxed::publication", loads_relaxed::publication);
    right::publication();
}

#[test]
fn reused_header_is_not_read_as_its_former_operation() {
    crate::fails("unfenced::reuse", unfenced::reuse);
    crate::fails("loads_relaxed::reuse", loads_relaxed::reuse);
    right::reuse();
}
