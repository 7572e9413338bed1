//! What the rank processes do.

use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, RedOp, Result, Work};

use super::gpu::{Gpu, Kind};
use super::job::Job;
use crate::common::ALL;
use crate::common::group::{group, world};
use crate::common::procs::Me;
use crate::rank::numbers;

/// For calls that are to end well: only a hang takes as long.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the survivors of a failure may take to notice, on a machine with other things to do.
const NOTICE: Duration = Duration::from_secs(10);
/// When a rank that waits for an absent one gives up.
const GIVES_UP: Duration = Duration::from_secs(2);

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

pub(crate) fn every_collective(me: &Me) {
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    for kind in [Kind::Legacy, Kind::Mapped] {
        for (i, collective) in ALL.into_iter().enumerate() {
            for (count, in_place) in [(1, false), (1000, true), (40_001, false), (40_001, true)] {
                let root = (i + count) % me.size;
                let job = Job::new((&gpu, &comm), collective, count, root, (kind, in_place));
                let right = |outcome: Result<()>| {
                    outcome.unwrap_or_else(|e| panic!("{kind:?} {collective:?} {count}: {e}"))
                };
                right(job.run());
                if kind == Kind::Mapped {
                    right(job.run_elsewhere());
                }
            }
        }
    }
    let (_, path) = comm.on_device(0).unwrap();
    assert!(path.contains(&setting("SMDDP_TEST_PATH").unwrap()), "{path}");
    comm.close();
    drop(comm);
    gpu.leave_nothing();
}

/// The collectives that have formats, of what is worth coding and of what is not. (Eight bits leave no number as it is.)
pub(crate) fn in_a_format(me: &Me) {
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
        for (count, in_place) in [(40_001, false), (200_003, true), (100, false)] {
            let job = Job::new((&gpu, &comm), collective, count, 0, (Kind::Mapped, in_place));
            job.run().unwrap_or_else(|e| panic!("{collective:?} {count}: {e}"));
        }
        let taken = comm.taken().into_iter().filter(|taken| taken.collective == collective);
        let coded: u64 = taken.filter(|taken| taken.way.1.is_some()).map(|taken| taken.operations).sum();
        // As many on host memory, which they are held against.
        assert_eq!(coded, 4, "{collective:?}: all but the small ones");
    }
    comm.close();
    drop(comm);
    gpu.leave_nothing();
}

/// Jobs of several groups at once, in an order of each rank's own.
pub(crate) fn several_groups(me: &Me) {
    let gpu = Gpu::open();
    let mut groups: Vec<Communicator> = (0..3)
        .map(|i| {
            let members: Vec<usize> = (0..me.size).map(|r| (r + i) % me.size).collect();
            group(me, &format!("of {i}").replace(' ', "-"), &members, PATIENCE)
        })
        .collect();
    // The first call on a device meets all ranks.
    groups.iter().for_each(|comm| {
        Job::new((&gpu, comm), Collective::Barrier, 0, 0, (Kind::Legacy, false)).run().unwrap()
    });
    let streams: Vec<Gpu> =
        groups.iter().map(|_| Gpu { stream: gpu.device.create_stream().unwrap(), ..gpu.clone() }).collect();
    for turn in 0..10 {
        {
            let mut jobs = Vec::new();
            for (i, comm) in groups.iter().enumerate() {
                for j in 0..3 {
                    let collective = ALL[(turn + i + 3 * j) % 8];
                    let kind = if j == 1 { Kind::Mapped } else { Kind::Legacy };
                    let count = [1, 3000, 50_000][(turn + j) % 3];
                    jobs.push((
                        i,
                        Job::new((&streams[i], comm), collective, count, j % me.size, (kind, j == 2)),
                    ));
                }
            }
            // Within a group in the group's order.
            let mut order: Vec<usize> = (0..groups.len()).collect();
            order.rotate_left((me.rank + turn) % groups.len());
            let mut works: Vec<(usize, Work)> = Vec::new();
            for group in order {
                let mine = jobs.iter().enumerate().filter(|(_, (i, _))| *i == group);
                works.extend(mine.map(|(index, (_, job))| (index, job.start().unwrap())));
            }
            works.iter().rev().for_each(|(index, work)| jobs[*index].1.finish(work).unwrap());
            for (index, work) in &works {
                jobs[*index].1.check();
                work.wait(None).unwrap();
            }
        }
        // One of them ends, and another comes in its place.
        groups[turn % 3].close();
        let members: Vec<usize> = (0..me.size).collect();
        groups[turn % 3] = group(me, &format!("turn-{turn}"), &members, PATIENCE);
    }
    groups.iter().for_each(Communicator::close);
    drop(groups);
    streams.iter().for_each(|gpu| {
        gpu.synchronize();
        gpu.device.destroy_stream(gpu.stream);
    });
    drop(streams);
    gpu.leave_nothing();
}

