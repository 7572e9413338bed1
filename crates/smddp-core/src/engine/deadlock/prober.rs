//! Thread that sends and forwards probes. It starts with the first probe and exits after [`IDLE_TIME`].

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use smddp_base::fork::PerProcess;
use smddp_group::ProbeContacts;

use super::registry::{Outgoing, registry};
use crate::config::DeadlockAction;
use crate::engine::shared::SharedState;
use crate::failure::deadlock::{Edge, Hop, MAX_PATH, Message, is_same_cycle, printable};
use crate::log::{self, Level};
use crate::sync::lock;

/// Maximum number of edges along which a process forwards a probe.
const MAX_EDGES: usize = 8;
/// Time limit of each step of a probe to another process.
const SEND_LIMIT: Duration = Duration::from_millis(300);
/// The same for a message about a confirmed cycle.
const RELAY_LIMIT: Duration = Duration::from_secs(1);
/// Minimum time between the two probes that confirm a cycle.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);
/// Time limit for the ownership of an engine whose group no thread waits in.
const OWN_LIMIT: Duration = Duration::from_millis(50);
/// Maximum number of repeated messages about a cycle. Then a process ends its wait without the other ones.
const MAX_REPEATS: u32 = 3;
/// Maximum number of waiting tasks. Further probes are dropped; their processes repeat them.
const MAX_TASKS: usize = 1024;
/// Idle time after which the thread exits.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// Task of the thread.
pub(super) enum Task {
    /// Send a probe for this wait.
    Probe(u64),
    /// Repeat the message about the confirmed cycle of this wait, or end the wait.
    Repeat(u64),
    /// Handle a message of another process.
    Received(Vec<u8>),
}

#[derive(Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    is_running: bool,
}

static TASKS: PerProcess<(Mutex<Tasks>, Condvar)> = PerProcess::new();

/// Registers a group for the probes of its other ranks.
pub(crate) fn register_group(group: &Arc<SharedState>) {
    if group.config.deadlock != DeadlockAction::Off && group.size > 1 {
        smddp_process::deadlock_probe::set_probe_receiver(receive);
        registry().add_group(group);
    }
}

/// Receives the content of a probe from the service thread.
fn receive(content: Vec<u8>) {
    enqueue(Task::Received(content));
}

/// Passes a task to the thread, and starts the thread if necessary. Without a thread, no deadlock is found.
pub(super) fn enqueue(task: Task) {
    let (tasks, changed) = TASKS.get();
    let mut tasks = lock(tasks);
    if tasks.waiting.len() >= MAX_TASKS {
        return;
    }
    tasks.waiting.push_back(task);
    if !tasks.is_running {
        tasks.is_running = smddp_base::threads::spawn("smddp-deadlock", run).is_ok();
    }
    changed.notify_all();
}

fn run() {
    let (tasks, changed) = TASKS.get();
    loop {
        let mut held = lock(tasks);
        if held.waiting.is_empty() {
            (held, _) = changed.wait_timeout(held, IDLE_TIME).unwrap_or_else(PoisonError::into_inner);
        }
        let Some(task) = held.waiting.pop_front() else {
            held.is_running = false;
            return;
        };
        drop(held);
        // A panic is a bug; its message is printed, and the next task continues.
        let _ = catch_unwind(AssertUnwindSafe(|| handle(task)));
    }
}

fn handle(task: Task) {
    match task {
        Task::Probe(wait) => start(wait),
        Task::Repeat(wait) => repeat(wait),
        Task::Received(content) => match Message::decode(&content) {
            Some(Message::Probe { round, path }) => continue_probe(round, &path),
            Some(Message::Confirmed { at, path }) => store(at, &path),
            Some(Message::End { at, path }) => end_at(at, &path),
            None => {}
        },
    }
}

/// Sends a probe along the edges of a wait of this process.
fn start(wait: u64) {
    let mut registry = registry();
    let Some(outgoing) = registry.outgoing(Instant::now()).filter(|outgoing| outgoing.wait == wait) else {
        return;
    };
    let Some(wait) = registry.wait(wait) else { return };
    wait.round += 1;
    let round = wait.round;
    drop(registry);
    forward(&outgoing, round, &[]);
}

/// Sends a probe with this path along the edges of this process. Different rounds begin with different edges.
fn forward(outgoing: &Outgoing, round: u64, path: &[Hop]) {
    let location = location(outgoing.wait);
    let skipped = usize::try_from(round).unwrap_or(0).wrapping_mul(MAX_EDGES) % outgoing.edges.len().max(1);
    let skipped = if outgoing.edges.len() > MAX_EDGES { skipped } else { 0 };
    for edge in outgoing.edges.iter().cycle().skip(skipped).take(outgoing.edges.len().min(MAX_EDGES)) {
        let hop = outgoing.hop(edge.clone(), location.clone());
        let path = [path, &[hop]].concat();
        // A process that does not reply is not blocked, or the next round finds it.
        let _ = send(&outgoing.contacts, edge.to, &Message::Probe { round, path }, SEND_LIMIT);
    }
}

fn send(contacts: &ProbeContacts, rank: usize, message: &Message, limit: Duration) -> std::io::Result<()> {
    contacts.send(rank, &message.encode().map_err(std::io::Error::other)?, limit)
}

