//! Several threads that use one communicator.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, DType, Error, Options, RedOp};

use crate::common::job::Job;
use crate::common::{Gate, TIMEOUT, Wire, over, takes_less_than, timed};

#[test]
fn calls_of_several_threads_on_one_group_are_serialized() {
    for wire in Wire::EACH {
        over(wire.links(3), TIMEOUT, |comm| {
            // All calls are equal, so the order of a rank's threads is irrelevant.
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let comm = comm.clone();
                    scope.spawn(move || {
                        for iteration in 0..60 {
                            let make =
                                || Job::new(comm.rank(), comm.size(), Collective::AllReduce, 3000, 0, 5);
                            if (iteration + thread + comm.rank()) % 3 == 0 {
                                for _ in 0..2 {
                                    let mut job = make();
                                    job.run(&comm).unwrap();
                                    job.check();
                                }
                            } else {
                                let mut jobs = [make(), make()];
                                let works = jobs.each_mut().map(|job| job.start(&comm).unwrap());
                                works.iter().rev().for_each(|work| work.wait(None).unwrap());
                                jobs.iter().for_each(Job::check);
                            }
                        }
                    });
                }
            });
        });
    }
}

/// Counts its remaining instances.
struct Held(Vec<f32>, Arc<AtomicUsize>);

impl Drop for Held {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn dropped_work_completes_and_releases_its_objects() {
    for wire in Wire::EACH {
        over(wire.links(3), TIMEOUT, |comm| {
            let left = Arc::new(AtomicUsize::new(0));
            for _ in 0..50 {
                let mut held = Box::new(Held(vec![1.0; 20_000], left.clone()));
                left.fetch_add(1, Ordering::SeqCst);
                let place = Blocks::Flat { ptr: held.0.as_mut_ptr().cast(), count: held.0.len() };
                let call = Call {
                    collective: Collective::AllReduce,
                    dtype: DType::F32,
                    redop: RedOp::Sum,
                    root: 0,
                    input: place,
                    output: place,
                };
                // SAFETY: the work keeps the buffer until it is complete.
                let work =
                    unsafe { comm.start(&call, Options { timeout: None, keep: Some(held), on: None }) }
                        .unwrap();
                drop(work);
            }
            let deadline = Instant::now() + TIMEOUT;
            while left.load(Ordering::SeqCst) > 0 {
                assert!(
                    Instant::now() < deadline,
                    "{} buffers are not released",
                    left.load(Ordering::SeqCst)
                );
                std::thread::yield_now();
            }
            // Keeps all ranks in the group until all are done.
            let mut job = Job::new(comm.rank(), 3, Collective::Barrier, 0, 0, 0);
            job.run(comm).unwrap();
        });
    }
}

fn is_closed(outcome: &smddp_core::Result<()>) -> bool {
    matches!(outcome, Err(Error::Closed { .. }))
}

/// Returns the longest time from the abort to the end of a waiting call.
fn aborted(wire: Wire, asynchronous: bool) -> Duration {
    let (ended_all, aborted) = (Gate::new(3), OnceLock::new());
    let took = over(wire.links(3), TIMEOUT, |comm| {
        // Between nodes an abort notice goes only to ranks that have exchanged data. Without this call, an abort
        // before the rank's first call would reach no rank.
        Job::new(comm.rank(), 3, Collective::AllToAll, 10, 0, 0).run(comm).unwrap();
        let gate = Gate::new(2);
        let took = std::thread::scope(|scope| {
            let (waiter, gate) = (comm.clone(), &gate);
            let waiting = scope.spawn(move || {
                let mut job = Job::new(waiter.rank(), 3, Collective::AllReduce, 50_000, 0, 0);
                // Rank 2 never calls; only rank 0 aborts.
                gate.wait();
                if waiter.rank() == 2 {
                    return (Err(Error::Interrupted), Instant::now(), Instant::now());
                }
                let called = Instant::now();
                let outcome = if asynchronous {
                    job.start(&waiter).and_then(|work| work.wait(None))
                } else {
                    job.run(&waiter)
                };
                (outcome, called, Instant::now())
            });
            gate.wait();
            if comm.rank() == 0 {
                // In most runs the waiter is in its call by then; the result must not depend on it.
                std::thread::park_timeout(Duration::from_millis(5));
                aborted.get_or_init(Instant::now);
                comm.abort("enough");
            }
            let (outcome, called, ended) = waiting.join().unwrap();
            if comm.rank() < 2 {
                assert!(is_closed(&outcome), "rank {}: {outcome:?}", comm.rank());
                assert!(outcome.unwrap_err().to_string().contains("enough"));
            }
            // Measured from the abort, or from a later call.
            aborted.get().map_or(Duration::ZERO, |&at| ended.saturating_duration_since(called.max(at)))
        });
        ended_all.wait();
        let again = || Job::new(comm.rank(), 3, Collective::AllReduce, 50_000, 0, 0).run(comm);
        // A rank that has all its data may complete one call.
        let after = again().and_then(|()| again());
        assert!(is_closed(&after), "{after:?}");
        comm.close();
        took
    });
    took.into_iter().max().unwrap()
}

#[test]
fn abort_from_another_thread_ends_waiting_calls_on_all_ranks() {
    for wire in Wire::EACH {
        for asynchronous in [false, true] {
            takes_less_than(Duration::from_secs(1), || aborted(wire, asynchronous));
        }
    }
}

/// Returns the duration of the close and of the waits that it ends.
fn closed(wire: Wire) -> Duration {
    let took = over(wire.links(2), TIMEOUT, |comm| {
        let mut jobs: Vec<Job> =
            (0..5).map(|salt| Job::new(comm.rank(), 2, Collective::AllReduce, 90_000, 0, salt)).collect();
        let mut message = vec![0f32; 10];
        if comm.rank() == 0 {
            let works: Vec<_> = jobs.iter_mut().map(|job| job.start(comm).unwrap()).collect();
            // SAFETY: the buffer outlives the work, which is awaited.
            let recv = unsafe {
                comm.recv(message.as_mut_ptr().cast(), 10, DType::F32, Some(1), 0, Options::default())
            };
            timed(|| {
                comm.close();
                comm.close();
                // The first works may be complete already; no rank sends the message of the recv.
                for work in works {
                    let outcome = work.wait(None);
                    assert!(outcome.is_ok() || is_closed(&outcome), "{outcome:?}");
                }
                assert!(is_closed(&recv.unwrap().wait(None)));
            })
        } else {
            // The first calls may complete before the close; the barrier after them never begins on rank 0.
            let mut more = Job::new(comm.rank(), 2, Collective::Barrier, 0, 0, 0);
            let outcome = jobs.iter_mut().chain([&mut more]).try_for_each(|job| job.run(comm));
            assert!(
                matches!(outcome, Err(Error::Closed { .. } | Error::PeerLost { rank: 0, .. })),
                "{outcome:?}"
            );
            Duration::ZERO
        }
    });
    took[0]
}

#[test]
fn close_ends_pending_works_and_returns() {
    for wire in Wire::EACH {
        takes_less_than(Duration::from_secs(1), || closed(wire));
    }
}
