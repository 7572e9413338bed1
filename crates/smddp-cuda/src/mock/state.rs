//! All that a world knows, behind one lock, and the checks.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, OnceLock};

use super::clock::Clock;
use super::memory;
use super::random::Random;
use super::report::{Fault, Operation, Report, Stall, WaitId, WaitSeen};
use super::shadow::{Access, Touch};
use super::space::{Had, Piece, Space};
use super::world::Script;
use crate::{Address, Element, Error, Fold, Result, reached};

/// No more than so many mistakes are told: a broken program makes the same one over and over.
const TOLD: usize = 200;

/// What a stream does.
#[derive(Debug)]
pub(super) enum Op {
    /// From, to.
    Copy(Vec<(Vec<Piece>, Vec<Piece>)>),
    Reduce {
        what: Folding,
        sources: Vec<Vec<Piece>>,
        to: Vec<Piece>,
    },
    WriteWord {
        word: Piece,
        value: u64,
    },
    WaitWord {
        word: Piece,
        value: u64,
        id: WaitId,
    },
    Record(Arc<OnceLock<Clock>>),
    WaitRecord {
        record: Arc<OnceLock<Clock>>,
        id: WaitId,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Folding {
    pub(super) element: Element,
    pub(super) fold: Fold,
    pub(super) divide: Option<u32>,
    pub(super) times: Option<f64>,
}

#[derive(Debug)]
pub(super) struct Queued {
    pub(super) op: Op,
    /// What the host knew.
    pub(super) order: Clock,
    pub(super) operation: Arc<Operation>,
}

#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) process: usize,
    pub(super) device: i32,
    /// Among the streams of its process.
    pub(super) number: usize,
    pub(super) actor: usize,
    pub(super) clock: Clock,
    pub(super) queue: VecDeque<Queued>,
    pub(super) executing: bool,
    pub(super) enqueued: u64,
    pub(super) done: u64,
    /// Ends when it is empty.
    pub(super) closing: bool,
    pub(super) capturing: bool,
    pub(super) waits: u64,
    pub(super) random: Random,
    pub(super) wake: Arc<Condvar>,
}

#[derive(Debug)]
pub(super) struct EventState {
    pub(super) process: usize,
    pub(super) device: i32,
    pub(super) record: Option<Arc<OnceLock<Clock>>>,
}

#[derive(Debug)]
pub(super) struct ProcessState {
    pub(super) name: String,
    pub(super) actor: usize,
    pub(super) clock: Clock,
    pub(super) operations: u64,
    pub(super) streams: usize,
    /// The default stream of each device.
    pub(super) defaults: HashMap<i32, u64>,
    pub(super) label: Option<String>,
    pub(super) random: Random,
    pub(super) killed: bool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) script: Script,
    pub(super) space: Space,
    pub(super) processes: Vec<ProcessState>,
    pub(super) streams: HashMap<u64, StreamState>,
    pub(super) events: HashMap<u64, EventState>,
    /// Views of each allocation by its process and first address: several where it is mapped in chunks.
    pub(super) segments: BTreeMap<(usize, Address), Vec<u64>>,
    /// Bytes allocated of each device, and pinned.
    pub(super) used: Vec<usize>,
    pub(super) pinned: usize,
    pub(super) actors: usize,
    /// What streams knew that are no more.
    pub(super) departed: Clock,
    pub(super) waits: BTreeMap<WaitId, WaitSeen>,
    pub(super) reports: Vec<Report>,
    pub(super) stalls: Vec<Stall>,
    told: BTreeSet<String>,
    pub(super) ended: bool,
}

/// A failed call of the driver.
pub(super) fn failed(call: &'static str, code: i32, name: &str) -> Error {
    Error::Driver { call, code, name: name.to_string(), advice: String::new() }
}

pub(super) fn invalid_value(call: &'static str) -> Error {
    failed(call, 1, "CUDA_ERROR_INVALID_VALUE")
}

