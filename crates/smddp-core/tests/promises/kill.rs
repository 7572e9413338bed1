//! `kill -9` of one rank in the middle of a collective.

use std::cell::Cell;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, DType, Error, Options, Result};

use crate::common::group::{group, world};
use crate::common::job::Job;
use crate::common::procs::{Me, Ranks, start};
use crate::common::{ALL, PATIENCE, takes_less_than, timed};

const CASES: usize = 100;
/// Elements of a block, from nothing to several MiB.
const COUNTS: [usize; 6] = [0, 1, 700, 20_000, 300_000, 1_000_000];

/// What the ranks do when one of them dies.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Sync(Collective),
    Async(Collective),
    Mail,
}

/// (deed, elements, ranks, victim) of a case.
fn case(number: usize) -> (Deed, usize, usize, usize) {
    let size = 2 + number % 3;
    let victim = (number / 3) % size;
    let deed = match number % 10 {
        9 => Deed::Mail,
        kind if (number / 10).is_multiple_of(2) => Deed::Sync(ALL[kind]),
        kind => Deed::Async(ALL[kind]),
    };
    (deed, COUNTS[(number / 7) % COUNTS.len()], size, victim)
}

/// Sends round the ring and receives from the left.
fn mail(comm: &Communicator, data: &[f32], into: &mut [f32]) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    // SAFETY: both buffers outlive both works, which are waited for or over when an error ends the group.
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

fn act(comm: &Communicator, deed: Deed, count: usize, turn: usize) -> Result<()> {
    act_since(comm, deed, count, turn, &Cell::new(Instant::now()))
}

/// `called`: when the library is first called; making the data takes a rank much longer.
fn act_since(
    comm: &Communicator,
    deed: Deed,
    count: usize,
    turn: usize,
    called: &Cell<Instant>,
) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    match deed {
        Deed::Sync(collective) => {
            let mut job = Job::new(me, n, collective, count, turn % n, turn);
            called.set(Instant::now());
            job.run(comm)?;
            job.check();
        }
        Deed::Async(collective) => {
            let mut jobs: Vec<Job> =
                (0..3).map(|i| Job::new(me, n, collective, count, turn % n, turn + i)).collect();
            called.set(Instant::now());
            // All of them are waited for before any buffer goes.
            let works: Vec<_> = jobs.iter_mut().map(|job| job.start(comm)).collect();
            let ends: Vec<_> = works.into_iter().map(|work| work.and_then(|work| work.wait(None))).collect();
            ends.into_iter().collect::<Result<()>>()?;
            jobs.iter().for_each(Job::check);
        }
        Deed::Mail => {
            let (data, mut into) = (vec![1.0; count], vec![0.0; count]);
            called.set(Instant::now());
            mail(comm, &data, &mut into)?;
        }
    }
    Ok(())
}

pub(crate) fn rank(me: &Me) {
    let number: usize = std::env::var("SMDDP_TEST_CASE").unwrap().parse().unwrap();
    let (deed, count, size, victim) = case(number);
    let comm = world(me, PATIENCE);
    act(&comm, deed, count, 0).unwrap();
    me.say("ready");
    let called = Cell::new(Instant::now());
    let error = (1..).find_map(|turn| act_since(&comm, deed, count, turn, &called).err()).unwrap();
    me.say(&format!("failed {}", called.get().elapsed().as_micros()));
    assert!(
        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
        "not the loss of {victim}: {error}"
    );
    // The first cause, at once, whatever is called.
    let ask = || {
        for collective in ALL {
            assert_eq!(act(&comm, Deed::Sync(collective), 100, 1), Err(error.clone()));
            assert_eq!(act(&comm, Deed::Async(collective), 100, 1), Err(error.clone()));
        }
        assert_eq!(act(&comm, Deed::Mail, 100, 1), Err(error.clone()));
    };
    takes_less_than(Duration::from_millis(500), || timed(ask));
    comm.close();
    drop(comm);
    let others: Vec<usize> = (0..size).filter(|&r| r != victim).collect();
    let again = group(me, "again", &others, PATIENCE);
    act(&again, Deed::Sync(Collective::AllReduce), 5000, 0).unwrap();
    again.close();
    me.say("done");
}

