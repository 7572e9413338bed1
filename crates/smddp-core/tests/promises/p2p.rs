//! Send and recv: any order, source and size, concurrently with other operations.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, Result, Work};

use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{Gate, PROMPT_LIMIT, TIMEOUT, Wire, fabric_links, over};

/// Contents of a message with this tag from this rank.
fn payload(from: usize, tag: u64, count: usize) -> Vec<f32> {
    (0..count).map(|i| (from * 1000 + tag as usize * 10 + i % 7) as f32).collect()
}

fn send(comm: &Communicator, data: &[f32], to: usize, tag: u64) -> Result<Work> {
    // SAFETY: every caller keeps the data until the work is complete.
    unsafe { comm.send(data.as_ptr().cast(), data.len(), DType::F32, to, tag, Options::default()) }
}

fn recv(comm: &Communicator, into: &mut [f32], from: Option<usize>, tag: u64) -> Result<Work> {
    let options = Options { timeout: None, keep: None, on: None };
    // SAFETY: every caller keeps the buffer until the work is complete.
    unsafe { comm.recv(into.as_mut_ptr().cast(), into.len(), DType::F32, from, tag, options) }
}

#[test]
fn messages_are_received_in_any_order_of_tags() {
    for wire in Wire::EACH {
        // Empty, inline in the announcement and slightly larger, in one slot, in fragments.
        for count in [0, 1, 8, 9, 1000, 20_000, 300_000] {
            over(wire.links(2), TIMEOUT, |comm| {
                let tags: Vec<u64> = (0..40).collect();
                if comm.rank() == 0 {
                    let data: Vec<_> = tags.iter().map(|&tag| payload(0, tag, count)).collect();
                    let works: Vec<_> =
                        tags.iter().map(|&t| send(comm, &data[t as usize], 1, t).unwrap()).collect();
                    works.iter().for_each(|work| work.wait(None).unwrap());
                } else {
                    for &tag in tags.iter().rev() {
                        let mut into = vec![f32::NAN; count];
                        recv(comm, &mut into, Some(0), tag).unwrap().wait(None).unwrap();
                        assert_eq!(into, payload(0, tag, count), "tag {tag}");
                    }
                }
            });
        }
    }
}

#[test]
fn messages_of_one_tag_keep_their_order() {
    for wire in Wire::EACH {
        over(wire.links(2), TIMEOUT, |comm| {
            for round in 0..200 {
                let count = [3, 30_000, 0, 500][round % 4];
                if comm.rank() == 0 {
                    let data = payload(round, 0, count);
                    send(comm, &data, 1, 9).unwrap().wait(None).unwrap();
                } else {
                    let mut into = vec![f32::NAN; count];
                    recv(comm, &mut into, Some(0), 9).unwrap().wait(None).unwrap();
                    assert_eq!(into, payload(round, 0, count));
                }
            }
        });
    }
}

#[test]
fn recv_from_any_rank_gets_each_message_once_with_its_source() {
    for wire in Wire::EACH {
        over(wire.links(4), TIMEOUT, |comm| {
            let me = comm.rank();
            if me == 0 {
                let mut seen = vec![0; 4];
                for _ in 0..60 {
                    let mut into = vec![f32::NAN; 2000];
                    let work = recv(comm, &mut into, None, 4).unwrap();
                    work.wait(None).unwrap();
                    let from = work.source().unwrap();
                    assert_eq!(into, payload(from, seen[from], 2000));
                    seen[from] += 1;
                }
                assert_eq!(seen, [0, 20, 20, 20]);
            } else {
                for tag in 0..20 {
                    send(comm, &payload(me, tag, 2000), 0, 4).unwrap().wait(None).unwrap();
                }
            }
        });
    }
}

#[test]
fn eager_sends_do_not_wait_for_receives() {
    for wire in Wire::EACH {
        over(wire.links(3), TIMEOUT, |comm| {
            let (me, n) = (comm.rank(), comm.size());
            for round in 0..30 {
                for to in (0..n).filter(|&r| r != me) {
                    send(comm, &payload(me, round, 16_000), to, round).unwrap().wait(None).unwrap();
                }
                for from in (0..n).filter(|&r| r != me) {
                    let mut into = vec![f32::NAN; 16_000];
                    recv(comm, &mut into, Some(from), round).unwrap().wait(None).unwrap();
                    assert_eq!(into, payload(from, round, 16_000));
                }
            }
        });
    }
}

/// Every rank sends large messages to all ranks concurrently, and receives them in another order.
fn exchange_concurrently(comm: &Communicator, messages: u64, count: usize) {
    let (me, n) = (comm.rank(), comm.size());
    let others: Vec<usize> = (0..n).filter(|&r| r != me).collect();
    let data: Vec<_> = (0..messages).map(|tag| payload(me, tag, count)).collect();
    let mut works = Vec::new();
    for (tag, data) in data.iter().enumerate() {
        works.extend(others.iter().map(|&to| send(comm, data, to, tag as u64).unwrap()));
    }
    for tag in (0..messages).rev() {
        for &from in &others {
            let mut into = vec![f32::NAN; count];
            recv(comm, &mut into, Some(from), tag).unwrap().wait(None).unwrap();
            assert!(into == payload(from, tag, count), "tag {tag} from {from}");
        }
    }
    works.iter().for_each(|work| work.wait(None).unwrap());
}

