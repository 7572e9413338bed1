//! Failed operations report the cause, and no stream waits forever.

use std::time::Duration;

use smddp_core::{Blocks, Call, Collective, DType, DeviceStream, Error, Options, RedOp};

use crate::collectives::{clean, world, world_of};
use crate::common::{Gate, TIMEOUT, Wire};
use crate::rank::{Job, PLAIN, Rank, Site, ranks};
use crate::world::{World, capture, faults};

const SUM: (DType, RedOp) = (DType::F32, RedOp::Sum);

/// Returns a call on new buffers of the rank, each of `count` elements with arbitrary contents.
fn call(rank: &Rank, collective: Collective, count: usize) -> (Call<'static>, u64) {
    let at = rank.device.allocate(4 * count * rank.comm.size()).unwrap();
    let flat = |count| Blocks::Flat { ptr: at as *mut u8, count };
    let input = flat(count);
    let output = flat(if collective == Collective::AllGather { count * rank.comm.size() } else { count });
    (Call { collective, dtype: DType::F32, redop: RedOp::Sum, root: 0, input, output }, at)
}

fn on(rank: &Rank) -> Options {
    Options { on: Some(rank.on()), ..Options::default() }
}

/// Asserts that no stream is blocked. Aborted operations may have read uninitialised memory.
fn assert_not_blocked(world: &World, case: &str) {
    let reports = world.end();
    let bad = faults(&reports).iter().position(|fault| fault == "Stuck" || fault == "Misuse");
    assert!(bad.is_none(), "{case}: {}", reports[bad.unwrap()]);
}

#[test]
fn timeout_reports_the_missing_rank_and_releases_the_stream() {
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(2)] {
        let world = world(3);
        // Rank 0 times out after rank 1 has made the call.
        let deadline = Duration::from_secs(3);
        let (called, failed) = (Gate::new(2), Gate::new(3));
        ranks(&world, wire.links(3), TIMEOUT, |rank| {
            let (call, _) = call(rank, Collective::AllReduce, 1000);
            // SAFETY: the buffers are never freed.
            let work = unsafe { rank.comm.start(&call, on(rank)) }.unwrap();
            work.wait_stream(rank.stream).unwrap();
            if rank.comm.rank() == 2 {
                failed.wait();
                return;
            }
            let first = rank.comm.rank() == 0;
            if first {
                called.wait();
            }
            let options = Options { timeout: first.then_some(deadline), ..on(rank) };
            // SAFETY: the buffers are never freed.
            let work = unsafe { rank.comm.start(&call, options) }.unwrap();
            if !first {
                called.wait();
            }
            // The host waits until the group fails; the stream is not blocked.
            let error = work.wait_stream(rank.stream).unwrap_err();
            rank.device.synchronize(rank.stream).unwrap();
            assert_eq!(work.wait(None).err(), Some(error.clone()));
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(*missing, [2], "{error}");
            // SAFETY: as above.
            let again = unsafe { rank.comm.start(&call, on(rank)) };
            assert_eq!(again.err(), Some(error), "the group remains failed");
            failed.wait();
        });
        assert_not_blocked(&world, "a late rank");
    }
}

#[test]
fn death_is_reported_by_survivors_and_releases_their_streams() {
    for at in 1..12 {
        let world = world(at);
        ranks(&world, Wire::Dying(1, at).links(3), Duration::from_secs(5), |rank| {
            for i in 0..20 {
                // The host-side part of the call may fail first.
                let (call, _) = call(rank, Collective::AllReduce, 5000 + i);
                // SAFETY: the buffers are never freed.
                let work = match unsafe { rank.comm.start(&call, on(rank)) } {
                    Ok(work) => work,
                    Err(error) => return Some(error),
                };
                let outcome = work.wait_stream(rank.stream).and_then(|()| {
                    rank.device.synchronize(rank.stream).unwrap();
                    work.wait(None)
                });
                if let Err(error) = outcome {
                    return Some(error);
                }
            }
            None
        })
        .into_iter()
        .enumerate()
        .for_each(|(rank, error)| {
            let error = error.unwrap_or_else(|| panic!("death at {at}: rank {rank} reported no error"));
            if rank != 1 {
                assert!(
                    matches!(&error, Error::PeerLost { rank: 1, .. }),
                    "death at {at}, rank {rank}: {error}"
                );
            }
        });
        assert_not_blocked(&world, "a death");
    }
}

#[test]
fn mismatched_calls_fail_on_all_ranks_with_both_calls() {
    for other in [Collective::AllGather, Collective::Barrier] {
        let world = world(4);
        ranks(&world, Wire::Shm.links(2), TIMEOUT, |rank| {
            Job::new(rank, Collective::AllReduce, SUM, 10, 0, PLAIN).run().unwrap();
            let collective = if rank.comm.rank() == 0 { Collective::AllReduce } else { other };
            let (call, _) = call(rank, collective, 100);
            // SAFETY: the buffers are never freed.
            let work = unsafe { rank.comm.start(&call, on(rank)) }.unwrap();
            let error = work.wait(None).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("all_reduce") && text.contains("on CUDA"), "{text}");
        });
        assert_not_blocked(&world, "a mismatch");
    }
}

