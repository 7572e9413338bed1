//! A rank that leaves in good order is missed only where it is needed.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options};
use smddp_transport::{Head, Wiring};

use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{Me, start};
use crate::common::{Gate, PATIENCE, Wire, over};

fn one(comm: &Communicator, collective: Collective, count: usize, turn: usize) -> smddp_core::Result<()> {
    let mut job = Job::new(comm.rank(), comm.size(), collective, count, turn % comm.size(), turn);
    job.run(comm)?;
    job.check();
    Ok(())
}

pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
    for turn in 0..50 {
        one(&comm, crate::common::ALL[turn % 9], 3000, turn).unwrap();
    }
    let letter = [7f32; 9];
    if me.rank == 1 {
        for to in [0, 2] {
            // SAFETY: the letter lives until the process ends.
            let sent = unsafe { comm.send(letter.as_ptr().cast(), 9, DType::F32, to, 5, Options::default()) };
            sent.unwrap().wait(None).unwrap();
        }
    }
    // The last collective, and the end of the process right behind it.
    one(&comm, Collective::AllGather, 100_000, 1).unwrap();
    if me.rank == 1 {
        smddp_core::shutdown();
        return;
    }
    // What it sent before is still received.
    let mut got = [0f32; 9];
    me.get("gone");
    // SAFETY: the buffer outlives the work, which is waited for.
    let work = unsafe { comm.recv(got.as_mut_ptr().cast(), 9, DType::F32, Some(1), 5, Options::default()) };
    work.unwrap().wait(None).unwrap();
    assert_eq!(got, letter);
    // Messages between those who are still there go on, whoever has left.
    let (other, mut into) = (2 - me.rank, vec![0f32; 100_000]);
    let out = vec![me.rank as f32; 100_000];
    // SAFETY: both buffers outlive both works, which are waited for.
    unsafe {
        let s = comm.send(out.as_ptr().cast(), out.len(), DType::F32, other, 1, Options::default()).unwrap();
        let r = comm
            .recv(into.as_mut_ptr().cast(), out.len(), DType::F32, Some(other), 1, Options::default())
            .unwrap();
        r.wait(None).unwrap();
        s.wait(None).unwrap();
    }
    assert!(into.iter().all(|&x| x == other as f32));
    assert_eq!(comm.error(), None, "a rank that left is no error by itself");
    let error = one(&comm, Collective::AllReduce, 10, 0).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 1, how, .. } if how.contains("left")), "{error}");
    comm.close();
    me.say("done");
}

#[test]
fn an_orderly_exit_after_the_last_collective_is_no_error_until_the_rank_is_needed() {
    for _ in 0..10 {
        let mut ranks = start("leaving", 3, &[], 2 * PATIENCE);
        if !ranks.exit(1).success() {
            ranks.fail("rank 1 ended badly");
        }
        ranks.put("gone", "yes");
        ranks.hear(0, "done");
        ranks.hear(2, "done");
        ranks.finish([0, 1, 2]);
    }
}

/// The last to leave may have been told that it keeps others waiting, and never have read that: it must not take its
/// own last bytes back by closing.
#[test]
fn what_a_rank_sent_arrives_though_it_leaves_at_once_and_has_unread_frames() {
    over(Wire::Nodes(1).links(3), PATIENCE, |comm| {
        if comm.rank() == 2 {
            // Longer than ranks wait before they say what they wait in.
            std::thread::park_timeout(Duration::from_millis(150));
        }
        one(comm, Collective::Broadcast, 4_000_000, 2).unwrap();
    });
}

/// It would look as if it were where those are that wait for it.
#[test]
fn a_rank_that_leaves_has_not_arrived_in_the_call_of_that_number() {
    let mut links = Wire::Nodes(1).links(2);
    let (mut leaves, mut asks) = (links.remove(1).group, links.remove(0).group);
    let wired = leaves.wire(Wiring { depth: (1, 1), window: 1, ..Wiring::default() });
    for (seq, wired, arrived) in [(0, wired.clone(), true), (1, wired.untold(), false)] {
        assert!(leaves.begin(seq, Head::default(), &wired, &[]));
        asks.survey();
        assert_eq!(asks.arrived(1, seq), Some(arrived), "#{seq}");
        leaves.end();
    }
}

/// The root of a broadcast waits for nobody's data, only for what it sends to be taken.
#[test]
fn who_sends_to_a_rank_that_left_does_not_wait_for_the_deadline() {
    for wire in [Wire::Nodes(1), Wire::Srd(7)] {
        let begun = Instant::now();
        over(wire.links(2), PATIENCE, |comm| {
            one(comm, Collective::Broadcast, 100, 1).unwrap();
            if comm.rank() == 0 {
                comm.close();
                return;
            }
            // It has gone out, or it is said that nobody takes it.
            match one(comm, Collective::Broadcast, 4_000_000, 1) {
                Ok(()) | Err(Error::PeerLost { rank: 0, .. }) => {}
                other => panic!("{other:?}"),
            }
        });
        assert!(begun.elapsed() < PATIENCE / 3, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_rank_that_closes_with_calls_pending_is_lost_to_the_others() {
    for wire in Wire::EACH {
        for pending in ["recv", "send", "collective"] {
            let (exchanged, closed) = (Gate::new(3), Gate::new(3));
            over(wire.links(3), PATIENCE, |comm| {
                Job::new(comm.rank(), 3, Collective::AllToAll, 10, 0, 0).run(comm).unwrap();
                // Ranks 1 and 2 may still exchange when rank 0 has all that it needs.
                exchanged.wait();
                let again = || Job::new(comm.rank(), 3, Collective::AllReduce, 7, 0, 0);
                if comm.rank() > 0 {
                    closed.wait();
                    // What rank 0 gave to its pending collective may be enough for the others.
                    let outcome = again().run(comm).and_then(|()| again().run(comm));
                    let lost = matches!(&outcome, Err(Error::PeerLost { rank: 0, how, .. }) if how.contains("pending"));
                    assert!(lost, "{wire:?}, {pending}: {outcome:?}");
                    return;
                }
                let mut message = vec![0_f32; 1 << 20];
                let (at, count) = (message.as_mut_ptr().cast::<u8>(), message.len());
                let mut job = again();
                // SAFETY: the buffer outlives the work, which the close ends.
                let work = unsafe {
                    match pending {
                        "recv" => comm.recv(at, count, DType::F32, Some(1), 0, Options::default()),
                        "send" => comm.send(at, count, DType::F32, 1, 0, Options::default()),
                        _ => job.start(comm),
                    }
                };
                comm.close();
                let outcome = work.unwrap().wait(None);
                assert!(matches!(outcome, Err(Error::Closed { .. })), "{wire:?}, {pending}: {outcome:?}");
                closed.wait();
            });
        }
    }
}
