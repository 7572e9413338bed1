//! [`Device`] over a world.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};

use super::memory;
use super::random::Random;
use super::reduce;
use super::report::{Fault, Operation, WaitId, WaitSeen};
use super::shadow::Touch;
use super::space::Had;
use super::state::{EventState, Folding, Op, Queued, State, StreamState, failed, invalid_value};
use super::stream;
use super::world::{Memory, Owner, Shared, World};
use crate::{
    Address, Copy, Device, Error, Event, Export, Import, Imported, Kind, MAX_SOURCES, Reduction, Region,
    Result, Stream, Uuid, Wait, reached,
};

/// A device as one process uses it.
#[derive(Debug)]
pub struct MockDevice {
    owner: Arc<Owner>,
    pub(super) process: usize,
    pub(super) ordinal: i32,
}

impl MockDevice {
    pub(super) fn new(owner: Arc<Owner>, process: usize, ordinal: i32) -> Self {
        Self { owner, process, ordinal }
    }

    /// Whether the stream is being captured, from now on.
    pub fn set_capturing(&self, stream: Stream, capturing: bool) {
        let mut state = self.shared().lock();
        if let Ok(id) = self.stream(&mut state, stream, "cuStreamBeginCapture")
            && let Some(stream) = state.streams.get_mut(&id)
        {
            stream.capturing = capturing;
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    /// A call that makes or uses something: refused when the process or the world is over.
    pub(super) fn calls(&self) -> Result<MutexGuard<'_, State>> {
        stream::shake(self.shared(), self.process);
        let state = self.shared().lock();
        if state.ended || state.processes[self.process].killed {
            return Err(failed("the mock", 4, "CUDA_ERROR_DEINITIALIZED"));
        }
        Ok(state)
    }

    /// Makes a stream, with its thread.
    fn add_stream(&self, state: &mut State) -> u64 {
        let id = state.space.number();
        let actor = state.actor();
        let process = &mut state.processes[self.process];
        let number = process.streams;
        process.streams += 1;
        let part = (self.process as u64) << 16 | number as u64;
        let stream = StreamState {
            process: self.process,
            device: self.ordinal,
            number,
            actor,
            clock: Default::default(),
            queue: VecDeque::new(),
            executing: false,
            enqueued: 0,
            done: 0,
            closing: false,
            capturing: false,
            waits: 0,
            random: Random::new(state.script.seed, part),
            wake: Arc::new(Condvar::new()),
        };
        state.streams.insert(id, stream);
        let shared = self.shared().clone();
        let thread = std::thread::spawn(move || stream::run(&shared, id));
        self.owner.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        id
    }

    /// The stream behind a handle, if it is this process's and this device's. Reports others.
    fn stream(&self, state: &mut State, stream: Stream, call: &'static str) -> Result<u64> {
        if stream.0 == 0 {
            if let Some(id) = state.processes[self.process].defaults.get(&self.ordinal) {
                return Ok(*id);
            }
            let id = self.add_stream(state);
            state.processes[self.process].defaults.insert(self.ordinal, id);
            return Ok(id);
        }
        let known = state.streams.get(&stream.0);
        if known.is_some_and(|known| {
            (known.process, known.device) == (self.process, self.ordinal) && !known.closing
        }) {
            return Ok(stream.0);
        }
        let operation = state.host_operation(self.process, format!("{call} with stream {:#x}", stream.0));
        let text = "no stream of this process and device, or one destroyed".into();
        state.report(Fault::Misuse, text, vec![operation]);
        Err(failed(call, 400, "CUDA_ERROR_INVALID_HANDLE"))
    }

    fn check_event(&self, state: &mut State, event: Event, call: &'static str) -> Result<()> {
        if state.events.get(&event.0).is_some_and(|known| known.process == self.process) {
            return Ok(());
        }
        let operation = state.host_operation(self.process, format!("{call} with event {:#x}", event.0));
        let text = "no event of this process, or one destroyed".into();
        state.report(Fault::Misuse, text, vec![operation]);
        Err(failed(call, 400, "CUDA_ERROR_INVALID_HANDLE"))
    }

    /// An operation to be enqueued, refused while the stream is captured.
    fn operation(&self, state: &mut State, id: u64, call: &'static str, what: String) -> Result<Operation> {
        let host = &state.processes[self.process];
        let Some(stream) = state.streams.get(&id) else { return Err(invalid_value(call)) };
        if stream.capturing {
            return Err(failed(call, 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
        }
        Ok(Operation {
            actor: format!("{}, stream {}", host.name, stream.number),
            number: stream.enqueued + 1,
            what,
            label: host.label.clone(),
        })
    }

    fn enqueue(&self, state: &mut State, id: u64, op: Op, operation: Operation) {
        let order = state.host_knows(self.process);
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.enqueued += 1;
            stream.queue.push_back(Queued { op, order, operation: Arc::new(operation) });
            stream.wake.notify_all();
        }
    }

    /// Enqueues a wait, unless the script leaves it out.
    fn enqueue_wait(
        &self,
        state: &mut State,
        id: u64,
        operation: Operation,
        word: Option<Wait>,
        op: impl FnOnce(WaitId) -> Op,
    ) {
        let Some(stream) = state.streams.get_mut(&id) else { return };
        let wait = WaitId { process: self.process, stream: stream.number, index: stream.waits };
        stream.waits += 1;
        let op = op(wait);
        let early = !state.will_pass(&op);
        let seen = WaitSeen { id: wait, what: operation.to_string(), word, early, redundant: None };
        state.waits.insert(wait, seen);
        if state.script.drop_wait != Some(wait) {
            self.enqueue(state, id, op, operation);
        }
    }

    fn words(&self, state: &State, call: &'static str) -> Result<()> {
        match &state.script.no_words {
            Some(_) => Err(failed(call, 801, "CUDA_ERROR_NOT_SUPPORTED")),
            None => Ok(()),
        }
    }
}

impl Device for MockDevice {
    fn describe(&self) -> String {
        format!("mock device {}", self.ordinal)
    }

    fn maps_beside_streams(&self) -> bool {
        true
    }

    fn ordinal(&self) -> i32 {
        self.ordinal
    }

    fn uuid(&self) -> Uuid {
        World::uuid(self.ordinal)
    }

    fn no_words(&self) -> Option<String> {
        self.shared().lock().script.no_words.clone()
    }

    fn reaches(&self, other: &Uuid) -> bool {
        let state = self.shared().lock();
        let known = (0..state.script.devices as i32).find(|ordinal| World::uuid(*ordinal) == *other);
        known.is_some_and(|other| !state.script.unreachable.contains(&(self.ordinal, other)))
    }

    fn create_stream(&self) -> Result<Stream> {
        let mut state = self.calls()?;
        Ok(Stream(self.add_stream(&mut state)))
    }

    fn destroy_stream(&self, stream: Stream) {
        let mut state = self.shared().lock();
        if let Ok(id) = self.stream(&mut state, stream, "cuStreamDestroy")
            && let Some(stream) = state.streams.get_mut(&id)
        {
            stream.closing = true;
            stream.wake.notify_all();
        }
    }

    fn create_event(&self) -> Result<Event> {
        let mut state = self.calls()?;
        let id = state.space.number();
        state.events.insert(id, EventState { process: self.process, device: self.ordinal, record: None });
        Ok(Event(id))
    }

    fn destroy_event(&self, event: Event) {
        let mut state = self.shared().lock();
        if self.check_event(&mut state, event, "cuEventDestroy").is_ok() {
            state.events.remove(&event.0);
        }
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let call = "cuEventRecord";
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, call)?;
        self.check_event(&mut state, event, call)?;
        let operation = self.operation(&mut state, id, call, format!("record of event {:#x}", event.0))?;
        let Some(known) = state.events.get_mut(&event.0) else { return Err(invalid_value(call)) };
        if known.device != self.ordinal {
            return Err(failed(call, 400, "CUDA_ERROR_INVALID_HANDLE"));
        }
        let record = known.record.insert(Arc::default()).clone();
        self.enqueue(&mut state, id, Op::Record(record), operation);
        Ok(())
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let call = "cuStreamWaitEvent";
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, call)?;
        self.check_event(&mut state, event, call)?;
        let operation = self.operation(&mut state, id, call, format!("wait for event {:#x}", event.0))?;
        // An event that was never recorded holds nobody up.
        if let Some(record) = state.events.get(&event.0).and_then(|event| event.record.clone()) {
            self.enqueue_wait(&mut state, id, operation, None, |id| Op::WaitRecord { record, id });
        }
        Ok(())
    }

