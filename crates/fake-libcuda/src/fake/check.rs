//! A *checked world*: the processes of a test are threads of one process, and every order between their accesses is
//! checked.
//!
//! The check does not depend on the actual timing. Each stream is an actor with a vector clock; all host threads of
//! one process together are another actor. A clock is joined with
//!
//! - the host's clock at the enqueue of an operation (host to stream);
//! - the clocks of earlier operations on the stream, and of an event that the stream waits for;
//! - for a wait on a word, the clock of the *first* write that satisfies it. The wait may have observed a later write,
//!   but nothing guarantees that;
//! - the stream's clock at `cuStreamSynchronize`, a completed event, or a word that the host reads with `fake_host`
//!   (stream to host).
//!
//! Two accesses to the same bytes, at least one of them a write, must be ordered by these clocks. Otherwise they are
//! reported as a race, for all delays. Lifetimes use the same order: every use must be ordered before the
//! call that frees, closes or unregisters the memory. Words are atomic, so their accesses do not race with each
//! other.
//!
//! Host threads of one process count as ordered among themselves, because locks and channels are not visible here.
//!
//! The world's lock is the innermost lock: no other lock is taken while it is held.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::clock::Clock;
use crate::history::reached;
use crate::operation::{Operation, Ticket};
use crate::views::{File, Allocation, View};
use crate::shadow::Touch;
use crate::state::*;
use crate::queue::Queue;

/// Maximum number of reports. A broken program repeats the same error.
const MAX_REPORTS: usize = 200;
/// Difference between the numbers of the first processes of consecutive worlds.
pub(crate) const PROCESSES: usize = 1000;

/// Process, stream (both in creation order) and number of a wait on its stream.
pub(crate) type WaitId = (usize, usize, u64);

/// Data of a stream operation besides the operation: the host's clock at the enqueue, and a description.
#[derive(Default)]
pub(crate) struct Order {
    host_clock: Clock,
    by: Arc<str>,
    number: u64,
    wait: Option<WaitId>,
    /// Set for the wait that the settings leave out.
    pub(crate) left_out: bool,
}

/// An operation that is enqueued and not yet complete.
enum Pending {
    Word { at: u64, place: Option<(File, usize)>, value: u64 },
    Event(Arc<Ticket>),
    Write { place: Option<(File, usize)>, value: u64 },
}

pub(crate) struct RecordedWait {
    pub(crate) description: Arc<str>,
    pub(crate) word: u64,
    /// No satisfying write was enqueued before the wait, so the stream blocks until a host enqueues one.
    pub(crate) early: bool,
    /// The wait orders nothing that was not ordered already. `None` until the wait is complete.
    pub(crate) redundant: Option<bool>,
}

struct Stream {
    rank: usize,
    number: usize,
    actor: usize,
    clock: Clock,
    enqueued: u64,
    done: u64,
    waits: u64,
    pending: BTreeMap<u64, (Pending, Arc<str>)>,
}

/// The host threads of one process.
pub(crate) struct Host {
    pub(crate) actor: usize,
    pub(crate) clock: Clock,
    operations: u64,
    streams: usize,
}

/// Actor that accesses memory, its clock, and the description of the operation.
pub(crate) type Accessor<'a> = (usize, &'a Clock, &'a Arc<str>);

#[derive(Default)]
pub(crate) struct World {
    hosts: Vec<Host>,
    /// By queue number.
    streams: BTreeMap<u64, Stream>,
    pub(crate) allocations: HashMap<File, Allocation>,
    /// By process and address.
    pub(crate) views: BTreeMap<(usize, u64), View>,
    actors: usize,
    pub(crate) waits: BTreeMap<WaitId, RecordedWait>,
    pub(crate) reports: Vec<String>,
    reported: BTreeSet<String>,
    /// Calls that a driver may block until the device is idle. They were made while a stream was in, or before, a wait
    /// that no enqueued operation satisfies.
    pub(crate) stalls: Vec<String>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// Number of the world's first process; 0 without a world.
static FIRST: AtomicUsize = AtomicUsize::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);

/// Passes the world, and the process's rank in it, to `f`. Returns `None` for a process outside the world.
pub(crate) fn with<T>(process: usize, f: impl FnOnce(&mut World, usize) -> T) -> Option<T> {
    let first = FIRST.load(SeqCst);
    if first == 0 || process < first {
        return None;
    }
    let mut world = lock(&WORLD);
    Some(f(world.get_or_insert_default(), process - first))
}

