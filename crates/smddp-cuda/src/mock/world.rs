//! The world of a test: devices, the processes that share them, and what was found.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::device::MockDevice;
use super::random::Random;
use super::report::{Fault, Report, Stall, WaitId, WaitSeen};
use super::shadow::Touch;
use super::space::{Had, Piece, gather, scatter};
use super::state::{ProcessState, State};
use crate::{Address, Uuid};

/// What the world is like, and what goes wrong in it.
#[derive(Clone, Debug)]
pub struct Script {
    /// Of delays and of the order of what has none.
    pub seed: u64,
    pub devices: usize,
    /// The longest pause before a part of an operation.
    pub delay: Duration,
    /// (device, other): the first cannot map the other's memory.
    pub unreachable: Vec<(i32, i32)>,
    /// Why there are no waits and writes on words.
    pub no_words: Option<String>,
    /// Bytes of each device's memory.
    pub memory: Option<usize>,
    /// Bytes of host memory that all processes together may allocate.
    pub pinned: Option<usize>,
    /// Freed device memory is given out again at the same address, as allocators do. Uses after `free` by the process
    /// itself are then not told from uses of what came after.
    pub reuse: bool,
    /// This wait is left out.
    pub drop_wait: Option<WaitId>,
    /// How long a host blocks in `synchronize`, and the world's end for its streams, before that counts as stuck.
    pub patience: Duration,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 0,
            devices: 1,
            delay: Duration::from_micros(20),
            unreachable: Vec::new(),
            no_words: None,
            memory: None,
            pinned: None,
            reuse: false,
            drop_wait: None,
            patience: Duration::from_secs(20),
        }
    }
}

/// How a test allocates what would be torch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// [`crate::Kind::Legacy`].
    Legacy,
    /// [`crate::Kind::Mapped`]: in a row, but an allocation of its own for each so many bytes.
    Mapped { chunk: usize },
    /// [`crate::Kind::Private`].
    Private,
}

/// What one process's host did so far: for [`Process::take_over`].
#[derive(Clone, Debug)]
pub struct Order(Clock);

/// What streams and hosts share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// A stream did something.
    pub(super) progress: Condvar,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait<'a>(&self, on: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        on.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait_for<'a>(
        &self,
        on: &Condvar,
        state: MutexGuard<'a, State>,
        most: Duration,
    ) -> MutexGuard<'a, State> {
        on.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until `enough`, at most the script's patience; whether it came true.
    pub(super) fn wait_until<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        mut enough: impl FnMut(&mut State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let deadline = Instant::now() + state.script.patience;
        loop {
            if enough(&mut state) {
                return (state, true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (state, false);
            }
            state = self.wait_for(&self.progress, state, left);
        }
    }
}

/// Ends the streams when the last handle is gone.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) shared: Arc<Shared>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    /// Reports that were asked for.
    read: Mutex<usize>,
}

impl Owner {
    fn end(&self) {
        let mut state = self.shared.lock();
        if !state.ended {
            (state, _) = self.shared.wait_until(state, State::quiet);
            state.settle();
            state.report_stuck();
            state.ended = true;
        }
        state.streams.values().for_each(|stream| stream.wake.notify_all());
        self.shared.progress.notify_all();
        drop(state);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A stream that panicked has said so.
            let _ = thread.join();
        }
    }

    fn reports(&self) -> Vec<Report> {
        let reports = self.shared.lock().reports.clone();
        *self.read.lock().unwrap_or_else(PoisonError::into_inner) = reports.len();
        reports
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.end();
        let read = *self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let reports = self.reports();
        let unread = &reports[read.min(reports.len())..];
        unread.iter().for_each(|report| eprintln!("{report}"));
        if !unread.is_empty() && !std::thread::panicking() {
            panic!("{} mistakes in a mock world that nobody asked about, above", unread.len());
        }
    }
}

