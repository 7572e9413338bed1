//! A forked child, and the groups of its parent.

use std::time::{Duration, Instant};

use smddp_core::{Collective, DType, Error, Options, Pending};

use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{PROMPT_LIMIT, TIMEOUT};

/// Runs `body` in a forked child. A panic of the child fails the test.
fn forked(body: impl FnOnce()) {
    // SAFETY: the child uses nothing that other threads of the parent may have locked. glibc's allocator is
    // fork-safe, and the child exits with `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: exits immediately, without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut status = 0;
    // SAFETY: `pid` is a child of this process and `status` is valid.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > deadline {
            // SAFETY: a child of this process that is not yet reaped.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the forked child failed");
}

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    let job = |salt| Job::new(me.rank, me.size, Collective::AllReduce, 5000, 0, salt);
    let run_checked = |salt| {
        let mut job = job(salt);
        job.run(&comm).unwrap();
        job.check();
        let mut job = self::job_async(me, salt);
        let work = job.start(&comm).unwrap();
        work.wait(None).unwrap();
        job.check();
    };
    run_checked(1);
    let mut pending = job_async(me, 9);
    let work = if me.rank == 0 { Some(pending.start(&comm).unwrap()) } else { None };
    forked(|| {
        let begun = Instant::now();
        let is_forked = |outcome| matches!(outcome, Err(Error::Forked { .. }));
        assert!(is_forked(job(2).run(&comm)));
        assert!(is_forked(job(2).start(&comm).map(drop)));
        let data = [0f32; 4];
        // SAFETY: the call is rejected, so the buffer is not used.
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
        assert!(begun.elapsed() < PROMPT_LIMIT, "{:?}", begun.elapsed());
        // A group that the child creates works.
        let own = Pending::new("own", 0, 1, TIMEOUT).unwrap();
        let info = own.rank_info();
        let own = own.connect(&[info]).unwrap();
        let mut job = Job::new(0, 1, Collective::AllReduce, 10, 0, 0);
        job.run(&own).unwrap();
        job.check();
    });
    // The parent's group is unaffected. The other ranks join the pending call only now, so it was pending at the
    // fork.
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
    run_checked(3);
    // The drop of the child's last handle does not affect the parent either.
    let mut comm = Some(comm);
    let pid = {
        // SAFETY: as in `forked`; the child drops the inherited handle and exits with `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop(comm.take());
            // SAFETY: exits the child immediately.
            unsafe { libc::_exit(0) };
        }
        pid
    };
    let mut status = 0;
    let deadline = Instant::now() + TIMEOUT;
    // SAFETY: a child of this process.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        assert!(Instant::now() < deadline, "the child hangs while it drops the parent's group");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let comm = comm.unwrap();
    for salt in 0..5 {
        let mut job = job(salt);
        job.run(&comm).unwrap();
        job.check();
    }
    comm.close();
    me.report("done");
}

fn job_async(me: &RankProcess, salt: usize) -> Job {
    Job::new(me.rank, me.size, Collective::AllGather, 5000, 0, salt)
}

#[test]
fn forked_child_is_rejected_and_the_parents_group_is_unaffected() {
    let mut ranks = start("fork", 2, &[], 3 * TIMEOUT);
    ranks.wait_for(0, "done");
    ranks.wait_for(1, "done");
    ranks.finish([0, 1]);
}
