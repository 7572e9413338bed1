//! Many consecutive groups, and the resources of a group of one rank.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Pending};

use crate::common::TIMEOUT;
use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};

const GROUPS: usize = 1000;

/// Resources of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Resident pages.
    pub(crate) resident: usize,
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    /// Mappings of the library's shared memory.
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

fn work(comm: &Communicator, iteration: usize) {
    let count = [10, 4000, 60_000][iteration % 3];
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllReduce, count, 0, iteration);
    job.run(comm).unwrap();
    job.check();
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllGather, count, 0, iteration);
    let work = job.start(comm).unwrap();
    work.wait(None).unwrap();
    job.check();
}

pub(crate) fn many(me: &RankProcess) {
    let all: Vec<usize> = (0..me.size).collect();
    let keep_one = std::env::var("SMDDP_TEST_KEEP").is_ok();
    let kept = keep_one.then(|| group(me, "kept", &all, TIMEOUT));
    let mut early = None;
    let groups = std::env::var("SMDDP_TEST_GROUPS").map_or(GROUPS, |text| text.parse().unwrap());
    for iteration in 0..groups {
        let comm = group(me, &format!("g{iteration}"), &all, TIMEOUT);
        work(&comm, iteration);
        if iteration % 2 == 0 {
            comm.close();
        }
        drop(comm);
        if iteration == groups / 5 {
            early = Some(Footprint::now());
        }
    }
    let early = early.unwrap();
    let is_released = |late: &Footprint| {
        late.resident < early.resident + 1024
            && late.descriptors <= early.descriptors + 3
            && late.threads <= early.threads + 1
            && late.mappings <= early.mappings.max(if keep_one { 2 } else { 0 })
    };
    // The progress thread releases a group shortly after its last call.
    let deadline = Instant::now() + TIMEOUT;
    let mut late = Footprint::now();
    while !is_released(&late) && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(1));
        late = Footprint::now();
    }
    me.report(&format!("early {early:?}, late {late:?}"));
    assert!(is_released(&late), "{early:?} {late:?}");
    drop(kept);
    me.report("done");
}

#[test]
fn thousand_groups_leak_no_resources() {
    for keep in [true, false] {
        let environment: &[(&str, &str)] = if keep { &[("SMDDP_TEST_KEEP", "1")] } else { &[] };
        let mut ranks = start("groups", 2, environment, 4 * TIMEOUT);
        for rank in 0..2 {
            println!("rank {rank}, other group kept: {keep}: {}", ranks.wait_for(rank, "early").text);
            ranks.wait_for(rank, "done");
        }
        ranks.finish(0..2);
    }
}

pub(crate) fn alone(me: &RankProcess) {
    // Excludes the cost of reading the settings.
    let make = || {
        let pending = Pending::new("alone", 0, 1, TIMEOUT).unwrap();
        let info = pending.rank_info();
        pending.connect(&[info]).unwrap()
    };
    let before = Footprint::now();
    let comm = make();
    for iteration in 0..10 {
        for collective in crate::common::ALL {
            let mut job = Job::new(0, 1, collective, 3000, 0, iteration);
            if iteration % 2 == 0 {
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
    me.report("done");
}

#[test]
fn group_of_one_rank_has_no_shared_memory_thread_or_descriptor() {
    let mut ranks = start("alone", 1, &[], TIMEOUT);
    ranks.wait_for(0, "done");
    ranks.finish([0]);
}
