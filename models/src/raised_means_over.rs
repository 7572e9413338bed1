//! Models of a call that another thread aborts: once the caller observes the outcome, the library no longer accesses
//! the caller's buffer.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::ownership::{Owned, Ownership, Submitted};
            use crate::$over::sync::{AtomicU32, Ordering};

            struct Abort;

            #[derive(Default)]
            struct Engine {
                failed: bool,
            }

            type OwnedEngine<'a> = Owned<'a, Engine, Abort>;

            struct Group {
                engine: Ownership<Engine, Abort>,
                /// Refuses new calls.
                closing: AtomicU32,
                buffer: UnsafeCell<u64>,
            }

            impl Group {
                /// Executes commands, then advances the pending call.
                fn pass(&self, engine: &mut OwnedEngine<'_>) {
                    let mut commands = Vec::new();
                    engine.take_commands(&mut commands);
                    engine.failed |= !commands.is_empty();
                    if !engine.failed {
                        // SAFETY: the call is pending, so the owner may write the caller's buffer.
                        self.buffer.with_mut(|buffer| unsafe { *buffer += 1 });
                    }
                }

                /// Owns the engine, if no other thread does, until no commands are left. Returns true if the aborted
                /// call has left it.
                fn progress(&self) -> bool {
                    let mut is_over = false;
                    while let Some(mut engine) = self.engine.try_own() {
                        self.pass(&mut engine);
                        is_over = engine.failed;
                        if !engine.release() {
                            break;
                        }
                    }
                    is_over
                }

                fn abort(&self) {
                    self.closing.store(1, Ordering::Release);
                    if self.engine.submit(|| Abort) == Submitted::Orphaned {
                        self.progress();
                    }
                }
            }

            /// One thread advances the call and another one aborts it; the caller waits for the outcome. `from_flag`:
            /// incorrect, takes the outcome from the flag that refuses new calls.
            pub(super) fn aborted_call(from_flag: bool) {
                crate::model(move || {
                    let group = Arc::new(Group {
                        engine: Ownership::new(Engine::default()),
                        closing: AtomicU32::new(0),
                        buffer: UnsafeCell::new(0),
                    });
                    let [owner, aborter] = [(); 2].map(|()| group.clone());
                    let progressing = thread::spawn(move || owner.progress());
                    let aborting = thread::spawn(move || aborter.abort());
                    loop {
                        let is_over = match from_flag {
                            true => group.closing.load(Ordering::Acquire) == 1,
                            false => group.progress(),
                        };
                        if is_over {
                            break;
                        }
                        thread::yield_now();
                    }
                    // SAFETY: the call has raised, so the buffer belongs to the caller.
                    group.buffer.with_mut(|buffer| unsafe { *buffer = 0 });
                    progressing.join().unwrap();
                    aborting.join().unwrap();
                    // SAFETY: as above.
                    assert_eq!(group.buffer.with(|buffer| unsafe { *buffer }), 0, "written after the error");
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);
models!(loads_relaxed);

#[test]
fn raised_call_does_not_access_the_buffer() {
    crate::fails("raised_means_over right::aborted_call(true)", || right::aborted_call(true));
    crate::fails("raised_means_over stores_relaxed::aborted_call", || stores_relaxed::aborted_call(false));
    crate::fails("raised_means_over loads_relaxed::aborted_call", || loads_relaxed::aborted_call(false));
    right::aborted_call(false);
}
