//! Streams: one thread and queue each. Events: tickets that a stream completes.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::api;
use crate::check::{self, Order};
use crate::memory::read;
use crate::numbers::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_LAUNCH_TIMEOUT};
use crate::operation::{Copy, Operation, Ticket, transfer};
use crate::state::*;
use crate::types::*;
use crate::words;
use crate::{os, views};

#[derive(Default)]
struct Waiting {
    operations: VecDeque<(Operation, Order)>,
    submitted: u64,
    completed: u64,
    closed: bool,
}

pub(crate) struct Queue {
    pub(crate) process: usize,
    pub(crate) number: u64,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    fn start() -> Arc<Self> {
        let (process, number) = (process(), fresh());
        let queue = Arc::new(Self { process, number, waiting: Mutex::default(), changed: Condvar::new() });
        let ours = queue.clone();
        // In a world the seed is the same in each run.
        let seed =
            check::add_stream(process, number).map_or(number, |(rank, stream)| (rank << 16 | stream) as u64);
        std::thread::Builder::new()
            .name(format!("fake-cuda-{number}"))
            .spawn(move || {
                become_process(process);
                ours.work(Delays::new(seed));
            })
            .expect("a stream thread starts");
        queue
    }

    fn work(&self, mut delays: Delays) {
        loop {
            let mut waiting = lock(&self.waiting);
            let (operation, order) = loop {
                if let Some(next) = waiting.operations.pop_front() {
                    break next;
                }
                if waiting.closed {
                    return;
                }
                waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            };
            drop(waiting);
            delays.sleep();
            // A broken context executes nothing, but enqueued operations complete.
            if broken() == CUDA_SUCCESS && !check::has_ended(self.process) {
                self.run(operation, &order, &mut delays);
            } else if let Operation::Tick(ticket) = operation {
                ticket.tick();
            }
            check::complete_operation(self, &order);
            lock(&self.waiting).completed += 1;
            self.changed.notify_all();
        }
    }

    pub(crate) fn submit(&self, operation: Operation) {
        let mut waiting = lock(&self.waiting);
        let order = check::enqueue(self, &operation).unwrap_or_default();
        if order.left_out {
            return;
        }
        waiting.submitted += 1;
        waiting.operations.push_back((operation, order));
        drop(waiting);
        self.changed.notify_all();
    }

    fn submitted(&self) -> u64 {
        lock(&self.waiting).submitted
    }

    fn is_empty(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.completed == waiting.submitted
    }

    /// Waits until `count` operations are complete. Returns false at the time limit.
    fn wait(&self, count: u64, limit: Option<Duration>) -> bool {
        let begin = Instant::now();
        let mut waiting = lock(&self.waiting);
        while waiting.completed < count {
            if limit.is_some_and(|limit| begin.elapsed() >= limit) {
                return false;
            }
            let interval = Duration::from_millis(500);
            waiting = match self.changed.wait_timeout(waiting, interval) {
                Ok((waiting, _)) => waiting,
                Err(error) => error.into_inner().0,
            };
        }
        true
    }

    fn run(&self, operation: Operation, order: &Order, delays: &mut Delays) {
        match &operation {
            Operation::Wait { word, value } => {
                return words::wait(*word, *value, || check::complete_wait(self, order, *word, *value));
            }
            Operation::Await(ticket) => {
                ticket.wait();
                return check::complete_event_wait(self, order, ticket);
            }
            _ if check::execute(self, order, &operation) => return,
            _ => {}
        }
        match operation {
            Operation::Copy(mut copies) => {
                // The copies of a batch are unordered.
                while !copies.is_empty() {
                    let copy = copies.swap_remove((delays.next() % copies.len() as u64) as usize);
                    transfer(&copy);
                }
            }
            Operation::Write { word, value } => words::write(word, value),
            Operation::Tick(ticket) => ticket.tick(),
            Operation::Launch(launch) => launch.run(),
            Operation::Wait { .. } | Operation::Await(_) => {}
        }
    }

    fn close(&self) {
        lock(&self.waiting).closed = true;
        self.changed.notify_all();
    }
}

/// Random numbers, and random delays if the seed is not 0.
pub(crate) struct Delays {
    state: u64,
    delays: bool,
}