#[test]
fn many_large_messages_interleave() {
    for wire in Wire::EACH {
        over(wire.links(3), TIMEOUT, |comm| exchange_concurrently(comm, 12, 200_000));
    }
}

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    exchange_concurrently(&comm, 12, 100_000);
    exchange_concurrently(&comm, 60, 3_000);
    exchange_concurrently(&comm, 200, 10);
    comm.close();
    me.report("done");
}

#[test]
fn messages_in_any_order_need_no_more_than_the_smallest_staging() {
    let mut ranks = start("p2p", 3, &[("SMDDP_STAGING_BYTES", "65536")], 2 * TIMEOUT);
    (0..3).for_each(|rank| drop(ranks.wait_for(rank, "done")));
    ranks.finish(0..3);
}

/// Applies to every path: in a slot, inline, or from the sender's memory to the receiver's.
#[test]
fn send_buffer_is_reusable_after_completion_before_the_recv() {
    for wire in Wire::EACH {
        for count in [1, 2_000, 16_000, 16_384, 16_385, 300_001] {
            let (begun, gate) = (Gate::new(2), Gate::new(2));
            over(wire.links(2), TIMEOUT, |comm| {
                if comm.rank() == 0 {
                    let mut data = payload(0, 1, count);
                    let work = send(comm, &data, 1, 1).unwrap();
                    // A long message waits for its receiver; shorter ones do not.
                    if count <= 16_384 {
                        work.wait(None).unwrap();
                        data.fill(f32::NAN);
                        gate.wait();
                    } else {
                        gate.wait();
                        work.wait(None).unwrap();
                        data.fill(f32::NAN);
                    }
                    begun.wait();
                } else {
                    gate.wait();
                    let mut into = vec![f32::NAN; count];
                    let work = recv(comm, &mut into, Some(0), 1).unwrap();
                    work.wait(None).unwrap();
                    begun.wait();
                    assert!(into == payload(0, 1, count), "{count} elements over {wire:?}");
                }
            });
        }
    }
}

#[test]
fn dead_sender_is_reported_and_the_receive_buffer_is_not_written_afterwards() {
    for at in [1, 2, 5, 9] {
        over(Wire::Dying(1, at).links(2), TIMEOUT, |comm| {
            let (data, mut into) = (payload(comm.rank(), 1, 1 << 20), vec![0f32; 1 << 20]);
            let receive = recv(comm, &mut into, Some(1 - comm.rank()), 1).unwrap();
            let send = send(comm, &data, 1 - comm.rank(), 1).unwrap();
            let ends = [receive.wait(None), send.wait(None)];
            if comm.rank() == 0 {
                let error = ends[0].as_ref().unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
                into.fill(-1.0);
                comm.close();
                assert!(into.iter().all(|&element| element == -1.0), "written after the error");
            } else {
                comm.close();
            }
        });
    }
}

#[test]
fn timed_out_recv_leaves_the_group_usable() {
    for wire in Wire::EACH {
        let gate = Gate::new(2);
        over(wire.links(2), TIMEOUT, |comm| {
            if comm.rank() == 0 {
                let mut into = vec![0f32; 10];
                let options = Options { timeout: Some(Duration::from_millis(100)), keep: None, on: None };
                let begun = Instant::now();
                // SAFETY: the buffer outlives the work, which is awaited.
                let work =
                    unsafe { comm.recv(into.as_mut_ptr().cast(), 10, DType::F32, Some(1), 3, options) }
                        .unwrap();
                let error = work.wait(None).unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
                assert!(error.to_string().contains("tag 3"), "{error}");
                assert!(begun.elapsed() < PROMPT_LIMIT);
                assert_eq!(comm.error(), None);
            }
            gate.wait();
            let mut job = Job::new(comm.rank(), 2, Collective::AllReduce, 5000, 0, 0);
            job.run(comm).unwrap();
            job.check();
            // The same tag, now with a sender.
            let mut into = vec![0f32; 10];
            if comm.rank() == 1 {
                send(comm, &payload(1, 3, 10), 0, 3).unwrap().wait(None).unwrap();
            } else {
                recv(comm, &mut into, Some(1), 3).unwrap().wait(None).unwrap();
                assert_eq!(into, payload(1, 3, 10));
            }
        });
    }
}

#[test]
fn messages_move_while_a_collective_waits_for_a_rank() {
    for links in Wire::EACH.map(|wire| wire.links(3)).into_iter().chain(fabric_links(3)) {
        over(links, TIMEOUT, |comm| {
            let mut job = Job::new(comm.rank(), 3, Collective::AllReduce, 40_000, 0, 0);
            let (me, count) = (comm.rank(), 100_000);
            let mut into = vec![f32::NAN; count];
            let started = (me != 2).then(|| job.start(comm).unwrap());
            // Rank 2 joins the collective only after the others' messages have arrived.
            match me {
                0 => send(comm, &payload(0, 1, count), 1, 1).unwrap().wait(None).unwrap(),
                1 => {
                    recv(comm, &mut into, Some(0), 1).unwrap().wait(None).unwrap();
                    assert!(into == payload(0, 1, count));
                    send(comm, &into, 2, 2).unwrap().wait(None).unwrap();
                }
                _ => {
                    recv(comm, &mut into, Some(1), 2).unwrap().wait(None).unwrap();
                    assert!(into == payload(0, 1, count));
                    job.run(comm).unwrap();
                }
            }
            if let Some(work) = started {
                work.wait(None).unwrap();
            }
            job.check();
        });
    }
}
