//! A group with permanent other traffic.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Error};
use smddp_group::joint::WireScript;

use crate::common::TIMEOUT;
use crate::common::fake::Fake;
use crate::common::job::Job;

const DEADLINE: Duration = Duration::from_millis(300);

fn busy() -> Fake {
    Fake::new(WireScript { busy: true, ..WireScript::default() })
}

fn barrier() -> Job {
    Job::new(0, 2, Collective::Barrier, 0, 0, 0)
}

#[test]
fn timeout_expires_despite_permanent_traffic() {
    let (comm, _other) = busy().comm(DEADLINE);
    let error = barrier().run(&comm).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
}

#[test]
fn death_is_detected_despite_permanent_traffic() {
    let (comm, other) = busy().comm(10 * TIMEOUT);
    drop(other);
    let error = barrier().run(&comm).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{error}");
}

#[test]
fn wait_times_out_despite_permanent_traffic() {
    let (comm, _other) = busy().comm(10 * TIMEOUT);
    let mut job = barrier();
    let work = job.start(&comm).unwrap();
    let error = work.wait(Some(DEADLINE)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { after, .. } if *after == DEADLINE), "{error}");
    assert_eq!(comm.error(), None, "the call is still pending");
    comm.close();
}

#[test]
fn busy_group_does_not_delay_other_groups_of_the_progress_thread() {
    let (busy, _other) = busy().comm(10 * TIMEOUT);
    let (other, _its_other) = Fake::new(WireScript::default()).comm(DEADLINE);
    let (mut first, mut second) = (barrier(), barrier());
    let endless = first.start(&busy).unwrap();
    let begun = Instant::now();
    let work = second.start(&other).unwrap();
    while !work.is_done() {
        assert!(begun.elapsed() < TIMEOUT, "the other group's timeout is not checked");
        std::thread::yield_now();
    }
    assert!(matches!(work.error(), Some(Error::Timeout { .. })), "{:?}", work.error());
    assert!(!endless.is_done());
    busy.close();
}
