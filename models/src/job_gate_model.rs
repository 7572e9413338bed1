//! Models of a helper pool's job: helpers access it only between its publication and its end, and the leader
//! observes their results.

macro_rules! models {
    ($over:ident) => {
        mod $over {
            use loom::cell::UnsafeCell;
            use loom::sync::Arc;
            use loom::thread;

            use crate::$over::job_gate::JobGate;

            struct Pool {
                gate: JobGate,
                job: UnsafeCell<u64>,
                done: UnsafeCell<u64>,
            }

            pub(super) fn job() {
                crate::model(|| {
                    let cell = || UnsafeCell::new(0);
                    let pool = Arc::new(Pool { gate: JobGate::default(), job: cell(), done: cell() });
                    let helper = pool.clone();
                    let helping = thread::spawn(move || {
                        let mut last = 0;
                        for _ in 0..2 {
                            let Some(generation) = helper.gate.open_job(last) else { continue };
                            last = generation;
                            if helper.gate.enter(generation) {
                                // SAFETY: the job is open.
                                let job = helper.job.with(|job| unsafe { *job });
                                assert_eq!(job, u64::from(generation));
                                // SAFETY: the helper owns this until it leaves.
                                helper.done.with_mut(|done| unsafe { *done = job });
                                helper.gate.leave();
                            }
                        }
                    });
                    for generation in [1, 3] {
                        // SAFETY: no job is open, and no helper is inside.
                        pool.job.with_mut(|job| unsafe { *job = generation });
                        pool.gate.open();
                        pool.gate.close();
                        while !pool.gate.is_empty() {
                            thread::yield_now();
                        }
                        // SAFETY: no job is open, and no helper is inside.
                        assert!(pool.done.with(|done| unsafe { *done }) <= generation);
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
fn jobs_are_accessed_only_while_open_and_results_are_observed() {
    crate::fails("job_gate stores_relaxed::job", stores_relaxed::job);
    crate::fails("job_gate loads_relaxed::job", loads_relaxed::job);
    crate::fails("job_gate unfenced::job", unfenced::job);
    right::job();
}