impl Delays {
    fn new(number: u64) -> Self {
        let seed = settings().seed;
        let state = (seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1;
        Self { state, delays: seed != 0 }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn sleep(&mut self) {
        if self.delays {
            match self.next() % 64 {
                // Long compared with an operation, so that other streams interleave. A test has many operations.
                0 => std::thread::sleep(Duration::from_micros(self.next() % 500)),
                1..16 => std::thread::sleep(Duration::from_micros(self.next() % 60)),
                _ => {}
            }
        }
    }
}

/// A stream handle. Streams that synchronize with the legacy default stream share its queue, which gives more order
/// than CUDA guarantees, and never less.
#[derive(Clone)]
pub(crate) struct Handle {
    queue: Arc<Queue>,
    device: usize,
    blocking: bool,
    capture: Arc<AtomicI32>,
}

pub(crate) struct Event {
    process: usize,
    device: usize,
    last: Mutex<Option<Arc<Ticket>>>,
}

#[derive(Default)]
struct Streams {
    streams: HashMap<u64, Handle>,
    /// By process and device.
    defaults: HashMap<(usize, usize), Handle>,
    events: HashMap<u64, Arc<Event>>,
    /// Queues of destroyed streams that may still have work.
    draining: Vec<Arc<Queue>>,
}

thread_local! {
    /// Capture mode of this thread.
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

static STREAMS: Mutex<Option<Streams>> = Mutex::new(None);

fn streams<T>(f: impl FnOnce(&mut Streams) -> T) -> T {
    f(lock(&STREAMS).get_or_insert_with(Streams::default))
}

/// Number of streams and events.
pub(crate) fn open() -> u64 {
    streams(|all| (all.streams.len() + all.events.len()) as u64)
}

/// Descriptions of the streams and events of a checked world.
pub(crate) fn list_open() -> Vec<String> {
    let first = check::first();
    streams(|all| {
        let streams = all.streams.values().map(|stream| (stream.queue.process, "a stream"));
        let all = streams.chain(all.events.values().map(|event| (event.process, "an event")));
        let ours = all.filter(|(process, _)| *process >= first);
        ours.map(|(process, what)| format!("rank {}: {what}", process - first)).collect()
    })
}

/// Drops all streams and events; enqueued work still completes.
pub(crate) fn reset() {
    let all = streams(std::mem::take);
    let handles = all.streams.values().chain(all.defaults.values());
    handles.for_each(|handle| handle.queue.close());
}

fn default_stream(all: &mut Streams, device: usize) -> Handle {
    let fresh = || Handle { queue: Queue::start(), device, blocking: true, capture: Arc::default() };
    all.defaults.entry((process(), device)).or_insert_with(fresh).clone()
}

/// Returns the stream of a handle, for the current context.
fn lookup(stream: CUstream) -> Answer<Handle> {
    let device = current()?;
    streams(|all| match stream {
        0 | STREAM_LEGACY | STREAM_PER_THREAD => Ok(default_stream(all, device)),
        _ => all.streams.get(&stream).filter(|s| s.ours()).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE),
    })
}

/// Like `lookup`, for an operation that does not support graph capture.
pub(crate) fn stream(stream: CUstream) -> Answer<Handle> {
    let handle = lookup(stream)?;
    if handle.capture.load(SeqCst) != 0 {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if handle.blocking && blocking_capture(handle.device) {
        return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    Ok(handle)
}

impl Handle {
    /// Returns true if the stream belongs to the calling process.
    fn ours(&self) -> bool {
        self.queue.process == process()
    }

    pub(crate) fn submit(&self, operation: Operation) {
        self.queue.submit(operation);
    }

    pub(crate) fn device(&self) -> usize {
        self.device
    }
}

/// Returns an event of the calling process.
fn event(event: CUevent) -> Answer<Arc<Event>> {
    let found = streams(|all| all.events.get(&event).cloned());
    found.filter(|event| event.process == process()).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// Returns true if a stream that synchronizes with the legacy default stream is being captured.
fn blocking_capture(device: usize) -> bool {
    streams(|all| {
        let blocking = |s: &Handle| s.ours() && s.blocking && s.device == device;
        all.streams.values().any(|s| blocking(s) && s.capture.load(SeqCst) != 0)
    })
}

/// Checks a call that is forbidden while any thread captures in global mode, unless this thread is in relaxed mode. A
/// forbidden call invalidates the capture.
pub(crate) fn check_capture() -> Answer {
    if MODE.get() == CAPTURE_MODE_RELAXED {
        return Ok(());
    }
    let broken = streams(|all| {
        let capturing =
            |handle: &&Handle| handle.ours() && handle.capture.load(SeqCst) != CAPTURE_STATUS_NONE;
        let broken = all.streams.values().filter(capturing).map(|handle| handle.capture.store(2, SeqCst));
        broken.count() > 0
    });
    if broken { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Waits for all enqueued work, as calls that free memory do. Prints a message after 10 s: with a stream that waits
/// for a word, the real driver would hang too.
pub(crate) fn drain(call: &str) -> Answer {
    check_capture()?;
    check::may_stall(call);
    let process = process();
    while let Some(blocked) = check::with_caller(|world, rank| world.is_blocked(Some(rank))) {
        // Later uses are reported anyway, so a world need not wait for a blocked stream.
        if blocked {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    let queues: Vec<(Arc<Queue>, u64)> = streams(|all| {
        let handles = all.streams.values().chain(all.defaults.values());
        let queues = handles.map(|handle| &handle.queue).chain(&all.draining);
        let ours = queues.filter(|queue| queue.process == process);
        ours.map(|queue| (queue.clone(), queue.submitted())).collect()
    });
    for (queue, submitted) in queues {
        if !queue.wait(submitted, Some(Duration::from_secs(10))) {
            eprintln!(
                "fake CUDA ({}): {call} has waited 10 s for a stream, as the real driver would",
                std::process::id()
            );
            queue.wait(submitted, None);
        }
    }
    Ok(())
}

/// Common part of calls that create, map, register or load: NVIDIA's manuals allow them to wait for the device too.
pub(crate) fn acquiring(call: &str) -> Answer {
    if settings().waits {
        return drain(call);
    }
    check::may_stall(call);
    check_capture()
}

fn enqueue_copies(stream: CUstream, wanted: impl Iterator<Item = (u64, u64, usize)>) -> Answer {
    let handle = self::stream(stream)?;
    let mut host = false;
    let mut copies = Vec::new();
    for (to, from, bytes) in wanted {
        let memory = read();
        let known = |at| memory.find(at).is_some();
        let to_known = known(to);
        if (to_known && !memory.covers(to, bytes)) || (known(from) && !memory.covers(from, bytes)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let read_before = if known(from) {
            None
        } else {
            let mut bytes = vec![0; bytes];
            if views::belongs_to_other_process(from) || !os::peek(from, &mut bytes) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            Some(bytes)
        };
        host |= !to_known;
        copies.push(Copy { to, from, bytes, to_known, read_before });
    }
    handle.submit(Operation::Copy(copies));
    if host {
        // A copy to pageable memory returns after completion, as in the real driver.
        handle.queue.wait(handle.queue.submitted(), None);
    }
    Ok(())
}

unsafe fn batch(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> Answer {
    match settings().no_batch {
        0 => {}
        1 => return Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    let invalid = Err(CUDA_ERROR_INVALID_VALUE);
    if count == 0 || attribute_count == 0 || attribute_count > count || *first != 0 {
        return invalid;
    }
    for i in 0..attribute_count {
        let set = &*attributes.add(i);
        if !(1..=3).contains(&set.src_access_order) || set.flags > 1 {
            return invalid;
        }
    }
    let all = |i: usize| (*to.add(i), *from.add(i), *bytes.add(i));
    if (0..count).map(all).any(|(to, from, bytes)| to == 0 || from == 0 || bytes == 0) {
        return invalid;
    }
    // Default streams reject batches.
    if matches!(stream, 0 | STREAM_LEGACY | STREAM_PER_THREAD) {
        return invalid;
    }
    enqueue_copies(stream, (0..count).map(all))
}

/// cuMemcpyBatchAsync of CUDA 12.8.
pub(crate) unsafe extern "C" fn memcpy_batch_12(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: CUstream,
) -> CUresult {
    run_call("cuMemcpyBatchAsync", || {
        let done = batch(to, from, bytes, count, attributes, first, attribute_count, stream);
        if done.is_err() {
            failed.write(usize::MAX);
        }
        done
    })
}

/// cuMemcpyBatchAsync of CUDA 13.0.
pub(crate) unsafe extern "C" fn memcpy_batch_13(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    first: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> CUresult {
    run_call("cuMemcpyBatchAsync_v2", || batch(to, from, bytes, count, attributes, first, attribute_count, stream))
}

api! {
    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        if bytes == 0 {
            return self::stream(stream).map(drop);
        }
        enqueue_copies(stream, std::iter::once((to, from, bytes)))
    }

    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, _priority: c_int) {
        let device = current()?;
        if flags > STREAM_NON_BLOCKING {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let blocking = flags != STREAM_NON_BLOCKING;
        let number = 0x5000 + fresh();
        streams(|all| {
            let shared = blocking || settings().one_queue;
            let queue = if shared { default_stream(all, device).queue } else { Queue::start() };
            all.streams.insert(number, Handle { queue, device, blocking, capture: Arc::default() });
        });
        write_out(stream, number)
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let ours = |all: &mut Streams| all.streams.get(&stream).filter(|handle| handle.ours()).is_some();
        let handle = streams(|all| if ours(all) { all.streams.remove(&stream) } else { None });
        let handle = handle.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if !handle.blocking && !settings().one_queue {
            handle.queue.close();
            streams(|all| {
                all.draining.retain(|queue| !queue.is_empty());
                all.draining.push(handle.queue);
            });
        }
        Ok(())
    }

    fn cuStreamSynchronize(stream: CUstream) {
        check_capture()?;
        let handle = self::stream(stream)?;
        let patience = (handle.queue.process > 0).then_some(settings().patience);
        if !handle.queue.wait(handle.queue.submitted(), patience) {
            check::with_caller(|world, _| world.report_stuck());
            return Err(CUDA_ERROR_LAUNCH_TIMEOUT);
        }
        check::synchronized(&handle.queue);
        match broken() {
            CUDA_SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) {
        let handle = lookup(stream)?;
        if matches!(stream, 0 | STREAM_LEGACY) && blocking_capture(handle.device) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        write_out(status, handle.capture.load(SeqCst))
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, _mode: c_int) {
        let handle = self::stream(stream)?;
        if matches!(stream, 0 | STREAM_LEGACY) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        handle.capture.store(1, SeqCst);
        Ok(())
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut usize) {
        if lookup(stream)?.capture.swap(0, SeqCst) == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        write_out(graph, 0)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        if !(0..=CAPTURE_MODE_RELAXED).contains(&*mode) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        write_out(mode, MODE.replace(*mode))
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) {
        let handle = self::stream(stream)?;
        let event = self::event(event)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // The last record at this time; later records do not affect the wait.
        if let Some(ticket) = lock(&event.last).clone() {
            handle.submit(Operation::Await(ticket));
        }
        Ok(())
    }

    fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        let device = current()?;
        if flags > 7 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let number = 0xE000 + fresh();
        streams(|all| all.events.insert(number, Arc::new(Event { process: process(), device, last: Mutex::new(None) })));
        write_out(event, number)
    }

    fn cuEventDestroy_v2(event: CUevent) {
        self::event(event)?;
        streams(|all| all.events.remove(&event)).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let handle = self::stream(stream)?;
        let event = self::event(event)?;
        if event.device != handle.device {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let ticket = Arc::new(Ticket::default());
        *lock(&event.last) = Some(ticket.clone());
        handle.submit(Operation::Tick(ticket));
        Ok(())
    }

    fn cuEventQuery(event: CUevent) {
        check_capture()?;
        let event = self::event(event)?;
        match lock(&event.last).clone() {
            Some(ticket) if !ticket.has_passed() => return Err(CUDA_ERROR_NOT_READY),
            Some(ticket) => check::observe_event(&ticket),
            None => {}
        }
        Ok(())
    }
}
