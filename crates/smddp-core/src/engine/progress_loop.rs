//! The progress loop, of a waiting thread for its group, and of the progress thread for all registered groups.

use std::os::fd::RawFd;
use std::time::Duration;

use crate::engine::wait_limit::Limit;
use crate::engine::wait_plan::{Check, Pass, WaitPlan};
use crate::error::Result;

/// Longest sleep of a thread that waits in a group of one rank, which has no doorbell.
const LONE_SLEEP: Duration = Duration::from_micros(50);

/// Reason for the end of a loop.
pub(crate) enum Exit {
    /// The condition is met. Contains the outcome of its call.
    Reached(Result<()>),
    /// The caller has to act: the time is up, a signal check is due, the release of the engine completes calls, or a
    /// group was registered.
    Interrupted,
}

/// Groups that one loop advances: the group of a waiting thread, or all registered groups.
pub(crate) trait Groups {
    /// Runs one round of all steps, with failure checks if `check` is due. Does not block.
    fn pass(&mut self, check: Option<Check>, fds: &mut Vec<(RawFd, i16)>) -> Pass;
    /// Returns the reason to end the loop after a pass.
    fn exit(&self) -> Option<Exit>;
    /// Sleeps where no message has to end the sleep. No command ends it for a thread that waits in a group of one rank.
    fn rest(&mut self, at_most: Duration) {
        std::thread::sleep(at_most.min(LONE_SLEEP));
    }
}

/// Advances `groups` until they or `limit` end the loop. The only loop that waits for progress.
pub(crate) fn progress(groups: &mut impl Groups, limit: &mut Limit, wait: &mut WaitPlan<'_>) -> Exit {
    let mut fds = Vec::new();
    loop {
        let check = wait.check_due();
        fds.clear();
        let pass = groups.pass(check, &mut fds);
        if let Some(exit) = groups.exit() {
            return exit;
        }
        let mut at_most = pass.max_sleep;
        if let Some(Check { now, .. }) = check {
            if limit.has_expired(now) || limit.check_due(now) {
                return Exit::Interrupted;
            }
            at_most = at_most.min(limit.remaining(now));
        }
        if pass.moved {
            wait.restart();
        } else {
            wait.pause(&pass, &fds, at_most, |at_most| groups.rest(at_most));
        }
    }
}
