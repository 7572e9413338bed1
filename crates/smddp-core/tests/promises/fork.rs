//! A forked child and its parent's groups.

use std::time::{Duration, Instant};

use smddp_core::{Collective, DType, Error, Options, Pending};

use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{Me, start};
use crate::common::{PATIENCE, SOON};

/// Runs `body` in a forked child; the child's panic is the test's.
fn forked(body: impl FnOnce()) {
    // SAFETY: the child touches nothing that other threads of the parent may have held locked: glibc's allocator
    // is fork-safe, and it leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends this process at once, without handlers that belong to the parent.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let until = Instant::now() + PATIENCE;
    let mut status = 0;
    // SAFETY: `pid` is our own child and `status` is valid.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > until {
            // SAFETY: our own child, not yet reaped.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the forked child failed");
}

pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
    let job = |salt| Job::new(me.rank, me.size, Collective::AllReduce, 5000, 0, salt);
    let good = |salt| {
        let mut job = job(salt);
        job.run(&comm).unwrap();
        job.check();
        let mut job = self::job_async(me, salt);
        let work = job.start(&comm).unwrap();
        work.wait(None).unwrap();
        job.check();
    };
    good(1);
    let mut pending = job_async(me, 9);
    let work = if me.rank == 0 { Some(pending.start(&comm).unwrap()) } else { None };
    forked(|| {
        let begun = Instant::now();
        let is_forked = |outcome| matches!(outcome, Err(Error::Forked { .. }));
        assert!(is_forked(job(2).run(&comm)));
        assert!(is_forked(job(2).start(&comm).map(drop)));
        let data = [0f32; 4];
        // SAFETY: the call is refused, so the buffer is not used at all.
        let sent =
            unsafe { comm.send(data.as_ptr().cast(), 4, DType::F32, 1 - me.rank, 0, Options::default()) };
        assert!(is_forked(sent.map(drop)));
        if let Some(work) = &work {
            let outcome = work.wait(None);
            assert!(is_forked(outcome.clone()), "{outcome:?}");
        }
        comm.abort("the child's");
        comm.close();
        drop(comm.clone());
        smddp_core::shutdown();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        // A group of its own works in the child.
        let own = Pending::new("own", 0, 1, PATIENCE).unwrap();
        let card = own.card();
        let own = own.connect(&[card]).unwrap();
        let mut job = Job::new(0, 1, Collective::AllReduce, 10, 0, 0);
        job.run(&own).unwrap();
        job.check();
    });
    // The child took nothing from the parent. What the others join only now was not over when it was forked.
    if me.rank == 0 {
        me.put("forked", "yes");
    } else {
        me.get("forked");
        pending.run(&comm).unwrap();
    }
    if let Some(work) = work {
        work.wait(None).unwrap();
    }
    pending.check();
    good(3);
    // Not even by dropping the last handle it has.
    let mut comm = Some(comm);
    let pid = {
        // SAFETY: as in `forked`; the child drops what it inherited and leaves by `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(comm.take());
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        pid
    };
    let mut status = 0;
    let until = Instant::now() + PATIENCE;
    // SAFETY: our own child.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        assert!(Instant::now() < until, "the child hangs while it drops the parent's group");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let comm = comm.unwrap();
    for salt in 0..5 {
        let mut job = job(salt);
        job.run(&comm).unwrap();
        job.check();
    }
    comm.close();
    me.say("done");
}

fn job_async(me: &Me, salt: usize) -> Job {
    Job::new(me.rank, me.size, Collective::AllGather, 5000, 0, salt)
}

#[test]
fn a_forked_child_is_refused_at_once_and_does_the_parents_group_no_harm() {
    let mut ranks = start("fork", 2, &[], 3 * PATIENCE);
    ranks.hear(0, "done");
    ranks.hear(1, "done");
    ranks.finish([0, 1]);
}
