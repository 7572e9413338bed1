//! Many groups, one after the other, and what a group of one rank costs.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Pending};

use crate::common::PATIENCE;
use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{Me, start};

const GROUPS: usize = 1000;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Pages in memory.
    pub(crate) resident: usize,
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    /// Mappings of shared memory of ours.
    pub(crate) mappings: usize,
}

impl Footprint {
    pub(crate) fn now() -> Self {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            resident: statm.split(' ').nth(1).unwrap().parse().unwrap(),
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            mappings: maps.lines().filter(|line| line.contains("memfd:smddp")).count(),
        }
    }
}

fn work(comm: &Communicator, turn: usize) {
    let count = [10, 4000, 60_000][turn % 3];
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllReduce, count, 0, turn);
    job.run(comm).unwrap();
    job.check();
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllGather, count, 0, turn);
    let work = job.start(comm).unwrap();
    work.wait(None).unwrap();
    job.check();
}

pub(crate) fn many(me: &Me) {
    let all: Vec<usize> = (0..me.size).collect();
    let keep_one = std::env::var("SMDDP_TEST_KEEP").is_ok();
    let kept = keep_one.then(|| group(me, "kept", &all, PATIENCE));
    let mut early = None;
    let groups = std::env::var("SMDDP_TEST_GROUPS").map_or(GROUPS, |text| text.parse().unwrap());
    for turn in 0..groups {
        let comm = group(me, &format!("g{turn}"), &all, PATIENCE);
        work(&comm, turn);
        if turn % 2 == 0 {
            comm.close();
        }
        drop(comm);
        if turn == groups / 5 {
            early = Some(Footprint::now());
        }
    }
    let early = early.unwrap();
    let back = |late: &Footprint| {
        late.resident < early.resident + 1024
            && late.descriptors <= early.descriptors + 3
            && late.threads <= early.threads + 1
            && late.mappings <= early.mappings.max(if keep_one { 2 } else { 0 })
    };
    // The progress thread lets go of a group a moment after its last call.
    let until = Instant::now() + PATIENCE;
    let mut late = Footprint::now();
    while !back(&late) && Instant::now() < until {
        std::thread::park_timeout(Duration::from_millis(1));
        late = Footprint::now();
    }
    me.say(&format!("early {early:?}, late {late:?}"));
    assert!(back(&late), "{early:?} {late:?}");
    drop(kept);
    me.say("done");
}

#[test]
fn a_thousand_groups_made_and_destroyed_leave_nothing_behind() {
    for keep in [true, false] {
        let environment: &[(&str, &str)] = if keep { &[("SMDDP_TEST_KEEP", "1")] } else { &[] };
        let mut ranks = start("groups", 2, environment, 4 * PATIENCE);
        for rank in 0..2 {
            println!("rank {rank}, another group alive {keep}: {}", ranks.hear(rank, "early").text);
            ranks.hear(rank, "done");
        }
        ranks.finish(0..2);
    }
}

pub(crate) fn alone(me: &Me) {
    // Whatever reading the settings costs is not the group's.
    let make = || {
        let pending = Pending::new("alone", 0, 1, PATIENCE).unwrap();
        let card = pending.card();
        pending.connect(&[card]).unwrap()
    };
    let before = Footprint::now();
    let comm = make();
    for turn in 0..10 {
        for collective in crate::common::ALL {
            let mut job = Job::new(0, 1, collective, 3000, 0, turn);
            if turn % 2 == 0 {
                job.run(&comm).unwrap();
            } else {
                job.start(&comm).unwrap().wait(None).unwrap();
            }
            job.check();
        }
    }
    let after = Footprint::now();
    assert_eq!(after.mappings, 0);
    assert_eq!((after.threads, after.descriptors), (before.threads, before.descriptors));
    assert!(smddp_core::Endpoint::existing().is_none());
    comm.close();
    me.say("done");
}

#[test]
fn a_group_of_one_rank_has_no_shared_memory_no_thread_and_no_descriptor() {
    let mut ranks = start("alone", 1, &[], PATIENCE);
    ranks.hear(0, "done");
    ranks.finish([0]);
}
