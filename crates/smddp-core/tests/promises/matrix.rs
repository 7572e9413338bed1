//! Every pair of different calls raises on all ranks, when they leave the group together at the latest; right calls never do.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, RedOp, Result};

use crate::common::{Gate, PATIENCE, Wire, over};
use crate::mismatch::{BASE, Make, listed, run};

/// What a rank does, once.
#[derive(Clone, Debug)]
enum Act {
    Call(Make),
    /// all_gather or reduce_scatter of blocks of these sizes; in a group of more ranks the last one is all others'.
    Listed(Collective, [usize; 3]),
    /// Rank 0 sends rank 1 messages of these tags.
    Sent(&'static [u64]),
    /// Rank 1 receives messages of these tags from rank 0.
    Received(&'static [u64]),
}

fn make(collective: Collective) -> Make {
    Make { collective, count: 12, ..BASE }
}

/// Each differs from each other one.
fn calls() -> Vec<Act> {
    use Collective::*;
    let moving = [AllGather, ReduceScatter, AllReduce, Broadcast, Reduce, Gather, Scatter, AllToAll];
    let mut calls: Vec<Make> = moving.map(make).into();
    calls.push(make(Barrier));
    calls.extend([Broadcast, Reduce, Gather, Scatter].map(|collective| Make { root: 1, ..make(collective) }));
    calls.extend(moving.map(|collective| Make { count: 13, ..make(collective) }));
    for collective in [AllGather, AllReduce, Broadcast, Scatter] {
        let base = make(collective);
        calls.extend([0, 30_000].map(|count| Make { count, ..base }));
        calls.push(Make { dtype: DType::I32, ..base });
    }
    for redop in [RedOp::Max, RedOp::Avg, RedOp::PremulSum(0.5), RedOp::PremulSum(2.0)] {
        calls.extend([AllReduce, Reduce].map(|collective| Make { redop, ..make(collective) }));
    }
    let lists =
        [[2, 1, 3], [3, 2, 1], [2, 3, 1], [0, 3, 3], [200, 100, 300], [200, 300, 100], [2000, 1000, 30_000]];
    let listed = [AllGather, ReduceScatter].into_iter().flat_map(|c| lists.map(|list| Act::Listed(c, list)));
    calls.into_iter().map(Act::Call).chain(listed).collect()
}

fn act(comm: &Communicator, act: &Act) -> Result<()> {
    match act {
        Act::Call(make) => run(comm, *make),
        Act::Listed(collective, list) => {
            let sizes: Vec<usize> = (0..comm.size()).map(|rank| list[rank.min(2)]).collect();
            listed(comm, *collective, &sizes)
        }
        Act::Sent(tags) => message(comm, tags, 0),
        Act::Received(tags) => message(comm, tags, 1),
    }
}

fn message(comm: &Communicator, tags: &[u64], whose: usize) -> Result<()> {
    let mut data = [1f32; 3];
    let ptr: *mut u8 = data.as_mut_ptr().cast();
    tags.iter().filter(|_| comm.rank() == whose).try_for_each(|&tag| {
        // SAFETY: the buffer outlives the works, which are waited for.
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

/// The groups over each wire in turn.
fn on<T: Send>(wire: usize, size: usize, body: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    over(Wire::EACH[wire].links(size), PATIENCE, body)
}

/// Rank `r` makes `calls[r]`; what each of them comes to, once all have left.
fn leave_after(wire: usize, calls: &[Vec<Act>]) -> Vec<Result<()>> {
    let gate = Gate::new(calls.len());
    on(wire, calls.len(), |comm| {
        let outcome = calls[comm.rank()].iter().try_for_each(|step| act(comm, step));
        let left = comm.finish(PATIENCE);
        gate.wait();
        outcome.and(left)
    })
}

fn all_raise(wire: usize, calls: &[Vec<Act>]) {
    if let Some(what) = wrong(wire, calls) {
        panic!("{what}");
    }
}

/// What of it is not as it should be: all raise, and soon.
fn wrong(wire: usize, calls: &[Vec<Act>]) -> Option<String> {
    let begun = Instant::now();
    println!("{calls:?} over wire {wire}");
    for (rank, outcome) in leave_after(wire, calls).into_iter().enumerate() {
        if !matches!(outcome, Err(Error::Mismatch { .. })) {
            return Some(format!("{calls:?} over wire {wire}: rank {rank} ended with {outcome:?}"));
        }
    }
    let took = begun.elapsed();
    (took >= PATIENCE / 2).then(|| format!("{calls:?} over wire {wire} took {took:?}"))
}

/// The ranks that differ, by the number of a case: of two either one, of three one or two.
fn placed(a: &Act, b: &Act, number: usize) -> Vec<Vec<Act>> {
    const RANKS: [&[bool]; 4] =
        [&[false, true], &[false, false, true], &[false, true, true], &[true, false, true]];
    RANKS[number % RANKS.len()].iter().map(|&other| vec![if other { b.clone() } else { a.clone() }]).collect()
}

/// Pairs of calls in one of these steps.
fn pairs(every: usize) {
    let calls = calls();
    let mut number = 0;
    for (i, a) in calls.iter().enumerate() {
        for b in &calls[..i] {
            number += 1;
            if number % every == 0 {
                all_raise(number / every % WIRES, &placed(a, b, number / every / WIRES));
            }
        }
    }
}

#[test]
fn different_calls_raise_on_all_ranks_when_they_leave_at_the_latest() {
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
                    found.extend(wrong(wire, &placed(a, b, ranks)));
                    number += 1;
                }
            }
        }
    }
    println!("{number} cases");
    assert!(found.is_empty(), "{} of {number}:\n{}", found.len(), found.join("\n"));
}

/// The difference is far behind when the ranks leave, and nobody read what the other one wrote.
#[test]
fn a_call_that_nobody_read_is_found_later() {
    let mine = Act::Call(make(Collective::Broadcast));
    let other = Act::Call(Make { root: 1, ..make(Collective::Broadcast) });
    for wire in 0..WIRES {
        all_raise(wire, &[vec![mine.clone()], vec![other.clone()]]);
        all_raise(wire, &[vec![mine.clone(); 2], vec![mine.clone()]]);
        all_raise(wire, &[vec![mine.clone()], vec![mine.clone()], vec![other.clone()]]);
    }
}

/// All write to those that read nothing of what comes.
#[test]
fn a_root_whose_bytes_nobody_takes_is_told() {
    let mine = Act::Call(Make { count: 30_000, ..make(Collective::Broadcast) });
    let other = Act::Call(make(Collective::Reduce));
    for wire in 0..WIRES {
        all_raise(wire, &[vec![mine.clone()], vec![other.clone()]]);
        all_raise(wire, &[vec![mine.clone()], vec![other.clone()], vec![other.clone()]]);
    }
}

/// The root waits for the one that writes to another root, whose call to leave lies before it and cannot be read yet: what the
/// others find out comes past that.
#[test]
fn a_root_that_waits_hears_what_those_found_out_who_leave() {
    let reduce = |root| vec![Act::Call(Make { root, ..make(Collective::Reduce) })];
    for wire in 0..WIRES {
        all_raise(wire, &[1, 1, 0].map(reduce));
    }
}

#[test]
fn a_message_that_nobody_receives_raises_on_all_ranks_when_they_leave() {
    for wire in 0..WIRES {
        for size in [2, 3] {
            let nothing = || vec![vec![]; size - 2];
            let of = |sent: &'static [u64], received: &'static [u64]| {
                [vec![vec![Act::Sent(sent)], vec![Act::Received(received)]], nothing()].concat()
            };
            all_raise(wire, &of(&[5], &[]));
            all_raise(wire, &of(&[5, 6], &[5]));
            for outcome in leave_after(wire, &of(&[5, 6, 5], &[6, 5, 5])) {
                assert_eq!(outcome, Ok(()));
            }
        }
    }
}

/// Both kinds of rank are told in a node; between nodes it is the one that waits.
#[test]
fn a_message_of_another_tag_raises_where_the_rank_waits() {
    for wire in 0..WIRES {
        let in_a_node = matches!(Wire::EACH[wire], Wire::Shm);
        let gate = Gate::new(2);
        let outcomes = on(wire, 2, |comm| {
            let outcome = match comm.rank() {
                0 => message(comm, &[1], 0),
                _ => message(comm, &[2], 1),
            };
            // Between nodes nobody tells the sender.
            let told = in_a_node || comm.rank() == 1;
            let left = comm.finish(if told { PATIENCE } else { Duration::from_secs(2) });
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

/// It ends with the group, as one whose wait was given up does.
#[test]
fn a_recv_that_nobody_answers_is_no_mismatch() {
    for wire in 0..WIRES {
        let gate = Gate::new(2);
        on(wire, 2, |comm| {
            let mut data = [0f32; 3];
            if comm.rank() == 1 {
                let ptr = data.as_mut_ptr().cast();
                // SAFETY: the buffer outlives the group, which ends the call.
                let work = unsafe { comm.recv(ptr, 3, DType::F32, Some(0), 7, Options::default()) }.unwrap();
                assert!(work.wait(Some(Duration::from_millis(10))).is_err());
                assert_eq!(comm.finish(Duration::from_millis(200)), Ok(()));
                let error = work.wait(None).unwrap_err();
                assert!(matches!(error, Error::Closed { .. } | Error::PeerLost { rank: 0, .. }), "{error}");
            } else {
                assert_eq!(comm.finish(PATIENCE), Ok(()));
            }
            gate.wait();
        });
    }
}

#[test]
fn the_ranks_of_a_message_that_nobody_receives_are_named() {
    for outcome in leave_after(1, &[vec![Act::Sent(&[5, 6])], vec![Act::Received(&[6])], vec![]]) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 0") && text.contains("sent 2") && text.contains("asked for 1"), "{text}");
    }
}

#[test]
fn right_calls_never_raise() {
    let calls = calls();
    for wire in 0..WIRES {
        for size in [2, 3, 4] {
            let mut mine = calls.clone();
            mine.extend([Act::Sent(&[1, 2]), Act::Received(&[2, 1])]);
            for outcome in leave_after(wire, &vec![mine; size]) {
                assert_eq!(outcome, Ok(()), "wire {wire}, {size} ranks");
            }
        }
    }
}

#[test]
fn who_leaves_alone_waits_no_longer_than_it_was_told_to() {
    for wire in 0..WIRES {
        let gate = Gate::new(2);
        on(wire, 2, |comm| {
            run(comm, make(Collective::Broadcast)).unwrap();
            if comm.rank() == 0 {
                let begun = Instant::now();
                assert_eq!(comm.finish(Duration::from_millis(100)), Ok(()));
                assert!(begun.elapsed() >= Duration::from_millis(100) && begun.elapsed() < PATIENCE / 2);
            }
            gate.wait();
            if comm.rank() == 1 {
                let error = run(comm, make(Collective::AllReduce)).unwrap_err();
                assert!(
                    matches!(&error, Error::PeerLost { rank: 0, how, .. } if how.contains("left")),
                    "{error}"
                );
            }
            gate.wait();
        });
    }
}

/// A program that ends for reasons of its own does not see its end replaced by another error, and the others hear who left.
#[test]
fn who_leaves_while_others_wait_ends_well_and_is_named_to_them() {
    for wire in 0..WIRES {
        for size in [2, 3] {
            let gate = Gate::new(size);
            on(wire, size, |comm| {
                run(comm, make(Collective::AllReduce)).unwrap();
                if comm.rank() == 1 {
                    assert_eq!(comm.finish(PATIENCE), Ok(()));
                } else {
                    let error = run(comm, make(Collective::AllReduce)).unwrap_err();
                    assert!(matches!(&error, Error::PeerLost { rank: 1, .. }), "{error}");
                }
                gate.wait();
            });
        }
    }
}
