//! Who is missing, where most ranks have nothing to do with whoever it is.

use std::time::Duration;

use smddp_core::{Collective, Communicator, Error};
use smddp_transport::fabric::srd::SrdScript;
use smddp_transport::joint::Joined;

use crate::common::job::Job;
use crate::common::{Gate, PATIENCE, Wire, fabric_links, over, simulated_links};

/// More than are asked at once. Each watches all others, which takes two descriptors of this one process for each: a
/// process may have 20,000 in many places.
const MANY: usize = 80;
/// More than are heard at once, too.
const MOST: usize = 300;
/// Far from what the call takes when everybody comes: on an idle machine, on a busy one, on one that does a hundred other things.
const DEADLINES: [Duration; 3] = [Duration::from_secs(4), Duration::from_secs(16), Duration::from_secs(64)];

/// One of a group of threads, each a node of its own, does not make a call that all others make: what is wrong with what they
/// say at that deadline.
fn what_the_others_say(links: Vec<Joined>, late: usize, deadline: Duration) -> Option<String> {
    let (size, long) = (links.len(), 2 * deadline + 4 * PATIENCE);
    let (ready, failed) = (Gate::new(size), Gate::new(size));
    let wrong = over(links, long, |comm: &Communicator| {
        ready.wait_for(long);
        let mut wrong = None;
        if comm.rank() != late {
            comm.set_timeout(deadline);
            let error = Job::new(comm.rank(), size, Collective::AllReduce, 10, 0, 0).run(comm).unwrap_err();
            let text = error.to_string();
            let named = matches!(&error, Error::Timeout { missing, .. } if *missing == [late]);
            let right = named && text.contains(&format!("missing: rank {late} ("));
            wrong = (!right).then(|| format!("rank {}: {text}", comm.rank()));
        }
        failed.wait_for(long);
        wrong
    });
    wrong.into_iter().flatten().next()
}

/// A machine that has no time for anybody is no failure of the group: then it gets more.
fn exactly_the_late_one_is_named(links: impl Fn() -> Option<Vec<Joined>>, late: usize) {
    let mut wrong = None;
    for deadline in DEADLINES {
        let Some(links) = links() else { return };
        wrong = what_the_others_say(links, late, deadline);
        match &wrong {
            None => return,
            Some(text) => println!("with {deadline:?}: {text}"),
        }
    }
    panic!("{wrong:?}");
}

/// The links of a group of that many nodes of one rank, where this machine has such a wire.
type Links = fn(usize) -> Option<Vec<Joined>>;

const WIRES: [(&str, Links); 3] = [
    ("tcp", |size| Some(Wire::Nodes(1).links(size))),
    ("srd", |size| {
        // As many receive buffers as a device has.
        let script = SrdScript { receives: 8192, completions: 16_384, ..SrdScript::default() };
        Some(simulated_links(size, 1, script).1)
    }),
    ("fabric", fabric_links),
];

#[test]
fn of_many_ranks_the_one_that_is_late_is_named_and_no_other() {
    for (name, links) in WIRES {
        println!("{name}");
        exactly_the_late_one_is_named(|| links(MANY), 5);
    }
}

#[test]
#[ignore = "900 groups of 300 ranks, each of which waits for its deadline: hours; run with --ignored and 100,000 descriptors"]
fn of_three_hundred_ranks_any_one_that_is_late_is_named_and_no_other() {
    for late in 0..MOST {
        for (name, links) in WIRES {
            println!("{name}, {late}");
            exactly_the_late_one_is_named(|| links(MOST), late);
        }
    }
}

/// One rank finds out; the others hear of it from a neighbour that has heard of it from a neighbour.
#[test]
fn a_cause_that_goes_from_rank_to_rank_is_told_once_and_whole() {
    let (size, late) = (40, 20);
    // Time enough for all others to make the call, on a machine that has other work for each core.
    let (limit, said) = (Duration::from_millis(2500), "waiting 2500ms");
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(4)] {
        let failed = Gate::new(size);
        let texts = over(wire.links(size), PATIENCE / 3, |comm| {
            if comm.rank() == late {
                failed.wait();
                return None;
            }
            if comm.rank() == 0 {
                comm.set_timeout(limit);
            }
            let error = Job::new(comm.rank(), size, Collective::AllReduce, 10, 0, 0).run(comm).unwrap_err();
            let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
            assert_eq!(*missing, [late], "rank {}: {error}", comm.rank());
            failed.wait();
            Some(error.to_string())
        });
        let told: Vec<String> = texts.into_iter().flatten().filter(|text| text.contains(said)).collect();
        // A rank may have only the late one between itself and the others: it waits for its own deadline.
        assert!(told.len() > size / 2, "over {wire:?} {} heard of it", told.len());
        assert_eq!(told[0].matches(" reports").count(), 0, "{}", told[0]);
        for text in &told[1..] {
            assert_eq!((text.matches(" reports").count(), text.matches("waiting").count()), (1, 1), "{text}");
            assert!(
                text.contains(": rank 0 (") && text.contains(&format!("missing: rank {late} (")),
                "{text}"
            );
        }
    }
}