/// Elements of each rank's blocks at most.
const SMALL: usize = 61;

/// Thousands of small calls in the order of one stream; the host looks at the results at the end.
pub(crate) fn soak(me: &Me) {
    let turns: usize = setting("SMDDP_TEST_TURNS").unwrap().parse().unwrap();
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    let n = me.size;
    let room = n * SMALL * 4;
    let input = gpu.allocate(Kind::Legacy, room);
    let output = gpu.allocate(Kind::Mapped, room);
    let results = gpu.allocate(Kind::Legacy, turns * room);
    let mut wants = Vec::with_capacity(turns);
    let mut last = None;
    for turn in 0..turns {
        let collective =
            [Collective::AllReduce, Collective::AllGather, Collective::AllToAll, Collective::ReduceScatter]
                [turn % 4];
        let count = 1 + turn * 7 % SMALL;
        let of = |rank: usize, count: usize| numbers(DType::F32, rank + turn, count);
        let floats = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let sum = |from: usize, count: usize, all: usize| -> Vec<u8> {
            let ranks: Vec<Vec<f32>> = (0..n).map(|rank| floats(of(rank, all))).collect();
            (from..from + count).flat_map(|i| ranks.iter().map(|r| r[i]).sum::<f32>().to_le_bytes()).collect()
        };
        let (given, want) = match collective {
            Collective::AllReduce => (count, sum(0, count, count)),
            Collective::AllGather => (count, (0..n).flat_map(|rank| of(rank, count)).collect()),
            Collective::ReduceScatter => (n * count, sum(me.rank * count, count, n * count)),
            _ => {
                let block = me.rank * count * 4..(me.rank + 1) * count * 4;
                (n * count, (0..n).flat_map(|rank| of(rank, n * count)[block.clone()].to_vec()).collect())
            }
        };
        let flat = |at: u64, count: usize| Blocks::Flat { ptr: at as *mut u8, count };
        let call = Call {
            collective,
            dtype: DType::F32,
            redop: RedOp::Sum,
            root: 0,
            input: flat(input.at, given),
            output: flat(output.at, want.len() / 4),
        };
        gpu.write(input.at, &of(me.rank, given));
        // SAFETY: the memory outlives the stream's work, which ends below.
        let work = unsafe { comm.start(&call, gpu.on()) }.unwrap();
        work.wait_stream(gpu.stream).unwrap();
        let to = results.at + (turn * room) as u64;
        let copy = smddp_cuda::Copy { to, from: output.at, bytes: want.len() };
        // SAFETY: as above.
        unsafe { gpu.device.copy(gpu.stream, &[copy]).unwrap() };
        wants.push(want);
        if turn % 100 == 99 {
            work.wait(None).unwrap();
        }
        last = Some(work);
    }
    last.unwrap().wait(None).unwrap();
    let found = results.read();
    for (turn, want) in wants.into_iter().enumerate() {
        assert!(found[turn * room..turn * room + want.len()] == want, "turn {turn}, rank {}", me.rank);
    }
    comm.close();
    drop((comm, input, output, results));
    gpu.leave_nothing();
}