/// Like [`with`], for the calling process.
pub(crate) fn with_caller<T>(f: impl FnOnce(&mut World, usize) -> T) -> Option<T> {
    with(process(), f)
}

pub(crate) fn first() -> usize {
    FIRST.load(SeqCst)
}

/// Begins a world, which replaces the previous world.
pub(crate) fn begin() {
    FIRST.fetch_add(PROCESSES, SeqCst);
    *lock(&WORLD) = None;
    ENDED.store(false, SeqCst);
}

/// Returns true if the process belongs to a world that has ended. Its streams execute nothing more.
pub(crate) fn has_ended(process: usize) -> bool {
    let first = FIRST.load(SeqCst);
    process < first && process > 0 || process >= first && ENDED.load(SeqCst)
}

/// Delays a host thread at random at a driver call.
pub(crate) fn delay_at_random() {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    if first() > 0 {
        let drawn = (DRAWN.fetch_add(1, SeqCst) ^ settings().seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        match drawn % 16 {
            0 => std::thread::sleep(std::time::Duration::from_micros(drawn % 20)),
            1..8 => std::thread::yield_now(),
            _ => {}
        }
    }
}

/// Adds a queue. Returns its process and stream number in creation order.
pub(crate) fn add_stream(process: usize, queue: u64) -> Option<(usize, usize)> {
    with(process, |world, rank| {
        let (actor, host) = (world.actor(), world.host(rank));
        let number = host.streams;
        host.streams += 1;
        let (clock, pending) = (Clock::default(), BTreeMap::new());
        let stream = Stream { rank, number, actor, clock, enqueued: 0, done: 0, waits: 0, pending };
        world.streams.insert(queue, stream);
        (rank, number)
    })
}

/// Records an operation that the host enqueues.
pub(crate) fn enqueue(queue: &Queue, operation: &Operation) -> Option<Order> {
    with(queue.process, |world, rank| {
        let pending = match operation {
            Operation::Wait { word, value } => {
                Some(Pending::Word { at: *word, place: world.locate(rank, *word), value: *value })
            }
            Operation::Await(ticket) => Some(Pending::Event(ticket.clone())),
            Operation::Write { word, value } => {
                Some(Pending::Write { place: world.locate(rank, *word), value: *value })
            }
            _ => None,
        };
        let early = pending.as_ref().is_some_and(|pending| !world.will_pass(rank, pending));
        let host_clock = world.take_host_clock(rank);
        let stream = world.streams.get_mut(&queue.number)?;
        let number = stream.enqueued + 1;
        let by: Arc<str> =
            format!("rank {rank}, stream {}, operation {number}: {operation}", stream.number).into();
        let word = match pending {
            Some(Pending::Word { at, .. }) => Some(at),
            Some(Pending::Event(_)) => Some(0),
            _ => None,
        };
        let mut order = Order { host_clock, by: by.clone(), number, wait: None, left_out: false };
        if let Some(word) = word {
            let id = (rank, stream.number, stream.waits);
            stream.waits += 1;
            world.waits.insert(id, RecordedWait { description: by.clone(), word, early, redundant: None });
            (order.wait, order.left_out) = (Some(id), settings().drop_wait == Some(id));
        }
        if !order.left_out {
            stream.enqueued = number;
            stream.pending.extend(pending.map(|pending| (number, (pending, by))));
        }
        Some(order)
    })?
}

/// Records the execution of an operation that is not a wait. Returns true if it is complete: a word write is done
/// here.
pub(crate) fn execute(queue: &Queue, order: &Order, operation: &Operation) -> bool {
    let done = with(queue.process, |world, rank| {
        let Some((actor, clock)) = world.advance(queue, order) else { return false };
        let by = (actor, &clock, &order.by);
        match operation {
            Operation::Write { word, value } => {
                if world.touch(rank, (*word, 8), Touch::AtomicWrite, by) {
                    world.write_word(rank, *word, *value, clock);
                }
                return true;
            }
            Operation::Tick(ticket) => ticket.clock.set(clock).unwrap_or_default(),
            _ => {
                let parts = operation.parts();
                world.overlaps(rank, &parts, &order.by);
                for (at, bytes, writes) in parts {
                    world.touch(rank, (at, bytes), if writes { Touch::Write } else { Touch::Read }, by);
                }
            }
        }
        false
    });
    done.unwrap_or(false)
}

/// Completes a wait whose word had reached the value. Returns false if the word has decreased meanwhile.
pub(crate) fn complete_wait(queue: &Queue, order: &Order, word: u64, value: u64) -> bool {
    let passed = with(queue.process, |world, rank| {
        if world.load(rank, word).is_some_and(|found| !reached(found, value)) {
            return false;
        }
        let Some((actor, clock)) = world.advance(queue, order) else { return true };
        world.touch(rank, (word, 8), Touch::AtomicRead, (actor, &clock, &order.by));
        let learned = world.word(rank, word).and_then(|word| word.clock_for(value)).flatten();
        world.join_wait(queue, order, learned.as_ref());
        true
    });
    passed.unwrap_or(true)
}

/// Completes a stream's wait for an event.
pub(crate) fn complete_event_wait(queue: &Queue, order: &Order, ticket: &Ticket) {
    with(queue.process, |world, _| {
        if world.advance(queue, order).is_some() {
            world.join_wait(queue, order, ticket.clock.get());
        }
    });
}

/// Records that a stream completed or skipped an operation.
pub(crate) fn complete_operation(queue: &Queue, order: &Order) {
    with(queue.process, |world, _| {
        if let Some(stream) = world.streams.get_mut(&queue.number) {
            stream.done = order.number;
            stream.pending.remove(&order.number);
        }
    });
}

/// Records that the host observed the completion of all enqueued operations.
pub(crate) fn synchronized(queue: &Queue) {
    with(queue.process, |world, rank| {
        let Some(stream) = world.streams.get_mut(&queue.number) else { return };
        if stream.done == stream.enqueued {
            // Later operations are ordered, whatever completed the earlier waits.
            stream.clock.after_abort = false;
        }
        let known = stream.clock.clone();
        world.host(rank).clock.join_seen(&known);
    });
}

/// Records that the host observed the completion of an event.
pub(crate) fn observe_event(ticket: &Ticket) {
    with_caller(|world, rank| {
        if let Some(known) = ticket.clock.get() {
            world.host(rank).clock.join_seen(known);
        }
    });
}

/// Records a call that may block until the process's streams are empty.
pub(crate) fn may_stall(call: &str) {
    with_caller(|world, rank| {
        let streams = world.streams.values().filter(|stream| stream.rank == rank);
        let waits = streams.flat_map(|stream| stream.pending.values());
        let blocked =
            waits.filter(|(pending, _)| !world.will_pass(rank, pending)).map(|(_, by)| by.clone()).next();
        if let Some(by) = blocked.filter(|_| world.stalls.len() < MAX_REPORTS) {
            let call = world.host_operation(rank, call);
            world.stalls.push(format!("{call}\n    {by}"));
        }
    });
}

/// Records a driver call that failed.
pub(crate) fn record_failure(call: &'static str, code: i32) {
    use crate::numbers::CUDA_ERROR_INVALID_HANDLE;
    use crate::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
    let release_calls =
        ["cuMemFree", "cuMemFreeHost", "cuMemHostUnregister", "cuIpcCloseMemHandle", "cuMemUnmap"];
    let access_calls = ["cuMemcpyAsync", "cuStreamWaitValue64", "cuStreamWriteValue64", "cuStreamBatchMemOp"];
    let is = |names: &[&str]| names.contains(&call.trim_end_matches("_v2"));
    let (fault, why) = match code {
        CUDA_ERROR_INVALID_HANDLE => ("Misuse", "not a stream or event of this process, or already destroyed"),
        CUDA_ERROR_NOT_SUPPORTED if call.starts_with("cuStreamWrite") && settings().memops => {
            ("Misuse", "a stream cannot write words in another process's device memory")
        }
        _ if is(&release_calls) => {
            ("Misuse", "this process has no such memory at the address, or has already released it")
        }
        CUDA_ERROR_INVALID_VALUE if is(&access_calls) => ("Unknown", "some of the bytes are not memory of this process"),
        _ => return,
    };
    with_caller(|world, rank| {
        let operation = world.host_operation(rank, call);
        world.report(fault, why, &[&operation]);
    });
}

impl World {
    fn actor(&mut self) -> usize {
        self.actors += 1;
        self.actors - 1
    }

    pub(crate) fn host(&mut self, rank: usize) -> &mut Host {
        while self.hosts.len() <= rank {
            let (actor, mut clock) = (self.actor(), Clock::default());
            // Tick 0 is part of every clock.
            clock.tick(actor);
            self.hosts.push(Host { actor, clock, operations: 0, streams: 0 });
        }
        &mut self.hosts[rank]
    }

    /// Returns a copy of the host's clock and advances it. Later host accesses are not part of the copy.
    pub(crate) fn take_host_clock(&mut self, rank: usize) -> Clock {
        let host = self.host(rank);
        let clock = host.clock.clone();
        host.clock.tick(host.actor);
        clock
    }

    pub(crate) fn host_operation(&mut self, rank: usize, what: &str) -> Arc<str> {
        let host = self.host(rank);
        host.operations += 1;
        format!("rank {rank}, host, operation {}: {what}", host.operations).into()
    }

    pub(crate) fn report(&mut self, fault: &str, why: &str, operations: &[&str]) {
        // The same operations are reported once, even if they share several pieces.
        let key = format!("{fault} {operations:?}");
        if !ENDED.load(SeqCst) && self.reports.len() < MAX_REPORTS && self.reported.insert(key) {
            self.reports.push(format!("{fault}: {why}\n    {}", operations.join("\n    ")));
        }
    }

    /// Advances the stream to an operation. Returns the stream's actor and clock.
    fn advance(&mut self, queue: &Queue, order: &Order) -> Option<(usize, Clock)> {
        let stream = self.streams.get_mut(&queue.number)?;
        stream.clock.join(&order.host_clock);
        stream.clock.tick(stream.actor);
        Some((stream.actor, stream.clock.clone()))
    }

    /// Joins the stream's clock with the clock of a completed wait.
    fn join_wait(&mut self, queue: &Queue, order: &Order, learned: Option<&Clock>) {
        let Some(stream) = self.streams.get_mut(&queue.number) else { return };
        let new = learned.is_some_and(|learned| stream.clock.join(learned));
        if let Some(seen) = order.wait.and_then(|wait| self.waits.get_mut(&wait)) {
            seen.redundant = Some(!new);
        }
    }

    /// Returns true if the condition of a wait of the process is satisfied.
    fn is_passed(&self, rank: usize, wait: &Pending) -> bool {
        match wait {
            Pending::Word { at, value, .. } => {
                self.load(rank, *at).is_none_or(|found| reached(found, *value))
            }
            Pending::Event(ticket) => ticket.has_passed(),
            Pending::Write { .. } => true,
        }
    }

    /// Returns true if it is satisfied, or an enqueued write will satisfy it. (Event records precede their waits.)
    fn will_pass(&self, rank: usize, wait: &Pending) -> bool {
        let Pending::Word { place: word, value, .. } = wait else { return true };
        let mut pending = self.streams.values().flat_map(|stream| stream.pending.values());
        let satisfies = |(pending, _): &(Pending, _)| match pending {
            Pending::Write { place, value: written } => place == word && reached(*written, *value),
            _ => false,
        };
        self.is_passed(rank, wait) || pending.any(satisfies)
    }

    /// For each non-empty stream (of a process): the wait in which it is blocked, or `None` if it can continue.
    fn blocked(&self, of: Option<usize>) -> Vec<Option<Arc<str>>> {
        let ours = self.streams.values().filter(|stream| of.is_none_or(|rank| stream.rank == rank));
        let busy = ours.filter(|stream| stream.done < stream.enqueued);
        let blocked = |stream: &Stream| {
            let (pending, by) = stream.pending.get(&(stream.done + 1))?;
            (!self.is_passed(stream.rank, pending)).then(|| by.clone())
        };
        busy.map(blocked).collect()
    }

    /// Returns true if no stream (of a process) can continue.
    pub(crate) fn is_blocked(&self, of: Option<usize>) -> bool {
        !self.blocked(of).contains(&None)
    }

    /// If no stream can continue, orders all completed work before all later host accesses. Returns true in that
    /// case.
    pub(crate) fn settle(&mut self) -> bool {
        if !self.is_blocked(None) {
            return false;
        }
        let mut all = Clock::default();
        self.hosts.iter().for_each(|host| all.join_seen(&host.clock));
        self.streams.values().for_each(|stream| all.join_seen(&stream.clock));
        for host in &mut self.hosts {
            host.clock.join_seen(&all);
            host.clock.tick(host.actor);
        }
        true
    }

    /// Reports the waits in which streams are blocked.
    pub(crate) fn report_stuck(&mut self) {
        for by in self.blocked(None).into_iter().flatten() {
            self.report("Stuck", "this wait was never satisfied", &[&by]);
        }
    }

    /// Ends the checks.
    pub(crate) fn end(&mut self) {
        self.report_stuck();
        ENDED.store(true, SeqCst);
    }
}
