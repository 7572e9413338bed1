//! Roles of the rank processes.

use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, RedOp, Result, Work};

use super::gpu::{Gpu, Kind};
use super::job::Job;
use crate::common::ALL;
use crate::common::group::{group, world};
use crate::common::procs::RankProcess;
use crate::rank::numbers;

/// Timeout of calls that must succeed; only a deadlock reaches it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the survivors of a failure to report it, on a loaded machine.
const REPORT_LIMIT: Duration = Duration::from_secs(10);
/// Timeout of a rank that waits for a missing rank.
const TIMEOUT_AT_RANK_0: Duration = Duration::from_secs(2);

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

pub(crate) fn every_collective(me: &RankProcess) {
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
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
                    right(job.run_remapped());
                }
            }
        }
    }
    let (_, path) = comm.on_device(0).unwrap();
    assert!(path.contains(&setting("SMDDP_TEST_PATH").unwrap()), "{path}");
    comm.close();
    drop(comm);
    gpu.close_and_check();
}

/// Collectives that support formats, with sizes that use one and a size that does not. (Int8 changes every value.)
pub(crate) fn in_a_format(me: &RankProcess) {
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
    for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
        for (count, in_place) in [(40_001, false), (200_003, true), (100, false)] {
            let job = Job::new((&gpu, &comm), collective, count, 0, (Kind::Mapped, in_place));
            job.run().unwrap_or_else(|e| panic!("{collective:?} {count}: {e}"));
        }
        let taken = comm.path_counters().into_iter().filter(|taken| taken.collective == collective);
        let coded: u64 = taken.filter(|taken| taken.variant.1.is_some()).map(|taken| taken.operations).sum();
        // The comparison runs the same number on host memory.
        assert_eq!(coded, 4, "{collective:?}: all except the small calls");
    }
    comm.close();
    drop(comm);
    gpu.close_and_check();
}

