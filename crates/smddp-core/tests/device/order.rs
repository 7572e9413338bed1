//! Every wait that the executor enqueues is needed: without it something is unordered, and the driver says what.

use std::time::Duration;

use smddp_core::{Collective, DType, RedOp};

use crate::common::{ALL, Wire};
use crate::rank::{Job, PLAIN, Site, ranks};
use crate::world::World;

/// A wait that is left out may leave others waiting; they end by this deadline.
const DEADLINE: Duration = Duration::from_secs(20);

/// Two calls of a collective in a row over `size` ranks, as a program that is the same each time.
fn program(world: &World, wire: Wire, size: usize, collective: Collective, count: usize, in_place: bool) {
    ranks(world, wire.links(size), DEADLINE, |rank| {
        let site = Site { in_place, ..PLAIN };
        for root in 0..2 {
            let job = Job::new(rank, collective, (DType::F32, RedOp::Sum), count, root, site);
            let work = job.start().unwrap();
            // All of it is enqueued before the caller's stream waits, so that it waits for an event each time.
            work.wait(None).unwrap();
            job.finish(&work).unwrap();
            job.spoil();
        }
    });
}

fn left_out(seed: u64, wait: &str) -> World {
    World::new(&format!("FAKE_CUDA_SEED={} FAKE_CUDA_DROP={wait}", seed + 1))
}

#[test]
fn a_wait_that_is_left_out_is_a_race_that_is_found() {
    let (mut tried, mut missed): (_, Vec<(Collective, String)>) = (0, Vec::new());
    for collective in ALL {
        for (count, in_place) in [(100, true), (40_000, false)] {
            let world = left_out(1, "none");
            program(&world, Wire::Shm, 3, collective, count, in_place);
            assert!(world.end().is_empty(), "{collective:?}");
            // What a stream knew already need not be waited for again.
            let needed: Vec<_> = world.waits().into_iter().filter(|wait| wait.needed).collect();
            drop(world);
            for wait in needed {
                // A host that happens to look at a word late knows more than it was promised: then another seed tells.
                let found = (2..6).any(|seed| {
                    let world = left_out(seed, &wait.id);
                    program(&world, Wire::Shm, 3, collective, count, in_place);
                    !world.end().is_empty()
                });
                tried += 1;
                if !found {
                    missed.push((collective, wait.description));
                }
            }
        }
    }
    // A barrier touches no memory; and in the mesh's reduce the last waits for readers tell a rank what it knows already by
    // way of the results that they made of what they read.
    let excused = |(collective, what): &(Collective, String)| match collective {
        Collective::Barrier => true,
        Collective::Reduce => what.contains("40 has reached"),
        _ => false,
    };
    missed.retain(|missed| !excused(missed));
    assert!(
        missed.is_empty(),
        "{} of {tried} waits that were left out were not missed: {missed:#?}",
        missed.len()
    );
    assert!(tried > 300, "{tried}");
}

#[test]
fn no_seed_shows_a_race() {
    for seed in 0..40 {
        let world = left_out(seed, "none");
        let wire = [Wire::Shm, Wire::EACH[0], Wire::Nodes(2)][seed as usize % 3];
        let collective = ALL[seed as usize % ALL.len()];
        program(&world, wire, 2 + seed as usize % 4, collective, 5000, seed % 2 == 0);
        let reports = world.end();
        assert!(reports.is_empty(), "seed {seed}, {collective:?}: {}", reports[0]);
    }
}