/// Returns the Python line of a wait.
fn location(wait: u64) -> String {
    let known = registry().wait(wait).map(|wait| (wait.location.clone(), wait.thread_name.clone()));
    let Some((known, thread_name)) = known else { return String::new() };
    known.unwrap_or_else(|| {
        let frames = smddp_process::main_thread_location();
        let line = frames.split(" < ").next().unwrap_or_default();
        let text = match thread_name {
            None => line.to_owned(),
            Some(name) => format!("thread {name}, with the main thread at {line}"),
        };
        let text = printable(&text);
        if let Some(wait) = registry().wait(wait) {
            wait.location = Some(text.clone());
        }
        text
    })
}

/// Handles a probe whose last edge points to this process.
fn continue_probe(round: u64, path: &[Hop]) {
    let (Some(first), Some(last)) = (path.first(), path.last()) else { return };
    let mut held = registry();
    let me = held.process();
    let Some(outgoing) = held.outgoing(Instant::now()) else { return };
    let groups = held.groups(&last.edge.group, last.edge.to);
    drop(held);
    let blocks = groups.iter().any(|group| is_blocked(group, &last.edge, outgoing.since));
    // The sends below must not keep a destroyed group.
    drop(groups);
    if !blocks {
        return;
    }
    if first.process == me {
        // An edge to this process leads to another thread, which may not have made a call yet.
        if path.len() > 1 && outgoing.wait == first.wait && outgoing.edges.contains(&first.edge) {
            found(path);
        }
        return;
    }
    let is_inner_cycle = path.iter().any(|hop| hop.process == me);
    if !is_inner_cycle && path.len() < MAX_PATH && registry().remember(first, round) {
        forward(&outgoing, round, path);
    }
}

/// Returns true if rank `edge.from` waits for this process, which has not begun the awaited action. All threads of this process
/// have been blocked since `since`.
fn is_blocked(group: &Arc<SharedState>, edge: &Edge, since: Instant) -> bool {
    if edge.from >= group.size || edge.from == group.rank {
        return false;
    }
    let view = registry().waits_of(group).find_map(|wait| wait.view_since(since));
    if let Some(view) = view {
        return view.blocks(edge.from, &edge.needed);
    }
    let until = Instant::now() + OWN_LIMIT;
    loop {
        if let Some(mut engine) = group.try_own() {
            let view = engine.guard(|engine| {
                engine.take_commands();
                engine.is_running().then(|| engine.group_view())
            });
            return view.flatten().is_some_and(|view| view.blocks(edge.from, &edge.needed));
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Handles a cycle that begins at this process. The second probe with the same waits confirms it.
fn found(path: &[Hop]) {
    let now = Instant::now();
    let mut registry = registry();
    let Some(wait) = registry.wait_of(&path[0]).filter(|wait| wait.confirmed.is_none()) else { return };
    let known = wait.candidate.as_ref().filter(|(known, _)| is_same_cycle(known, path));
    match known {
        None => {
            wait.candidate = Some((path.to_vec(), now));
            wait.next_probe = now + CONFIRM_AFTER;
            return;
        }
        Some((_, since)) if now.saturating_duration_since(*since) < CONFIRM_AFTER => return,
        Some(_) => {}
    }
    registry.confirm(path, 0);
    drop(registry);
    relay(0, path, |at, path| Message::Confirmed { at, path });
}

/// Sends a message about a cycle from the process `path[at]`, which is this one, to the next one.
fn relay(at: usize, path: &[Hop], message: impl FnOnce(usize, Vec<Hop>) -> Message) {
    let Some(contacts) = registry().route(&path[at]) else { return };
    let next = (at + 1) % path.len();
    if let Err(error) = send(&contacts, path[at].edge.to, &message(next, path.to_vec()), RELAY_LIMIT) {
        let rank = &path[next].rank;
        log::say(Level::Info, &format!("cannot report a deadlock to {rank}: {error}"));
    }
}

/// Stores a confirmed cycle. Once all processes have stored it, the first one begins to end the waits.
fn store(at: usize, path: &[Hop]) {
    if at == 0 {
        end_at(0, path);
    } else if registry().confirm(path, at) {
        relay(at, path, |at, path| Message::Confirmed { at, path });
    }
}

/// Ends the wait of the process `path[at]`, which is this one. The next process is notified first, because this process may
/// exit with its error. A process that has not stored the cycle ignores the message.
fn end_at(at: usize, path: &[Hop]) {
    let hop = &path[at];
    if registry().route(hop).is_none() {
        return;
    }
    if at + 1 < path.len() {
        relay(at, path, |at, path| Message::End { at, path });
    }
    end(hop.wait);
}

/// Repeats the message about a confirmed cycle, because not all processes have stored it in time.
fn repeat(id: u64) {
    let mut held = registry();
    let Some(confirmed) = held.wait(id).and_then(|wait| wait.confirmed.as_mut()) else { return };
    confirmed.repeated += 1;
    let (is_last, at, path) = (confirmed.repeated > MAX_REPEATS, confirmed.at, confirmed.path.clone());
    drop(held);
    if is_last {
        end(id);
    } else {
        relay(at, &path, |at, path| Message::Confirmed { at, path });
    }
}

/// Ends a wait of a confirmed cycle with an error, or logs the cycle.
fn end(id: u64) {
    let mut registry = registry();
    let Some(wait) = registry.wait(id).filter(|wait| !wait.is_ended) else { return };
    let Some(error) = wait.error() else { return };
    wait.is_ended = true;
    let group = wait.group.clone();
    let text = wait.confirmed.as_ref().map(|confirmed| confirmed.text.clone()).unwrap_or_default();
    drop(registry);
    if group.config.deadlock == DeadlockAction::Error {
        group.abort(error);
    } else {
        // A thread without earlier calls or a callback may still make the awaited call.
        log::say(Level::Warn, &format!("possible {text}"));
    }
}