/// Runs jobs of several groups concurrently, in a different group order on each rank.
pub(crate) fn several_groups(me: &RankProcess) {
    let gpu = Gpu::open();
    let mut groups: Vec<Communicator> = (0..3)
        .map(|i| {
            let members: Vec<usize> = (0..me.size).map(|r| (r + i) % me.size).collect();
            group(me, &format!("of {i}").replace(' ', "-"), &members, TIMEOUT)
        })
        .collect();
    // Makes the first device call of each group, which needs all ranks.
    groups.iter().for_each(|comm| {
        Job::new((&gpu, comm), Collective::Barrier, 0, 0, (Kind::Legacy, false)).run().unwrap()
    });
    let streams: Vec<Gpu> =
        groups.iter().map(|_| Gpu { stream: gpu.device.create_stream().unwrap(), ..gpu.clone() }).collect();
    for iteration in 0..10 {
        {
            let mut jobs = Vec::new();
            for (i, comm) in groups.iter().enumerate() {
                for j in 0..3 {
                    let collective = ALL[(iteration + i + 3 * j) % 8];
                    let kind = if j == 1 { Kind::Mapped } else { Kind::Legacy };
                    let count = [1, 3000, 50_000][(iteration + j) % 3];
                    jobs.push((
                        i,
                        Job::new((&streams[i], comm), collective, count, j % me.size, (kind, j == 2)),
                    ));
                }
            }
            // Keeps the order within each group.
            let mut order: Vec<usize> = (0..groups.len()).collect();
            order.rotate_left((me.rank + iteration) % groups.len());
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
        // Closes one of the groups and creates another in its place.
        groups[iteration % 3].close();
        let members: Vec<usize> = (0..me.size).collect();
        groups[iteration % 3] = group(me, &format!("iteration-{iteration}"), &members, TIMEOUT);
    }
    groups.iter().for_each(Communicator::close);
    drop(groups);
    streams.iter().for_each(|gpu| {
        gpu.synchronize();
        gpu.device.destroy_stream(gpu.stream);
    });
    drop(streams);
    gpu.close_and_check();
}

/// Maximum number of elements of each rank's blocks.
const SMALL: usize = 61;

/// Thousands of small calls in the order of one stream. The host checks the results at the end.
pub(crate) fn soak(me: &RankProcess) {
    let iterations: usize = setting("SMDDP_TEST_ITERATIONS").unwrap().parse().unwrap();
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
    let n = me.size;
    let room = n * SMALL * 4;
    let input = gpu.allocate(Kind::Legacy, room);
    let output = gpu.allocate(Kind::Mapped, room);
    let results = gpu.allocate(Kind::Legacy, iterations * room);
    let mut wants = Vec::with_capacity(iterations);
    let mut last = None;
    for iteration in 0..iterations {
        let collective =
            [Collective::AllReduce, Collective::AllGather, Collective::AllToAll, Collective::ReduceScatter]
                [iteration % 4];
        let count = 1 + iteration * 7 % SMALL;
        let of = |rank: usize, count: usize| numbers(DType::F32, rank + iteration, count);
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
        let to = results.at + (iteration * room) as u64;
        let copy = smddp_cuda::Copy { to, from: output.at, bytes: want.len() };
        // SAFETY: as above.
        unsafe { gpu.device.copy(gpu.stream, &[copy]).unwrap() };
        wants.push(want);
        if iteration % 100 == 99 {
            work.wait(None).unwrap();
        }
        last = Some(work);
    }
    last.unwrap().wait(None).unwrap();
    let found = results.read();
    for (iteration, want) in wants.into_iter().enumerate() {
        assert!(
            found[iteration * room..iteration * room + want.len()] == want,
            "iteration {iteration}, rank {}",
            me.rank
        );
    }
    comm.close();
    drop((comm, input, output, results));
    gpu.close_and_check();
}

/// Uses more buffers than a group caches mappings of, one after the other in stream order.
pub(crate) fn many_buffers(me: &RankProcess) {
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
    let (buffers, n) = (1100, me.size);
    let inputs: Vec<_> = (0..buffers).map(|_| gpu.allocate(Kind::Legacy, 64)).collect();
    let output = gpu.allocate(Kind::Legacy, buffers * n * 64);
    let mut last = None;
    for (iteration, input) in inputs.iter().enumerate() {
        let flat = |at: u64, count: usize| Blocks::Flat { ptr: at as *mut u8, count };
        let call = Call {
            collective: Collective::AllGather,
            dtype: DType::F32,
            redop: RedOp::Sum,
            root: 0,
            input: flat(input.at, 16),
            output: flat(output.at + (iteration * n * 64) as u64, 16 * n),
        };
        gpu.write(input.at, &numbers(DType::F32, me.rank + iteration, 16));
        // SAFETY: the memory outlives the stream's work, which ends below.
        let work = unsafe { comm.start(&call, gpu.on()) }.unwrap();
        work.wait_stream(gpu.stream).unwrap();
        last = Some(work);
    }
    last.unwrap().wait(None).unwrap();
    let want: Vec<u8> = (0..buffers)
        .flat_map(|iteration| (0..n).flat_map(move |rank| numbers(DType::F32, rank + iteration, 16)))
        .collect();
    assert!(output.read() == want);
    comm.close();
    drop((comm, inputs, output));
    gpu.close_and_check();
}

/// The test kills one of the ranks while this runs.
pub(crate) fn killed(me: &RankProcess) {
    let number: usize = setting("SMDDP_TEST_CASE").unwrap().parse().unwrap();
    let collective = [Collective::AllReduce, Collective::AllGather, Collective::AllToAll][number % 3];
    let (victim, count) = (number % me.size, [1000, 300_000][number % 2]);
    let remaps = number >= 6;
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
    let kind = if remaps { Kind::Mapped } else { Kind::Legacy };
    let job = Job::new((&gpu, &comm), collective, count, 0, (kind, false));
    job.run().unwrap();
    me.report("ready");
    // Either several asynchronous calls, some of which are enqueued at the kill; or calls on new mappings, whose
    // owner may be dead when a peer requests the export.
    let error = loop {
        if remaps {
            match job.run_remapped() {
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
    me.report("failed");
    assert!(
        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
        "not the loss of {victim}: {error}"
    );
    // The stream must not be blocked any more.
    gpu.synchronize();
    me.report("released");
    assert_eq!(job.start().err(), Some(error));
    drop(job);
    comm.close();
    drop(comm);
    let others: Vec<usize> = (0..me.size).filter(|&r| r != victim).collect();
    let again = group(me, "again", &others, TIMEOUT);
    Job::new((&gpu, &again), collective, count, 0, (Kind::Mapped, false)).run().unwrap();
    again.close();
    drop(again);
    gpu.close_and_check();
    me.report("done");
}

/// The last rank does not make the call of the other ranks.
pub(crate) fn absent(me: &RankProcess) {
    let gpu = Gpu::open();
    let comm = world(me, TIMEOUT);
    let job = Job::new((&gpu, &comm), Collective::AllReduce, 5000, 0, (Kind::Legacy, false));
    job.run_again().unwrap();
    let late = me.size - 1;
    if me.rank == late {
        me.get("over");
    } else {
        let begun = Instant::now();
        // Rank 0 times out after the other ranks have made the call.
        let timeout = (me.rank == 0).then_some(TIMEOUT_AT_RANK_0);
        if me.rank == 0 {
            (1..late).for_each(|rank| drop(me.get(&format!("called/{rank}"))));
        }
        let work = job.start_within(timeout).unwrap();
        me.put(&format!("called/{}", me.rank), "yes");
        let error = work.wait_stream(gpu.stream).unwrap_err();
        assert!(begun.elapsed() >= TIMEOUT_AT_RANK_0, "the host continued before the timeout of the group");
        gpu.synchronize();
        assert_eq!(work.wait(None).err(), Some(error.clone()));
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [late], "{error}");
        assert!(begun.elapsed() < TIMEOUT_AT_RANK_0 + REPORT_LIMIT, "{:?}", begun.elapsed());
        me.report("failed");
    }
    drop(job);
    comm.close();
    drop(comm);
    let again = group(me, "again", &(0..me.size).collect::<Vec<_>>(), TIMEOUT);
    Job::new((&gpu, &again), Collective::AllReduce, 5000, 0, (Kind::Legacy, true)).run().unwrap();
    again.close();
    drop(again);
    gpu.close_and_check();
}
