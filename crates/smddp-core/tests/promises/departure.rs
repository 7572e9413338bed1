//! Orderly departure of a rank: other ranks fail only if they need it.

use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Channels};
use smddp_core::{Collective, Communicator, DType, Error, Options};
use smddp_group::Facts;

use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{Gate, TIMEOUT, Wire, over};

fn one(
    comm: &Communicator,
    collective: Collective,
    count: usize,
    iteration: usize,
) -> smddp_core::Result<()> {
    let mut job = Job::new(comm.rank(), comm.size(), collective, count, iteration % comm.size(), iteration);
    job.run(comm)?;
    job.check();
    Ok(())
}

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    for iteration in 0..50 {
        one(&comm, crate::common::ALL[iteration % 9], 3000, iteration).unwrap();
    }
    let message = [7f32; 9];
    if me.rank == 1 {
        for to in [0, 2] {
            // SAFETY: the message lives until the process exits.
            let sent =
                unsafe { comm.send(message.as_ptr().cast(), 9, DType::F32, to, 5, Options::default()) };
            sent.unwrap().wait(None).unwrap();
        }
    }
    // The last collective, followed immediately by the shutdown.
    one(&comm, Collective::AllGather, 100_000, 1).unwrap();
    if me.rank == 1 {
        smddp_core::shutdown();
        return;
    }
    // Messages that it sent before are still received.
    let mut got = [0f32; 9];
    me.get("departed");
    // SAFETY: the buffer outlives the work, which is awaited.
    let work = unsafe { comm.recv(got.as_mut_ptr().cast(), 9, DType::F32, Some(1), 5, Options::default()) };
    work.unwrap().wait(None).unwrap();
    assert_eq!(got, message);
    // Messages between the remaining ranks continue.
    let (other, mut into) = (2 - me.rank, vec![0f32; 100_000]);
    let out = vec![me.rank as f32; 100_000];
    // SAFETY: both buffers outlive both works, which are awaited.
    unsafe {
        let s = comm.send(out.as_ptr().cast(), out.len(), DType::F32, other, 1, Options::default()).unwrap();
        let r = comm
            .recv(into.as_mut_ptr().cast(), out.len(), DType::F32, Some(other), 1, Options::default())
            .unwrap();
        r.wait(None).unwrap();
        s.wait(None).unwrap();
    }
    assert!(into.iter().all(|&x| x == other as f32));
    assert_eq!(comm.error(), None, "a departed rank alone is not an error");
    let error = one(&comm, Collective::AllReduce, 10, 0).unwrap_err();
    assert!(matches!(&error, Error::PeerLost { rank: 1, reason, .. } if reason.contains("left")), "{error}");
    comm.close();
    me.report("done");
}

#[test]
fn departed_rank_is_an_error_only_when_needed() {
    for _ in 0..10 {
        let mut ranks = start("departure", 3, &[], 2 * TIMEOUT);
        if !ranks.exit(1).success() {
            ranks.fail("rank 1 failed");
        }
        ranks.put("departed", "yes");
        ranks.wait_for(0, "done");
        ranks.wait_for(2, "done");
        ranks.finish([0, 1, 2]);
    }
}

/// The last rank may have an unread wait notice when it leaves. Its close must not discard its last sent bytes.
#[test]
fn data_sent_before_an_immediate_departure_arrives() {
    over(Wire::Nodes(1).links(3), TIMEOUT, |comm| {
        if comm.rank() == 2 {
            // Longer than the delay after which ranks send wait notices.
            std::thread::park_timeout(Duration::from_millis(150));
        }
        one(comm, Collective::Broadcast, 4_000_000, 2).unwrap();
    });
}

/// Otherwise the departed rank would count as present in the call of the waiting ranks.
#[test]
fn departure_does_not_count_as_arrival_in_a_call() {
    let mut links = Wire::Nodes(1).links(2);
    let (mut departing, mut querying) = (links.remove(1).group, links.remove(0).group);
    let routed = departing.info().routes.route(&Arc::new(Channels {
        depth: (1, 1),
        window: 1,
        ..Channels::default()
    }));
    for (seq, routed, arrived) in [(0, routed.clone(), true), (1, routed.unannounced(), false)] {
        // SAFETY: no memory.
        assert!(unsafe { departing.begin(seq, CallFingerprint::default(), &routed, &[], iter::empty()) });
        let (mut health, mut facts) = (querying.health(), Facts::default());
        health.start_query(&[1], |_| 0, Instant::now());
        while !health.poll_query(Instant::now(), &mut facts) {
            std::thread::yield_now();
        }
        health.observe(Instant::now(), seq, &mut facts);
        assert_eq!(facts.ranks[1].arrived, Some(arrived), "#{seq}");
        departing.end();
    }
}

/// A broadcast's root waits for no data, only for the receipt of the sent data.
#[test]
fn send_to_a_departed_rank_does_not_wait_for_the_timeout() {
    for wire in [Wire::Nodes(1), Wire::Efa(7)] {
        let begun = Instant::now();
        over(wire.links(2), TIMEOUT, |comm| {
            one(comm, Collective::Broadcast, 100, 1).unwrap();
            if comm.rank() == 0 {
                comm.close();
                return;
            }
            // Either everything is sent, or the departure of the receiver is reported.
            match one(comm, Collective::Broadcast, 4_000_000, 1) {
                Ok(()) | Err(Error::PeerLost { rank: 0, .. }) => {}
                other => panic!("{other:?}"),
            }
        });
        assert!(begun.elapsed() < TIMEOUT / 3, "{:?}", begun.elapsed());
    }
}

#[test]
fn close_with_pending_calls_is_reported_as_a_lost_rank() {
    for wire in Wire::EACH {
        for pending in ["recv", "send", "collective"] {
            let (exchanged, closed) = (Gate::new(3), Gate::new(3));
            over(wire.links(3), TIMEOUT, |comm| {
                Job::new(comm.rank(), 3, Collective::AllToAll, 10, 0, 0).run(comm).unwrap();
                // Ranks 1 and 2 may still exchange data when rank 0 has all it needs.
                exchanged.wait();
                let again = || Job::new(comm.rank(), 3, Collective::AllReduce, 7, 0, 0);
                if comm.rank() > 0 {
                    closed.wait();
                    // The data that rank 0 sent for its pending collective may be sufficient for the others.
                    let outcome = again().run(comm).and_then(|()| again().run(comm));
                    let lost = matches!(&outcome, Err(Error::PeerLost { rank: 0, reason, .. }) if reason.contains("pending"));
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
