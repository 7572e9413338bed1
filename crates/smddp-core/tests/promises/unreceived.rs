//! Departure of a rank with an unreceived message: `Mismatch` on its sender and its receiver.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, Result};

use crate::common::{Gate, PROMPT_LIMIT, TIMEOUT, Wire, over};
use crate::mismatch::{BASE, CallSpec, run};

/// Call of the receiver while the sender leaves.
#[derive(Clone, Copy, Debug)]
enum Waiting {
    Collective(Collective, usize),
    /// A recv with another tag.
    Recv,
    Leaves,
}

/// Elements of a message inside its announcement, in one slot, and above the eager limit.
const SIZES: [usize; 3] = [3, 2_000, 300_000];

fn waits() -> Vec<Waiting> {
    use smddp_core::Collective::*;
    let unrooted =
        [Barrier, AllReduce, AllGather, ReduceScatter, AllToAll].map(|c| Waiting::Collective(c, 0));
    let rooted = [Broadcast, Reduce, Gather, Scatter];
    let rooted = rooted.into_iter().flat_map(|c| [0, 1].map(|root| Waiting::Collective(c, root)));
    unrooted.into_iter().chain(rooted).chain([Waiting::Recv, Waiting::Leaves]).collect()
}

fn call(comm: &Communicator, waits: Waiting, data: &mut [f32]) -> Result<()> {
    match waits {
        Waiting::Collective(collective, root) => run(comm, CallSpec { collective, root, count: 12, ..BASE }),
        Waiting::Recv if comm.rank() == 1 => {
            let (ptr, count) = (data.as_mut_ptr().cast(), data.len());
            // SAFETY: the buffer outlives the work, which is awaited.
            unsafe { comm.recv(ptr, count, DType::F32, Some(0), 8, Options::default()) }?.wait(None)
        }
        Waiting::Recv | Waiting::Leaves => Ok(()),
    }
}

/// Rank 0 sends a message to rank 1 and leaves; the others make their call. Returns the outcome of each rank.
fn outcomes(wire: Wire, size: usize, count: usize, waits: Waiting, late: bool) -> Vec<Result<()>> {
    let gate = Gate::new(size);
    over(wire.links(size), TIMEOUT, |comm| {
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
        let left = comm.shutdown_checked(TIMEOUT);
        drop(sent);
        gate.wait();
        outcome.and(left)
    })
}

/// Longer than a rank waits for the report of another rank.
const LATE: Duration = Duration::from_millis(500);

#[test]
fn late_receiver_of_an_unreceived_message_and_its_sender_raise_mismatch() {
    let mut wrong = Vec::new();
    for wire in Wire::EACH {
        for waits in
            [Waiting::Collective(Collective::Barrier, 0), Waiting::Collective(Collective::AllReduce, 0)]
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
fn a_rank_whose_messages_were_received_leaves_immediately() {
    // Between nodes a short message is not confirmed.
    let cases =
        Wire::EACH.map(|wire| (wire, if matches!(wire, Wire::Shm) { &SIZES[..] } else { &SIZES[2..] }));
    for (wire, sizes) in cases {
        for &count in sizes {
            let (received, left) = (Gate::new(3), Gate::new(3));
            over(wire.links(3), TIMEOUT, |comm| {
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
                    0 => assert_eq!(comm.shutdown_checked(TIMEOUT), Ok(())),
                    1 => {}
                    _ => {
                        let outcome =
                            run(comm, CallSpec { collective: Collective::AllReduce, count: 12, ..BASE });
                        assert!(matches!(outcome, Err(Error::PeerLost { rank: 0, .. })), "{outcome:?}");
                    }
                }
                assert!(begun.elapsed() < PROMPT_LIMIT, "{wire:?}, {count} elements: {:?}", begun.elapsed());
                left.wait();
            });
        }
    }
}
