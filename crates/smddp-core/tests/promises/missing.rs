//! Reports of a missing rank in large groups, where most ranks do not communicate with it.

use std::time::Duration;

use fake_libfabric::{SimulatedFabric, knob};
use smddp_core::{Collective, Communicator, Error};
use smddp_group::joint::Joined;

use crate::common::job::Job;
use crate::common::{Gate, TIMEOUT, Wire, efa_links, fabric_links, over};

/// More ranks than are queried at once. Each watches all others, which takes two descriptors of this process per
/// pair. Many systems allow a process 20,000.
const MANY: usize = 80;
/// More ranks than can reply at once, too.
const MOST: usize = 300;
/// Timeouts much longer than the call: for an idle machine, a busy one, and one with a hundred other tasks.
const DEADLINES: [Duration; 3] = [Duration::from_secs(4), Duration::from_secs(16), Duration::from_secs(64)];

/// Runs ranks as threads, each a separate node, of which `late` makes no call. Returns an error report that does not
/// name exactly this rank, if there is one.
fn wrong_report(links: Vec<Joined>, late: usize, deadline: Duration) -> Option<String> {
    let (size, long) = (links.len(), 2 * deadline + 4 * TIMEOUT);
    let (ready, failed) = (Gate::new(size), Gate::new(size));
    let wrong = over(links, long, |comm: &Communicator| {
        ready.wait_timeout(long);
        let mut wrong = None;
        if comm.rank() != late {
            comm.set_timeout(deadline);
            let error = Job::new(comm.rank(), size, Collective::AllReduce, 10, 0, 0).run(comm).unwrap_err();
            let text = error.to_string();
            let named = matches!(&error, Error::Timeout { missing, .. } if *missing == [late]);
            let right = named && text.contains(&format!("missing: rank {late} ("));
            wrong = (!right).then(|| format!("rank {}: {text}", comm.rank()));
        }
        failed.wait_timeout(long);
        wrong
    });
    wrong.into_iter().flatten().next()
}

/// Retries with longer timeouts, because an overloaded machine is not a failure of the group.
fn assert_only_the_late_rank_is_reported(links: impl Fn() -> Option<Vec<Joined>>, late: usize) {
    let mut wrong = None;
    for deadline in DEADLINES {
        let Some(links) = links() else { return };
        wrong = wrong_report(links, late, deadline);
        match &wrong {
            None => return,
            Some(text) => println!("with {deadline:?}: {text}"),
        }
    }
    panic!("{wrong:?}");
}

/// Creates the links of a group of that many nodes of one rank; `None` if this machine lacks the transport.
type Links = fn(usize) -> Option<Vec<Joined>>;

const WIRES: [(&str, Links); 3] = [
    ("tcp", |size| Some(Wire::Nodes(1).links(size))),
    // The number of receive buffers of a real device.
    ("efa", |size| {
        Some(efa_links(size, 1, &SimulatedFabric::with_small_limits(0, &[(knob::RECEIVES, 8192)])))
    }),
    ("fabric", fabric_links),
];

#[test]
fn only_the_late_rank_of_many_is_reported() {
    for (name, links) in WIRES {
        println!("{name}");
        assert_only_the_late_rank_is_reported(|| links(MANY), 5);
    }
}

#[test]
#[ignore = "900 groups of 300 ranks, each of which waits for its deadline: hours; run with --ignored and 100,000 descriptors"]
fn only_the_late_rank_of_three_hundred_is_reported() {
    for late in 0..MOST {
        for (name, links) in WIRES {
            println!("{name}, {late}");
            assert_only_the_late_rank_is_reported(|| links(MOST), late);
        }
    }
}

/// One rank detects the timeout. The others get it from a neighbour, which got it from another neighbour.
#[test]
fn forwarded_cause_is_reported_once_and_completely() {
    let (size, late) = (40, 20);
    // Enough time for all other ranks to make the call on a fully loaded machine.
    let (limit, phrase) = (Duration::from_millis(2500), "waiting 2500ms");
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(4)] {
        let failed = Gate::new(size);
        let texts = over(wire.links(size), TIMEOUT / 3, |comm| {
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
        let reports: Vec<String> = texts.into_iter().flatten().filter(|text| text.contains(phrase)).collect();
        // A rank may be connected to the others only through the late one: it waits for its own timeout.
        assert!(reports.len() > size / 2, "over {wire:?} only {} ranks got the report", reports.len());
        assert_eq!(reports[0].matches(" reports").count(), 0, "{}", reports[0]);
        for text in &reports[1..] {
            assert_eq!((text.matches(" reports").count(), text.matches("waiting").count()), (1, 1), "{text}");
            assert!(
                text.contains(": rank 0 (") && text.contains(&format!("missing: rank {late} (")),
                "{text}"
            );
        }
    }
}