#[test]
fn device_call_and_host_call_mismatch() {
    let world = world(5);
    ranks(&world, Wire::Shm.links(2), TIMEOUT, |rank| {
        Job::new(rank, Collective::AllReduce, SUM, 10, 0, PLAIN).run().unwrap();
        let (mut device, _) = call(rank, Collective::AllReduce, 4);
        let mut host = [0f32; 4];
        let options = if rank.comm.rank() == 0 {
            on(rank)
        } else {
            let flat = Blocks::Flat { ptr: host.as_mut_ptr().cast(), count: 4 };
            (device.input, device.output) = (flat, flat);
            Options::default()
        };
        // SAFETY: the device buffers are never freed; the host buffers outlive the call, which is awaited.
        let error = unsafe { rank.comm.start(&device, options) }.unwrap().wait(None).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }) && text.contains("on CUDA"), "{text}");
    });
    assert_not_blocked(&world, "a mismatch of devices");
}

#[test]
fn invalid_device_calls_are_rejected_and_the_group_remains_usable() {
    let world = world(6);
    ranks(&world, Wire::Shm.links(2), TIMEOUT, |rank| {
        // A capturing stream, before the group has exchanged its devices: no communication with the other rank.
        if rank.comm.rank() == 0 {
            capture(rank.stream, true);
            let (call, at) = call(rank, Collective::AllReduce, 10);
            // SAFETY: rejected before any data moves.
            let error = unsafe { rank.comm.start(&call, on(rank)) }.unwrap_err();
            assert!(matches!(&error, Error::Invalid(text) if text.contains("captured")), "{error}");
            capture(rank.stream, false);
            // SAFETY: unused.
            unsafe { rank.device.free(at) };
        }
        Job::new(rank, Collective::AllReduce, SUM, 10, 0, PLAIN).run().unwrap();
        // A message: the CPU would read device memory.
        let at = rank.device.allocate(64).unwrap();
        // SAFETY: rejected before any data moves.
        let sent =
            unsafe { rank.comm.send(at as *const u8, 4, DType::F32, 1 - rank.comm.rank(), 0, on(rank)) };
        let error = sent.unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("host memory")), "{error}");
        // SAFETY: unused.
        unsafe { rank.device.free(at) };
        // A capturing stream after the exchange.
        let captured = rank.device.create_stream().unwrap();
        capture(captured, true);
        let (call, at) = call(rank, Collective::AllReduce, 10);
        let options = Options {
            on: Some(DeviceStream { device: rank.device.clone(), stream: captured }),
            ..Options::default()
        };
        // SAFETY: rejected before any data moves.
        let error = unsafe { rank.comm.start(&call, options) }.unwrap_err();
        assert!(
            matches!(&error, Error::Invalid(text) if text.contains("captured into a CUDA graph")),
            "{error}"
        );
        capture(captured, false);
        rank.device.destroy_stream(captured);
        // An undefined reduction.
        let call = Call { redop: RedOp::Bxor, ..call };
        // SAFETY: as above.
        let error = unsafe { rank.comm.start(&call, on(rank)) }.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        // SAFETY: unused.
        unsafe { rank.device.free(at) };
        Job::new(rank, Collective::AllReduce, SUM, 10, 0, Site { in_place: true, ..PLAIN }).run().unwrap();
    });
    clean(&world, "refusals");
}

#[test]
fn unregistered_memory_and_a_full_device_fail_the_group_with_the_reason() {
    let calls = [
        (Collective::AllReduce, "all_reduce"),
        (Collective::AllGather, "all_gather"),
        (Collective::AllToAll, "all_to_all"),
    ];
    for (collective, name) in calls {
        let full = collective == Collective::AllToAll;
        // The limit leaves room for the slab of the path selection and for the buffer.
        let world = world_of(if full { "FAKE_CUDA_MEMORY=11000000" } else { "" });
        ranks(&world, Wire::Shm.links(2), TIMEOUT, |rank| {
            // all_to_all in place copies its input first, and this copy does not fit.
            let count = 700_000;
            let memory = vec![0f32; 2 * count];
            let at = if full { call(rank, collective, count).1 } else { memory.as_ptr() as u64 };
            let flat = |count| Blocks::Flat { ptr: at as *mut u8, count };
            let output = flat(if collective == Collective::AllGather { 2 * count } else { count });
            let (dtype, redop, input) = (DType::F32, RedOp::Sum, flat(count));
            let call = Call { collective, dtype, redop, root: 0, input, output };
            // SAFETY: never freed, or alive until the end of this closure.
            let outcome = unsafe { rank.comm.start(&call, on(rank)) }.and_then(|work| work.wait(None));
            let text = outcome.unwrap_err().to_string();
            let wanted = if full { "MEMORY" } else { "CUDA" };
            assert!(text.contains(name) && text.contains(wanted), "{text}");
        });
        // The driver reports the invalid memory too.
        let _ = world.end();
    }
}

#[test]
fn close_lets_enqueued_device_work_complete() {
    for seed in 0..20 {
        let world = world(seed);
        ranks(&world, Wire::Shm.links(3), TIMEOUT, |rank| {
            let job = Job::new(rank, Collective::AllReduce, SUM, 20_000, 0, PLAIN);
            let work = job.start().unwrap();
            work.wait_stream(rank.stream).unwrap();
            while !work.is_enqueued() {
                std::thread::yield_now();
            }
            rank.comm.close();
            job.check();
        });
        clean(&world, "closed at once");
    }
}

/// The ranks export a sample of each device's memory to find out which ranks can map it.
#[test]
fn device_memory_is_freed_when_the_first_call_fails() {
    let world = world(7);
    ranks(&world, Wire::Shm.links(3), TIMEOUT, |rank| {
        if rank.comm.rank() == 1 {
            rank.comm.close();
        } else {
            rank.comm.prepare_device(&rank.on()).unwrap_err();
        }
    });
    clean(&world, "a rank that left before the first call on a device");
}
