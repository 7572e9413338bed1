//! Correct results and complete ordering for every wire, size, type and kind of memory.

use smddp_core::{Collective, DType, RedOp};

use crate::common::{ALL, TIMEOUT, Wire};
use crate::rank::{Job, Memory, PLAIN, Rank, Site, ranks, ranks_on};
use crate::world::{World, assert_clean, open_device};

pub(crate) fn world(seed: u64) -> World {
    world_of(&format!("FAKE_CUDA_SEED={}", seed + 1))
}

pub(crate) fn world_of(settings: &str) -> World {
    World::new(&format!("{settings} FAKE_CUDA_GRANULARITY=4096"))
}

/// Ends the world. Asserts that it has found no errors and no leaks.
pub(crate) fn clean(world: &World, what: &str) {
    assert_clean(world, what);
    assert_eq!(world.leaks(), Vec::<String>::new(), "{what}");
}

#[test]
fn collectives_are_correct_on_devices_over_every_wire() {
    for size in [1, 2, 3, 5] {
        for wire in [Wire::EACH[0], Wire::Shm, Wire::Nodes(1), Wire::Nodes(2), Wire::Nodes(3)] {
            let world = world(size as u64);
            ranks(&world, wire.links(size), TIMEOUT, |rank| {
                for (i, collective) in ALL.into_iter().enumerate() {
                    for (count, in_place) in [(1, false), (1000, true), (40_001, i % 2 == 0)] {
                        let root = (i + count) % size;
                        let site = Site { in_place, ..PLAIN };
                        let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), count, root, site);
                        job.run().unwrap_or_else(|e| panic!("{wire:?} {size} {collective:?} {count}: {e}"));
                    }
                }
            });
            clean(&world, &format!("{wire:?}, {size} ranks"));
        }
    }
}

/// Forms that no plan supports in place: the stream copies the input first.
#[test]
fn overlapping_device_buffers_give_the_results_of_separate_buffers() {
    for wire in [Wire::Shm, Wire::Nodes(2)] {
        let world = world(3);
        ranks(&world, wire.links(3), TIMEOUT, |rank| {
            for (i, collective) in ALL.into_iter().enumerate() {
                for (count, at) in [(8, (0, 0)), (8, (0, 4)), (40_001, (20_000, 0)), (40_001, (40_001, 0))] {
                    let job = Job::overlapping(rank, collective, count, i % 3, at);
                    job.run().unwrap_or_else(|e| panic!("{wire:?} {collective:?} {count} {at:?}: {e}"));
                }
            }
        });
        clean(&world, &format!("{wire:?}"));
    }
}

#[test]
fn device_reductions_are_bit_identical_to_host_reductions() {
    let world = world(1);
    ranks(&world, Wire::Shm.links(3), TIMEOUT, |rank| {
        for dtype in DType::ALL {
            for code in 0..9 {
                let redop = RedOp::from_code(code, 0.3).unwrap();
                let reduces = matches!(dtype as u8, 0..=14);
                let bits = matches!(redop, RedOp::Band | RedOp::Bor | RedOp::Bxor);
                let whole = matches!(dtype as u8, 4..=12);
                let complex = matches!(dtype, DType::C64 | DType::C128);
                let ordered = matches!(redop, RedOp::Min | RedOp::Max);
                let defined = reduces
                    && (!bits || whole)
                    && !(complex && ordered)
                    && !(dtype == DType::Bool && matches!(redop, RedOp::PremulSum(_)));
                let collectives: &[Collective] = if defined {
                    &[Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce]
                } else if code == 0 {
                    &[Collective::AllGather, Collective::AllToAll, Collective::Broadcast]
                } else {
                    &[]
                };
                for &collective in collectives {
                    for (count, in_place) in [(37, true), (30_000, false)] {
                        let site = Site { in_place, ..PLAIN };
                        Job::new(rank, collective, (dtype, redop), count, 1, site).run().unwrap();
                    }
                }
            }
        }
    });
    clean(&world, "types");
}

#[test]
fn collectives_are_correct_for_every_kind_of_memory() {
    for memory in [Memory::Mapped { chunk: 4096 }, Memory::Mapped { chunk: 61_440 }, Memory::Private] {
        for wire in [Wire::Shm, Wire::Nodes(2)] {
            let world = world(2);
            ranks(&world, wire.links(4), TIMEOUT, |rank| {
                for collective in ALL {
                    for (count, in_place) in [(1, false), (40_000, false), (40_000, true)] {
                        let site = Site { memory, in_place };
                        let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), count, 1, site);
                        job.run().unwrap_or_else(|e| panic!("{memory:?} {collective:?}: {e}"));
                    }
                }
            });
            clean(&world, &format!("{memory:?}"));
        }
    }
}

