use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use smddp_cuda::driver::Cuda;
use smddp_cuda::{Device, Wait};
use smddp_group::{Facts, Group};
use smddp_plan::Memory;

use super::RELEASE_TIME;
use crate::call::message_label::Direction;
use crate::call::types::DType;
use crate::device::{DeviceFlags, DeviceSite, DeviceSiteHandle, FlagPages, MAX_SITES};
use crate::engine::messages::Request;
use crate::for_tests::groups;
use crate::sync::completion::Completion;
use crate::{Communicator, Error};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns rank 0 of a group of this node, and the group of rank 1.
fn pair() -> (Communicator, Group) {
    let mut groups = groups(2);
    let peer = groups.pop().unwrap();
    (Communicator::from_group(groups.pop().unwrap(), &[0, 0], "test", TIMEOUT), peer)
}

fn aborted() -> Error {
    Error::Closed { group: "test".to_owned(), reason: "enough".to_owned() }
}

/// Returns true if rank 0 has reported its abort.
fn is_reported(peer: &mut Group) -> bool {
    let mut facts = Facts::default();
    peer.health().observe(Instant::now(), 0, &mut facts);
    facts.ranks[0].abort.is_some()
}

fn wait_until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "the condition is not met");
        std::thread::yield_now();
    }
}

/// Adds sites on a device of the simulated driver to the engine.
fn add_sites(comm: &Communicator) -> (Arc<Device>, Vec<Arc<DeviceSiteHandle>>) {
    let cuda = Cuda::open(Some(Path::new(fake_libcuda::PATH))).unwrap();
    let device = cuda.device(0).unwrap();
    let page = comm.state().shared_page.clone().unwrap();
    let pages = Arc::new(FlagPages::new(device.clone(), page.clone(), 2).unwrap());
    let handles = (0..MAX_SITES).map(|site| {
        let flags = DeviceFlags::new(device.clone(), Some(pages.clone()), (0, 2), site).unwrap();
        let site = (site, Memory::Reference);
        DeviceSiteHandle::new(device.clone(), site, "fake".to_owned(), flags).unwrap()
    });
    let handles: Vec<_> = handles.collect();
    let site = |handle: &Arc<DeviceSiteHandle>| DeviceSite::new(handle.clone(), Some(page.clone()), 2, None);
    comm.state().own().sites.extend(handles.iter().map(site));
    (device, handles)
}

/// Submits a recv whose message is never sent.
fn recv(comm: &Communicator) -> Arc<Completion> {
    let work = Arc::new(Completion::new(None));
    comm.state().start_message(Request {
        direction: Direction::From(1),
        ptr: 0,
        count: 0,
        dtype: DType::F32,
        tag: 0,
        timeout: TIMEOUT,
        submitted: Instant::now(),
        work: work.clone(),
    });
    work
}

#[test]
fn abort_report_is_sent_by_the_owner_of_the_engine_without_pending_calls() {
    let (comm, mut peer) = pair();
    comm.while_owned(|| comm.abort("enough"));
    let begun = Instant::now();
    while !is_reported(&mut peer) {
        assert!(begun.elapsed() < TIMEOUT, "no abort report was sent");
        std::thread::sleep(Duration::from_millis(1));
    }
    comm.close();

    let (closed, mut peer) = pair();
    closed.while_owned(|| closed.abort("enough"));
    closed.close();
    assert!(is_reported(&mut peer));
}

#[test]
fn streams_are_released_after_the_abort_report() {
    // A rank whose streams are released looks for the report at once. Several rounds, because the reverse order is
    // visible for a few microseconds only.
    for _ in 0..100 {
        let (comm, mut peer) = pair();
        let (_device, handles) = add_sites(&comm);
        std::thread::scope(|scope| {
            let first = &handles[0];
            let observer = scope.spawn(move || {
                while !first.released() {
                    std::hint::spin_loop();
                }
                fence(Ordering::Acquire);
                is_reported(&mut peer)
            });
            std::thread::sleep(Duration::from_millis(1));
            comm.state().own().fail_group(aborted());
            assert!(observer.join().unwrap(), "streams were released before the report");
        });
        comm.close();
    }
}

#[test]
fn command_submitted_during_a_close_is_executed_before_its_end() {
    let (comm, _peer) = pair();
    let (device, handles) = add_sites(&comm);
    let word = device.allocate_host(64).unwrap();
    let wait = Wait { word: word as u64, value: 1 };
    // SAFETY: the word is freed after the close, which waits for the stream.
    unsafe {
        device.store(wait.word, 0);
        device.write_and_wait_words(handles[0].stream, None, &[wait], None).unwrap();
    }
    let pending = recv(&comm);
    std::thread::scope(|scope| {
        let begun = Instant::now();
        let closing = scope.spawn(|| comm.close());
        wait_until(|| pending.is_done());
        // The busy stream delays the close, but no command.
        let late = recv(&comm);
        wait_until(|| late.is_done());
        assert!(!closing.is_finished() || begun.elapsed() > RELEASE_TIME);
        assert!(matches!(late.outcome(), Err(Error::Closed { .. })), "{:?}", late.outcome());
        // SAFETY: as above.
        unsafe { device.store(wait.word, wait.value) };
    });
    drop(handles);
    // SAFETY: allocated above; no stream uses it.
    unsafe { device.free_host(word) };
}