/// More buffers than a group keeps mappings of, one after the other in the order of one stream.
pub(crate) fn many_buffers(me: &Me) {
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    let (buffers, n) = (1100, me.size);
    let inputs: Vec<_> = (0..buffers).map(|_| gpu.allocate(Kind::Legacy, 64)).collect();
    let output = gpu.allocate(Kind::Legacy, buffers * n * 64);
    let mut last = None;
    for (turn, input) in inputs.iter().enumerate() {
        let flat = |at: u64, count: usize| Blocks::Flat { ptr: at as *mut u8, count };
        let call = Call {
            collective: Collective::AllGather,
            dtype: DType::F32,
            redop: RedOp::Sum,
            root: 0,
            input: flat(input.at, 16),
            output: flat(output.at + (turn * n * 64) as u64, 16 * n),
        };
        gpu.write(input.at, &numbers(DType::F32, me.rank + turn, 16));
        // SAFETY: the memory outlives the stream's work, which ends below.
        let work = unsafe { comm.start(&call, gpu.on()) }.unwrap();
        work.wait_stream(gpu.stream).unwrap();
        last = Some(work);
    }
    last.unwrap().wait(None).unwrap();
    let want: Vec<u8> = (0..buffers)
        .flat_map(|turn| (0..n).flat_map(move |rank| numbers(DType::F32, rank + turn, 16)))
        .collect();
    assert!(output.read() == want);
    comm.close();
    drop((comm, inputs, output));
    gpu.leave_nothing();
}

/// One of the ranks is killed in the middle of this.
pub(crate) fn killed(me: &Me) {
    let number: usize = setting("SMDDP_TEST_CASE").unwrap().parse().unwrap();
    let collective = [Collective::AllReduce, Collective::AllGather, Collective::AllToAll][number % 3];
    let (victim, count) = (number % me.size, [1000, 300_000][number % 2]);
    let anew = number >= 6;
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    let kind = if anew { Kind::Mapped } else { Kind::Legacy };
    let job = Job::new((&gpu, &comm), collective, count, 0, (kind, false));
    job.run().unwrap();
    me.say("ready");
    // Calls whose works the host waits for in the end only: some are enqueued and some not when it happens. Or calls on
    // memory that is new each time, and is asked for when its owner may be dead.
    let error = loop {
        if anew {
            match job.run_elsewhere() {
                Ok(()) => continue,
                Err(error) => break error,
            }
        }
        let works: Vec<Result<Work>> = (0..4)
            .map(|_| {
                let work = job.start()?;
                work.wait_stream(gpu.stream)?;
                Ok(work)
            })
            .collect();
        let ends: Vec<Result<()>> =
            works.into_iter().map(|work| work.and_then(|work| work.wait(None))).collect();
        if let Some(error) = ends.into_iter().find_map(Result::err) {
            break error;
        }
    };
    me.say("failed");
    assert!(
        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
        "not the loss of {victim}: {error}"
    );
    // What waited on the device waits no more.
    gpu.synchronize();
    me.say("released");
    assert_eq!(job.start().err(), Some(error));
    drop(job);
    comm.close();
    drop(comm);
    let others: Vec<usize> = (0..me.size).filter(|&r| r != victim).collect();
    let again = group(me, "again", &others, PATIENCE);
    Job::new((&gpu, &again), collective, count, 0, (Kind::Mapped, false)).run().unwrap();
    again.close();
    drop(again);
    gpu.leave_nothing();
    me.say("done");
}

/// The last rank does not make the call that the others make.
pub(crate) fn absent(me: &Me) {
    let gpu = Gpu::open();
    let comm = world(me, PATIENCE);
    let job = Job::new((&gpu, &comm), Collective::AllReduce, 5000, 0, (Kind::Legacy, false));
    job.run_again().unwrap();
    let late = me.size - 1;
    if me.rank == late {
        me.get("over");
    } else {
        let begun = Instant::now();
        // Rank 0 gives up, when the others have made the call.
        let timeout = (me.rank == 0).then_some(GIVES_UP);
        if me.rank == 0 {
            (1..late).for_each(|rank| drop(me.get(&format!("called/{rank}"))));
        }
        let work = job.start_within(timeout).unwrap();
        me.put(&format!("called/{}", me.rank), "yes");
        let error = work.wait_stream(gpu.stream).unwrap_err();
        assert!(begun.elapsed() >= GIVES_UP, "the host went on before the group gave up");
        gpu.synchronize();
        assert_eq!(work.wait(None).err(), Some(error.clone()));
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [late], "{error}");
        assert!(begun.elapsed() < GIVES_UP + NOTICE, "{:?}", begun.elapsed());
        me.say("failed");
    }
    drop(job);
    comm.close();
    drop(comm);
    let again = group(me, "again", &(0..me.size).collect::<Vec<_>>(), PATIENCE);
    Job::new((&gpu, &again), Collective::AllReduce, 5000, 0, (Kind::Legacy, true)).run().unwrap();
    again.close();
    drop(again);
    gpu.leave_nothing();
}