    fn passed(&self, event: Event) -> Result<bool> {
        let mut state = self.calls()?;
        self.check_event(&mut state, event, "cuEventQuery")?;
        let Some(record) = state.events.get(&event.0).and_then(|event| event.record.clone()) else {
            return Ok(true);
        };
        if let Some(known) = record.get() {
            state.processes[self.process].clock.join_seen(known);
        }
        Ok(record.get().is_some())
    }

    fn capturing(&self, stream: Stream) -> Result<bool> {
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, "cuStreamIsCapturing")?;
        Ok(state.streams.get(&id).is_some_and(|stream| stream.capturing))
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        let call = "cuStreamSynchronize";
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, call)?;
        let until = state.streams.get(&id).map_or(0, |stream| stream.enqueued);
        let (mut state, done) = self.shared().wait_until(state, |state| {
            state.ended || state.streams.get(&id).is_none_or(|stream| stream.done >= until)
        });
        if let Some(stream) = state.streams.get(&id).filter(|stream| stream.done < until) {
            let head = stream.queue.front().map(|head| head.operation.to_string());
            if !done {
                state.report_stuck();
            }
            return Err(Error::Driver {
                call,
                code: 702,
                name: "CUDA_ERROR_LAUNCH_TIMEOUT".into(),
                advice: format!("the stream stands at: {}", head.unwrap_or_default()),
            });
        }
        let State { streams, processes, departed, .. } = &mut *state;
        let known = match streams.get_mut(&id) {
            Some(stream) => {
                if stream.done == stream.enqueued {
                    // Whatever ended its waits, what comes now comes after.
                    stream.clock.poisoned = false;
                }
                &stream.clock
            }
            None => departed,
        };
        processes[self.process].clock.join_seen(known);
        Ok(())
    }

    unsafe fn wait_words(&self, stream: Stream, waits: &[Wait]) -> Result<()> {
        let call = "cuStreamWaitValue64";
        let mut state = self.calls()?;
        self.words(&state, call)?;
        let id = self.stream(&mut state, stream, call)?;
        let mut all = Vec::with_capacity(waits.len());
        for wait in waits {
            let what = format!("wait until the word at {:#x} has reached {}", wait.word, wait.value);
            let operation = self.operation(&mut state, id, call, what)?;
            let word = state.resolve_word(self.process, self.ordinal, wait.word, (call, &operation))?;
            all.push((word, *wait, operation));
        }
        for (word, wait, operation) in all {
            let value = wait.value;
            self.enqueue_wait(&mut state, id, operation, Some(wait), |id| Op::WaitWord { word, value, id });
        }
        Ok(())
    }

    unsafe fn write_word(&self, stream: Stream, word: Address, value: u64) -> Result<()> {
        let call = "cuStreamWriteValue64";
        let mut state = self.calls()?;
        self.words(&state, call)?;
        let id = self.stream(&mut state, stream, call)?;
        let operation =
            self.operation(&mut state, id, call, format!("write of {value} to the word at {word:#x}"))?;
        let piece = state.resolve_word(self.process, self.ordinal, word, (call, &operation))?;
        let had = state.space.views.get(&piece.view).map(|view| view.had);
        if matches!(had, Some(Had::Imported { .. })) {
            let text = "streams write no words of another process's device memory".into();
            state.report(Fault::Misuse, text, vec![operation]);
            return Err(failed(call, 801, "CUDA_ERROR_NOT_SUPPORTED"));
        }
        self.enqueue(&mut state, id, Op::WriteWord { word: piece, value }, operation);
        Ok(())
    }

    unsafe fn copy(&self, stream: Stream, copies: &[Copy]) -> Result<()> {
        let call = "cuMemcpyAsync";
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, call)?;
        let copies: Vec<&Copy> = copies.iter().filter(|copy| copy.bytes > 0).collect();
        let what: Vec<String> = copies
            .iter()
            .map(|copy| format!("{} bytes from {:#x} to {:#x}", copy.bytes, copy.from, copy.to))
            .collect();
        let operation = self.operation(&mut state, id, call, format!("copy of {}", what.join(", ")))?;
        let mut pieces = Vec::with_capacity(copies.len());
        for copy in copies {
            let from =
                state.resolve(self.process, self.ordinal, copy.from, copy.bytes, (call, &operation))?;
            let to = state.resolve(self.process, self.ordinal, copy.to, copy.bytes, (call, &operation))?;
            pieces.push((from, to));
        }
        if !pieces.is_empty() {
            self.enqueue(&mut state, id, Op::Copy(pieces), operation);
        }
        Ok(())
    }

    unsafe fn reduce(&self, stream: Stream, reduction: &Reduction) -> Result<()> {
        let call = "cuLaunchKernel";
        let Reduction { element, fold, divide, times, to, count, ref sources } = *reduction;
        reduce::check(element, fold, divide, times)?;
        if sources.is_empty() || sources.len() > MAX_SOURCES {
            return Err(Error::Invalid(format!("a reduction of {} sources", sources.len())));
        }
        let bytes = count
            .checked_mul(element.size())
            .ok_or(Error::Invalid(format!("a reduction of {count} elements")))?;
        let mut state = self.calls()?;
        let id = self.stream(&mut state, stream, call)?;
        let from: Vec<String> = sources.iter().map(|source| format!("{source:#x}")).collect();
        let from = from.join(", ");
        let what = format!("reduction of {count} {element:?} by {fold:?} from {from} to {to:#x}");
        let operation = self.operation(&mut state, id, call, what)?;
        if count == 0 {
            return Ok(());
        }
        let to = state.resolve(self.process, self.ordinal, to, bytes, (call, &operation))?;
        let mut all = Vec::with_capacity(sources.len());
        for source in sources {
            all.push(state.resolve(self.process, self.ordinal, *source, bytes, (call, &operation))?);
        }
        let what = Folding { element, fold, divide, times };
        self.enqueue(&mut state, id, Op::Reduce { what, sources: all, to }, operation);
        Ok(())
    }

    unsafe fn load(&self, word: Address) -> u64 {
        stream::shake(self.shared(), self.process);
        let mut state = self.shared().lock();
        state.host_touches(self.process, word, 8, Touch::AtomicRead);
        if let Some(piece) = state.space.resolve(self.process, word, 8).filter(|pieces| pieces.len() == 1)
            && let State { space, processes, .. } = &mut *state
            && let Some(allocation) = space.allocations.get_mut(&piece[0].allocation)
        {
            if let Some(known) = allocation.word(piece[0].offset).read() {
                processes[self.process].clock.join_seen(&known);
            }
            // SAFETY: a live allocation, and the lock is held.
            return unsafe { memory::load(allocation.backing + piece[0].offset) };
        }
        // SAFETY: the caller's promise; memory that the mock does not know.
        unsafe { memory::load(word as usize) }
    }

    unsafe fn has_reached(&self, word: Address, value: u64) -> bool {
        stream::shake(self.shared(), self.process);
        let mut state = self.shared().lock();
        let pieces = state.space.resolve(self.process, word, 8).filter(|pieces| pieces.len() == 1);
        let Some(piece) = pieces.map(|pieces| pieces[0]) else {
            // SAFETY: the caller's promise; memory that the mock does not know.
            return reached(unsafe { memory::load(word as usize) }, value);
        };
        state.host_touches(self.process, word, 8, Touch::AtomicRead);
        let State { space, processes, .. } = &mut *state;
        let Some(allocation) = space.allocations.get_mut(&piece.allocation) else { return false };
        let found = allocation.word(piece.offset).lets_through(value);
        if let Some(Some(learned)) = &found {
            processes[self.process].clock.join_seen(learned);
        }
        found.is_some()
    }

    unsafe fn store(&self, word: Address, value: u64) {
        stream::shake(self.shared(), self.process);
        let mut state = self.shared().lock();
        state.host_touches(self.process, word, 8, Touch::AtomicWrite);
        let pieces = state.space.resolve(self.process, word, 8).filter(|pieces| pieces.len() == 1);
        match pieces {
            Some(pieces) => {
                let knows = state.host_knows(self.process);
                state.write_word(&pieces[0], value, knows);
            }
            // SAFETY: the caller's promise; memory that the mock does not know.
            None => unsafe { memory::store(word as usize, value) },
        }
    }

    fn host_touches(&self, address: Address, bytes: usize, writes: bool) {
        let touch = if writes { Touch::Write } else { Touch::Read };
        self.shared().lock().host_touches(self.process, address, bytes, touch);
    }

    fn allocate(&self, bytes: usize) -> Result<Address> {
        self.allocate_as(Memory::Legacy, bytes)
    }

    unsafe fn free(&self, address: Address) {
        self.give_back(address, &[Kind::Legacy, Kind::Mapped, Kind::Private], "free");
    }

    fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        self.pin(bytes)
    }

    unsafe fn free_host(&self, memory: *mut u8) {
        self.give_back(memory as Address, &[Kind::Host], "free_host");
    }

    unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<Address> {
        self.make_known(memory as Address, bytes)
    }

    unsafe fn unregister(&self, memory: *mut u8) {
        self.make_unknown(memory as Address);
    }

    fn region(&self, address: Address) -> Result<Region> {
        self.find_region(address)
    }

    fn export(&self, region: &Region) -> Result<Export> {
        self.give_handle(region)
    }

    fn import(&self, import: Import<'_>, bytes: usize) -> Result<Imported> {
        self.take_handle(import, bytes)
    }

    fn close(&self, imported: Imported) {
        self.close_handle(imported);
    }
}
