//! The progress thread. It polls the groups that have pending work and no waiting thread.
//!
//! The first asynchronous call that needs the thread creates it. A thread that waits for an operation owns that
//! group's engine itself; the progress thread then skips the group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smddp_base::fork::PerProcess;

use crate::engine::shared::SharedState;
use crate::engine::wait_plan::{SpinPolicy, WaitPlan, max_poll_interval};
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

fn progress() -> (MutexGuard<'static, Queue>, &'static Condvar) {
    let (state, changed) = PROGRESS.get();
    (lock(state), changed)
}

/// Makes the progress thread poll `comm` until nothing is pending there.
pub(crate) fn register(comm: &Arc<SharedState>) {
    let (mut state, changed) = progress();
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
    progress().0.running
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

fn run() {
    helpers::disable_helpers();
    set_default_float_mode();
    let mut comms: Vec<Arc<SharedState>> = Vec::new();
    let mut seen = 0;
    loop {
        {
            let (mut state, changed) = progress();
            loop {
                for comm in state.incoming.drain(..) {
                    if !comms.iter().any(|polled| Arc::ptr_eq(polled, &comm)) {
                        comms.push(comm);
                    }
                }
                if !comms.is_empty() {
                    break;
                }
                // Exit after an idle period; the next asynchronous call creates a new thread.
                let wakeups = state.wakeups;
                let (next, timed_out) = sleep(state, changed, &mut seen, Duration::from_secs(5));
                state = next;
                if timed_out && state.wakeups == wakeups && state.incoming.is_empty() {
                    state.running = false;
                    return;
                }
            }
        }
        // Dropping a group here also drops objects that its callers kept alive, which may panic. The calls of other
        // groups continue. A panic in an engine has failed its group before it could get here.
        let _ = catch_unwind(AssertUnwindSafe(|| poll_groups(&mut comms, &mut seen)));
    }
}

/// Polls until nothing is pending, or a group is registered.
fn poll_groups(comms: &mut Vec<Arc<SharedState>>, seen: &mut u64) {
    // Background thread: no spinning next to compute threads.
    let spin_policy = SpinPolicy::new(Some(Duration::ZERO), false);
    // A group of one rank has no doorbell to sleep on.
    let sleeper = comms.iter().map(|comm| &comm.sleeper).find(|sleeper| sleeper.can_sleep()).cloned();
    let mut wait = WaitPlan::new(&spin_policy, sleeper.as_ref());
    // True before a short sleep while only devices are pending: no message needs to end it, and no rank notifies this
    // thread.
    let mut about_to_rest = false;
    while !comms.is_empty() {
        let check_now = wait.check_due() || about_to_rest;
        let (mut moved, mut has_pending, mut only_devices) = (false, false, true);
        let (mut fds, mut at_most) = (Vec::new(), Duration::MAX);
        comms.retain(|comm| {
            let Some(mut engine) = comm.try_own() else {
                // The owner may release the engine before the next poll.
                at_most = at_most.min(OWNED_POLL_INTERVAL);
                return true;
            };
            let pending = comm.guard(&mut engine, |engine| {
                moved |= comm.poll(engine);
                if check_now {
                    let now = Instant::now();
                    comm.check(engine, now);
                    at_most =
                        at_most.min(engine.max_sleep(now)).min(max_poll_interval(&engine.group, &mut fds));
                }
                engine.group.flush();
                engine.pending()
            });
            // A group whose engine panicked has failed; only its report is pending.
            let pending = pending.unwrap_or(engine.is_failing());
            has_pending |= pending;
            engine.device_only = pending && engine.only_devices();
            only_devices &= engine.device_only || !pending;
            // Commands that arrived meanwhile are progress: the next poll takes them.
            let has_commands = engine.release_unregistered();
            moved |= has_commands;
            has_pending |= has_commands;
            pending || has_commands
        });
        if moved {
            wait.restart();
            if !check_now {
                continue;
            }
        }
        {
            let (state, changed) = progress();
            if !state.incoming.is_empty() {
                return;
            }
            if !has_pending || (about_to_rest && only_devices) || sleeper.is_none() {
                // Either waiting threads own all engines and register what they leave pending, or nothing arrives
                // from other ranks. A registration ends the sleep.
                let at_most =
                    if check_now && sleeper.is_none() { at_most } else { at_most.min(OWNED_POLL_INTERVAL) };
                drop(sleep(state, changed, seen, at_most));
                wait.withdraw();
                about_to_rest = sleeper.is_none();
                continue;
            }
            about_to_rest = only_devices;
            if only_devices {
                wait.withdraw();
                continue;
            }
        }
        if wait.is_announced() {
            wait.sleep(&fds, at_most, at_most);
            wait.restart();
        } else if !moved {
            wait.pause(|| {});
        }
    }
}
