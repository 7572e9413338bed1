//! A query of a late rank, and the check that continues it, end with their operation.

use std::time::{Duration, Instant};

use super::owned_engine::OwnedEngine;
use super::shared::DESTROYED;
use crate::error::Error;
use crate::for_tests::group;
use crate::{Communicator, Options};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `body` on a group of two ranks after the deadline of a barrier that rank 1 has not begun, while rank 1 is
/// queried. `body` also gets the time of the last check.
fn while_querying(body: impl Fn(&Communicator, OwnedEngine<'_>, Instant)) {
    // A reply that arrives during the check completes the query, and the test needs one in progress.
    for _ in 0..1000 {
        let comm = Communicator::from_group(group(2), &[0, 0], "test", TIMEOUT);
        let mut engine = comm.state().own();
        drop(comm.start_barrier(Options::default()).unwrap());
        engine.take_commands();
        engine.poll().unwrap();
        let expired = Instant::now() + TIMEOUT;
        if engine.check(expired).is_ok() {
            assert!(engine.facts.is_querying && engine.monitor.is_querying());
            assert!(engine.next_check.is_some_and(|at| at > expired), "{:?}", engine.next_check);
            body(&comm, engine, expired);
            comm.close();
            return;
        }
        drop(engine);
        comm.abort("the query is complete");
        comm.close();
    }
    panic!("each query was complete at once");
}

/// Asserts that nothing is checked or queried any more, so that an idle thread sleeps until an event.
fn assert_idle(comm: &Communicator, later: Instant) {
    let engine = comm.state().own();
    assert!(!engine.facts.is_querying, "the query continues");
    assert_eq!(engine.next_check, None);
    assert_eq!(engine.max_sleep(later), Duration::MAX);
}

#[test]
fn failure_of_the_group_ends_its_query() {
    while_querying(|comm, mut engine, now| {
        engine.fail(&Error::Closed { group: "test".to_owned(), reason: "enough".to_owned() }, now);
        assert_eq!(engine.next_check, None);
        engine.poll_failed(now + TIMEOUT);
        assert!(engine.has_failed());
        drop(engine);
        assert_idle(comm, now + TIMEOUT);
    });
}

#[test]
fn completion_of_the_operation_ends_its_query() {
    while_querying(|comm, mut engine, now| {
        engine.complete_first(0).unwrap();
        assert!(!engine.has_calls());
        drop(engine);
        let mut engine = comm.state().own();
        assert!(!engine.facts.is_querying, "the query continues");
        // The next wait begins with a check.
        engine.check(now + TIMEOUT).unwrap();
        assert!(!engine.monitor.is_querying());
        drop(engine);
        assert_idle(comm, now + 2 * TIMEOUT);
    });
}

#[test]
fn close_after_the_completion_ends_the_check() {
    while_querying(|comm, mut engine, now| {
        engine.complete_first(0).unwrap();
        engine.close(&Error::Closed { group: "test".to_owned(), reason: DESTROYED.to_owned() }, now);
        assert!(engine.has_failed());
        // The close sends the last frames, in phases of the engine.
        let begun = Instant::now();
        while engine.max_sleep(now) < Duration::MAX {
            assert!(begun.elapsed() < TIMEOUT, "the close does not end");
            engine.poll_failed(Instant::now());
        }
        drop(engine);
        assert_idle(comm, now + TIMEOUT);
    });
}
