//! Streams, each with a queue. Events: tickets that a stream completes.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::api;
use crate::check;
use crate::numbers::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_LAUNCH_TIMEOUT};
use crate::operation::{Operation, Ticket};
use crate::queue::Queue;
use crate::state::*;
use crate::types::*;

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

    /// Waits until all submitted operations are complete.
    pub(crate) fn wait(&self) {
        self.queue.wait(self.queue.submitted(), None);
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

api! {
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
