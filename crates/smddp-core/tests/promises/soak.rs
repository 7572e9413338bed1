//! Many collectives from several threads over overlapping groups at the minimum staging budget.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Work};

use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{ALL, Gate, TIMEOUT};
use crate::groups::Footprint;

const THREADS: usize = 4;
/// Members of each group in a world of 4 ranks. In smaller worlds only the existing ranks are members.
const GROUPS: [&[usize]; 8] =
    [&[0, 1, 2, 3], &[0, 1], &[1, 2], &[0, 2], &[0, 1, 2], &[3, 0, 1], &[2, 3, 1], &[2, 1, 0, 3]];
/// Collectives of each group in a round. All of them are started before the first wait.
const EACH: usize = 4;

pub(crate) fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the `number`-th collective of a group, which is equal on all its ranks.
fn job(comm: &Communicator, group: usize, number: u64) -> Job {
    let random = scramble(group as u64 * 1_000_003 + number);
    let collective: Collective = ALL[(random % 9) as usize];
    // Mostly small; some use the staging ring, few wrap around it many times.
    let count = match (random >> 8) % 32 {
        0 => 30_000,
        1..=6 => 5_000,
        _ => (random >> 16) as usize % 1500,
    };
    let root = (random >> 40) as usize % comm.size();
    Job::new(comm.rank(), comm.size(), collective, count, root, (random >> 50) as usize)
}

struct Group {
    comm: Communicator,
    name: usize,
    /// Number of the next collective. Locked during its start, so that numbers and starts have the same order.
    next: Mutex<u64>,
}

/// Distribution of a round's collectives over the threads, in a different random order on each rank.
#[derive(Default)]
struct Distribution {
    left: Mutex<(u64, Vec<usize>)>,
}

impl Distribution {
    fn take(&self, round: u64, me: usize, groups: usize) -> Option<usize> {
        let mut left = self.left.lock().unwrap();
        if left.0 < round {
            let mut order: Vec<usize> = (0..groups).flat_map(|g| [g; EACH]).collect();
            for i in (1..order.len()).rev() {
                order.swap(i, scramble(round * 4096 + me as u64 * 512 + i as u64) as usize % (i + 1));
            }
            *left = (round, order);
        }
        left.1.pop()
    }
}

fn thread(me: usize, index: usize, rounds: u64, groups: &[Group], distribution: &Distribution, gate: &Gate) {
    for round in 1..=rounds {
        let mut pending: Vec<(Work, Job)> = Vec::new();
        let mut last: Option<usize> = None;
        while let Some(group) = distribution.take(round, me, groups.len()) {
            // The previous collective is not the last one: it is started and awaited later.
            if let Some(before) = last.replace(group) {
                pending.push(begin(&groups[before]));
            }
        }
        if let Some(group) = last {
            // All other collectives of this thread are started, so it may block here.
            let (work, job) = begin(&groups[group]);
            if (round as usize + index + me).is_multiple_of(2) {
                work.wait(None).unwrap();
                job.check();
            } else {
                pending.push((work, job));
            }
        }
        // Waits in a random order.
        while !pending.is_empty() {
            let at = scramble(round + index as u64) as usize % pending.len();
            let (work, job) = pending.swap_remove(at);
            work.wait(None).unwrap();
            job.check();
        }
        gate.wait();
    }
}

fn begin(group: &Group) -> (Work, Job) {
    let mut next = group.next.lock().unwrap();
    let mut job = job(&group.comm, group.name, *next);
    *next += 1;
    let work = job.start(&group.comm).unwrap();
    (work, job)
}

pub(crate) fn rank(me: &RankProcess) {
    let rounds: u64 = std::env::var("SMDDP_TEST_ROUNDS").unwrap().parse().unwrap();
    let mut groups = Vec::new();
    for (name, members) in GROUPS.iter().enumerate() {
        let members: Vec<usize> = members.iter().copied().filter(|&r| r < me.size).collect();
        if members.contains(&me.rank) {
            let comm = group(me, &format!("soak{name}"), &members, Duration::from_secs(60));
            groups.push(Group { comm, name, next: Mutex::new(0) });
        }
    }
    let gate = Gate::new(THREADS);
    let begun = Instant::now();
    let half = |rounds: u64| {
        let distribution = Distribution::default();
        std::thread::scope(|scope| {
            for index in 0..THREADS {
                let (groups, distribution, gate) = (&groups, &distribution, &gate);
                scope.spawn(move || thread(me.rank, index, rounds, groups, distribution, gate));
            }
        });
    };
    half(rounds / 5);
    let early = Footprint::now();
    half(rounds - rounds / 5);
    let late = Footprint::now();
    let calls: u64 = groups.iter().map(|g| *g.next.lock().unwrap()).sum();
    me.report(&format!("made {calls} in {:?}, early {early:?}, late {late:?}", begun.elapsed()));
    assert!(
        late.resident < early.resident + 2048,
        "resident pages: {} early, {} late",
        early.resident,
        late.resident
    );
    assert!(late.descriptors <= early.descriptors && late.mappings == early.mappings);
    groups.iter().for_each(|group| group.comm.close());
    me.report("done");
}

/// Runs about `collectives` collectives over all groups together.
fn soak(size: usize, collectives: usize, timeout: Duration) {
    let alive = GROUPS.iter().filter(|m| m.iter().any(|&r| r < size)).count();
    let collectives =
        std::env::var("SMDDP_TEST_COLLECTIVES").map_or(collectives, |text| text.parse().unwrap());
    let rounds = collectives.div_ceil(alive * EACH);
    let environment = [("SMDDP_STAGING_BYTES", "65536"), ("SMDDP_TEST_ROUNDS", &*rounds.to_string())];
    let mut ranks = start("soak", size, &environment, timeout);
    for rank in 0..size {
        println!("rank {rank} of {size}: {}", ranks.wait_for(rank, "made").text);
    }
    (0..size).for_each(|rank| drop(ranks.wait_for(rank, "done")));
    ranks.finish(0..size);
}

#[test]
fn ten_thousand_collectives_of_four_threads_over_eight_groups_at_minimum_staging() {
    soak(3, 5_000, 4 * TIMEOUT);
    soak(4, 5_000, 4 * TIMEOUT);
}

#[test]
#[ignore = "takes half a minute on two idle cores; run with --ignored"]
fn hundred_thousand_collectives_of_four_threads_over_eight_groups_at_minimum_staging() {
    soak(3, 100_000, Duration::from_secs(900));
    soak(4, 100_000, Duration::from_secs(900));
}