impl State {
    pub(super) fn new(script: Script) -> Self {
        Self {
            used: vec![0; script.devices],
            script,
            space: Space::default(),
            processes: Vec::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            segments: BTreeMap::new(),
            pinned: 0,
            actors: 0,
            departed: Clock::default(),
            waits: BTreeMap::new(),
            reports: Vec::new(),
            stalls: Vec::new(),
            told: BTreeSet::new(),
            ended: false,
        }
    }

    pub(super) fn actor(&mut self) -> usize {
        self.actors += 1;
        self.actors - 1
    }

    pub(super) fn report(&mut self, fault: Fault, text: String, operations: Vec<Operation>) {
        let report = Report { fault, text, operations };
        // The same operations are told once, however many pieces they share.
        let key = format!("{fault:?} {:?}", report.operations);
        let key = if report.operations.is_empty() { report.to_string() } else { key };
        if self.reports.len() < TOLD && self.told.insert(key) {
            self.reports.push(report);
        }
    }

    /// An operation of the host of `process`.
    pub(super) fn host_operation(&mut self, process: usize, what: String) -> Operation {
        let host = &mut self.processes[process];
        host.operations += 1;
        let actor = format!("{}, host", host.name);
        Operation { actor, number: host.operations, what, label: host.label.clone() }
    }

    /// What the host knows, given away: what it does from now on is not part of it.
    pub(super) fn host_knows(&mut self, process: usize) -> Clock {
        let host = &mut self.processes[process];
        let clock = host.clock.clone();
        host.clock.tick(host.actor);
        clock
    }

