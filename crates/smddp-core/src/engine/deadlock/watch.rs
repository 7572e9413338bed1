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

/// Signal checks, one every 100 ms, before a wait is registered.
const CHECKS_BEFORE: u32 = 4;
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
    /// Records that the thread still waits for `work`. Called at each signal check, without the engine. Returns true if it
    /// has owned the engine and released it without registering pending work.
    #[cold]
    pub(crate) fn observe(&mut self, group: &Arc<SharedState>, work: &Completion) -> bool {
        self.checks = self.checks.saturating_add(1);
        if self.checks < CHECKS_BEFORE || group.config.deadlock == DeadlockAction::Off || group.size < 2 {
            return false;
        }
        let now = Instant::now();
        let id = *self.id.get_or_insert_with(|| {
            caller_threads::add(std::thread::current().id());
            registry().add(group, std::ptr::from_ref(work) as usize, now)
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
            drop(wait);
        }
    }
}

/// Updates the edges of all waits in the group, if no other thread owns the engine. Returns true if this thread has owned
/// it.
fn refresh(group: &Arc<SharedState>, now: Instant) -> bool {
    let (mut waits, mut contacts) = (Vec::new(), None);
    for wait in registry().waits_of(group) {
        waits.push((wait.id, wait.work));
        contacts = contacts.or_else(|| wait.contacts.clone());
    }
    let Some(mut engine) = group.try_own() else { return false };
    let observed = engine.guard(|engine| {
        engine.take_commands();
        let edges: Vec<(u64, WaitEdges)> =
            waits.iter().map(|&(id, work)| (id, engine.wait_edges(work, now))).collect();
        let rank = engine.names.describe(engine.names.me);
        // The addresses of all ranks, which do not change.
        let contacts = contacts.unwrap_or_else(|| Arc::new(engine.group.health().probe_contacts()));
        (edges, Arc::new(engine.group_view()), rank, contacts)
    });
    // The calling thread owns the engine again soon.
    let _ = engine.release_unregistered();
    if let Some((edges, view, rank, contacts)) = observed {
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
