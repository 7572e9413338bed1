//! Several threads on one communicator.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, DType, Error, Options, RedOp};

use crate::common::job::Job;
use crate::common::{Gate, PATIENCE, Wire, over, takes_less_than, timed};

#[test]
fn calls_of_several_threads_on_one_group_are_served_in_turn() {
    for wire in Wire::EACH {
        over(wire.links(3), PATIENCE, |comm| {
            // All calls are alike, so the order in which the threads of a rank come does not matter.
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let comm = comm.clone();
                    scope.spawn(move || {
                        for turn in 0..60 {
                            let make =
                                || Job::new(comm.rank(), comm.size(), Collective::AllReduce, 3000, 0, 5);
                            if (turn + thread + comm.rank()) % 3 == 0 {
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

/// Counts how many of them are left.
struct Held(Vec<f32>, Arc<AtomicUsize>);

impl Drop for Held {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn a_work_dropped_without_waiting_still_ends_and_lets_go_of_what_it_held() {
    for wire in Wire::EACH {
        over(wire.links(3), PATIENCE, |comm| {
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
                // SAFETY: the work holds the buffer until it is over.
                let work =
                    unsafe { comm.start(&call, Options { timeout: None, keep: Some(held), on: None }) }
                        .unwrap();
                drop(work);
            }
            let until = Instant::now() + PATIENCE;
            while left.load(Ordering::SeqCst) > 0 {
                assert!(Instant::now() < until, "{} works are left", left.load(Ordering::SeqCst));
                std::thread::yield_now();
            }
            // Nobody leaves the others in the middle of it.
            let mut job = Job::new(comm.rank(), 3, Collective::Barrier, 0, 0, 0);
            job.run(comm).unwrap();
        });
    }
}

fn is_closed(outcome: &smddp_core::Result<()>) -> bool {
    matches!(outcome, Err(Error::Closed { .. }))
}

/// How long the slowest of the waiters goes on after the abort.
fn aborted(wire: Wire, asynchronous: bool) -> Duration {
    let (ended_all, aborted) = (Gate::new(3), OnceLock::new());
    let took = over(wire.links(3), PATIENCE, |comm| {
        // Between nodes bad news goes to ranks that have exchanged something; without this an abort that comes before
        // its rank's first call is told to nobody.
        Job::new(comm.rank(), 3, Collective::AllToAll, 10, 0, 0).run(comm).unwrap();
        let gate = Gate::new(2);
        let took = std::thread::scope(|scope| {
            let (waiter, gate) = (comm.clone(), &gate);
            let waiting = scope.spawn(move || {
                let mut job = Job::new(waiter.rank(), 3, Collective::AllReduce, 50_000, 0, 0);
                // Rank 2 never calls; only rank 0 is aborted.
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
                // Lets the waiter get into its call in most runs; every order must do.
                std::thread::park_timeout(Duration::from_millis(5));
                aborted.get_or_init(Instant::now);
                comm.abort("enough");
            }
            let (outcome, called, ended) = waiting.join().unwrap();
            if comm.rank() < 2 {
                assert!(is_closed(&outcome), "rank {}: {outcome:?}", comm.rank());
                assert!(outcome.unwrap_err().to_string().contains("enough"));
            }
            // From the abort, or from a call that came later.
            aborted.get().map_or(Duration::ZERO, |&at| ended.saturating_duration_since(called.max(at)))
        });
        ended_all.wait();
        let again = || Job::new(comm.rank(), 3, Collective::AllReduce, 50_000, 0, 0).run(comm);
        // Who finds all that it needs may finish one call.
        let after = again().and_then(|()| again());
        assert!(is_closed(&after), "{after:?}");
        comm.close();
        took
    });
    took.into_iter().max().unwrap()
}

#[test]
fn an_abort_from_another_thread_ends_the_waiters_here_and_at_the_peers() {
    for wire in Wire::EACH {
        for asynchronous in [false, true] {
            takes_less_than(Duration::from_secs(1), || aborted(wire, asynchronous));
        }
    }
}

/// How long the close and what it ends take.
fn closed(wire: Wire) -> Duration {
    let took = over(wire.links(2), PATIENCE, |comm| {
        let mut jobs: Vec<Job> =
            (0..5).map(|salt| Job::new(comm.rank(), 2, Collective::AllReduce, 90_000, 0, salt)).collect();
        let mut letter = vec![0f32; 10];
        if comm.rank() == 0 {
            let works: Vec<_> = jobs.iter_mut().map(|job| job.start(comm).unwrap()).collect();
            // SAFETY: the buffer outlives the work, which is waited for.
            let recv = unsafe {
                comm.recv(letter.as_mut_ptr().cast(), 10, DType::F32, Some(1), 0, Options::default())
            };
            timed(|| {
                comm.close();
                comm.close();
                // The first ones may have been over already; nobody sends what is to be received.
                for work in works {
                    let outcome = work.wait(None);
                    assert!(outcome.is_ok() || is_closed(&outcome), "{outcome:?}");
                }
                assert!(is_closed(&recv.unwrap().wait(None)));
            })
        } else {
            // The first ones may be over before the close, and the one behind them never begins at rank 0.
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
fn a_close_ends_what_is_pending_and_returns() {
    for wire in Wire::EACH {
        takes_less_than(Duration::from_secs(1), || closed(wire));
    }
}
