//! A bug of this library's, on whatever thread it shows.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Error, Options};
use smddp_transport::joint::WireScript;

use crate::common::fake::Fake;
use crate::common::job::Job;
use crate::common::{PATIENCE, Wire, over};

const TEXT: &str = "the wire is cut";

fn barrier() -> Job {
    Job::new(0, 2, Collective::Barrier, 0, 0, 0)
}

fn told(error: Option<Error>) -> bool {
    matches!(error, Some(Error::System { what, why }) if what.contains("fake") && why.contains(TEXT))
}

fn await_end(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "the call has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_panic_on_the_progress_thread_ends_its_group_once_and_no_other() {
    let script = WireScript { panics: Some("smddp-progress"), ..WireScript::default() };
    let (comm, _other) = Fake::new(script.clone()).comm(Duration::from_secs(2));
    let (waiting, _its_other) = Fake::new(WireScript::default()).comm(10 * PATIENCE);
    let mut kept = barrier();
    let other = kept.start(&waiting).unwrap();
    let mut job = barrier();
    let work = job.start(&comm).unwrap();
    await_end(|| work.is_done());
    assert!(told(work.error()), "{:?}", work.error());
    assert!(told(work.wait(None).err()));
    assert!(told(comm.error()), "{:?}", comm.error());
    assert!(told(barrier().run(&comm).err()), "the group stays failed");
    assert_eq!(script.panicked.load(Ordering::SeqCst), 1, "it was not tried again");
    assert!(script.poisoned.load(Ordering::SeqCst) > 0, "the others were told");
    assert!(!other.is_done() && waiting.error().is_none());
    waiting.close();
}

#[test]
fn a_panic_in_a_callers_own_thread_is_its_error_too() {
    let script = WireScript { panics: Some(""), ..WireScript::default() };
    let (comm, _other) = Fake::new(script.clone()).comm(PATIENCE);
    assert!(told(barrier().run(&comm).err()));
    assert_eq!(script.panicked.load(Ordering::SeqCst), 1);
    comm.close();
}

/// What a caller wants held, and what it wants called.
struct Angry;

impl Drop for Angry {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a caller's own panic");
    }
}

fn angry(comm: &Communicator) {
    let place = smddp_core::Blocks::None;
    let call = smddp_core::Call {
        collective: Collective::Barrier,
        dtype: smddp_core::DType::F32,
        redop: smddp_core::RedOp::Sum,
        root: 0,
        input: place,
        output: place,
    };
    let options = Options { keep: Some(Box::new(Angry)), ..Options::default() };
    // SAFETY: a barrier has no buffers.
    let work = unsafe { comm.start(&call, options) }.unwrap();
    work.wait(None).unwrap();
}

#[test]
fn a_panic_of_the_callers_own_leaves_its_group_as_it_was() {
    over(Wire::Shm.links(2), PATIENCE, |comm| {
        for salt in 0..3 {
            angry(comm);
            let mut job = Job::new(comm.rank(), 2, Collective::AllReduce, 1000, 0, salt);
            job.run(comm).unwrap();
            job.check();
        }
        assert_eq!(comm.error(), None);
    });
}
