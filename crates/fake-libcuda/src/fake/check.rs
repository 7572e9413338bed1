//! A *checked world*: the processes of a test as threads of one, and every order among them checked.
//!
//! What is checked is not what happened to happen. Each stream, and the host threads of each process together, is an
//! actor with a vector clock, which learns
//!
//! - what the host did before it enqueued an operation (host to stream);
//! - what came before on the stream, or before an event that it waits for;
//! - from a wait for a word, what the *first* write that lets it through came after: a later one may be what it
//!   really saw, but nothing promises that;
//! - from `cuStreamSynchronize`, a passed event, or a word that the host reads by `fake_host` (stream to host).
//!
//! Two operations that touch the same bytes, one of which writes, must be ordered by that, or they are reported as a
//! race whatever the delays were. Lifetimes are held to the same order: every use is ordered before the call that frees
//! or closes memory, or makes it unknown. Words are atomic: they do not race among themselves.
//!
//! Host threads of one process count as ordered among themselves, by luck or not: locks and channels are not seen.
//!
//! The world's lock is the innermost: nothing else is locked while it is held.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::clock::Clock;
use crate::history::reached;
use crate::operation::{Operation, Ticket};
use crate::views::{File, Allocation, View};
use crate::shadow::Touch;
use crate::state::*;
use crate::streams::Queue;

/// No more than so many mistakes are told: a broken program makes the same one over and over.
const TOLD: usize = 200;
/// Between the numbers of the first processes of a world and the next.
pub(crate) const PROCESSES: usize = 1000;

/// A wait's process and stream, in the order in which they were made, and its number on the stream.
pub(crate) type WaitId = (usize, usize, u64);

/// What an operation on a stream has besides itself: what the host knew, and what it is called.
#[derive(Default)]
pub(crate) struct Order {
    knew: Clock,
    by: Arc<str>,
    number: u64,
    wait: Option<WaitId>,
    /// It is the wait that is left out.
    pub(crate) left_out: bool,
}

/// Enqueued, and not yet passed.
enum Pending {
    Word { at: u64, place: Option<(File, usize)>, value: u64 },
    Event(Arc<Ticket>),
    Write { place: Option<(File, usize)>, value: u64 },
}

