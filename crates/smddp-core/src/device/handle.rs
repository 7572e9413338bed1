//! What callers of any thread see of a group's site on one device.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_cuda::{Address, Device, Event, Result, Stream, Wait};
use smddp_plan::Memory;

use super::words::Words;
use crate::sync::lock;

/// An event of the handle's pool, which gets it back when nobody has it any more.
pub(crate) struct PooledEvent {
    handle: Arc<SiteHandle>,
    event: Event,
}

impl PooledEvent {
    pub(crate) fn event(&self) -> Event {
        self.event
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        lock(&self.handle.events).push(self.event);
    }
}

/// What all threads see of a site.
pub(crate) struct SiteHandle {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    /// Its number in the group; all ranks have the same.
    pub(crate) site: usize,
    pub(crate) memory: Memory,
    /// How messages go inside a node, and why, in words.
    pub(crate) path: String,
    pub(crate) words: ManuallyDrop<Words>,
    events: Mutex<Vec<Event>>,
    /// Behind waits for `done` on callers' streams: as long as one is not passed, the word has to stay.
    gates: Mutex<Vec<Event>>,
    /// Operations that were given a number.
    numbers: AtomicU64,
    /// The last one that mapped or allocated memory.
    learned: AtomicU64,
    /// Streams may stand at words that are written later.
    ahead: bool,
}

/// So many operations in a row that found all memory known: the next one will, too.
const SETTLED: u64 = 8;

/// A stream that is not empty after this time is left alone with what it uses.
const DRAIN: Duration = Duration::from_secs(2);

impl SiteHandle {
    pub(crate) fn new(
        device: Arc<Device>,
        (site, memory): (usize, Memory),
        path: String,
        words: Words,
        ahead: bool,
    ) -> Result<Arc<Self>> {
        let stream = device.create_stream()?;
        let words = ManuallyDrop::new(words);
        let (events, gates) = (Mutex::default(), Mutex::default());
        let (numbers, learned) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self {
            device,
            stream,
            site,
            memory,
            path,
            words,
            events,
            gates,
            numbers,
            learned,
            ahead,
        }))
    }

    /// A place in the order of `stream`.
    pub(crate) fn mark(self: &Arc<Self>, stream: Stream) -> Result<PooledEvent> {
        let pooled = lock(&self.events).pop();
        let event = pooled.map_or_else(|| self.device.create_event(), Ok)?;
        let mark = PooledEvent { handle: self.clone(), event };
        self.device.record(event, stream)?;
        Ok(mark)
    }

    /// The next operation's number, from 1. Called where submissions have an order.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Operation `number` mapped or allocated memory.
    pub(super) fn learns(&self, number: u64) {
        self.learned.fetch_max(number, Ordering::Relaxed);
    }

    /// Whether the host waits until all of operation `number` is enqueued, and no stream for a word that it is yet to write:
    /// where it may have to map or allocate memory, for which the driver may wait for all streams; or where what writes the
    /// word would come behind that stream.
    pub(crate) fn keeps_host(&self, number: u64) -> bool {
        !self.ahead || number <= self.learned.load(Ordering::Relaxed) + SETTLED
    }

    /// Whether the device is through with that operation, or all were released.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.words.reached(self.words.done(), number)
    }

    /// Whether a failure released everything.
    pub(crate) fn released(&self) -> bool {
        self.words.load(self.words.done()) >= super::words::POISON || self.words.released()
    }

    pub(super) fn done_word(&self) -> Address {
        self.words.done()
    }

    /// What comes next on `stream`, a caller's, is after operation `number`, not all of which is enqueued yet.
    pub(super) fn gate(&self, stream: Stream, number: u64) -> Result<()> {
        let mut gates = lock(&self.gates);
        let mut events = lock(&self.events);
        gates.retain(|&event| {
            let passed = self.device.passed(event).unwrap_or(false);
            if passed {
                events.push(event);
            }
            !passed
        });
        let event = events.pop().map_or_else(|| self.device.create_event(), Ok)?;
        gates.push(event);
        let wait = Wait { word: self.done_word(), value: number };
        // SAFETY: the word stays until the event behind the wait is passed; whoever waits is let go when the operation ends or
        // its group fails.
        unsafe { self.device.wait_words(stream, &[wait])? };
        self.device.record(event, stream)
    }

    /// Whether an event is passed, or is soon.
    fn passes(&self, event: Event, begun: Instant) -> bool {
        loop {
            match self.device.passed(event) {
                Ok(false) if begun.elapsed() < DRAIN => std::thread::sleep(Duration::from_micros(200)),
                passed => return matches!(passed, Ok(true)),
            }
        }
    }

    /// Whether no caller's stream waits for the word any more, or soon does not.
    fn gates_passed(&self) -> bool {
        let begun = Instant::now();
        let mut gates = lock(&self.gates);
        while let Some(&event) = gates.last().filter(|&&event| self.passes(event, begun)) {
            gates.pop();
            self.device.destroy_event(event);
        }
        gates.is_empty()
    }

    /// Whether the stream is empty, or becomes so soon.
    pub(super) fn drained(&self) -> bool {
        let Ok(event) = self.device.create_event() else { return false };
        let recorded = self.device.record(event, self.stream).is_ok();
        let passed = self.passes(event, Instant::now()) && recorded;
        self.device.destroy_event(event);
        passed
    }
}

impl Drop for SiteHandle {
    fn drop(&mut self) {
        if !self.drained() {
            return;
        }
        for event in lock(&self.events).drain(..) {
            self.device.destroy_event(event);
        }
        self.device.destroy_stream(self.stream);
        if self.gates_passed() {
            // SAFETY: dropped once, here; the stream that writes the words is empty, and nobody waits for them.
            unsafe { ManuallyDrop::drop(&mut self.words) };
        }
    }
}
