//! A group in which something else goes on and on.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Error};
use smddp_transport::joint::WireScript;

use crate::common::PATIENCE;
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
fn a_deadline_passes_though_other_things_never_stop_moving() {
    let (comm, _other) = busy().comm(DEADLINE);
    let error = barrier().run(&comm).unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
}

#[test]
fn a_death_is_noticed_though_other_things_never_stop_moving() {
    let (comm, other) = busy().comm(10 * PATIENCE);
    drop(other);
    let error = barrier().run(&comm).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{error}");
}

#[test]
fn a_wait_gives_up_in_time_though_other_things_never_stop_moving() {
    let (comm, _other) = busy().comm(10 * PATIENCE);
    let mut job = barrier();
    let work = job.start(&comm).unwrap();
    let error = work.wait(Some(DEADLINE)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { after, .. } if *after == DEADLINE), "{error}");
    assert_eq!(comm.error(), None, "the call goes on");
    comm.close();
}

#[test]
fn a_group_that_never_stops_moving_holds_up_no_other_group_of_the_progress_thread() {
    let (busy, _other) = busy().comm(10 * PATIENCE);
    let (other, _its_other) = Fake::new(WireScript::default()).comm(DEADLINE);
    let (mut first, mut second) = (barrier(), barrier());
    let endless = first.start(&busy).unwrap();
    let begun = Instant::now();
    let work = second.start(&other).unwrap();
    while !work.is_done() {
        assert!(begun.elapsed() < PATIENCE, "nobody looks at the other group's deadline");
        std::thread::yield_now();
    }
    assert!(matches!(work.error(), Some(Error::Timeout { .. })), "{:?}", work.error());
    assert!(!endless.is_done());
    busy.close();
}