    /// Bytes that the device will touch. Refuses, and reports, what the process does not have there.
    pub(super) fn resolve(
        &mut self,
        process: usize,
        device: i32,
        address: Address,
        bytes: usize,
        (call, operation): (&'static str, &Operation),
    ) -> Result<Vec<Piece>> {
        let Some(pieces) = self.space.resolve(process, address, bytes) else {
            let name = &self.processes[process].name;
            let (fault, why) = match self.space.find_closed(process, address) {
                Some(view) if matches!(view.had, Had::Imported { .. }) => (Fault::Closed, "was closed"),
                Some(_) => (Fault::Freed, "was freed"),
                None => (Fault::Unknown, "is not all memory that the device knows"),
            };
            let text = format!("what {name} has at {address:#x} ({bytes} bytes) {why}");
            self.report(fault, text, vec![operation.clone()]);
            return Err(invalid_value(call));
        };
        let far = pieces.iter().find_map(|piece| {
            let (_, of) = self.space.allocations.get(&piece.allocation)?.owner?;
            (of != device && self.script.unreachable.contains(&(device, of))).then_some(of)
        });
        if let Some(of) = far {
            let text = format!("device {device} does not reach device {of}'s memory at {address:#x}");
            self.report(Fault::Misuse, text, vec![operation.clone()]);
            return Err(failed(call, 700, "CUDA_ERROR_ILLEGAL_ADDRESS"));
        }
        Ok(pieces)
    }

    pub(super) fn resolve_word(
        &mut self,
        process: usize,
        device: i32,
        word: Address,
        (call, operation): (&'static str, &Operation),
    ) -> Result<Piece> {
        if !word.is_multiple_of(8) {
            return Err(invalid_value(call));
        }
        match self.resolve(process, device, word, 8, (call, operation))?.as_slice() {
            [piece] => Ok(*piece),
            _ => Err(invalid_value(call)),
        }
    }

    /// "64 bytes at offset 128 of rank 0's allocation 7 (Legacy, 4096 bytes)".
    fn place(&self, allocation: u64, offset: usize, bytes: usize) -> String {
        let Some(found) = self.space.allocations.get(&allocation) else { return "memory".into() };
        let owner = found
            .owner
            .map_or("registered".into(), |(process, _)| format!("{}'s", self.processes[process].name));
        format!(
            "{bytes} bytes at offset {offset} of {owner} allocation {allocation} ({:?}, {} bytes)",
            found.kind, found.bytes
        )
    }

    /// An actor that knows `clock` touches `pieces`, in its tick. False where it must not: the memory is gone.
    pub(super) fn touch(
        &mut self,
        pieces: &[Piece],
        touch: Touch,
        (actor, clock): (usize, &Clock),
        operation: &Arc<Operation>,
    ) -> bool {
        let tick = clock.of(actor);
        let access = Access { actor, tick, touch, poisoned: clock.poisoned, by: operation.clone() };
        let mut alive = true;
        for piece in pieces {
            if !self.space.alive(piece) {
                alive = false;
                let closed = self
                    .space
                    .views
                    .get(&piece.view)
                    .is_some_and(|view| !view.open && matches!(view.had, Had::Imported { .. }));
                let (fault, how) =
                    if closed { (Fault::Closed, "closing") } else { (Fault::Freed, "freeing") };
                let text = format!(
                    "nothing orders this before the {how} of {}",
                    self.place(piece.allocation, piece.offset, piece.bytes)
                );
                self.report(fault, text, vec![operation.as_ref().clone()]);
                continue;
            }
            if let Some(view) = self.space.views.get_mut(&piece.view) {
                view.uses.insert(actor, (tick, operation.clone()));
            }
            let Some(allocation) = self.space.allocations.get_mut(&piece.allocation) else { continue };
            let found = allocation.shadow.touch(piece.offset..piece.offset + piece.bytes, &access, clock);
            for (range, earlier) in found.races {
                let text = format!(
                    "nothing orders these two on {}",
                    self.place(piece.allocation, range.start, range.len())
                );
                let operations = vec![earlier.by.as_ref().clone(), operation.as_ref().clone()];
                self.report(Fault::Race, text, operations);
            }
            if let Some(range) = found.unwritten {
                let text = format!(
                    "nothing wrote what this reads, {}",
                    self.place(piece.allocation, range.start, range.len())
                );
                self.report(Fault::Unwritten, text, vec![operation.as_ref().clone()]);
            }
        }
        alive
    }

    /// The processor touches memory at `address`, if the device knows it.
    pub(super) fn host_touches(&mut self, process: usize, address: Address, bytes: usize, touch: Touch) {
        let Some(pieces) = self.space.resolve(process, address, bytes) else {
            let closed = self.space.find_closed(process, address).is_some_and(|view| view.had == Had::Own);
            if closed && self.space.find(process, address).is_none() {
                let operation =
                    self.host_operation(process, format!("{touch:?} of {bytes} bytes at {address:#x}"));
                self.report(Fault::Freed, "this was freed before".into(), vec![operation]);
            }
            return;
        };
        let operation = self.host_operation(process, format!("{touch:?} of {bytes} bytes at {address:#x}"));
        let host = &self.processes[process];
        let (actor, clock) = (host.actor, host.clock.clone());
        self.touch(&pieces, touch, (actor, &clock), &Arc::new(operation));
    }

    /// Reports parts of one operation (pieces, and whether they are written) that touch the same bytes, one of them
    /// writing: their order among themselves is free.
    pub(super) fn overlaps(&mut self, parts: &[(&[Piece], bool)], operation: &Operation) {
        let mut pieces: Vec<(u64, usize, usize, bool)> = parts
            .iter()
            .flat_map(|(pieces, writes)| {
                pieces
                    .iter()
                    .map(|piece| (piece.allocation, piece.offset, piece.offset + piece.bytes, *writes))
            })
            .collect();
        pieces.sort_unstable();
        for (k, &(allocation, _, end, writes)) in pieces.iter().enumerate() {
            let after = pieces[k + 1..].iter();
            let mut common = after.take_while(|next| next.0 == allocation && next.1 < end);
            if let Some(next) = common.find(|next| writes || next.3) {
                let place = self.place(allocation, next.1, end.min(next.2) - next.1);
                self.report(
                    Fault::Overlap,
                    format!("parts of this touch both {place}"),
                    vec![operation.clone()],
                );
                return;
            }
        }
    }

    /// Whether a stream can do this now.
    pub(super) fn ready(space: &mut Space, op: &Op) -> bool {
        match op {
            Op::WaitWord { word, value, .. } => {
                !space.alive(word)
                    || space
                        .allocations
                        .get_mut(&word.allocation)
                        .is_none_or(|allocation| allocation.word(word.offset).lets_through(*value).is_some())
            }
            Op::WaitRecord { record, .. } => record.get().is_some(),
            _ => true,
        }
    }

    /// Whether what lets the wait through has happened, or is enqueued at least.
    pub(super) fn will_pass(&mut self, wait: &Op) -> bool {
        if Self::ready(&mut self.space, wait) {
            return true;
        }
        // An event's record was enqueued before any wait for it.
        let Op::WaitWord { word, value, .. } = wait else { return true };
        is_enqueued(&self.streams, word, *value)
    }

    /// `process` makes a call that may be held until its streams on the device are empty.
    pub(super) fn may_stall(&mut self, process: usize, device: i32, call: &str) {
        let streams =
            self.streams.values().filter(|stream| (stream.process, stream.device) == (process, device));
        let queued = streams.flat_map(|stream| &stream.queue);
        let wait = queued.filter(|queued| !Self::ready(&mut self.space, &queued.op)).find(|queued| {
            match &queued.op {
                Op::WaitWord { word, value, .. } => !is_enqueued(&self.streams, word, *value),
                _ => false,
            }
        });
        let Some(wait) = wait.map(|wait| wait.operation.as_ref().clone()) else { return };
        if self.stalls.len() < TOLD {
            let call = self.host_operation(process, call.to_string());
            self.stalls.push(Stall { call, wait });
        }
    }

    /// Whether the stream has something that it can do now.
    pub(super) fn can_go(&mut self, stream: u64) -> bool {
        let head = self.streams.get(&stream).and_then(|stream| stream.queue.front());
        head.is_some_and(|head| Self::ready(&mut self.space, &head.op))
    }

    /// Wakes streams that can go on.
    pub(super) fn wake_ready(&mut self) {
        let ids: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| !stream.executing).map(|(id, _)| *id).collect();
        for id in ids {
            if self.can_go(id)
                && let Some(stream) = self.streams.get(&id)
            {
                stream.wake.notify_all();
            }
        }
    }

    /// Nothing goes on by itself: every stream is empty or waits for what no other stream is about to do.
    pub(super) fn quiet(&mut self) -> bool {
        let ids: Vec<u64> = self.streams.keys().copied().collect();
        ids.iter().all(|id| !self.streams.get(id).is_some_and(|stream| stream.executing) && !self.can_go(*id))
    }

    /// Reports the waits at which streams stand.
    pub(super) fn report_stuck(&mut self) {
        let mut heads: Vec<Operation> = self
            .streams
            .values()
            .filter_map(|stream| stream.queue.front())
            .filter(|head| matches!(head.op, Op::WaitWord { .. } | Op::WaitRecord { .. }))
            .map(|head| head.operation.as_ref().clone())
            .collect();
        heads.sort_by(|a, b| a.actor.cmp(&b.actor));
        for head in heads {
            self.report(Fault::Stuck, "this was never let through".into(), vec![head]);
        }
    }

    /// A word is written by an actor that knows `knows`.
    pub(super) fn write_word(&mut self, word: &Piece, value: u64, knows: Clock) {
        if let Some(allocation) = self.space.allocations.get_mut(&word.allocation) {
            // Whatever was written past the checker came before.
            allocation.word(word.offset);
            // SAFETY: a word of a live allocation: the caller has touched it just now, under the same lock.
            unsafe { memory::store(allocation.backing + word.offset, value) };
            if let Some(known) = allocation.words.get_mut(&word.offset) {
                known.write(value, Arc::new(knows));
            }
        }
        self.wake_ready();
    }
}

/// Whether a stream is going to write to the word what lets a wait for `value` through.
fn is_enqueued(streams: &HashMap<u64, StreamState>, word: &Piece, value: u64) -> bool {
    let place = (word.allocation, word.offset);
    streams.values().flat_map(|stream| &stream.queue).any(|queued| match &queued.op {
        Op::WriteWord { word, value: written } => {
            (word.allocation, word.offset) == place && reached(*written, value)
        }
        _ => false,
    })
}
