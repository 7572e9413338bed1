//! Registration of a wait by its thread, and the observations that keep it current.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::prober::{Task, enqueue};
use super::registry::registry;
use super::view::WaitEdges;
use crate::config::DeadlockAction;
use crate::engine::shared::SharedState;
use crate::sync::caller_threads;
use crate::sync::completion::Completion;

/// Signal checks before a wait is registered, and their interval.
const CHECKS_BEFORE: u32 = 4;
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which a process repeats the message about a confirmed cycle, which may be lost on a busy host.
const REPEAT_AFTER: Duration = Duration::from_secs(1);

/// Long wait of one thread. The first observations cost nothing.
#[derive(Default)]
pub(crate) struct WaitWatch {
    checks: u32,
    /// Number of the registered wait.
    id: Option<u64>,
}

impl WaitWatch {
    /// Records that the thread still waits for `work`. `has_limit`: for a limited time. Called at each signal check,
    /// without the engine. Returns true if it has owned the engine and released it without registering pending work.
    #[cold]
    pub(crate) fn observe(&mut self, group: &Arc<SharedState>, work: &Completion, has_limit: bool) -> bool {
        self.checks = self.checks.saturating_add(1);
        if self.checks < CHECKS_BEFORE || group.size < 2 {
            return false;
        }
        let now = Instant::now();
        let id = *self.id.get_or_insert_with(|| {
            caller_threads::add(std::thread::current().id());
            let has_edges = !has_limit && group.config.deadlock != DeadlockAction::Off;
            let id = registry().add(group, std::ptr::from_ref(work) as usize, has_edges, now);
            let since = now.checked_sub(CHECKS_BEFORE * CHECK_INTERVAL).unwrap_or(now);
            group.recorder.waited.begin(id, since);
            id
        });
        let has_owned = refresh(group, now);
        let mut registry = registry();
        let is_due = registry.observe(id, now);
        let is_late = registry.wait(id).is_some_and(|wait| {
            let confirmed = wait.confirmed.as_mut().filter(|_| !wait.is_ended);
            confirmed.is_some_and(|confirmed| {
                let is_late = now.saturating_duration_since(confirmed.since) >= REPEAT_AFTER;
                if is_late {
                    confirmed.since = now;
                }
                is_late
            })
        });
        drop(registry);
        if is_due {
            enqueue(Task::Probe(id));
        }
        if is_late {
            enqueue(Task::Repeat(id));
        }
        has_owned
    }
}

impl Drop for WaitWatch {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // Dropped after the lock is released.
            let wait = registry().remove(id);
            if let Some(wait) = wait {
                wait.group.recorder.waited.end(id);
            }
        }
    }
}

/// Updates the edges of all waits in the group, if no other thread owns the engine. Returns true if this thread has owned
/// it.
fn refresh(group: &Arc<SharedState>, now: Instant) -> bool {
    let (mut waits, mut contacts) = (Vec::new(), None);
    for wait in registry().waits_of(group) {
        waits.push((wait.id, wait.work, wait.has_edges));
        contacts = contacts.or_else(|| wait.contacts.clone());
    }
    let Some(mut engine) = group.try_own() else { return false };
    let observed = engine.guard(|engine| {
        engine.take_commands();
        for &(id, work, _) in &waits {
            if let Some(call) = engine.recorded_call(work) {
                group.recorder.waited.identify(id, call);
            }
        }
        let with_edges = waits.iter().filter(|(.., has_edges)| *has_edges);
        let edges: Vec<(u64, WaitEdges)> =
            with_edges.map(|&(id, work, _)| (id, engine.wait_edges(work, now))).collect();
        if edges.is_empty() {
            return None;
        }
        let rank = engine.names.describe(engine.names.me);
        // The addresses of all ranks, which do not change.
        let contacts = contacts.unwrap_or_else(|| Arc::new(engine.group.health().probe_contacts()));
        Some((edges, Arc::new(engine.group_view()), rank, contacts))
    });
    // The calling thread owns the engine again soon.
    let _ = engine.release_unregistered();
    if let Some((edges, view, rank, contacts)) = observed.flatten() {
        let mut registry = registry();
        for (id, edges) in edges {
            if let Some(wait) = registry.wait(id) {
                (wait.edges, wait.rank) = (edges, rank.clone());
                (wait.view, wait.contacts) = (Some((view.clone(), now)), Some(contacts.clone()));
            }
        }
    }
    true
}
