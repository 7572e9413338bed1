//! What goes wrong ends in an error that says what, and no stream waits for ever.

use std::time::Duration;

use smddp_core::{Blocks, Call, Collective, DType, Error, On, Options, RedOp};

use crate::collectives::{clean, world, world_of};
use crate::common::{Gate, PATIENCE, Wire};
use crate::rank::{Job, PLAIN, Rank, Site, ranks};
use crate::world::{World, capture, faults};

const SUM: (DType, RedOp) = (DType::F32, RedOp::Sum);

/// A call on buffers of the rank's own, all of `count` elements, with no regard to what they hold.
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

/// Streams go on, nothing is stuck; what was cut short may have read what nobody wrote.
fn nothing_stuck(world: &World, what: &str) {
    let reports = world.end();
    let bad = faults(&reports).iter().position(|fault| fault == "Stuck" || fault == "Misuse");
    assert!(bad.is_none(), "{what}: {}", reports[bad.unwrap()]);
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_callers_stream_goes_on() {
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(2)] {
        let world = world(3);
        // Rank 0 gives up, when rank 1 has made the call.
        let deadline = Duration::from_secs(3);
        let (called, failed) = (Gate::new(2), Gate::new(3));
        ranks(&world, wire.links(3), PATIENCE, |rank| {
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
            // The host waits until the group fails, and the stream for nothing.
            let error = work.wait_stream(rank.stream).unwrap_err();
            rank.device.synchronize(rank.stream).unwrap();
            assert_eq!(work.wait(None).err(), Some(error.clone()));
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(*missing, [2], "{error}");
            // SAFETY: as above.
            let again = unsafe { rank.comm.start(&call, on(rank)) };
            assert_eq!(again.err(), Some(error), "the group stays failed");
            failed.wait();
        });
        nothing_stuck(&world, "a late rank");
    }
}

#[test]
fn a_rank_that_dies_is_named_by_the_others_and_their_streams_go_on() {
    for at in 1..12 {
        let world = world(at);
        ranks(&world, Wire::Dying(1, at).links(3), Duration::from_secs(5), |rank| {
            for i in 0..20 {
                // What the processor makes of it may fail first.
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
            let error = error.unwrap_or_else(|| panic!("death at {at}: rank {rank} noticed nothing"));
            if rank != 1 {
                assert!(
                    matches!(&error, Error::PeerLost { rank: 1, .. }),
                    "death at {at}, rank {rank}: {error}"
                );
            }
        });
        nothing_stuck(&world, "a death");
    }
}

#[test]
fn calls_that_differ_fail_on_all_sides_naming_both() {
    for other in [Collective::AllGather, Collective::Barrier] {
        let world = world(4);
        ranks(&world, Wire::Shm.links(2), PATIENCE, |rank| {
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
        nothing_stuck(&world, "a mismatch");
    }
}

#[test]
fn a_call_on_a_device_does_not_match_one_on_host_memory() {
    let world = world(5);
    ranks(&world, Wire::Shm.links(2), PATIENCE, |rank| {
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
        // SAFETY: the device's buffers are never freed, the host's outlive the call, which is waited for.
        let error = unsafe { rank.comm.start(&device, options) }.unwrap().wait(None).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Mismatch { .. }) && text.contains("on CUDA"), "{text}");
    });
    nothing_stuck(&world, "a mismatch of devices");
}

#[test]
fn what_cannot_be_done_is_refused_and_the_group_stays_usable() {
    let world = world(6);
    ranks(&world, Wire::Shm.links(2), PATIENCE, |rank| {
        // A stream under capture, before the group has met its devices: the other rank is not asked.
        if rank.comm.rank() == 0 {
            capture(rank.stream, true);
            let (call, at) = call(rank, Collective::AllReduce, 10);
            // SAFETY: refused before anything moves.
            let error = unsafe { rank.comm.start(&call, on(rank)) }.unwrap_err();
            assert!(matches!(&error, Error::Invalid(text) if text.contains("captured")), "{error}");
            capture(rank.stream, false);
            // SAFETY: nobody uses it.
            unsafe { rank.device.free(at) };
        }
        Job::new(rank, Collective::AllReduce, SUM, 10, 0, PLAIN).run().unwrap();
        // A message: the processor would read the device's memory.
        let at = rank.device.allocate(64).unwrap();
        // SAFETY: refused before anything moves.
        let sent =
            unsafe { rank.comm.send(at as *const u8, 4, DType::F32, 1 - rank.comm.rank(), 0, on(rank)) };
        let error = sent.unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains("host memory")), "{error}");
        // SAFETY: nobody uses it.
        unsafe { rank.device.free(at) };
        // A stream under capture.
        let captured = rank.device.create_stream().unwrap();
        capture(captured, true);
        let (call, at) = call(rank, Collective::AllReduce, 10);
        let options =
            Options { on: Some(On { device: rank.device.clone(), stream: captured }), ..Options::default() };
        // SAFETY: refused before anything moves.
        let error = unsafe { rank.comm.start(&call, options) }.unwrap_err();
        assert!(
            matches!(&error, Error::Invalid(text) if text.contains("captured into a CUDA graph")),
            "{error}"
        );
        capture(captured, false);
        rank.device.destroy_stream(captured);
        // A reduction that is not defined.
        let call = Call { redop: RedOp::Bxor, ..call };
        // SAFETY: as above.
        let error = unsafe { rank.comm.start(&call, on(rank)) }.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        // SAFETY: nobody uses it.
        unsafe { rank.device.free(at) };
        Job::new(rank, Collective::AllReduce, SUM, 10, 0, Site { in_place: true, ..PLAIN }).run().unwrap();
    });
    clean(&world, "refusals");
}

