//! Ranks go from group to group in the middle of their calls: nothing of an earlier group lands in a later one.

use smddp_core::{Communicator, DType, Error, Options, Work};

use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{Me, start};
use crate::common::{ALL, PATIENCE};
use crate::soak::scramble;

/// Elements of a message; more than a cell holds, in every third group.
const LETTERS: [usize; 3] = [9, 700, 40_000];
const TAG: u64 = 5;

/// Draws of one stream; a seed for all ranks, or one for each.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = scramble(self.0);
        (self.0 % limit as u64) as usize
    }
}

/// The group's next call, the same on all ranks.
fn job(comm: &Communicator, all: &mut Draw, seed: usize) -> Job {
    let collective = ALL[all.below(ALL.len())];
    let count = [1, 300, 5_000, 70_000][all.below(4)];
    Job::new(comm.rank(), comm.size(), collective, count, all.below(comm.size()), seed + all.below(1000))
}

/// A message to the next rank and one of the rank before; what both of them hold until they are done.
fn letters(comm: &Communicator, seed: usize) -> ([Vec<f32>; 2], [smddp_core::Result<Work>; 2]) {
    let (me, n, count) = (comm.rank(), comm.size(), LETTERS[seed % 3]);
    let mut held = [vec![(seed * n + me) as f32; count], vec![f32::NAN; count]];
    let next = (me + 1) % n;
    // SAFETY: both vectors go to the caller, who keeps them until both works are done.
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

/// Two calls and a message that all make: the very first ones of the group, with the numbers of those that were under way.
fn make_right(comm: &Communicator, all: &mut Draw, seed: usize) {
    let (me, n) = (comm.rank(), comm.size());
    let (held, works) = letters(comm, seed);
    for _ in 0..2 {
        let mut job = job(comm, all, seed);
        job.run(comm).unwrap();
        job.check();
    }
    works.into_iter().for_each(|work| work.unwrap().wait(None).unwrap());
    let want = (seed * n + (me + n - 1) % n) as f32;
    assert!(held[1].iter().all(|&x| x == want), "a message of seed {seed} is {}, not {want}", held[1][0]);
}

/// Calls that some ranks make, some do not, and some go away from; whether any was cut off.
fn leave_amid(comm: Communicator, all: &mut Draw, mine: &mut Draw, seed: usize) -> bool {
    let planned = 1 + all.below(3);
    let mut under_way: Vec<(Work, Job)> = Vec::new();
    let mut cut = false;
    let mail = (mine.below(2) == 0).then(|| letters(&comm, seed));
    for _ in 0..planned {
        // Drawn on all ranks, made on some.
        let mut job = job(&comm, all, seed);
        if cut || mine.below(3) == 0 {
            cut = true;
            continue;
        }
        match job.start(&comm) {
            Ok(work) => under_way.push((work, job)),
            // Another rank is gone already.
            Err(_) => cut = true,
        }
    }
    if mine.below(4) == 0
        && let Some((work, _)) = under_way.first()
    {
        let _ = work.wait(Some(std::time::Duration::from_micros(mine.below(300) as u64)));
    }
    match mine.below(2) {
        0 => comm.close(),
        _ => comm.abort("it goes on in another group"),
    }
    for (work, job) in &under_way {
        match work.wait(None) {
            Ok(()) => job.check(),
            Err(Error::Timeout { .. }) => {
                panic!("seed {seed}: a call of a group that is left waits for its deadline")
            }
            Err(_) => cut = true,
        }
    }
    if let Some((held, works)) = mail {
        works.into_iter().flatten().for_each(|work| cut |= work.wait(None).is_err());
        drop(held);
    }
    cut
}

pub(crate) fn rank(me: &Me) {
    let seeds: usize = std::env::var("SMDDP_TEST_SEEDS").unwrap().parse().unwrap();
    let everybody: Vec<usize> = (0..me.size).collect();
    let mut cut = 0;
    for seed in 0..seeds {
        let mut all = Draw(seed as u64);
        let mut mine = Draw((seed * 16 + me.rank + 1) as u64 * 7919);
        // In another order each time.
        let mut members = everybody.clone();
        members.rotate_left(seed % me.size);
        let comm = group(me, &format!("generation-{seed}"), &members, PATIENCE);
        make_right(&comm, &mut all, seed);
        // Who goes away ends what others are still in.
        me.put(&format!("right/{seed}/{}", me.rank), "1");
        everybody.iter().for_each(|rank| drop(me.get(&format!("right/{seed}/{rank}"))));
        cut += usize::from(leave_amid(comm, &mut all, &mut mine, seed));
    }
    me.say(&format!("cut {cut} of {seeds}"));
}

fn go_through(ranks: usize, environment: &[(&str, &str)], seeds: usize) {
    let seeds_text = seeds.to_string();
    let mut environment = environment.to_vec();
    environment.push(("SMDDP_TEST_SEEDS", &seeds_text));
    let mut started =
        start("stale", ranks, &environment, PATIENCE + std::time::Duration::from_millis(60) * seeds as u32);
    for rank in 0..ranks {
        let said = started.hear(rank, "cut").text;
        println!("{environment:?}, rank {rank}: {said}");
        let cut: usize = said.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(cut > seeds / 4, "too few calls were under way: {said}");
    }
    started.finish(0..ranks);
}

const SHM: &[(&str, &str)] = &[];
const TCP: &[(&str, &str)] = &[("SMDDP_SHM", "0"), ("SMDDP_SOCKET_IFNAME", "=lo")];

#[test]
fn nothing_of_an_earlier_group_lands_in_a_later_one() {
    go_through(3, SHM, 60);
    go_through(3, TCP, 40);
}

/// `cargo nextest run -p smddp-core --run-ignored only stale`.
#[test]
#[ignore = "four minutes, of which the test above is a hundredth; run with --ignored"]
fn nothing_of_ten_thousand_earlier_groups_lands_in_a_later_one() {
    go_through(3, SHM, 6000);
    go_through(4, TCP, 4000);
}