pub(crate) struct Seen {
    pub(crate) what: Arc<str>,
    pub(crate) word: u64,
    /// When it was enqueued, nothing that lets it through had been: the stream stands until some host goes on.
    pub(crate) early: bool,
    /// Whether the stream knew already all that it could learn from it. `None` until the wait is passed.
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

/// A process's host threads.
pub(crate) struct Host {
    pub(crate) actor: usize,
    pub(crate) clock: Clock,
    operations: u64,
    streams: usize,
}

/// Who touches memory, what that one knows, and by what.
pub(crate) type By<'a> = (usize, &'a Clock, &'a Arc<str>);

#[derive(Default)]
pub(crate) struct World {
    hosts: Vec<Host>,
    /// By the numbers of their queues.
    streams: BTreeMap<u64, Stream>,
    pub(crate) allocations: HashMap<File, Allocation>,
    /// By process and address.
    pub(crate) views: BTreeMap<(usize, u64), View>,
    actors: usize,
    pub(crate) waits: BTreeMap<WaitId, Seen>,
    pub(crate) reports: Vec<String>,
    told: BTreeSet<String>,
    /// Calls that a driver may hold until the device is idle, made while a stream stood, or would come to stand, at a wait
    /// that nothing enqueued so far lets through.
    pub(crate) stalls: Vec<String>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// The number of the world's first process; 0 where there is no world.
static FIRST: AtomicUsize = AtomicUsize::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);

/// The world, if the process is one of its own, and the process's place in it.
pub(crate) fn with<T>(process: usize, f: impl FnOnce(&mut World, usize) -> T) -> Option<T> {
    let first = FIRST.load(SeqCst);
    if first == 0 || process < first {
        return None;
    }
    let mut world = lock(&WORLD);
    Some(f(world.get_or_insert_default(), process - first))
}

/// As [`with`], of the process that calls.
pub(crate) fn here<T>(f: impl FnOnce(&mut World, usize) -> T) -> Option<T> {
    with(process(), f)
}

pub(crate) fn first() -> usize {
    FIRST.load(SeqCst)
}

/// Begins a world in place of the one before.
pub(crate) fn begin() {
    FIRST.fetch_add(PROCESSES, SeqCst);
    *lock(&WORLD) = None;
    ENDED.store(false, SeqCst);
}

/// Whether the process is of a world that has ended: its streams do no more.
pub(crate) fn over(process: usize) -> bool {
    let first = FIRST.load(SeqCst);
    process < first && process > 0 || process >= first && ENDED.load(SeqCst)
}

/// Lets a host thread be interrupted where it calls the driver.
pub(crate) fn shake() {
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

/// A queue begins: (process, stream) in the order of their making.
pub(crate) fn stream(process: usize, queue: u64) -> Option<(usize, usize)> {
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

/// The host enqueues something.
pub(crate) fn enqueued(queue: &Queue, operation: &Operation) -> Option<Order> {
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
        let knew = world.host_knows(rank);
        let stream = world.streams.get_mut(&queue.number)?;
        let number = stream.enqueued + 1;
        let by: Arc<str> =
            format!("rank {rank}, stream {}, operation {number}: {operation}", stream.number).into();
        let word = match pending {
            Some(Pending::Word { at, .. }) => Some(at),
            Some(Pending::Event(_)) => Some(0),
            _ => None,
        };
        let mut order = Order { knew, by: by.clone(), number, wait: None, left_out: false };
        if let Some(word) = word {
            let id = (rank, stream.number, stream.waits);
            stream.waits += 1;
            world.waits.insert(id, Seen { what: by.clone(), word, early, redundant: None });
            (order.wait, order.left_out) = (Some(id), settings().drop_wait == Some(id));
        }
        if !order.left_out {
            stream.enqueued = number;
            stream.pending.extend(pending.map(|pending| (number, (pending, by))));
        }
        Some(order)
    })?
}

/// A stream does an operation that is no wait. True where that is all of it: a word is written with its history.
pub(crate) fn does(queue: &Queue, order: &Order, operation: &Operation) -> bool {
    let done = with(queue.process, |world, rank| {
        let Some((actor, clock)) = world.comes_to(queue, order) else { return false };
        let by = (actor, &clock, &order.by);
        match operation {
            Operation::Write { word, value } => {
                if world.touch(rank, (*word, 8), Touch::AtomicWrite, by) {
                    world.write_word(rank, *word, *value, clock);
                }
                return true;
            }
            Operation::Tick(ticket) => ticket.knows.set(clock).unwrap_or_default(),
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

/// A stream that waits for a word found that it had reached the value. False where it fell again before it was looked at.
pub(crate) fn passes(queue: &Queue, order: &Order, word: u64, value: u64) -> bool {
    let passed = with(queue.process, |world, rank| {
        if world.load(rank, word).is_some_and(|found| !reached(found, value)) {
            return false;
        }
        let Some((actor, clock)) = world.comes_to(queue, order) else { return true };
        world.touch(rank, (word, 8), Touch::AtomicRead, (actor, &clock, &order.by));
        let learned = world.word(rank, word).and_then(|word| word.lets_through(value)).flatten();
        world.learns(queue, order, learned.as_ref());
        true
    });
    passed.unwrap_or(true)
}

/// A stream passed an event.
pub(crate) fn passed(queue: &Queue, order: &Order, ticket: &Ticket) {
    with(queue.process, |world, _| {
        if world.comes_to(queue, order).is_some() {
            world.learns(queue, order, ticket.knows.get());
        }
    });
}

/// A stream is through with an operation, or skipped it.
pub(crate) fn done(queue: &Queue, order: &Order) {
    with(queue.process, |world, _| {
        if let Some(stream) = world.streams.get_mut(&queue.number) {
            stream.done = order.number;
            stream.pending.remove(&order.number);
        }
    });
}

/// The host saw that all enqueued so far is over.
pub(crate) fn synchronized(queue: &Queue) {
    with(queue.process, |world, rank| {
        let Some(stream) = world.streams.get_mut(&queue.number) else { return };
        if stream.done == stream.enqueued {
            // Whatever ended its waits, what comes now comes after.
            stream.clock.poisoned = false;
        }
        let known = stream.clock.clone();
        world.host(rank).clock.join_seen(&known);
    });
}

/// The host saw that an event has passed.
pub(crate) fn saw(ticket: &Ticket) {
    here(|world, rank| {
        if let Some(known) = ticket.knows.get() {
            world.host(rank).clock.join_seen(known);
        }
    });
}

/// A call that may be held until the process's streams are empty.
pub(crate) fn may_stall(call: &str) {
    here(|world, rank| {
        let streams = world.streams.values().filter(|stream| stream.rank == rank);
        let waits = streams.flat_map(|stream| stream.pending.values());
        let stands =
            waits.filter(|(pending, _)| !world.will_pass(rank, pending)).map(|(_, by)| by.clone()).next();
        if let Some(by) = stands.filter(|_| world.stalls.len() < TOLD) {
            let call = world.host_operation(rank, call);
            world.stalls.push(format!("{call}\n    {by}"));
        }
    });
}

/// The driver refused a call.
pub(crate) fn refused(call: &'static str, code: i32) {
    use crate::numbers::CUDA_ERROR_INVALID_HANDLE;
    use crate::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
    let gives_back =
        ["cuMemFree", "cuMemFreeHost", "cuMemHostUnregister", "cuIpcCloseMemHandle", "cuMemUnmap"];
    let touches = ["cuMemcpyAsync", "cuStreamWaitValue64", "cuStreamWriteValue64", "cuStreamBatchMemOp"];
    let is = |names: &[&str]| names.contains(&call.trim_end_matches("_v2"));
    let (fault, why) = match code {
        CUDA_ERROR_INVALID_HANDLE => ("Misuse", "no stream or event of this process, or one destroyed"),
        CUDA_ERROR_NOT_SUPPORTED if call.starts_with("cuStreamWrite") && settings().memops => {
            ("Misuse", "streams write no words of another process's device memory")
        }
        _ if is(&gives_back) => {
            ("Misuse", "this process has nothing of this kind there, or gave it back before")
        }
        CUDA_ERROR_INVALID_VALUE if is(&touches) => ("Unknown", "not all of this is memory of this process"),
        _ => return,
    };
    here(|world, rank| {
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
            // Tick 0 is what everybody knows.
            clock.tick(actor);
            self.hosts.push(Host { actor, clock, operations: 0, streams: 0 });
        }
        &mut self.hosts[rank]
    }

    /// What the host knows, given away: what it does from now on is not part of it.
    pub(crate) fn host_knows(&mut self, rank: usize) -> Clock {
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
        // The same operations are told once, however many pieces they share.
        let key = format!("{fault} {operations:?}");
        if !ENDED.load(SeqCst) && self.reports.len() < TOLD && self.told.insert(key) {
            self.reports.push(format!("{fault}: {why}\n    {}", operations.join("\n    ")));
        }
    }

    /// The stream comes to an operation: who it is, and what it knows.
    fn comes_to(&mut self, queue: &Queue, order: &Order) -> Option<(usize, Clock)> {
        let stream = self.streams.get_mut(&queue.number)?;
        stream.clock.join(&order.knew);
        stream.clock.tick(stream.actor);
        Some((stream.actor, stream.clock.clone()))
    }

    /// The stream is past a wait.
    fn learns(&mut self, queue: &Queue, order: &Order, learned: Option<&Clock>) {
        let Some(stream) = self.streams.get_mut(&queue.number) else { return };
        let new = learned.is_some_and(|learned| stream.clock.join(learned));
        if let Some(seen) = order.wait.and_then(|wait| self.waits.get_mut(&wait)) {
            seen.redundant = Some(!new);
        }
    }

    /// Whether what lets a wait of the process through has happened.
    fn is_passed(&self, rank: usize, wait: &Pending) -> bool {
        match wait {
            Pending::Word { at, value, .. } => {
                self.load(rank, *at).is_none_or(|found| reached(found, *value))
            }
            Pending::Event(ticket) => ticket.has_passed(),
            Pending::Write { .. } => true,
        }
    }

    /// The same, or is enqueued at least. (An event's record was enqueued before any wait for it.)
    fn will_pass(&self, rank: usize, wait: &Pending) -> bool {
        let Pending::Word { place: word, value, .. } = wait else { return true };
        let mut pending = self.streams.values().flat_map(|stream| stream.pending.values());
        let lets = |(pending, _): &(Pending, _)| match pending {
            Pending::Write { place, value: written } => place == word && reached(*written, *value),
            _ => false,
        };
        self.is_passed(rank, wait) || pending.any(lets)
    }

    /// For each stream (of a process) that is not empty: the wait at which it stands, if it does not go on by itself.
    fn standing(&self, of: Option<usize>) -> Vec<Option<Arc<str>>> {
        let ours = self.streams.values().filter(|stream| of.is_none_or(|rank| stream.rank == rank));
        let busy = ours.filter(|stream| stream.done < stream.enqueued);
        let stands = |stream: &Stream| {
            let (pending, by) = stream.pending.get(&(stream.done + 1))?;
            (!self.is_passed(stream.rank, pending)).then(|| by.clone())
        };
        busy.map(stands).collect()
    }

    /// Whether no stream (of a process) goes on by itself.
    pub(crate) fn rests(&self, of: Option<usize>) -> bool {
        !self.standing(of).contains(&None)
    }

    /// If nothing goes on by itself, orders all that was done before all that hosts do from now on.
    pub(crate) fn settles(&mut self) -> bool {
        if !self.rests(None) {
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

    /// Reports the waits at which streams stand.
    pub(crate) fn report_stuck(&mut self) {
        for by in self.standing(None).into_iter().flatten() {
            self.report("Stuck", "this was never let through", &[&by]);
        }
    }

    /// Nothing is checked any more.
    pub(crate) fn end(&mut self) {
        self.report_stuck();
        ENDED.store(true, SeqCst);
    }
}
