//! A rank that leaves a group with a message that no rank received: `Mismatch` on its sender and on its receiver.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, Result};

use crate::common::{Gate, PATIENCE, SOON, Wire, over};
use crate::mismatch::{BASE, Make, run};

/// Call of the receiver while the sender leaves.
#[derive(Clone, Copy, Debug)]
enum Waits {
    Collective(Collective, usize),
    /// A recv with another tag.
    Recv,
    Leaves,
}

/// Elements of a message inside its announcement, in one cell, and above the eager limit.
const SIZES: [usize; 3] = [3, 2_000, 300_000];

fn waits() -> Vec<Waits> {
    use smddp_core::Collective::*;
    let unrooted = [Barrier, AllReduce, AllGather, ReduceScatter, AllToAll].map(|c| Waits::Collective(c, 0));
    let rooted = [Broadcast, Reduce, Gather, Scatter];
    let rooted = rooted.into_iter().flat_map(|c| [0, 1].map(|root| Waits::Collective(c, root)));
    unrooted.into_iter().chain(rooted).chain([Waits::Recv, Waits::Leaves]).collect()
}

fn call(comm: &Communicator, waits: Waits, data: &mut [f32]) -> Result<()> {
    match waits {
        Waits::Collective(collective, root) => run(comm, Make { collective, root, count: 12, ..BASE }),
        Waits::Recv if comm.rank() == 1 => {
            let (ptr, count) = (data.as_mut_ptr().cast(), data.len());
            // SAFETY: the buffer outlives the work, which is waited for.
            unsafe { comm.recv(ptr, count, DType::F32, Some(0), 8, Options::default()) }?.wait(None)
        }
        Waits::Recv | Waits::Leaves => Ok(()),
    }
}

/// Rank 0 sends a message to rank 1 and leaves; the others make their call. Returns the outcome of each rank.
fn outcomes(wire: Wire, size: usize, count: usize, waits: Waits, late: bool) -> Vec<Result<()>> {
    let gate = Gate::new(size);
    over(wire.links(size), PATIENCE, |comm| {
        let mut data = vec![0f32; count];
        let mut outcome = Ok(());
        let mut sent = None;
        if comm.rank() == 0 {
            // SAFETY: the buffer outlives the group, which ends the work.
            let work =
                unsafe { comm.send(data.as_ptr().cast(), count, DType::F32, 1, 7, Options::default()) };
            sent = Some(work.unwrap());
        } else {
            if late && comm.rank() == 1 {
                // Rank 2 has reported the departure of rank 0 by then.
                std::thread::sleep(LATE);
            }
            outcome = call(comm, waits, &mut data);
        }
        let left = comm.finish(PATIENCE);
        drop(sent);
        gate.wait();
        outcome.and(left)
    })
}

/// Longer than a rank waits for the report of another rank.
const LATE: Duration = Duration::from_millis(500);

#[test]
fn a_late_receiver_of_an_unreceived_message_and_its_sender_raise_mismatch() {
    let mut wrong = Vec::new();
    for wire in Wire::EACH {
        for waits in [Waits::Collective(Collective::Barrier, 0), Waits::Collective(Collective::AllReduce, 0)]
        {
            let ends = outcomes(wire, 3, 3, waits, true);
            for (rank, end) in ends.iter().enumerate().take(2) {
                if !matches!(end, Err(Error::Mismatch { .. })) {
                    wrong.push(format!("{wire:?}, {waits:?}: rank {rank}: {end:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn sender_and_receiver_of_an_unreceived_message_raise_mismatch() {
    let mut wrong = Vec::new();
    for wire in Wire::EACH {
        for size in [2, 3] {
            for count in SIZES {
                for waits in waits() {
                    let ends = outcomes(wire, size, count, waits, false);
                    for (rank, end) in ends.iter().enumerate().take(2) {
                        if !matches!(end, Err(Error::Mismatch { .. })) {
                            wrong.push(format!(
                                "{wire:?} {size} ranks, {count} elements, {waits:?}: rank {rank}: {end:?}"
                            ));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of:\n{}", wrong.len(), wrong.join("\n"));
}

/// Rank 1 has received the message and makes no call, rank 2 waits in a collective.
#[test]
fn a_rank_whose_messages_were_received_leaves_at_once() {
    // Between nodes a short message is not confirmed.
    let cases =
        Wire::EACH.map(|wire| (wire, if matches!(wire, Wire::Shm) { &SIZES[..] } else { &SIZES[2..] }));
    for (wire, sizes) in cases {
        for &count in sizes {
            let (received, left) = (Gate::new(3), Gate::new(3));
            over(wire.links(3), PATIENCE, |comm| {
                let mut data = vec![0f32; count];
                let ptr: *mut u8 = data.as_mut_ptr().cast();
                let work = match comm.rank() {
                    // SAFETY: the buffer outlives the work, which is waited for.
                    0 => Some(unsafe { comm.send(ptr, count, DType::F32, 1, 7, Options::default()) }),
                    // SAFETY: as above.
                    1 => Some(unsafe { comm.recv(ptr, count, DType::F32, Some(0), 7, Options::default()) }),
                    _ => None,
                };
                work.into_iter().for_each(|work| work.unwrap().wait(None).unwrap());
                received.wait();
                let begun = Instant::now();
                match comm.rank() {
                    0 => assert_eq!(comm.finish(PATIENCE), Ok(())),
                    1 => {}
                    _ => {
                        let outcome =
                            run(comm, Make { collective: Collective::AllReduce, count: 12, ..BASE });
                        assert!(matches!(outcome, Err(Error::PeerLost { rank: 0, .. })), "{outcome:?}");
                    }
                }
                assert!(begun.elapsed() < SOON, "{wire:?}, {count} elements: {:?}", begun.elapsed());
                left.wait();
            });
        }
    }
}
