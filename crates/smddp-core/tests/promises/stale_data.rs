//! Ranks leave groups during their calls and create new ones: data of an earlier group must not reach a later one.

use smddp_core::{Communicator, DType, Error, Options, Work};

use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{ALL, TIMEOUT};
use crate::soak::scramble;

/// Elements of a message. Every third group uses a message larger than a slot.
const MESSAGE_COUNTS: [usize; 3] = [9, 700, 40_000];
const TAG: u64 = 5;

/// Random numbers from a seed, which is common to all ranks or private to one.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = scramble(self.0);
        (self.0 % limit as u64) as usize
    }
}

/// Returns the group's next call, which is equal on all ranks.
fn job(comm: &Communicator, all: &mut Draw, seed: usize) -> Job {
    let collective = ALL[all.below(ALL.len())];
    let count = [1, 300, 5_000, 70_000][all.below(4)];
    Job::new(comm.rank(), comm.size(), collective, count, all.below(comm.size()), seed + all.below(1000))
}

/// Sends a message to the next rank and receives one from the previous rank. Returns the buffers and the works.
fn exchange_messages(comm: &Communicator, seed: usize) -> ([Vec<f32>; 2], [smddp_core::Result<Work>; 2]) {
    let (me, n, count) = (comm.rank(), comm.size(), MESSAGE_COUNTS[seed % 3]);
    let mut held = [vec![(seed * n + me) as f32; count], vec![f32::NAN; count]];
    let next = (me + 1) % n;
    // SAFETY: the caller keeps both vectors until both works are complete.
    let works = unsafe {
        [
            comm.send(held[0].as_ptr().cast(), count, DType::F32, next, TAG, Options::default()),
            comm.recv(
                held[1].as_mut_ptr().cast(),
                count,
                DType::F32,
                Some((me + n - 1) % n),
                TAG,
                Options::default(),
            ),
        ]
    };
    (held, works)
}

/// Makes two calls and a message exchange on all ranks. They are the first of the group, with the numbers of the
/// abandoned operations of the earlier group.
fn run_checked(comm: &Communicator, all: &mut Draw, seed: usize) {
    let (me, n) = (comm.rank(), comm.size());
    let (held, works) = exchange_messages(comm, seed);
    for _ in 0..2 {
        let mut job = job(comm, all, seed);
        job.run(comm).unwrap();
        job.check();
    }
    works.into_iter().for_each(|work| work.unwrap().wait(None).unwrap());
    let want = (seed * n + (me + n - 1) % n) as f32;
    assert!(held[1].iter().all(|&x| x == want), "seed {seed}: received {}, expected {want}", held[1][0]);
}

/// Makes calls that some ranks skip or abandon, and leaves. Returns true if any call was cut off.
fn leave_during_calls(comm: Communicator, all: &mut Draw, mine: &mut Draw, seed: usize) -> bool {
    let planned = 1 + all.below(3);
    let mut pending: Vec<(Work, Job)> = Vec::new();
    let mut cut = false;
    let messages = (mine.below(2) == 0).then(|| exchange_messages(&comm, seed));
    for _ in 0..planned {
        // Drawn on all ranks, made on some.
        let mut job = job(&comm, all, seed);
        if cut || mine.below(3) == 0 {
            cut = true;
            continue;
        }
        match job.start(&comm) {
            Ok(work) => pending.push((work, job)),
            // Another rank has left already.
            Err(_) => cut = true,
        }
    }
    if mine.below(4) == 0
        && let Some((work, _)) = pending.first()
    {
        let _ = work.wait(Some(std::time::Duration::from_micros(mine.below(300) as u64)));
    }
    match mine.below(2) {
        0 => comm.close(),
        _ => comm.abort("continues in another group"),
    }
    for (work, job) in &pending {
        match work.wait(None) {
            Ok(()) => job.check(),
            Err(Error::Timeout { .. }) => {
                panic!("seed {seed}: a call of a closed group waits for its timeout")
            }
            Err(_) => cut = true,
        }
    }
    if let Some((held, works)) = messages {
        works.into_iter().flatten().for_each(|work| cut |= work.wait(None).is_err());
        drop(held);
    }
    cut
}

pub(crate) fn rank(me: &RankProcess) {
    let seeds: usize = std::env::var("SMDDP_TEST_SEEDS").unwrap().parse().unwrap();
    let all_ranks: Vec<usize> = (0..me.size).collect();
    let mut cut = 0;
    for seed in 0..seeds {
        let mut all = Draw(seed as u64);
        let mut mine = Draw((seed * 16 + me.rank + 1) as u64 * 7919);
        // Another rank order each time.
        let mut members = all_ranks.clone();
        members.rotate_left(seed % me.size);
        let comm = group(me, &format!("generation-{seed}"), &members, TIMEOUT);
        run_checked(&comm, &mut all, seed);
        // Waits for all ranks, because a departure ends the calls of other ranks.
        me.put(&format!("right/{seed}/{}", me.rank), "1");
        all_ranks.iter().for_each(|rank| drop(me.get(&format!("right/{seed}/{rank}"))));
        cut += usize::from(leave_during_calls(comm, &mut all, &mut mine, seed));
    }
    me.report(&format!("cut {cut} of {seeds}"));
}

fn run_seeds(ranks: usize, environment: &[(&str, &str)], seeds: usize) {
    let seeds_text = seeds.to_string();
    let mut environment = environment.to_vec();
    environment.push(("SMDDP_TEST_SEEDS", &seeds_text));
    let mut started = start(
        "stale_data",
        ranks,
        &environment,
        TIMEOUT + std::time::Duration::from_millis(60) * seeds as u32,
    );
    for rank in 0..ranks {
        let report = started.wait_for(rank, "cut").text;
        println!("{environment:?}, rank {rank}: {report}");
        let cut: usize = report.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(cut > seeds / 4, "too few calls were pending: {report}");
    }
    started.finish(0..ranks);
}

const SHM: &[(&str, &str)] = &[];
const TCP: &[(&str, &str)] = &[("SMDDP_NODE", "%r"), ("SMDDP_SOCKET_IFNAME", "=lo")];

#[test]
fn data_of_an_earlier_group_does_not_reach_a_later_one() {
    run_seeds(3, SHM, 60);
    run_seeds(3, TCP, 40);
}

/// Run it with `cargo nextest run -p smddp-core --run-ignored only stale_data`.
#[test]
#[ignore = "takes four minutes, a hundred times the test above; run with --ignored"]
fn data_of_ten_thousand_earlier_groups_does_not_reach_later_ones() {
    run_seeds(3, SHM, 6000);
    run_seeds(4, TCP, 4000);
}
