//! Right results over every wire, size, type and kind of memory, and nothing unordered on the way.

use smddp_core::{Collective, DType, RedOp};

use crate::common::{ALL, PATIENCE, Wire};
use crate::rank::{Job, Memory, PLAIN, Rank, Site, ranks, ranks_on};
use crate::world::{World, assert_clean, open_device};

pub(crate) fn world(seed: u64) -> World {
    world_of(&format!("FAKE_CUDA_SEED={}", seed + 1))
}

pub(crate) fn world_of(settings: &str) -> World {
    World::new(&format!("{settings} FAKE_CUDA_GRANULARITY=4096"))
}

/// Ends the world: no mistakes, and nothing left behind.
pub(crate) fn clean(world: &World, what: &str) {
    assert_clean(world, what);
    assert_eq!(world.leaks(), Vec::<String>::new(), "{what}");
}

#[test]
fn every_collective_is_right_on_devices_over_every_wire() {
    for size in [1, 2, 3, 5] {
        for wire in [Wire::EACH[0], Wire::Shm, Wire::Nodes(1), Wire::Nodes(2), Wire::Nodes(3)] {
            let world = world(size as u64);
            ranks(&world, wire.links(size), PATIENCE, |rank| {
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
fn overlapping_input_and_output_on_devices_give_the_results_of_separate_buffers() {
    for wire in [Wire::Shm, Wire::Nodes(2)] {
        let world = world(3);
        ranks(&world, wire.links(3), PATIENCE, |rank| {
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
fn every_type_and_reduction_has_the_bits_of_the_processors_collective() {
    let world = world(1);
    ranks(&world, Wire::Shm.links(3), PATIENCE, |rank| {
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
fn memory_of_any_kind_moves() {
    for memory in [Memory::Mapped { chunk: 4096 }, Memory::Mapped { chunk: 61_440 }, Memory::Private] {
        for wire in [Wire::Shm, Wire::Nodes(2)] {
            let world = world(2);
            ranks(&world, wire.links(4), PATIENCE, |rank| {
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
fn devices_that_do_not_reach_each_other_go_through_pinned_memory_and_say_so() {
    for unreachable in [(1, 2), (2, 0)] {
        let (one, other) = unreachable;
        let world =
            world_of(&format!("FAKE_CUDA_DEVICES=3 FAKE_CUDA_SEED=1 FAKE_CUDA_NO_PEER={one}-{other}"));
        ranks_on(
            &world,
            Wire::Shm.links(3),
            PATIENCE,
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
fn calls_overlap_and_mix_with_calls_on_host_memory() {
    for seed in 0..10 {
        let world = world(seed);
        let wire = if seed % 2 == 0 { Wire::Shm } else { Wire::Nodes(2) };
        ranks(&world, wire.links(4), PATIENCE, |rank| {
            let sum = (DType::F32, RedOp::Sum);
            // Making a job calls the group's own collective on host memory, while those before are under way.
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
fn calls_that_other_ranks_have_not_made_yet_are_waited_for() {
    for seed in 0..4 {
        let world = world(seed);
        let wire = if seed % 2 == 0 { Wire::Shm } else { Wire::Nodes(2) };
        ranks(&world, wire.links(3), PATIENCE, |rank| {
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), 5000, 0, PLAIN);
                for turn in 0..60 {
                    // Each rank is the last one to call now and then, by a little work of its host.
                    if (turn + seed as usize) % 3 == rank.comm.rank() {
                        (0..2000).for_each(|_| std::hint::spin_loop());
                        std::thread::yield_now();
                    }
                    let work = job.start().unwrap();
                    // Its stream overwrites the input as soon as the call is over, and makes it anew.
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
fn no_stream_stands_at_a_word_while_new_memory_is_mapped() {
    let world = world(8);
    ranks(&world, Wire::Shm.links(3), PATIENCE, |rank| {
        // Buffers of its own for each call: all of them have to be mapped.
        for turn in 0..30 {
            let collective = ALL[turn % 8];
            Job::new(rank, collective, (DType::F32, RedOp::Sum), 5000, 0, PLAIN).run().unwrap();
        }
    });
    let stalls = world.stalls();
    assert!(stalls.is_empty(), "{} calls at which a driver may stop for ever: {}", stalls.len(), stalls[0]);
    clean(&world, "new memory");
}

#[test]
fn one_group_serves_several_devices() {
    let world = world_of("FAKE_CUDA_DEVICES=2 FAKE_CUDA_SEED=1");
    ranks_on(
        &world,
        Wire::Shm.links(3),
        PATIENCE,
        |rank| (rank % 2) as i32,
        |rank| {
            let sum = (DType::F32, RedOp::Sum);
            Job::new(rank, Collective::AllReduce, sum, 3000, 0, PLAIN).run().unwrap();
            // All ranks turn to their other device, and back.
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
