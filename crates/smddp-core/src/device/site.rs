//! A group's site on one device: its stream, its words, and the memory it works with.
//!
//! The [`Lobby`] is what callers of any thread see of it; the [`Site`] is the driver's.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_cuda::{Address, Copy, Device, Event, Reduction, Result, Stream, Wait};
use smddp_transport::Board;

use super::Place;
use super::bounce::Bounce;
use super::regions::{Mapping, Regions};
use super::words::Words;
use crate::comm::lock;

/// An event of the lobby's pool, which gets it back when nobody has it any more.
pub(crate) struct Mark {
    lobby: Arc<Lobby>,
    event: Event,
}

impl Mark {
    pub(crate) fn event(&self) -> Event {
        self.event
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.lobby.events).push(self.event);
    }
}

/// What all threads see of a site.
pub(crate) struct Lobby {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) place: Place,
    /// How messages go inside a node, and why, in words.
    pub(crate) path: String,
    pub(super) words: ManuallyDrop<Words>,
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

/// Whether all streams of a device share one queue of the hardware, as programs wish that lay computing over communication:
/// a stream that waits there for a word holds up the one that is to write it.
fn in_turn() -> bool {
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|text| text.trim() == "1")
}

/// So many operations in a row that found all memory known: the next one will, too.
const SETTLED: u64 = 8;

/// A stream that is not empty after this time is left alone with what it uses.
const DRAIN: Duration = Duration::from_secs(2);

impl Lobby {
    pub(super) fn new(
        device: Arc<Device>,
        place: Place,
        path: String,
        words: Words,
        ahead: bool,
    ) -> Result<Arc<Self>> {
        let stream = device.create_stream()?;
        let words = ManuallyDrop::new(words);
        let (events, gates) = (Mutex::default(), Mutex::default());
        let (numbers, learned) = (AtomicU64::new(0), AtomicU64::new(0));
        let ahead = ahead && !in_turn();
        Ok(Arc::new(Self { device, stream, place, path, words, events, gates, numbers, learned, ahead }))
    }

    /// A place in the order of `stream`.
    pub(crate) fn mark(self: &Arc<Self>, stream: Stream) -> Result<Mark> {
        let pooled = lock(&self.events).pop();
        let event = pooled.map_or_else(|| self.device.create_event(), Ok)?;
        let mark = Mark { lobby: self.clone(), event };
        self.device.record(event, stream)?;
        Ok(mark)
    }

