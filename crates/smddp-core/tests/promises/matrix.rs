//! Pairs of different calls raise an error on all ranks, at the latest when they leave the group. Matching calls
//! never do.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, RedOp, Result};

use crate::common::{Gate, TIMEOUT, Wire, over};
use crate::mismatch::{BASE, CallSpec, listed, run};

/// One operation of a rank.
#[derive(Clone, Debug)]
enum Action {
    Call(CallSpec),
    /// all_gather or reduce_scatter of blocks of these sizes. In larger groups the last size applies to all further
    /// ranks.
    Listed(Collective, [usize; 3]),
    /// Rank 0 sends rank 1 messages of these tags.
    Sent(&'static [u64]),
    /// Rank 1 receives messages of these tags from rank 0.
    Received(&'static [u64]),
}

fn make(collective: Collective) -> CallSpec {
    CallSpec { collective, count: 12, ..BASE }
}

/// Returns calls of which every two differ.
fn calls() -> Vec<Action> {
    use Collective::*;
    let moving = [AllGather, ReduceScatter, AllReduce, Broadcast, Reduce, Gather, Scatter, AllToAll];
    let mut calls: Vec<CallSpec> = moving.map(make).into();
    calls.push(make(Barrier));
    calls.extend(
        [Broadcast, Reduce, Gather, Scatter].map(|collective| CallSpec { root: 1, ..make(collective) }),
    );
    calls.extend(moving.map(|collective| CallSpec { count: 13, ..make(collective) }));
    for collective in [AllGather, AllReduce, Broadcast, Scatter] {
        let base = make(collective);
        calls.extend([0, 30_000].map(|count| CallSpec { count, ..base }));
        calls.push(CallSpec { dtype: DType::I32, ..base });
    }
    for redop in [RedOp::Max, RedOp::Avg, RedOp::PremulSum(0.5), RedOp::PremulSum(2.0)] {
        calls.extend([AllReduce, Reduce].map(|collective| CallSpec { redop, ..make(collective) }));
    }
    let lists =
        [[2, 1, 3], [3, 2, 1], [2, 3, 1], [0, 3, 3], [200, 100, 300], [200, 300, 100], [2000, 1000, 30_000]];
    let listed =
        [AllGather, ReduceScatter].into_iter().flat_map(|c| lists.map(|list| Action::Listed(c, list)));
    calls.into_iter().map(Action::Call).chain(listed).collect()
}

fn run_action(comm: &Communicator, action: &Action) -> Result<()> {
    match action {
        Action::Call(make) => run(comm, *make),
        Action::Listed(collective, list) => {
            let sizes: Vec<usize> = (0..comm.size()).map(|rank| list[rank.min(2)]).collect();
            listed(comm, *collective, &sizes)
        }
        Action::Sent(tags) => message(comm, tags, 0),
        Action::Received(tags) => message(comm, tags, 1),
    }
}

fn message(comm: &Communicator, tags: &[u64], whose: usize) -> Result<()> {
    let mut data = [1f32; 3];
    let ptr: *mut u8 = data.as_mut_ptr().cast();
    tags.iter().filter(|_| comm.rank() == whose).try_for_each(|&tag| {
        // SAFETY: the buffer outlives the works, which are awaited.
        let work = unsafe {
            match whose {
                0 => comm.send(ptr, 3, DType::F32, 1, tag, Options::default()),
                _ => comm.recv(ptr, 3, DType::F32, Some(0), tag, Options::default()),
            }
        };
        work?.wait(None)
    })
}

const WIRES: usize = Wire::EACH.len();

/// Runs ranks over the wire with the number `wire`.
fn on<T: Send>(wire: usize, size: usize, body: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    over(Wire::EACH[wire].links(size), TIMEOUT, body)
}

/// Runs `calls[r]` on rank `r` and leaves. Returns the outcome of each rank.
fn leave_after(wire: usize, calls: &[Vec<Action>]) -> Vec<Result<()>> {
    let gate = Gate::new(calls.len());
    on(wire, calls.len(), |comm| {
        let outcome = calls[comm.rank()].iter().try_for_each(|step| run_action(comm, step));
        let left = comm.shutdown_checked(TIMEOUT);
        gate.wait();
        outcome.and(left)
    })
}

fn assert_all_raise(wire: usize, calls: &[Vec<Action>]) {
    if let Some(what) = find_violation(wire, calls) {
        panic!("{what}");
    }
}

/// Returns a description if a rank raises no mismatch, or raises it too late.
fn find_violation(wire: usize, calls: &[Vec<Action>]) -> Option<String> {
    let begun = Instant::now();
    println!("{calls:?} over wire {wire}");
    for (rank, outcome) in leave_after(wire, calls).into_iter().enumerate() {
        if !matches!(outcome, Err(Error::Mismatch { .. })) {
            return Some(format!("{calls:?} over wire {wire}: the outcome of rank {rank} is {outcome:?}"));
        }
    }
    let took = begun.elapsed();
    (took >= TIMEOUT / 2).then(|| format!("{calls:?} over wire {wire} took {took:?}"))
}

/// Distributes two calls over ranks by a case number: one of two ranks differs, or one or two of three.
fn placed(a: &Action, b: &Action, number: usize) -> Vec<Vec<Action>> {
    const RANKS: [&[bool]; 4] =
        [&[false, true], &[false, false, true], &[false, true, true], &[true, false, true]];
    RANKS[number % RANKS.len()].iter().map(|&other| vec![if other { b.clone() } else { a.clone() }]).collect()
}

/// Tests every `every`-th pair of calls.
fn pairs(every: usize) {
    let calls = calls();
    let mut number = 0;
    for (i, a) in calls.iter().enumerate() {
        for b in &calls[..i] {
            number += 1;
            if number % every == 0 {
                assert_all_raise(number / every % WIRES, &placed(a, b, number / every / WIRES));
            }
        }
    }
}

#[test]
fn different_calls_raise_on_all_ranks_before_they_leave() {
    pairs(7);
}

#[test]
#[ignore = "all pairs on each wire: minutes"]
fn all_pairs_of_different_calls_raise_on_all_ranks() {
    let calls = calls();
    let (mut number, mut found) = (0, Vec::new());
    for (i, a) in calls.iter().enumerate() {
        for b in &calls[..i] {
            for wire in 0..WIRES {
                for ranks in 0..4 {
                    found.extend(find_violation(wire, &placed(a, b, ranks)));
                    number += 1;
                }
            }
        }
    }
    println!("{number} cases");
    assert!(found.is_empty(), "{} of {number}:\n{}", found.len(), found.join("\n"));
}

/// The ranks leave long after the difference, and neither has read the other's data.
#[test]
fn unread_mismatch_is_detected_later() {
    let mine = Action::Call(make(Collective::Broadcast));
    let other = Action::Call(CallSpec { root: 1, ..make(Collective::Broadcast) });
    for wire in 0..WIRES {
        assert_all_raise(wire, &[vec![mine.clone()], vec![other.clone()]]);
        assert_all_raise(wire, &[vec![mine.clone(); 2], vec![mine.clone()]]);
        assert_all_raise(wire, &[vec![mine.clone()], vec![mine.clone()], vec![other.clone()]]);
    }
}

/// The ranks send to peers that receive nothing.
#[test]
fn root_without_receivers_raises_mismatch() {
    let mine = Action::Call(CallSpec { count: 30_000, ..make(Collective::Broadcast) });
    let other = Action::Call(make(Collective::Reduce));
    for wire in 0..WIRES {
        assert_all_raise(wire, &[vec![mine.clone()], vec![other.clone()]]);
        assert_all_raise(wire, &[vec![mine.clone()], vec![other.clone()], vec![other.clone()]]);
    }
}

/// The root waits for a rank that sends to another root. That rank's leave request precedes the data and cannot be
/// read yet, so the other ranks' findings must bypass it.
#[test]
fn waiting_root_gets_the_mismatch_of_departing_ranks() {
    let reduce = |root| vec![Action::Call(CallSpec { root, ..make(Collective::Reduce) })];
    for wire in 0..WIRES {
        assert_all_raise(wire, &[1, 1, 0].map(reduce));
    }
}

#[test]
fn unreceived_message_raises_on_all_ranks_when_they_leave() {
    for wire in 0..WIRES {
        for size in [2, 3] {
            let nothing = || vec![vec![]; size - 2];
            let of = |sent: &'static [u64], received: &'static [u64]| {
                [vec![vec![Action::Sent(sent)], vec![Action::Received(received)]], nothing()].concat()
            };
            assert_all_raise(wire, &of(&[5], &[]));
            assert_all_raise(wire, &of(&[5, 6], &[5]));
            for outcome in leave_after(wire, &of(&[5, 6, 5], &[6, 5, 5])) {
                assert_eq!(outcome, Ok(()));
            }
        }
    }
}

/// Within a node both ranks get the error; between nodes only the receiver.
#[test]
fn message_with_another_tag_raises_on_the_receiver() {
    for wire in 0..WIRES {
        let in_a_node = matches!(Wire::EACH[wire], Wire::Shm);
        let gate = Gate::new(2);
        let outcomes = on(wire, 2, |comm| {
            let outcome = match comm.rank() {
                0 => message(comm, &[1], 0),
                _ => message(comm, &[2], 1),
            };
            // Between nodes the sender gets no notice.
            let notified = in_a_node || comm.rank() == 1;
            let left = comm.shutdown_checked(if notified { TIMEOUT } else { Duration::from_secs(2) });
            gate.wait();
            outcome.and(left)
        });
        let [sender, receiver] = &outcomes[..] else { panic!("two ranks") };
        assert!(matches!(receiver, Err(Error::Mismatch { rank: 0, .. })), "wire {wire}: {receiver:?}");
        assert!(receiver.as_ref().unwrap_err().to_string().contains("tag 1"), "wire {wire}: {receiver:?}");
        if in_a_node {
            assert!(matches!(sender, Err(Error::Mismatch { .. })), "wire {wire}: {sender:?}");
        }
    }
}

/// It ends with the group, like a recv whose wait timed out.
#[test]
fn recv_without_a_send_is_not_a_mismatch() {
    for wire in 0..WIRES {
        let gate = Gate::new(2);
        on(wire, 2, |comm| {
            let mut data = [0f32; 3];
            if comm.rank() == 1 {
                let ptr = data.as_mut_ptr().cast();
                // SAFETY: the buffer outlives the group, which ends the call.
                let work = unsafe { comm.recv(ptr, 3, DType::F32, Some(0), 7, Options::default()) }.unwrap();
                assert!(work.wait(Some(Duration::from_millis(10))).is_err());
                assert_eq!(comm.shutdown_checked(Duration::from_millis(200)), Ok(()));
                let error = work.wait(None).unwrap_err();
                assert!(matches!(error, Error::Closed { .. } | Error::PeerLost { rank: 0, .. }), "{error}");
            } else {
                assert_eq!(comm.shutdown_checked(TIMEOUT), Ok(()));
            }
            gate.wait();
        });
    }
}

#[test]
fn unreceived_message_error_names_the_ranks() {
    for outcome in leave_after(1, &[vec![Action::Sent(&[5, 6])], vec![Action::Received(&[6])], vec![]]) {
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("rank 0") && text.contains("sent 2") && text.contains("posted 1 recv"),
            "{text}"
        );
    }
}

#[test]
fn matching_calls_never_raise() {
    let calls = calls();
    for wire in 0..WIRES {
        for size in [2, 3, 4] {
            let mut mine = calls.clone();
            mine.extend([Action::Sent(&[1, 2]), Action::Received(&[2, 1])]);
            for outcome in leave_after(wire, &vec![mine; size]) {
                assert_eq!(outcome, Ok(()), "wire {wire}, {size} ranks");
            }
        }
    }
}

#[test]
fn departure_of_one_rank_respects_its_timeout() {
    for wire in 0..WIRES {
        let gate = Gate::new(2);
        on(wire, 2, |comm| {
            run(comm, make(Collective::Broadcast)).unwrap();
            if comm.rank() == 0 {
                let begun = Instant::now();
                assert_eq!(comm.shutdown_checked(Duration::from_millis(100)), Ok(()));
                assert!(begun.elapsed() >= Duration::from_millis(100) && begun.elapsed() < TIMEOUT / 2);
            }
            gate.wait();
            if comm.rank() == 1 {
                let error = run(comm, make(Collective::AllReduce)).unwrap_err();
                assert!(
                    matches!(&error, Error::PeerLost { rank: 0, reason, .. } if reason.contains("left")),
                    "{error}"
                );
            }
            gate.wait();
        });
    }
}

/// The departing rank gets no additional error, and the waiting ranks report its departure.
#[test]
fn departure_during_a_collective_succeeds_and_is_reported() {
    for wire in 0..WIRES {
        for size in [2, 3] {
            let gate = Gate::new(size);
            on(wire, size, |comm| {
                run(comm, make(Collective::AllReduce)).unwrap();
                if comm.rank() == 1 {
                    assert_eq!(comm.shutdown_checked(TIMEOUT), Ok(()));
                } else {
                    let error = run(comm, make(Collective::AllReduce)).unwrap_err();
                    assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{error}");
                }
                gate.wait();
            });
        }
    }
}
