//! SIGKILL of one rank during a collective.

use std::cell::Cell;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, Result};

use crate::common::group::{group, world};
use crate::common::job::Job;
use crate::common::procs::{RankProcess, Ranks, start};
use crate::common::{ALL, TIMEOUT, takes_less_than, timed};

const CASES: usize = 100;
/// Elements of a block, from zero to several MiB.
const COUNTS: [usize; 6] = [0, 1, 700, 20_000, 300_000, 1_000_000];

/// Operation of the ranks when one of them dies.
#[derive(Clone, Copy, Debug)]
enum Activity {
    Sync(Collective),
    Async(Collective),
    Messages,
}

/// Returns (activity, elements, ranks, victim) of a case.
fn case(number: usize) -> (Activity, usize, usize, usize) {
    let size = 2 + number % 3;
    let victim = (number / 3) % size;
    let activity = match number % 10 {
        9 => Activity::Messages,
        kind if (number / 10).is_multiple_of(2) => Activity::Sync(ALL[kind]),
        kind => Activity::Async(ALL[kind]),
    };
    (activity, COUNTS[(number / 7) % COUNTS.len()], size, victim)
}

/// Sends to the next rank and receives from the previous one.
fn exchange_messages(comm: &Communicator, data: &[f32], into: &mut [f32]) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    // SAFETY: both buffers outlive both works, which are awaited, or ended by an error of the group.
    unsafe {
        let send =
            comm.send(data.as_ptr().cast(), data.len(), DType::F32, (me + 1) % n, 7, Options::default())?;
        let recv = comm.recv(
            into.as_mut_ptr().cast(),
            into.len(),
            DType::F32,
            Some((me + n - 1) % n),
            7,
            Options::default(),
        );
        let got = recv.and_then(|recv| recv.wait(None));
        send.wait(None).and(got)
    }
}

fn run_activity(comm: &Communicator, activity: Activity, count: usize, iteration: usize) -> Result<()> {
    run_activity_timed(comm, activity, count, iteration, &Cell::new(Instant::now()))
}

/// Stores the time of the first library call in `called`. The preparation of the data takes much longer.
fn run_activity_timed(
    comm: &Communicator,
    activity: Activity,
    count: usize,
    iteration: usize,
    called: &Cell<Instant>,
) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    match activity {
        Activity::Sync(collective) => {
            let mut job = Job::new(me, n, collective, count, iteration % n, iteration);
            called.set(Instant::now());
            job.run(comm)?;
            job.check();
        }
        Activity::Async(collective) => {
            let mut jobs: Vec<Job> =
                (0..3).map(|i| Job::new(me, n, collective, count, iteration % n, iteration + i)).collect();
            called.set(Instant::now());
            // Waits for all works before any buffer is freed.
            let works: Vec<_> = jobs.iter_mut().map(|job| job.start(comm)).collect();
            let ends: Vec<_> = works.into_iter().map(|work| work.and_then(|work| work.wait(None))).collect();
            ends.into_iter().collect::<Result<()>>()?;
            jobs.iter().for_each(Job::check);
        }
        Activity::Messages => {
            let (data, mut into) = (vec![1.0; count], vec![0.0; count]);
            called.set(Instant::now());
            exchange_messages(comm, &data, &mut into)?;
        }
    }
    Ok(())
}

pub(crate) fn rank(me: &RankProcess) {
    let number: usize = std::env::var("SMDDP_TEST_CASE").unwrap().parse().unwrap();
    let (activity, count, size, victim) = case(number);
    let comm = world(me, TIMEOUT);
    run_activity(&comm, activity, count, 0).unwrap();
    me.report("ready");
    let called = Cell::new(Instant::now());
    let error = (1..)
        .find_map(|iteration| run_activity_timed(&comm, activity, count, iteration, &called).err())
        .unwrap();
    me.report(&format!("failed {}", called.get().elapsed().as_micros()));
    assert!(
        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
        "not the loss of {victim}: {error}"
    );
    // Every later call fails immediately with the same error.
    let call_all = || {
        for collective in ALL {
            assert_eq!(run_activity(&comm, Activity::Sync(collective), 100, 1), Err(error.clone()));
            assert_eq!(run_activity(&comm, Activity::Async(collective), 100, 1), Err(error.clone()));
        }
        assert_eq!(run_activity(&comm, Activity::Messages, 100, 1), Err(error.clone()));
    };
    takes_less_than(Duration::from_millis(500), || timed(call_all));
    comm.close();
    drop(comm);
    let others: Vec<usize> = (0..size).filter(|&r| r != victim).collect();
    let again = group(me, "again", &others, TIMEOUT);
    run_activity(&again, Activity::Sync(Collective::AllReduce), 5000, 0).unwrap();
    again.close();
    me.report("done");
}

