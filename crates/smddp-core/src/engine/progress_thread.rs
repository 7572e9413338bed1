//! The progress thread: it drives the communicators that have work under way and nobody waiting.
//!
//! It is made when the first asynchronous call needs it, and only then. A thread that waits for a work drives that
//! communicator itself; this thread then finds it taken and leaves it alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smddp_transport::fork::PerProcess;

use crate::engine::shared::SharedState;
use crate::engine::wait_plan::{AboutToSleep, Backoff, Rounds, SpinPolicy, longest};
use crate::kernels::float_mode::set_default_float_mode;
use crate::kernels::helpers;
use crate::sync::lock;

#[derive(Default)]
struct Queue {
    incoming: Vec<Arc<SharedState>>,
    running: bool,
    /// The thread sleeps until it is told of a change: telling it otherwise would be a system call for nothing.
    sleeps: bool,
    /// It looks again in a moment, told or not.
    rests: bool,
    wakeups: u64,
}

/// The thread's state, and what tells it of a change.
static PROGRESS: PerProcess<(Mutex<Queue>, Condvar)> = PerProcess::new();

fn progress() -> (MutexGuard<'static, Queue>, &'static Condvar) {
    let (state, changed) = PROGRESS.get();
    (lock(state), changed)
}

/// Has the progress thread look after `comm` until nothing is pending there.
pub(crate) fn register(comm: &Arc<SharedState>) {
    let (mut state, changed) = progress();
    state.wakeups += 1;
    if !state.incoming.iter().any(|c| Arc::ptr_eq(c, comm)) {
        state.incoming.push(comm.clone());
    }
    if !state.running {
        let spawned = std::thread::Builder::new().name("smddp-progress".to_owned()).spawn(run);
        // Without a thread, whoever waits still drives.
        state.running = spawned.is_ok();
    }
    if state.sleeps {
        changed.notify_all();
    } else if !state.rests {
        // It may sleep until something comes for other communicators, or until this one has more room to send.
        drop(state);
        comm.sleeper.notify_if_waiting();
    }
}

/// Returns whether the progress thread exists. It does wherever a call is pending that no thread waits for, unless the
/// process may not have another thread.
pub(crate) fn runs() -> bool {
    progress().0.running
}

/// Sleep of the progress thread after a registration. A caller that starts an operation and waits for it immediately drives it
/// itself; waking this thread for it would cost two system calls, and the caller's processor where both share one.
const REST: Duration = Duration::from_micros(50);

/// The thread's own sleep, whose end says whether it was as long as it could be. After a look before which somebody has registered,
/// `seen` being the registrations that it knew of, it is short, and nobody need end it.
fn sleep<'a>(
    mut state: MutexGuard<'a, Queue>,
    changed: &Condvar,
    seen: &mut u64,
    at_most: Duration,
) -> (MutexGuard<'a, Queue>, bool) {
    let rests = std::mem::replace(seen, state.wakeups) != state.wakeups;
    (state.rests, state.sleeps) = (rests, !rests);
    let at_most = if rests { at_most.min(REST) } else { at_most };
    let (mut state, timeout) = changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner);
    (state.rests, state.sleeps) = (false, false);
    (state, timeout.timed_out() && !rests)
}

/// Between two looks at groups that others drive.
const SOON: Duration = Duration::from_millis(2);

fn run() {
    helpers::stay_alone();
    set_default_float_mode();
    let mut comms: Vec<Arc<SharedState>> = Vec::new();
    let mut seen = 0;
    loop {
        {
            let (mut state, changed) = progress();
            loop {
                for comm in state.incoming.drain(..) {
                    if !comms.iter().any(|known| Arc::ptr_eq(known, &comm)) {
                        comms.push(comm);
                    }
                }
                if !comms.is_empty() {
                    break;
                }
                // Idle for a while: go; the next asynchronous call makes a new thread.
                let wakeups = state.wakeups;
                let (next, timed_out) = sleep(state, changed, &mut seen, Duration::from_secs(5));
                state = next;
                if timed_out && state.wakeups == wakeups && state.incoming.is_empty() {
                    state.running = false;
                    return;
                }
            }
        }
        // A group may be dropped here with what its callers wanted held, which is not ours and may panic: the others' calls
        // go on. Panics of a driver end its group before they get here.
        let _ = catch_unwind(AssertUnwindSafe(|| drive(&mut comms, &mut seen)));
    }
}

/// Drives until nothing is pending anywhere, or something new comes in.
fn drive(comms: &mut Vec<Arc<SharedState>>, seen: &mut u64) {
    // In the background: no spinning beside the threads that compute.
    let spin_policy = SpinPolicy::new(Some(Duration::ZERO), false);
    let mut backoff = Backoff::new(&spin_policy);
    // A group of one rank has no bell to sleep at.
    let sleeper = comms.iter().map(|comm| &comm.sleeper).find(|sleeper| sleeper.can_sleep()).cloned();
    let (mut rounds, mut about_to_sleep) = (Rounds::default(), None::<AboutToSleep<'_>>);
    // About to rest: devices alone have something to end, so no message need end the sleep, and nobody rings for one.
    let mut about_to_rest = false;
    while !comms.is_empty() {
        // The last look before sleeping, or other things go on and on.
        let late = about_to_sleep.is_some() || about_to_rest || rounds.due();
        let (mut moved, mut owned, mut only_devices) = (false, false, true);
        let (mut fds, mut at_most) = (Vec::new(), Duration::MAX);
        comms.retain(|comm| {
            let Some(mut engine) = comm.try_own() else {
                // Whoever has it may leave it to the next look.
                at_most = at_most.min(SOON);
                return true;
            };
            let pending = comm.guard(&mut engine, |engine| {
                moved |= comm.poll(engine);
                if late {
                    let now = Instant::now();
                    comm.examine(engine, now);
                    at_most = at_most.min(engine.max_sleep(now)).min(longest(&engine.group, &mut fds));
                }
                engine.group.flush();
                engine.pending() || comm.has_commands()
            });
            // One that panicked has nothing more to do.
            let pending = pending.unwrap_or(false);
            owned |= pending;
            engine.device_only = pending && engine.only_devices();
            only_devices &= engine.device_only || !pending;
            pending
        });
        if moved {
            backoff.reset();
            about_to_sleep = None;
            if !late {
                continue;
            }
        }
        {
            let (state, changed) = progress();
            if !state.incoming.is_empty() {
                return;
            }
            if !owned || (about_to_rest && only_devices) || sleeper.is_none() {
                // All groups are driven by waiters, which register what they leave behind, or nothing arrives from other ranks:
                // a registration ends the sleep.
                let at_most = if late && sleeper.is_none() { at_most } else { at_most.min(SOON) };
                drop(sleep(state, changed, seen, at_most));
                (about_to_sleep, about_to_rest) = (None, sleeper.is_none());
                continue;
            }
            about_to_rest = only_devices;
            if only_devices {
                about_to_sleep = None;
                continue;
            }
        }
        if let Some(about_to_sleep) = about_to_sleep.take() {
            about_to_sleep.sleep(&fds, at_most);
            backoff.reset();
        } else if !moved
            && backoff.wait()
            && let Some(sleeper) = &sleeper
        {
            about_to_sleep = Some(AboutToSleep::new(sleeper));
        }
    }
}