#[test]
fn memory_that_is_no_devices_and_a_device_without_memory_fail_the_group_with_the_reason() {
    let calls = [
        (Collective::AllReduce, "all_reduce"),
        (Collective::AllGather, "all_gather"),
        (Collective::AllToAll, "all_to_all"),
    ];
    for (collective, name) in calls {
        let full = collective == Collective::AllToAll;
        // With a slab that was allocated to find the way, and the buffer.
        let world = world_of(if full { "FAKE_CUDA_MEMORY=11000000" } else { "" });
        ranks(&world, Wire::Shm.links(2), PATIENCE, |rank| {
            // In place, all_to_all works on a copy of its input: there is no room for one of this size.
            let count = 700_000;
            let memory = vec![0f32; 2 * count];
            let at = if full { call(rank, collective, count).1 } else { memory.as_ptr() as u64 };
            let flat = |count| Blocks::Flat { ptr: at as *mut u8, count };
            let output = flat(if collective == Collective::AllGather { 2 * count } else { count });
            let (dtype, redop, input) = (DType::F32, RedOp::Sum, flat(count));
            let call = Call { collective, dtype, redop, root: 0, input, output };
            // SAFETY: never freed, or alive until this ends.
            let outcome = unsafe { rank.comm.start(&call, on(rank)) }.and_then(|work| work.wait(None));
            let text = outcome.unwrap_err().to_string();
            let wanted = if full { "MEMORY" } else { "CUDA" };
            assert!(text.contains(name) && text.contains(wanted), "{text}");
        });
        // What was not the device's is reported by the driver too.
        let _ = world.end();
    }
}

#[test]
fn a_group_closed_at_once_lets_what_is_on_the_device_end() {
    for seed in 0..20 {
        let world = world(seed);
        ranks(&world, Wire::Shm.links(3), PATIENCE, |rank| {
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

/// A sample of each device's memory is lent while the ranks find out who can map it.
#[test]
fn device_memory_is_freed_where_the_group_fails_at_its_first_call() {
    let world = world(7);
    ranks(&world, Wire::Shm.links(3), PATIENCE, |rank| {
        if rank.comm.rank() == 1 {
            rank.comm.close();
        } else {
            rank.comm.prepare_device(&rank.on()).unwrap_err();
        }
    });
    clean(&world, "a rank that left before the first call on a device");
}