/// Asserts that every open or mapped file of the process exists in memory only.
fn assert_memory_only(ranks: &Ranks, rank: usize) {
    let pid = ranks.pid(rank);
    let bad =
        |path: &str| path.starts_with("/dev/shm") || path.starts_with("/tmp") && !path.contains("/deps/");
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
        assert!(!bad(&target.to_string_lossy()), "rank {rank} has an open file {}", target.display());
    }
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines() {
        let path = line.splitn(6, ' ').nth(5).unwrap_or("").trim();
        assert!(!bad(path), "rank {rank} has mapped {path}");
    }
}

/// Returns the table of Unix sockets, lossily decoded, because other programs may use any name.
fn unix_sockets() -> String {
    String::from_utf8_lossy(&std::fs::read("/proc/net/unix").unwrap()).into_owned()
}

fn assert_no_traces(pids: &[u32]) {
    let sockets = unix_sockets();
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} still exists");
        assert!(!sockets.contains(&format!("smddp-{pid}-")), "a socket of process {pid} still exists");
    }
}

/// Kills the victim of a case. Returns the time until the slowest survivor has reported the death.
fn kill(number: usize, folder: &Path) -> Duration {
    let (activity, count, size, victim) = case(number);
    let environment = [("SMDDP_TEST_CASE", &*number.to_string()), ("TMPDIR", folder.to_str().unwrap())];
    let mut ranks = start("kill", size, &environment, 2 * TIMEOUT);
    (0..size).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
    if number.is_multiple_of(10) {
        (0..size).for_each(|rank| assert_memory_only(&ranks, rank));
    }
    // Varies the moment of the kill.
    std::thread::park_timeout(Duration::from_micros((number as u64 * 613) % 4000));
    let killed = ranks.kill(victim);
    let others: Vec<usize> = (0..size).filter(|&r| r != victim).collect();
    let latency = |&rank: &usize| {
        let report = ranks.wait_for(rank, "failed");
        let call = Duration::from_micros(report.text.split_once(' ').unwrap().1.parse().unwrap());
        // A rank outside a call at the time of the kill reports it in its next call.
        report.at.saturating_duration_since(killed).min(call)
    };
    let slowest = others.iter().map(latency).max().unwrap();
    for &rank in &others {
        ranks.wait_for(rank, "done");
    }
    let pids: Vec<u32> = (0..size).map(|r| ranks.pid(r)).collect();
    ranks.finish(others);
    assert_no_traces(&pids);
    println!("case {number} ({activity:?}, {count}): reported after {slowest:?}");
    slowest
}

#[test]
fn killed_rank_is_reported_by_every_survivor_within_a_second() {
    let folder = std::env::temp_dir().join(format!("smddp-kill-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    for number in 0..CASES {
        takes_less_than(Duration::from_secs(1), || kill(number, &folder));
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file remains in {}", folder.display());
    std::fs::remove_dir(&folder).unwrap();
}

/// Opens connections of the same user to the socket of every rank, and sends nothing.
fn silent_connections(pids: &[u32], each: usize) -> Vec<UnixStream> {
    let table = unix_sockets();
    let ours = |name: &&str| pids.iter().any(|pid| name.starts_with(&format!("@smddp-{pid}-")));
    let names = table.lines().filter_map(|line| line.split_whitespace().last()).filter(ours);
    let sockets: std::collections::BTreeSet<&str> = names.collect();
    assert_eq!(sockets.len(), pids.len(), "a rank has no socket");
    let connect = |name: &str| UnixStream::connect_addr(&SocketAddr::from_abstract_name(&name[1..]).unwrap());
    sockets.iter().flat_map(|name| (0..each).map(move |_| connect(name).unwrap())).collect()
}

#[test]
fn death_is_reported_within_a_second_despite_silent_connections() {
    takes_less_than(Duration::from_secs(1), || {
        let (size, victim) = (3, 1);
        let mut ranks = start("kill", size, &[("SMDDP_TEST_CASE", "4")], 2 * TIMEOUT);
        (0..size).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
        let pids: Vec<u32> = (0..size).map(|rank| ranks.pid(rank)).collect();
        let connections = silent_connections(&pids, 4);
        let killed = ranks.kill(victim);
        let latency = [0, 2].map(|rank| ranks.wait_for(rank, "failed").at.saturating_duration_since(killed));
        // The survivors can create groups in the meantime.
        [0, 2].iter().for_each(|&rank| drop(ranks.wait_for(rank, "done")));
        drop(connections);
        ranks.finish([0, 2]);
        latency.into_iter().max().unwrap()
    });
}
