//! A team's job: nobody looks at it before it is written or after its leader goes on, and what was done for it is seen.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::job_gate::Turns;

            struct Team {
                turns: Turns,
                job: UnsafeCell<u64>,
                done: UnsafeCell<u64>,
            }

            pub(super) fn led() {
                crate::model(|| {
                    let cell = || UnsafeCell::new(0);
                    let team = Arc::new(Team { turns: Turns::default(), job: cell(), done: cell() });
                    let helper = team.clone();
                    let helping = thread::spawn(move || {
                        let mut last = 0;
                        for _ in 0..2 {
                            let Some(turn) = helper.turns.news(last) else { continue };
                            last = turn;
                            if helper.turns.enter(turn) {
                                // SAFETY: the job stands.
                                let job = helper.job.with(|job| unsafe { *job });
                                assert_eq!(job, u64::from(turn));
                                // SAFETY: the helper's own until it leaves.
                                helper.done.with_mut(|done| unsafe { *done = job });
                                helper.turns.leave();
                            }
                        }
                    });
                    for turn in [1, 3] {
                        // SAFETY: no job stands, and nobody is inside.
                        team.job.with_mut(|job| unsafe { *job = turn });
                        team.turns.open();
                        team.turns.close();
                        while !team.turns.empty() {
                            thread::yield_now();
                        }
                        // SAFETY: as above.
                        assert!(team.done.with(|done| unsafe { *done }) <= turn);
                    }
                    helping.join().unwrap();
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
fn a_job_is_looked_at_while_it_stands_and_what_was_done_for_it_is_seen() {
    crate::fails("turns stores_relaxed::led", stores_relaxed::led);
    crate::fails("turns loads_relaxed::led", loads_relaxed::led);
    crate::fails("turns unfenced::led", unfenced::led);
    right::led();
}
