use super::*;
use crate::for_tests::{group, groups};
use crate::observe::recorder::Members;
use smddp_plan::Topology;

fn recorder() -> Arc<Recorder> {
    Recorder::new(("test", "shm", Members::default()), 0, &Topology::single(2), Arc::default(), 4)
}

fn recv(into: &mut [f32], tag: u64) -> Request {
    Request {
        direction: Direction::From(1),
        ptr: into.as_mut_ptr() as usize,
        count: into.len(),
        dtype: DType::F32,
        tag,
        timeout: Duration::MAX,
        submitted: Instant::now(),
        work: Arc::new(Completion::default()),
    }
}

/// Returns the shortest time of several runs, to exclude interference from other processes.
fn shortest_time(group: &mut Group, size: usize, waiting: u64) -> Duration {
    let mut messages = MessageQueues::new(0, size, recorder());
    let mut into = [0f32; 1];
    (0..waiting).for_each(|tag| messages.post(recv(&mut into, tag)));
    let polls = |messages: &mut MessageQueues, group: &mut Group| {
        let begun = Instant::now();
        for _ in 0..30 {
            assert!(!messages.poll(group, "test").unwrap());
        }
        begun.elapsed()
    };
    (0..5).map(|_| polls(&mut messages, group)).min().unwrap()
}

#[test]
fn poll_cost_is_independent_of_waiting_receives_and_silent_ranks() {
    let mut group = group(1000);
    let (few, many) = (shortest_time(&mut group, 2, 1), shortest_time(&mut group, 1000, 2000));
    assert!(many < 100 * few, "{few:?}; {many:?} with 2,000 receives that wait in a group of 1,000");
}

#[test]
fn poll_requests_no_announcement_after_the_last_awaited_one() {
    let mut groups = groups(2);
    let (mut messages, mut into) = (MessageQueues::new(0, 2, recorder()), [0f32; 0]);
    for tag in 1..=3 {
        let envelope = Envelope { tag, dtype: DType::F32 as u64, bytes: 0 };
        groups[1].messages().announce(0, envelope).unwrap();
    }
    for (tag, unexpected) in [(2, 1), (1, 0), (3, 0)] {
        messages.post(recv(&mut into, tag));
        messages.poll(&mut groups[0], "test").unwrap();
        assert!(!messages.pending(), "tag {tag} is received");
        let stored: usize = messages.unexpected.values().map(VecDeque::len).sum();
        assert_eq!(stored, unexpected, "after tag {tag}");
    }
}