    /// The next operation's number, from 1. Called where submissions have an order.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Operation `number` mapped or allocated memory.
    fn learns(&self, number: u64) {
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

    /// Whether no caller's stream waits for the word any more, or soon does not.
    fn gates_passed(&self) -> bool {
        let begun = Instant::now();
        let mut gates = lock(&self.gates);
        while let Some(&event) = gates.last() {
            match self.device.passed(event) {
                Ok(true) => {
                    gates.pop();
                    self.device.destroy_event(event);
                }
                Ok(false) if begun.elapsed() < DRAIN => std::thread::sleep(Duration::from_micros(200)),
                _ => return false,
            }
        }
        true
    }

    /// Whether the stream is empty, or becomes so soon.
    fn drained(self: &Lobby) -> bool {
        let Ok(event) = self.device.create_event() else { return false };
        let recorded = self.device.record(event, self.stream);
        let begun = Instant::now();
        let passed = loop {
            match self.device.passed(event) {
                Ok(true) => break recorded.is_ok(),
                Ok(false) if begun.elapsed() < DRAIN => std::thread::sleep(Duration::from_micros(200)),
                _ => break false,
            }
        };
        self.device.destroy_event(event);
        passed
    }
}

impl Drop for Lobby {
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

/// Device memory of the site's own.
struct Slab {
    at: Address,
    bytes: usize,
    free: bool,
}

/// What only an empty stream may lose.
struct Gear {
    device: Arc<Device>,
    bounce: Bounce,
    regions: Regions,
    slabs: Vec<Slab>,
}

impl Drop for Gear {
    fn drop(&mut self) {
        for slab in &self.slabs {
            // SAFETY: allocated by `Site::slab`; no stream uses it any more, which whoever drops this has seen to.
            unsafe { self.device.free(slab.at) };
        }
    }
}

/// The driver's side of a site.
pub(crate) struct Site {
    pub(crate) lobby: Arc<Lobby>,
    gear: ManuallyDrop<Gear>,
    /// Last number that the stream writes into this rank's progress word, and into its host's.
    progress: u64,
    passed: u64,
    /// Something was enqueued since.
    dirty: bool,
    /// By rank: the progress that the stream waits for already.
    seen: Vec<u64>,
    /// Not yet enqueued: waits, then copies in any order.
    waits: Vec<Wait>,
    copies: Vec<Copy>,
    /// The end of all that was enqueued before the group failed.
    end: Option<Event>,
}

/// The driver cuts smaller allocations from blocks of this size, and a legacy handle hands out the whole block: mapped
/// twice by one reader, it may be refused.
pub(super) const LEAST_SLAB: usize = 2 << 20;

impl Site {
    /// `first`: device memory of [`LEAST_SLAB`] bytes, this site's from now on.
    pub(super) fn new(
        lobby: Arc<Lobby>,
        board: Option<Arc<Board>>,
        size: usize,
        first: Option<Address>,
    ) -> Self {
        let device = lobby.device.clone();
        let gear = Gear {
            bounce: Bounce::new(device.clone()),
            device,
            regions: Regions::new(&lobby, board),
            slabs: first.map(|at| Slab { at, bytes: LEAST_SLAB, free: true }).into_iter().collect(),
        };
        Self {
            lobby,
            gear: ManuallyDrop::new(gear),
            progress: 0,
            passed: 0,
            dirty: false,
            seen: vec![0; size],
            waits: Vec::new(),
            copies: Vec::new(),
            end: None,
        }
    }

    pub(super) fn words(&self) -> &Words {
        &self.lobby.words
    }

    pub(super) fn bounce(&mut self) -> &mut Bounce {
        &mut self.gear.bounce
    }

    pub(super) fn regions(&mut self) -> &mut Regions {
        &mut self.gear.regions
    }

    /// Whether the stream is past a number of [`Self::host_mark`].
    pub(super) fn has_passed(&self, number: u64) -> bool {
        self.lobby.words.reached(self.lobby.words.passed(), number)
    }

    /// A pinned slot, as [`Bounce::take`] gives it to operation `number`.
    pub(super) fn slot(&mut self, bytes: usize, needed: bool, number: u64) -> Result<Option<usize>> {
        let before = self.gear.bounce.count();
        let words = &self.lobby.words;
        let slot = self.gear.bounce.take(bytes, |number| words.reached(words.passed(), number), needed)?;
        if self.gear.bounce.count() > before {
            self.lobby.learns(number);
        }
        Ok(slot)
    }

    /// What `rank` lends under that number, mapped here for operation `number`.
    pub(super) fn borrow(&mut self, rank: usize, token: u64, number: u64) -> Result<Arc<Mapping>, String> {
        if !self.gear.regions.knows(rank, token) {
            self.lobby.learns(number);
        }
        self.gear.regions.borrow(rank, token, number)
    }

    /// Device memory of `bytes`, until it is given back.
    pub(super) fn slab(&mut self, bytes: usize, number: u64) -> Result<(usize, Address)> {
        let slabs = &mut self.gear.slabs;
        if let Some(index) = slabs.iter().position(|slab| slab.free && slab.bytes >= bytes) {
            slabs[index].free = false;
            return Ok((index, slabs[index].at));
        }
        let bytes = bytes.next_power_of_two().max(LEAST_SLAB);
        self.lobby.learns(number);
        let at = self.lobby.device.allocate(bytes)?;
        slabs.push(Slab { at, bytes, free: false });
        Ok((slabs.len() - 1, at))
    }

