//! Every wait that the executor enqueues is necessary: the driver reports an error if one is left out.

use std::time::Duration;

use smddp_core::{Collective, DType, RedOp};

use crate::common::{ALL, Wire};
use crate::rank::{Job, PLAIN, Site, ranks};
use crate::world::World;

/// An omitted wait may block other ranks; this timeout ends them.
const DEADLINE: Duration = Duration::from_secs(20);

/// Two consecutive calls of a collective over `size` ranks, with the same operations in each run.
fn program(world: &World, wire: Wire, size: usize, collective: Collective, count: usize, in_place: bool) {
    ranks(world, wire.links(size), DEADLINE, |rank| {
        let site = Site { in_place, ..PLAIN };
        for root in 0..2 {
            let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), count, root, site);
            let work = job.start().unwrap();
            // Everything is enqueued before the caller's stream waits, so it waits for an event in each run.
            work.wait(None).unwrap();
            job.finish(&work).unwrap();
            job.overwrite();
        }
    });
}

fn world_without_wait(seed: u64, wait: &str) -> World {
    World::new(&format!("FAKE_CUDA_SEED={} FAKE_CUDA_DROP={wait}", seed + 1))
}

#[test]
fn omitted_waits_are_detected_as_races() {
    let (mut tried, mut undetected): (_, Vec<(Collective, String)>) = (0, Vec::new());
    for collective in ALL {
        for (count, in_place) in [(100, true), (40_000, false)] {
            let world = world_without_wait(1, "none");
            program(&world, Wire::Shm, 3, collective, count, in_place);
            assert!(world.end().is_empty(), "{collective:?}");
            // Redundant waits may be left out.
            let needed: Vec<_> = world.waits().into_iter().filter(|wait| wait.needed).collect();
            drop(world);
            for wait in needed {
                // A host that polls a word late may get more order than guaranteed. Another seed then detects the
                // omission.
                let found = (2..6).any(|seed| {
                    let world = world_without_wait(seed, &wait.id);
                    program(&world, Wire::Shm, 3, collective, count, in_place);
                    !world.end().is_empty()
                });
                tried += 1;
                if !found {
                    undetected.push((collective, wait.description));
                }
            }
        }
    }
    // A barrier accesses no memory. In the mesh's reduce, the last waits for readers add no order: the results that
    // the readers computed already imply it.
    let is_expected = |(collective, wait): &(Collective, String)| match collective {
        Collective::Barrier => true,
        Collective::Reduce => wait.contains("40 has reached"),
        _ => false,
    };
    undetected.retain(|wait| !is_expected(wait));
    assert!(
        undetected.is_empty(),
        "{} of {tried} omitted waits were not detected: {undetected:#?}",
        undetected.len()
    );
    assert!(tried > 300, "{tried}");
}

#[test]
fn no_seed_has_a_race() {
    for seed in 0..40 {
        let world = world_without_wait(seed, "none");
        let wire = [Wire::Shm, Wire::EACH[0], Wire::Nodes(2)][seed as usize % 3];
        let collective = ALL[seed as usize % ALL.len()];
        program(&world, wire, 2 + seed as usize % 4, collective, 5000, seed % 2 == 0);
        let reports = world.end();
        assert!(reports.is_empty(), "seed {seed}, {collective:?}: {}", reports[0]);
    }
}