#[test]
fn devices_without_peer_access_use_pinned_memory() {
    for unreachable in [(1, 2), (2, 0)] {
        let (one, other) = unreachable;
        let world =
            world_of(&format!("FAKE_CUDA_DEVICES=3 FAKE_CUDA_SEED=1 FAKE_CUDA_NO_PEER={one}-{other}"));
        ranks_on(
            &world,
            Wire::Shm.links(3),
            TIMEOUT,
            |rank| rank as i32,
            |rank| {
                for collective in ALL {
                    for (count, in_place) in [(1, true), (300_000, false)] {
                        let site = Site { in_place, ..PLAIN };
                        Job::new(rank, collective, (DType::F32, RedOp::Sum), count, 2, site).run().unwrap();
                    }
                }
                let (_, path) = rank.comm.on_device(rank.comm.rank() as i32).unwrap();
                assert!(path.contains("through pinned host memory"), "{path}");
                assert!(
                    path.contains(&format!("rank {one}: ")) && path.contains(&format!("of rank {other}")),
                    "{path}"
                );
            },
        );
        clean(&world, "through pinned memory");
    }
}

#[test]
fn calls_overlap_and_mix_with_host_memory_calls() {
    for seed in 0..10 {
        let world = world(seed);
        let wire = if seed % 2 == 0 { Wire::Shm } else { Wire::Nodes(2) };
        ranks(&world, wire.links(4), TIMEOUT, |rank| {
            let sum = (DType::F32, RedOp::Sum);
            // The creation of a job runs the group's collective on host memory while earlier calls are active.
            let jobs: Vec<_> = (0..6)
                .map(|i| {
                    let job = Job::new(rank, ALL[(i + seed as usize) % 8], sum, 3000 * i + 1, i % 4, PLAIN);
                    let work = job.start().unwrap();
                    (job, work)
                })
                .collect();
            for (job, work) in jobs.iter().rev() {
                job.finish(work).unwrap();
            }
            for (job, work) in &jobs {
                job.check();
                work.wait(None).unwrap();
                assert!(work.is_done());
            }
        });
        clean(&world, "overlapping calls");
    }
}

#[test]
fn streams_wait_for_late_ranks() {
    for seed in 0..4 {
        let world = world(seed);
        let wire = if seed % 2 == 0 { Wire::Shm } else { Wire::Nodes(2) };
        ranks(&world, wire.links(3), TIMEOUT, |rank| {
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), 5000, 0, PLAIN);
                for iteration in 0..60 {
                    // Delays one rank's host a little, a different rank in each iteration.
                    if (iteration + seed as usize) % 3 == rank.comm.rank() {
                        (0..2000).for_each(|_| std::hint::spin_loop());
                        std::thread::yield_now();
                    }
                    let work = job.start().unwrap();
                    // The stream overwrites the input after the call completes, and then restores it.
                    job.finish(&work).unwrap();
                    job.refill();
                }
                let work = job.start().unwrap();
                work.wait_stream(rank.stream).unwrap();
                job.check();
            }
        });
        clean(&world, "late ranks");
    }
}

#[test]
fn no_stream_waits_for_a_word_while_memory_is_mapped() {
    let world = world(8);
    ranks(&world, Wire::Shm.links(3), TIMEOUT, |rank| {
        // Separate buffers for each call: all of them must be mapped.
        for iteration in 0..30 {
            let collective = ALL[iteration % 8];
            Job::new(rank, collective, (DType::F32, RedOp::Sum), 5000, 0, PLAIN).run().unwrap();
        }
    });
    let stalls = world.stalls();
    assert!(stalls.is_empty(), "{} calls that a driver may block forever: {}", stalls.len(), stalls[0]);
    clean(&world, "new memory");
}

#[test]
fn one_group_uses_several_devices() {
    let world = world_of("FAKE_CUDA_DEVICES=2 FAKE_CUDA_SEED=1");
    ranks_on(
        &world,
        Wire::Shm.links(3),
        TIMEOUT,
        |rank| (rank % 2) as i32,
        |rank| {
            let sum = (DType::F32, RedOp::Sum);
            Job::new(rank, Collective::AllReduce, sum, 3000, 0, PLAIN).run().unwrap();
            // All ranks switch to their other device and back.
            let device = open_device(1 - (rank.comm.rank() % 2) as i32);
            let stream = device.create_stream().unwrap();
            let other = Rank { device, comm: rank.comm.clone(), stream };
            for _ in 0..3 {
                Job::new(&other, Collective::AllGather, sum, 500, 0, PLAIN).run().unwrap();
                Job::new(rank, Collective::ReduceScatter, sum, 500, 0, PLAIN).run().unwrap();
            }
            other.device.synchronize(stream).unwrap();
            other.device.destroy_stream(stream);
        },
    );
    clean(&world, "two devices");
}