    pub(crate) fn give_back(&mut self, slabs: &[usize]) {
        for &index in slabs {
            self.gear.slabs[index].free = true;
        }
    }

    /// What comes next on the stream is after `event`.
    pub(super) fn after(&mut self, event: Event) -> Result<()> {
        self.flush()?;
        self.dirty = true;
        self.lobby.device.wait_event(self.lobby.stream, event)
    }

    /// What comes next is after `rank`'s stream wrote `value` into its progress word.
    pub(super) fn await_progress(&mut self, rank: usize, value: u64) {
        if self.seen[rank] < value
            && let Some(lines) = self.lobby.words.of(rank)
        {
            self.seen[rank] = value;
            self.waits.push(Wait { word: lines.progress(), value });
        }
    }

    pub(super) fn await_word(&mut self, wait: Wait) {
        self.waits.push(wait);
    }

    /// Waits that were asked for before are enqueued before it; other copies since the last flush are not ordered.
    pub(super) fn copy(&mut self, to: Address, from: Address, bytes: usize) {
        if bytes > 0 && to != from {
            self.copies.push(Copy { to, from, bytes });
        }
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        let (device, stream) = (&*self.lobby.device, self.lobby.stream);
        if !self.waits.is_empty() {
            self.dirty = true;
            // SAFETY: words of pages that the lobby keeps.
            unsafe { device.wait_words(stream, &self.waits)? };
            self.waits.clear();
        }
        if !self.copies.is_empty() {
            self.dirty = true;
            // SAFETY: buffers of the call, which its caller keeps until it is over; slots and slabs of this site;
            // peers' memory, whose owners wait for this rank's reads before their operation is over.
            unsafe { device.copy(stream, &self.copies)? };
            self.copies.clear();
        }
        Ok(())
    }

    pub(super) fn reduce(&mut self, reduction: &Reduction) -> Result<()> {
        self.flush()?;
        self.dirty = true;
        // SAFETY: as in `flush`.
        unsafe { self.lobby.device.reduce(self.lobby.stream, reduction) }
    }

    /// The number that this rank's progress word reaches once all that was asked for is over.
    pub(super) fn mark(&mut self) -> Result<u64> {
        self.flush()?;
        if self.dirty
            && let Some(mine) = self.lobby.words.mine()
        {
            self.progress += 1;
            self.write(mine.progress(), self.progress)?;
            self.dirty = false;
        }
        Ok(self.progress)
    }

    /// The same for this rank's host: see [`Site::has_passed`].
    pub(super) fn host_mark(&mut self) -> Result<u64> {
        self.flush()?;
        self.passed += 1;
        self.write(self.lobby.words.passed(), self.passed)?;
        Ok(self.passed)
    }

    pub(super) fn write(&self, word: Address, value: u64) -> Result<()> {
        // SAFETY: a word of a page that the lobby keeps.
        unsafe { self.lobby.device.write_word(self.lobby.stream, word, value) }
    }

    /// The group is dead: nobody waits any more. Done again and again until the stream is empty, which comes back.
    ///
    /// Callers' streams wait until then, because what is enqueued still uses their memory; no longer where it is `late`.
    pub(crate) fn release_all(&mut self, late: bool) -> bool {
        let Lobby { device, stream, words, .. } = &*self.lobby;
        words.release_sites();
        if self.end.is_none() {
            self.end = device.create_event().ok().filter(|&event| device.record(event, *stream).is_ok());
        }
        // What cannot be asked is not waited for.
        let empty = self.end.is_none_or(|event| device.passed(event).unwrap_or(true));
        if empty || late {
            words.release_callers();
        }
        empty
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(event) = self.end {
            self.lobby.device.destroy_event(event);
        }
        if self.lobby.drained() {
            // SAFETY: dropped once, here; the stream that used it is empty.
            unsafe { ManuallyDrop::drop(&mut self.gear) };
        } else {
            // What the stream may still use is kept, and so is what says that it does.
            std::mem::forget(self.lobby.clone());
        }
    }
}
