//! The thread that runs the callbacks of futures, and its shutdown when the interpreter exits.
//!
//! A core thread that completes a call may hold locks on which Python code would deadlock. Therefore it only queues the
//! callback, and a separate thread runs it. Python terminates threads that need the interpreter after its exit has begun.
//! Inside C++ frames, such as those of torch's futures, that aborts the process. Therefore no callback starts after [`stop`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use smddp_core::log::{self, Level};
use smddp_core::{PerProcess, lock};

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Py<PyAny>>,
    started: bool,
    running: bool,
    stopped: bool,
}

static CALLBACKS: PerProcess<(Mutex<Queue>, Condvar)> = PerProcess::new();

fn queue() -> (MutexGuard<'static, Queue>, &'static Condvar) {
    let (queue, changed) = CALLBACKS.get();
    (lock(queue), changed)
}

/// Starts the thread if it does not run. Returns false if callbacks do not run, since the interpreter exits or the process
/// cannot start a thread.
pub(crate) fn start() -> bool {
    let (mut queue, _) = queue();
    if !queue.started && !queue.stopped {
        match smddp_core::spawn("smddp-callbacks", run) {
            Ok(_) => queue.started = true,
            Err(error) => {
                log::say(Level::Warn, &format!("{error}; get_future() waits for its call meanwhile"))
            }
        }
    }
    queue.started && !queue.stopped
}

/// Queues a callback. Any thread may call this, with or without the GIL.
pub(crate) fn enqueue(callback: Py<PyAny>) {
    let (mut queue, changed) = queue();
    if queue.stopped {
        // The interpreter may have exited, so the reference count must not change.
        std::mem::forget(callback);
        return;
    }
    queue.waiting.push_back(callback);
    changed.notify_all();
}

fn run() {
    loop {
        let (mut queue, changed) = queue();
        queue.running = false;
        changed.notify_all();
        while queue.waiting.is_empty() && !queue.stopped {
            queue = changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let Some(callback) = queue.waiting.pop_front() else { return };
        queue.running = true;
        drop(queue);
        let ran = Python::try_attach(|py| {
            if let Err(error) = callback.call0(py) {
                error.write_unraisable(py, None);
            }
            drop(callback);
        });
        if ran.is_none() {
            return;
        }
    }
}

/// Waits at most `limit` for the queued callbacks, and starts none afterwards. Called without the GIL when the interpreter
/// exits.
pub(crate) fn stop(limit: Duration) {
    let until = Instant::now() + limit;
    let (mut queue, changed) = queue();
    while queue.started && (queue.running || !queue.waiting.is_empty()) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            log::say(
                Level::Warn,
                &format!(
                    "the interpreter exits while a callback of a future has run for more than {limit:?}; {} queued callbacks are dropped",
                    queue.waiting.len()
                ),
            );
            break;
        }
        queue = changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    queue.stopped = true;
    queue.waiting.drain(..).for_each(std::mem::forget);
    changed.notify_all();
}

/// The thread that exits the interpreter.
static EXITING: OnceLock<ThreadId> = OnceLock::new();

/// Makes [`block_during_exit`] block all threads other than the current one.
pub(crate) fn exit_here() {
    let _ = EXITING.set(std::thread::current().id());
}

/// Blocks a thread whose group was closed because the interpreter exits. If it returned to Python, Python would terminate
/// it, which aborts the process inside C++ frames. Only daemon threads still run at that time.
pub(crate) fn block_during_exit(py: Python<'_>) {
    if EXITING.get().is_some_and(|&exits| exits != std::thread::current().id()) {
        py.detach(|| {
            loop {
                std::thread::park();
            }
        });
    }
}
