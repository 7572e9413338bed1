//! Models of ownership: one thread at a time uses the value, and an owner executes each command once.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::ownership::{Ownership, Submitted};

            /// A group that lists its executed commands. A command is a number.
            type Group = Ownership<UnsafeCell<Vec<u64>>, u64>;

            /// Executes commands until a release leaves none.
            fn progress(group: &Group, checks_again: bool) {
                while let Some(mut owned) = group.try_own() {
                    let mut commands = Vec::new();
                    owned.take_commands(&mut commands);
                    // SAFETY: this thread owns the value.
                    owned.with_mut(|executed| unsafe { (*executed).append(&mut commands) });
                    if !(owned.release() && checks_again) {
                        break;
                    }
                }
            }

            /// Two threads submit; a third one owns the group at first and releases it.
            pub(super) fn submissions(checks_again: bool) {
                crate::model(move || {
                    let group = Arc::new(Group::new(UnsafeCell::new(Vec::new())));
                    let submitters = [1, 2].map(|number| {
                        let group = group.clone();
                        thread::spawn(move || {
                            if group.submit(|| number) == Submitted::Orphaned {
                                progress(&group, checks_again);
                            }
                        })
                    });
                    progress(&group, checks_again);
                    submitters.into_iter().for_each(|submitter| submitter.join().unwrap());
                    let owned = group.try_own().unwrap();
                    // SAFETY: this thread owns the value.
                    let mut executed = owned.with(|executed| unsafe { (*executed).clone() });
                    executed.sort_unstable();
                    assert_eq!(executed, [1, 2]);
                });
            }
        }
    };
}

models!(right);
models!(stores_relaxed);
models!(loads_relaxed);

#[test]
fn no_command_is_lost_when_the_owner_releases() {
    crate::fails("ownership right::submissions(false)", || right::submissions(false));
    crate::fails("ownership stores_relaxed::submissions", || stores_relaxed::submissions(true));
    crate::fails("ownership loads_relaxed::submissions", || loads_relaxed::submissions(true));
    right::submissions(true);
}