/// Everything that this process has open or mapped lies in memory only.
fn names_nothing(ranks: &Ranks, rank: usize) {
    let pid = ranks.pid(rank);
    let bad =
        |path: &str| path.starts_with("/dev/shm") || path.starts_with("/tmp") && !path.contains("/deps/");
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
        assert!(!bad(&target.to_string_lossy()), "rank {rank} has {} open", target.display());
    }
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines() {
        let path = line.splitn(6, ' ').nth(5).unwrap_or("").trim();
        assert!(!bad(path), "rank {rank} has mapped {path}");
    }
}

/// Others' sockets may be called anything.
fn unix_sockets() -> String {
    String::from_utf8_lossy(&std::fs::read("/proc/net/unix").unwrap()).into_owned()
}

fn no_trace_of(pids: &[u32]) {
    let sockets = unix_sockets();
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
        assert!(!sockets.contains(&format!("smddp-{pid}-")), "a socket of process {pid} is left");
    }
}

/// Kills the victim of a case: how long the slowest survivor takes to notice.
fn kill(number: usize, folder: &Path) -> Duration {
    let (deed, count, size, victim) = case(number);
    let environment = [("SMDDP_TEST_CASE", &*number.to_string()), ("TMPDIR", folder.to_str().unwrap())];
    let mut ranks = start("kill", size, &environment, 2 * PATIENCE);
    (0..size).for_each(|rank| drop(ranks.hear(rank, "ready")));
    if number.is_multiple_of(10) {
        (0..size).for_each(|rank| names_nothing(&ranks, rank));
    }
    // Not a wait for anything: it moves the blow to another moment of the collective.
    std::thread::park_timeout(Duration::from_micros((number as u64 * 613) % 4000));
    let killed = ranks.kill(victim);
    let others: Vec<usize> = (0..size).filter(|&r| r != victim).collect();
    let noticed = |&rank: &usize| {
        let said = ranks.hear(rank, "failed");
        let call = Duration::from_micros(said.text.split_once(' ').unwrap().1.parse().unwrap());
        // Who was not in a call when it happened notices in the next one.
        said.at.saturating_duration_since(killed).min(call)
    };
    let slowest = others.iter().map(noticed).max().unwrap();
    for &rank in &others {
        ranks.hear(rank, "done");
    }
    let pids: Vec<u32> = (0..size).map(|r| ranks.pid(r)).collect();
    ranks.finish(others);
    no_trace_of(&pids);
    println!("case {number} ({deed:?}, {count}): noticed after {slowest:?}");
    slowest
}

#[test]
fn a_killed_rank_is_named_by_every_survivor_within_a_second_in_a_hundred_collectives() {
    let folder = std::env::temp_dir().join(format!("smddp-kill-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    for number in 0..CASES {
        takes_less_than(Duration::from_secs(1), || kill(number, &folder));
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file is left in {}", folder.display());
    std::fs::remove_dir(&folder).unwrap();
}

/// Somebody of this user at the door of every rank, who connects and says nothing.
fn silent_callers(pids: &[u32], each: usize) -> Vec<UnixStream> {
    let table = unix_sockets();
    let ours = |name: &&str| pids.iter().any(|pid| name.starts_with(&format!("@smddp-{pid}-")));
    let names = table.lines().filter_map(|line| line.split_whitespace().last()).filter(ours);
    let doors: std::collections::BTreeSet<&str> = names.collect();
    assert_eq!(doors.len(), pids.len(), "a rank has no socket");
    let call = |name: &str| UnixStream::connect_addr(&SocketAddr::from_abstract_name(&name[1..]).unwrap());
    doors.iter().flat_map(|name| (0..each).map(move |_| call(name).unwrap())).collect()
}

#[test]
fn callers_that_say_nothing_do_not_keep_a_death_from_being_noticed_within_a_second() {
    takes_less_than(Duration::from_secs(1), || {
        let (size, victim) = (3, 1);
        let mut ranks = start("kill", size, &[("SMDDP_TEST_CASE", "4")], 2 * PATIENCE);
        (0..size).for_each(|rank| drop(ranks.hear(rank, "ready")));
        let pids: Vec<u32> = (0..size).map(|rank| ranks.pid(rank)).collect();
        let callers = silent_callers(&pids, 4);
        let killed = ranks.kill(victim);
        let noticed = [0, 2].map(|rank| ranks.hear(rank, "failed").at.saturating_duration_since(killed));
        // Groups can be made meanwhile, too.
        [0, 2].iter().for_each(|&rank| drop(ranks.hear(rank, "done")));
        drop(callers);
        ranks.finish([0, 2]);
        noticed.into_iter().max().unwrap()
    });
}
