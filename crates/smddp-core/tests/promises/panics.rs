//! Panics inside the library, on any thread.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Error, Options};
use smddp_group::joint::WireScript;

use crate::common::fake::Fake;
use crate::common::job::Job;
use crate::common::{TIMEOUT, Wire, over};

const TEXT: &str = "the wire is cut";

fn barrier() -> Job {
    Job::new(0, 2, Collective::Barrier, 0, 0, 0)
}

fn is_reported(error: Option<Error>) -> bool {
    matches!(error, Some(Error::System { operation, reason }) if operation.contains("fake") && reason.contains(TEXT))
}

fn wait_until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "the call has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn panic_on_the_progress_thread_ends_its_group_only() {
    let script = WireScript { panics: Some("smddp-progress"), ..WireScript::default() };
    let (comm, _other) = Fake::new(script.clone()).comm(Duration::from_secs(2));
    let (waiting, _its_other) = Fake::new(WireScript::default()).comm(10 * TIMEOUT);
    let mut kept = barrier();
    let other = kept.start(&waiting).unwrap();
    let mut job = barrier();
    let work = job.start(&comm).unwrap();
    wait_until(|| work.is_done());
    assert!(is_reported(work.error()), "{:?}", work.error());
    assert!(is_reported(work.wait(None).err()));
    assert!(is_reported(comm.error()), "{:?}", comm.error());
    assert!(is_reported(barrier().run(&comm).err()), "the group remains failed");
    assert_eq!(script.panicked.load(Ordering::SeqCst), 1, "no second attempt");
    assert!(script.aborted.load(Ordering::SeqCst) > 0, "the peers got an abort notice");
    assert!(!other.is_done() && waiting.error().is_none());
    waiting.close();
}

#[test]
fn panic_on_the_callers_thread_is_an_error() {
    let script = WireScript { panics: Some(""), ..WireScript::default() };
    let (comm, _other) = Fake::new(script.clone()).comm(TIMEOUT);
    assert!(is_reported(barrier().run(&comm).err()));
    assert_eq!(script.panicked.load(Ordering::SeqCst), 1);
    comm.close();
}

/// A caller's object that panics in its drop.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "panic of the caller");
    }
}

fn run_with_panicking_drop(comm: &Communicator) {
    let place = smddp_core::Blocks::None;
    let call = smddp_core::Call {
        collective: Collective::Barrier,
        dtype: smddp_core::DType::F32,
        redop: smddp_core::RedOp::Sum,
        root: 0,
        input: place,
        output: place,
    };
    let options = Options { keep: Some(Box::new(PanicsOnDrop)), ..Options::default() };
    // SAFETY: a barrier has no buffers.
    let work = unsafe { comm.start(&call, options) }.unwrap();
    work.wait(None).unwrap();
}

#[test]
fn panic_in_a_callers_drop_does_not_affect_the_group() {
    over(Wire::Shm.links(2), TIMEOUT, |comm| {
        for salt in 0..3 {
            run_with_panicking_drop(comm);
            let mut job = Job::new(comm.rank(), 2, Collective::AllReduce, 1000, 0, salt);
            job.run(comm).unwrap();
            job.check();
        }
        assert_eq!(comm.error(), None);
    });
}