/// Devices, the processes that use them, and what was found. A handle: clones are the same world.
///
/// When the last handle (of devices and processes too) is dropped, streams end, also those that stand at a wait. Reports
/// that nobody read by then make that drop panic.
#[derive(Clone, Debug)]
pub struct World {
    owner: Arc<Owner>,
}

impl World {
    pub fn new(script: Script) -> Self {
        let shared = Shared { state: Mutex::new(State::new(script)), progress: Condvar::new() };
        let owner = Owner { shared: Arc::new(shared), threads: Mutex::default(), read: Mutex::new(0) };
        Self { owner: Arc::new(owner) }
    }

    /// Another process. They are numbered from 0 and called "rank 0" and so on.
    pub fn process(&self) -> Process {
        let mut state = self.owner.shared.lock();
        let number = state.processes.len();
        let actor = state.actor();
        let mut clock = Clock::default();
        // Tick 0 is what everybody knows.
        clock.tick(actor);
        let random = Random::new(state.script.seed, 1 << 32 | number as u64);
        state.processes.push(ProcessState {
            name: format!("rank {number}"),
            actor,
            clock,
            operations: 0,
            streams: 0,
            defaults: Default::default(),
            label: None,
            random,
            killed: false,
        });
        drop(state);
        Process { owner: self.owner.clone(), number }
    }

    /// The name for itself of the device with this ordinal.
    pub fn uuid(ordinal: i32) -> Uuid {
        let mut uuid = *b"mock device 0000";
        uuid[12..].copy_from_slice(&ordinal.to_le_bytes());
        uuid
    }

    /// Mistakes found so far, of all kinds.
    pub fn reports(&self) -> Vec<Report> {
        self.owner.reports()
    }

    /// Races found so far, overlaps inside one operation among them.
    pub fn races(&self) -> Vec<Report> {
        let races = |report: &Report| matches!(report.fault, Fault::Race | Fault::Overlap);
        self.reports().into_iter().filter(races).collect()
    }

    /// Waits enqueued so far, the one left out by the script too.
    pub fn waits(&self) -> Vec<WaitSeen> {
        self.owner.shared.lock().waits.values().cloned().collect()
    }

    /// Calls so far that a driver might have held until the device was idle, at a bad time. No mistakes by themselves.
    pub fn stalls(&self) -> Vec<Stall> {
        self.owner.shared.lock().stalls.clone()
    }

    /// Lets all streams go on until each is empty or stands at a wait, and then orders all that is done before all that
    /// any host does from now on: a test that looks at results.
    pub fn settle(&self) {
        let state = self.owner.shared.lock();
        let (mut state, _) = self.owner.shared.wait_until(state, State::quiet);
        state.settle();
    }

    /// Ends the world: as [`Self::settle`], then streams that stand at a wait are reported, and nothing more can be
    /// enqueued. Gives all reports.
    pub fn end(&self) -> Vec<Report> {
        self.owner.end();
        self.owner.reports()
    }

    /// What is still allocated, registered, imported or created, in words.
    pub fn leaks(&self) -> Vec<String> {
        let state = self.owner.shared.lock();
        let name = |process: usize| state.processes[process].name.clone();
        let views = state.space.views.values().filter(|view| view.open).map(|view| {
            let how = match view.had {
                Had::Own => "allocated",
                Had::Registered => "registered",
                Had::Imported { .. } => "imported",
            };
            format!("{}: {} bytes {how} at {:#x}", name(view.process), view.bytes, view.base)
        });
        let default =
            |id: &u64| state.processes.iter().any(|process| process.defaults.values().any(|of| of == id));
        let streams = state.streams.iter().filter(|(id, stream)| !stream.closing && !default(id));
        let streams =
            streams.map(|(_, stream)| format!("{}: stream {}", name(stream.process), stream.number));
        let events = state.events.values().map(|event| format!("{}: an event", name(event.process)));
        let mut leaks: Vec<String> = views.chain(streams).chain(events).collect();
        leaks.sort();
        leaks
    }

