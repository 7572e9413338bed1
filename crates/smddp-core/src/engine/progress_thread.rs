//! The progress thread. It polls the groups that have pending work and no waiting thread.
//!
//! The first asynchronous call that needs the thread creates it. A thread that waits for an operation owns that
//! group's engine itself; the progress thread then skips the group.

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smddp_base::fork::PerProcess;

use crate::engine::progress_loop::{Exit, Groups, progress};
use crate::engine::shared::SharedState;
use crate::engine::wait_limit::Limit;
use crate::engine::wait_plan::{Check, Pass, SpinPolicy, WaitPlan};
use crate::kernels::float_mode::set_default_float_mode;
use crate::kernels::helpers;
use crate::sync::lock;

#[derive(Default)]
struct Queue {
    incoming: Vec<Arc<SharedState>>,
    running: bool,
    /// True while the thread sleeps until it is notified. Without it a notification would be a needless system
    /// call.
    is_sleeping: bool,
    /// True while the thread sleeps for `REST` at most, so no notification is needed.
    is_resting: bool,
    wakeups: u64,
}

/// State of the thread, and the condition that signals a change.
static PROGRESS: PerProcess<(Mutex<Queue>, Condvar)> = PerProcess::new();

fn progress_queue() -> (MutexGuard<'static, Queue>, &'static Condvar) {
    let (state, changed) = PROGRESS.get();
    (lock(state), changed)
}

/// Makes the progress thread poll `comm` until nothing is pending there.
pub(crate) fn register(comm: &Arc<SharedState>) {
    let (mut state, changed) = progress_queue();
    state.wakeups += 1;
    if !state.incoming.iter().any(|c| Arc::ptr_eq(c, comm)) {
        state.incoming.push(comm.clone());
    }
    if !state.running {
        let spawned = std::thread::Builder::new().name("smddp-progress".to_owned()).spawn(run);
        // Without the thread, waiting threads still poll.
        state.running = spawned.is_ok();
    }
    if state.is_sleeping {
        changed.notify_all();
    } else if !state.is_resting {
        // The thread may sleep until another group receives data, or until this one has more space to send.
        drop(state);
        comm.sleeper.notify_if_waiting();
    }
}

/// Returns true if the progress thread exists. It exists wherever a call is pending that no thread waits for,
/// unless the process cannot create another thread.
pub(crate) fn runs() -> bool {
    progress_queue().0.running
}

/// Sleep of the progress thread after a registration. A caller that starts an operation and immediately waits for
/// it polls on its own thread. Waking this thread would cost two system calls, and the caller's processor if both share
/// one.
const REST: Duration = Duration::from_micros(50);

/// Sleeps until a change. Returns true if the sleep lasted its full time. If a group was registered since `seen`
/// registrations, the sleep lasts `REST` at most and needs no notification.
fn sleep<'a>(
    mut state: MutexGuard<'a, Queue>,
    changed: &Condvar,
    seen: &mut u64,
    at_most: Duration,
) -> (MutexGuard<'a, Queue>, bool) {
    let is_resting = std::mem::replace(seen, state.wakeups) != state.wakeups;
    (state.is_resting, state.is_sleeping) = (is_resting, !is_resting);
    let at_most = if is_resting { at_most.min(REST) } else { at_most };
    let (mut state, timeout) = changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner);
    (state.is_resting, state.is_sleeping) = (false, false);
    (state, timeout.timed_out() && !is_resting)
}

/// Interval between two polls of groups that other threads own.
const OWNED_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Idle time after which the thread exits. The next asynchronous call creates a new one.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// The registered groups.
#[derive(Default)]
struct Registered {
    groups: Vec<Arc<SharedState>>,
    /// Registrations before the last sleep.
    seen: u64,
    /// Nothing is pending, or a group was registered.
    is_over: bool,
}

impl Registered {
    /// Takes new groups, and waits for one if there is none. Returns false after [`IDLE_TIME`].
    fn collect(&mut self) -> bool {
        let (mut state, changed) = progress_queue();
        if self.groups.is_empty() && state.incoming.is_empty() {
            let timed_out;
            (state, timed_out) = sleep(state, changed, &mut self.seen, IDLE_TIME);
            state.running = !timed_out || !state.incoming.is_empty();
        }
        for group in state.incoming.drain(..) {
            if !self.groups.iter().any(|polled| Arc::ptr_eq(polled, &group)) {
                self.groups.push(group);
            }
        }
        state.running
    }
}

impl Groups for Registered {
    fn pass(&mut self, check: Option<Check>, fds: &mut Vec<(RawFd, i16)>) -> Pass {
        let mut all = Pass::EMPTY;
        self.groups.retain(|group| {
            let Some(mut engine) = group.try_own() else {
                // The owner registers what it leaves pending.
                all.max_sleep = all.max_sleep.min(OWNED_POLL_INTERVAL);
                return true;
            };
            let pass = engine.pass(check, fds);
            let pending = engine.pending();
            engine.device_only = pending && engine.only_devices();
            all.rests &= engine.device_only || !pending;
            // Commands that arrived meanwhile are progress: the next pass takes them.
            let has_commands = engine.release_unregistered();
            all.moved |= pass.moved || has_commands;
            all.poll_interval = all.poll_interval.min(pass.poll_interval);
            all.max_sleep = all.max_sleep.min(pass.max_sleep);
            pending || has_commands
        });
        let has_time = !all.moved || check.is_some();
        self.is_over = self.groups.is_empty() || has_time && !progress_queue().0.incoming.is_empty();
        all
    }

    fn exit(&self) -> Option<Exit> {
        self.is_over.then_some(Exit::Interrupted)
    }

    /// Sleeps until a registration. Other ranks do not notify this thread meanwhile.
    fn rest(&mut self, at_most: Duration) {
        let (state, changed) = progress_queue();
        if state.incoming.is_empty() {
            drop(sleep(state, changed, &mut self.seen, at_most));
        }
    }
}

fn run() {
    helpers::disable_helpers();
    set_default_float_mode();
    // Background thread: no spinning next to compute threads.
    let spin_policy = SpinPolicy::new(Some(Duration::ZERO), false);
    let mut registered = Registered::default();
    while registered.collect() {
        let mut sleepers = registered.groups.iter().map(|group| &group.sleeper);
        // A group of one rank has no doorbell to sleep on.
        let sleeper = sleepers.find(|sleeper| sleeper.can_sleep()).cloned();
        let mut wait = WaitPlan::new(&spin_policy, sleeper.as_ref());
        // Dropping a group here also drops objects that its callers kept alive, which may panic. The calls of other
        // groups continue. A panic in an engine has failed its group before it could get here.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            progress(&mut registered, &mut Limit::uninterrupted(None), &mut wait)
        }));
    }
}