    /// Writes `data` at `address` of whichever process has it as its own, as that process's processor would: ordered
    /// after what its host knows, held against everything else.
    ///
    /// # Panics
    /// Where no process has so much of its own there.
    pub fn upload(&self, address: Address, data: &[u8]) {
        let mut state = self.owner.shared.lock();
        let pieces = state.host_of(address, data.len(), Touch::Write);
        // SAFETY: live memory, which cannot go while the lock is held.
        unsafe { scatter(&state.space, &pieces, 0, data) };
    }

    /// Reads `bytes` at `address`; see [`Self::upload`].
    ///
    /// # Panics
    /// As [`Self::upload`].
    pub fn download(&self, address: Address, bytes: usize) -> Vec<u8> {
        let mut state = self.owner.shared.lock();
        let pieces = state.host_of(address, bytes, Touch::Read);
        let mut data = vec![0; bytes];
        // SAFETY: as in `upload`.
        unsafe { gather(&state.space, &pieces, 0, &mut data) };
        data
    }
}

impl State {
    /// Orders all that was done before all that hosts do from now on.
    fn settle(&mut self) {
        let mut all = self.departed.clone();
        for process in &self.processes {
            all.join_seen(&process.clock);
        }
        for stream in self.streams.values() {
            all.join_seen(&stream.clock);
        }
        for process in &mut self.processes {
            process.clock.join_seen(&all);
            process.clock.tick(process.actor);
        }
    }

    /// The memory at `address`, touched by the host of the process whose own it is.
    fn host_of(&mut self, address: Address, bytes: usize, touch: Touch) -> Vec<Piece> {
        let owns = |process: &usize| {
            self.space
                .find(*process, address)
                .is_some_and(|(_, view)| !matches!(view.had, Had::Imported { .. }))
        };
        let found = (0..self.processes.len()).find(owns);
        let found = found.and_then(|process| Some((process, self.space.resolve(process, address, bytes)?)));
        let Some((process, pieces)) = found else {
            panic!("no process has {bytes} bytes of its own at {address:#x}");
        };
        self.host_touches(process, address, bytes, touch);
        pieces
    }
}

/// One process: what it allocates, its streams and events, and what its host threads know.
#[derive(Clone, Debug)]
pub struct Process {
    owner: Arc<Owner>,
    number: usize,
}

impl Process {
    /// From 0 in the order of [`World::process`].
    pub fn number(&self) -> usize {
        self.number
    }

    /// A device as this process uses it.
    ///
    /// # Panics
    /// Where the world has no device of this ordinal.
    pub fn device(&self, ordinal: i32) -> Arc<MockDevice> {
        let devices = self.owner.shared.lock().script.devices;
        assert!((0..devices as i32).contains(&ordinal), "no device {ordinal} among {devices}");
        Arc::new(MockDevice::new(self.owner.clone(), self.number, ordinal))
    }

    /// What reports call the operations that this process enqueues from now on.
    pub fn label(&self, label: &str) {
        self.owner.shared.lock().processes[self.number].label = Some(label.to_string());
    }

    /// What this process's host knows now, to go along with a message that the mock does not see.
    pub fn hand_over(&self) -> Order {
        Order(self.owner.shared.lock().host_knows(self.number))
    }

    /// Such a message has arrived: what its sender knew is ordered before what this host does from now on.
    pub fn take_over(&self, order: &Order) {
        self.owner.shared.lock().processes[self.number].clock.join_seen(&order.0);
    }

    /// The process is gone: nothing that it enqueued goes on, and it enqueues nothing more. Its memory stays as long as
    /// others may have it mapped.
    pub fn kill(&self) {
        let mut state = self.owner.shared.lock();
        let number = self.number;
        state.processes[number].killed = true;
        for stream in state.streams.values_mut().filter(|stream| stream.process == number) {
            stream.queue.clear();
            stream.closing = true;
            stream.wake.notify_all();
        }
        self.owner.shared.progress.notify_all();
    }
}
