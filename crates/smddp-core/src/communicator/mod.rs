//! Communicators: the ranks of one group, with their own sequence numbers.

mod device_setup;
mod estimate;
mod internal_calls;
mod peers;
mod shutdown;
mod work;

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use smddp_plan::{Collective, Counts, Memory, Network, Topology};
use smddp_transport::Group;
use smddp_transport::bootstrap::Claim;
use smddp_transport::fork::{self, PerProcess};

use self::work::CallName;
pub use self::work::Work;
use crate::bind::{self, GroupFacts};
use crate::call::key::Key;
use crate::call::message_label::Direction;
use crate::call::types::{DType, RedOp};
use crate::call::{self, Blocks, Call};
use crate::config::Config;
use crate::config::network::{NetworkEstimate, Origin};
use crate::device::DeviceStream;
use crate::engine::messages::Request;
use crate::engine::progress_loop::Until;
use crate::engine::progress_thread;
use crate::engine::shared::{DESTROYED, Deletion, SharedState};
use crate::engine::wait_plan::SpinPolicy;
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::observe::recorder::{self, Counters, PathCounters, Recorder};
use crate::sync::completion::{Completion, KeepAlive, in_handler};
use crate::sync::lock;

/// Options of one call.
#[derive(Default)]
pub struct Options {
    /// Deadline of this call; `None`: the deadline of the group.
    pub timeout: Option<Duration>,
    /// Object kept alive until the call is over.
    pub keep: Option<KeepAlive>,
    /// Device that holds the buffers. The call runs after the earlier work of its stream and does not wait for the
    /// device: it is done when the device has completed it.
    pub on: Option<DeviceStream>,
}

/// Largest call, in bytes, that takes the fast path without detaching from the interpreter.
const FAST_PATH_BYTES: usize = 32 << 10;

/// A group's ranks. Clones share the group; any thread may call.
#[derive(Clone)]
pub struct Communicator(Arc<SharedState>);

impl Communicator {
    /// Creates a communicator over a group; `nodes[r]` is the node of rank `r`.
    pub fn from_group(group: Group, nodes: &[usize], name: &str, timeout: Duration) -> Self {
        let (rank, size) = (group.rank(), group.size());
        let network_path = group.network_path();
        let topology = Topology::from_labels(nodes);
        let (slot, assumed) = (group.slot_bytes(), GroupFacts::assumed(&network_path));
        let routes = group.routes().clone();
        let (network, canonical) = (OnceLock::new(), OnceLock::new());
        let facts = GroupFacts { rank, topology, slot, routes, assumed, network, canonical };
        let (sleeper, shared_page) = (group.sleeper(), group.shared_page());
        let config = Config::get().unwrap_or_else(|_| {
            static FALLBACK: OnceLock<Config> = OnceLock::new();
            FALLBACK.get_or_init(Config::default)
        });
        let counters = Arc::new(PathCounters::default());
        let name_and_path = (name, if network_path.is_empty() { "shm" } else { network_path.as_str() });
        let recorder = Recorder::new(name_and_path, rank, &facts.topology, counters.clone(), config.recorder);
        group.set_status_id(recorder::query_key(name, rank));
        let comm = Self(Arc::new(SharedState {
            engine: Mutex::new(Engine::new(group, name.to_owned(), counters.clone(), recorder)),
            counters,
            cache: Mutex::default(),
            commands: Mutex::default(),
            has_commands: AtomicBool::new(false),
            submitted: AtomicU64::new(0),
            sleeper,
            failure: OnceLock::new(),
            abort_reported: AtomicBool::new(false),
            timeout: AtomicU64::new(0),
            long_waits: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            claim: Mutex::default(),
            rank,
            size,
            facts,
            shared_page,
            overlaps: AtomicU16::new(0),
            handles: Mutex::default(),
            preparing: Mutex::default(),
            name: name.to_owned(),
            forks: fork::generation(),
            spin_policy: SpinPolicy::new(config.spin, !network_path.is_empty()),
            network_path,
            config,
        }));
        comm.set_timeout(timeout);
        let mut open = lock(OPEN_GROUPS.get());
        open.retain(|group| group.strong_count() > 0);
        open.push(Arc::downgrade(&comm.0));
        comm
    }

    /// Keeps the claim of this process on its rank until the group is closed or dead.
    pub(crate) fn keep_claim(&self, claim: Claim, deletion: Option<Deletion>) {
        let mut held = lock(&self.0.claim);
        // `fail_group` sets the reason before it releases the claim, so a group that fails meanwhile keeps none.
        if self.0.failure.get().is_none() {
            *held = Some((claim, deletion));
        }
    }

    pub fn rank(&self) -> usize {
        self.0.rank
    }

    pub fn size(&self) -> usize {
        self.0.size
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sets the deadline of calls without their own deadline.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.0.timeout.store(nanos, Ordering::Relaxed);
    }

    pub(crate) fn timeout(&self, options: &Options) -> Duration {
        options.timeout.unwrap_or_else(|| Duration::from_nanos(self.0.timeout.load(Ordering::Relaxed)))
    }

    /// Returns the number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.0.submitted.load(Ordering::Relaxed)
    }

    /// Returns the error that ended the group.
    pub fn error(&self) -> Option<Error> {
        self.0.failure.get().cloned()
    }

    /// Describes the transport and algorithm of a collective on a whole buffer of `bytes`.
    pub fn path(&self, collective: Collective, dtype: DType, bytes: usize) -> String {
        if self.0.size == 1 {
            return "one rank: a copy at most".to_owned();
        }
        let counts = Counts::of_buffer(collective, bytes / dtype.size(), self.0.size);
        let key = Key {
            collective,
            dtype,
            redop: 0,
            factor: 0,
            root: 0,
            counts,
            memory: Memory::Host,
            site: 0,
            lossless: false,
        };
        bind::describe_decision(&self.transport(), &bind::plan_decision(&key, &self.0.facts, self.0.config))
    }

    /// Returns the transports of this group: "shm", "tcp eth0 10.0.0.1", or both.
    pub fn transport(&self) -> String {
        let inside = self.0.facts.topology.node_sizes().1 > 1;
        match (inside, self.0.network_path.as_str()) {
            (_, "") => "shm".to_owned(),
            (true, network) => format!("shm + {network}"),
            (false, network) => network.to_owned(),
        }
    }

    /// Returns the network estimate by which segments and algorithms are chosen between nodes, and its origin.
    /// `None` in a group of one node.
    pub fn network(&self) -> Option<NetworkEstimate> {
        let assumed = NetworkEstimate { network: Network::ASSUMED, origin: Origin::Default };
        (self.0.facts.topology.nodes() > 1).then(|| self.0.facts.network.get().copied().unwrap_or(assumed))
    }

    /// Sets the network estimate of a communicator that was created by [`Communicator::from_group`]: before its
    /// first call, and equal on all ranks. Returns false if it was set already.
    pub fn set_network(&self, known: NetworkEstimate) -> bool {
        let first = self.0.facts.network.set(known).is_ok();
        if first {
            lock(&self.0.engine).group.expect(known.network.in_flight_bytes());
        }
        first
    }

    /// Returns the shortest round trip to `rank` that the kernel has measured, if any.
    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        lock(&self.0.engine).group.round_trip(rank)
    }

    pub(crate) fn config(&self) -> &'static Config {
        self.0.config
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.0.facts.topology
    }

    /// Returns the node of each rank, numbered by first appearance.
    pub fn nodes(&self) -> Vec<usize> {
        (0..self.0.size).map(|rank| self.0.facts.topology.node_of(rank)).collect()
    }

    /// Returns completed operations and bytes, by collective and path.
    pub fn path_counters(&self) -> Vec<Counters> {
        self.0.counters.nonzero().collect()
    }

    /// Runs `call` on the calling thread. Returns when it is over.
    ///
    /// After an error the caller's memory is no longer used. On [`Error::Interrupted`] the operation continues with
    /// copies of its buffers, so the other ranks can finish. If other ranks read the buffers directly, the group
    /// ends instead. Only device buffers remain in use, in the order of their stream, and `options.keep` is held
    /// until then.
    ///
    /// # Safety
    /// The buffers of `call` are valid and no other thread writes to them until this returns.
    pub unsafe fn run(&self, call: &Call<'_>, options: Options) -> Result<()> {
        // SAFETY: the caller guarantees it.
        unsafe { self.run_with(call, options, false, |wait| wait()) }
    }

    /// Runs `call`, waiting in another state, such as without an interpreter's lock. `outside` switches the state and
    /// calls the closure that it receives. A small call that the other ranks have already made completes without
    /// `outside`.
    ///
    /// # Safety
    /// As for [`Communicator::run`].
    pub unsafe fn run_detached(
        &self,
        call: &Call<'_>,
        options: Options,
        outside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        if call.bytes() <= FAST_PATH_BYTES {
            // SAFETY: the caller guarantees it.
            return unsafe { self.run_with(call, options, true, outside) };
        }
        let (mut outcome, mut options) = (Ok(()), Some(options));
        outside(&mut || {
            if let Some(options) = options.take() {
                // SAFETY: the caller guarantees it.
                outcome = unsafe { self.run(call, options) };
            }
        });
        outcome
    }

    /// # Safety
    /// As for [`Communicator::run`].
    unsafe fn run_with(
        &self,
        call: &Call<'_>,
        options: Options,
        fast: bool,
        outside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        let state = &self.0;
        state.check_usable()?;
        if options.on.is_none()
            && let Some(mut engine) = state.try_own()
        {
            let op = state.prepare_repeated(&mut engine, call, self.timeout(&options))?;
            state.take_commands(&mut engine);
            let number = engine.next;
            if let Some(Err(error)) = state.guard(&mut engine, |engine| engine.start(op)) {
                state.fail_group(&mut engine, error);
            }
            state.submitted.fetch_add(1, Ordering::Relaxed);
            let until = Until::Over(number);
            let mut outcome = state.outcome_of(&engine, &until);
            if outcome.is_some() {
                engine.group.flush();
            } else if fast {
                outcome = state.poll_briefly(&mut engine, &until);
            }
            if let Some(outcome) = outcome {
                if engine.pending() {
                    state.release(engine);
                }
                return outcome;
            }
            let mut held = Some(engine);
            outside(&mut || {
                if let Some(engine) = held.take() {
                    outcome = Some(state.run_to_completion(engine, number));
                }
            });
            // The buffers are in use until the operation is over, even if `outside` did not call its closure.
            let rest = held.take().map(|engine| state.run_to_completion(engine, number));
            return outcome.or(rest).unwrap_or(Ok(()));
        }
        let mut outcome = Ok(());
        let mut options = Some(options);
        outside(&mut || {
            if let Some(options) = options.take() {
                let on_device = options.on.is_some();
                // SAFETY: the caller guarantees it. `wait` returns when the work is done or interrupted. After an
                // interrupt, `SharedState::detach` releases the buffers; for device buffers the work holds `keep`.
                outcome = unsafe { self.start(call, options) }.and_then(|work| {
                    let outcome = work.wait(None);
                    if outcome == Err(Error::Interrupted) && !on_device {
                        state.detach(&work.shared);
                    }
                    outcome
                });
            }
        });
        outcome
    }

    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self, options: Options) -> Result<()> {
        // SAFETY: a barrier has no buffers.
        unsafe { self.run(&BARRIER, options) }
    }

    /// Waits at a barrier and calls `check` after each pause. The first pause is `pause`; pauses grow to ten times
    /// `pause`.
    ///
    /// # Errors
    /// Errors of the barrier and of `check`; the latter aborts the group.
    pub(crate) fn checked_barrier(
        &self,
        options: Options,
        pause: Duration,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // SAFETY: a barrier has no buffers.
        let work = unsafe { self.begin(&BARRIER, options) }?;
        let mut next = pause;
        loop {
            let outcome = work.wait(Some(next));
            if work.is_done() {
                return work.wait(None);
            }
            if outcome == Err(Error::Interrupted) {
                return outcome;
            }
            if let Err(error) = check() {
                if work.poll() {
                    return work.wait(None);
                }
                self.abort("another rank could not join");
                return Err(error);
            }
            next = (2 * next).min(10 * pause);
        }
    }

    /// Starts `call`, which progresses in the background.
    ///
    /// # Safety
    /// The buffers of `call` are valid, and not written by other threads, until the work is done. `options.keep`
    /// can hold them.
    pub unsafe fn start(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        // SAFETY: the caller guarantees it.
        let work = unsafe { self.begin(call, options) }?;
        self.0.start_progress();
        Ok(work)
    }

    /// Starts `call` and makes `stream`, a stream of the call's device, wait for it, as [`Work::wait_stream`] does.
    /// The second value is the outcome of that wait. Only this thread polls; the progress thread is not notified.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn start_for(
        &self,
        call: &Call<'_>,
        options: Options,
        stream: smddp_cuda::Stream,
    ) -> Result<(Work, Result<()>)> {
        // SAFETY: the caller guarantees it.
        let work = unsafe { self.begin(call, options) }?;
        let waits = work.wait_stream(stream);
        Ok((work, waits))
    }

    /// Submits a call without starting progress on it.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    unsafe fn begin(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        let state = &self.0;
        state.check_usable()?;
        let counts = call::check(call, state.rank, state.size)?;
        let timeout = self.timeout(&options);
        let device = options.on.as_ref().map(|on| self.device_op(on, call)).transpose()?;
        let shared = Arc::new(Completion::new(options.keep));
        let spare = state.try_own().and_then(|mut engine| engine.spare.take());
        let mut op = state.prepare(spare, call, counts, timeout, device)?;
        op.work = Some(shared.clone());
        op.submitted = Some(Instant::now());
        let mut completion = None;
        state.submit(|| {
            // Device sequence numbers follow the order of the commands.
            completion = op.device.as_mut().map(|device| {
                device.number = device.handle.number();
                device.completion()
            });
            state.submitted.fetch_add(1, Ordering::Relaxed);
            Command::Collective(op)
        });
        let call = CallName::Collective(call.collective);
        Ok(Work { shared, comm: state.clone(), call, completion })
    }

    /// Sends `count` elements to `dst`.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn send(
        &self,
        ptr: *const u8,
        count: usize,
        dtype: DType,
        dst: usize,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        self.post(Direction::To(dst), ptr as usize, count, dtype, tag, options)
    }

    /// Receives `count` elements from `src`, or from any rank.
    ///
    /// # Safety
    /// As for [`Communicator::start`]: no pending call reads or writes the memory, which is not checked.
    pub unsafe fn recv(
        &self,
        ptr: *mut u8,
        count: usize,
        dtype: DType,
        src: Option<usize>,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        self.post(src.map_or(Direction::FromAny, Direction::From), ptr as usize, count, dtype, tag, options)
    }

    fn post(
        &self,
        direction: Direction,
        ptr: usize,
        count: usize,
        dtype: DType,
        tag: u64,
        options: Options,
    ) -> Result<Work> {
        let state = &self.0;
        state.check_usable()?;
        if options.on.is_some() {
            return Err(Error::Invalid(format!(
                "{direction} on group `{}`: send and recv support host memory only; copy the tensor to the CPU first",
                state.name
            )));
        }
        match direction {
            Direction::To(rank) | Direction::From(rank) if rank >= state.size => {
                return Err(Error::Invalid(format!("rank {rank} is not in this group of {}", state.size)));
            }
            Direction::To(rank) | Direction::From(rank) if rank == state.rank => {
                return Err(Error::Invalid(format!("rank {rank} cannot send to or receive from itself")));
            }
            _ => {}
        }
        let timeout = self.timeout(&options);
        let shared = Arc::new(Completion::new(options.keep));
        let post = Request {
            direction,
            ptr,
            count,
            dtype,
            tag,
            timeout,
            submitted: Instant::now(),
            work: shared.clone(),
        };
        state.start_message(post);
        Ok(Work { shared, comm: state.clone(), call: CallName::Message(direction), completion: None })
    }

    /// Aborts the group: all waiting calls fail, on this rank and on its peers. Waits for no rank; sends the
    /// report for at most 50 ms.
    pub fn abort(&self, reason: &str) {
        let state = &self.0;
        if state.forks != fork::generation() {
            return;
        }
        let _ = state
            .failure
            .set(Error::Closed { group: state.name.clone(), reason: format!("aborted: {reason}") });
        match state.try_own() {
            Some(mut engine) => {
                state.guard(&mut engine, |engine| {
                    state.poll(engine);
                    state.failure.get().map(|error| engine.fail(error, Instant::now()))
                });
            }
            // The owner of the engine sees the abort at its next poll.
            None => progress_thread::register(state),
        }
        state.sleeper.notify();
    }

    /// Leaves the group together with all other ranks. Waits up to `limit` for them and compares the calls that
    /// each rank made. Late and lost ranks are not compared; that is not an error. The group is closed in any case. In
    /// a signal handler that interrupted a call it is closed without the comparison.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the calls differ and no call has reported that, for example another root or a message
    /// without recv. [`Error::Interrupted`] if a signal ended the wait; the group is closed then, too.
    pub fn shutdown_checked(&self, limit: Duration) -> Result<()> {
        let state = &self.0;
        let mut outcome = Ok(false);
        let mut interrupted = false;
        let is_open = state.forks == fork::generation() && !state.closed.load(Ordering::Acquire);
        if is_open && state.size > 1 && !in_handler() {
            state.run_for(&Until::DevicesIdle, DEVICE_COMPLETION_TIME);
            let begun = Instant::now();
            let left = || limit.saturating_sub(begun.elapsed());
            if state.failure.get().is_none() {
                let deleted = if limit.is_zero() { Ok(()) } else { state.delete_claim() };
                outcome = deleted.and_then(|()| {
                    state.compare(|work| match state.wait_until(&Until::Done(work), Some(left()))? {
                        true => work.outcome(),
                        false => Err(Error::Closed {
                            group: state.name.clone(),
                            reason: "the time limit of the shutdown has passed".to_owned(),
                        }),
                    })
                });
            }
            match &outcome {
                Ok(true) => state.run_for(&Until::Idle, left()),
                Ok(false) => {}
                Err(reason) => {
                    log::say(
                        Level::Info,
                        &format!(
                            "closed group `{}` without comparing the calls of all ranks: {reason}",
                            state.name
                        ),
                    );
                    interrupted = *reason == Error::Interrupted;
                    state.cancel_leaving();
                }
            }
            // The error that ended the group, unless a call has reported it.
            outcome = match state.failure.get() {
                Some(error @ Error::Mismatch { .. }) if !state.abort_reported.load(Ordering::Relaxed) => {
                    Err(error.clone())
                }
                _ => Ok(true),
            };
        }
        self.close();
        if interrupted { Err(Error::Interrupted) } else { outcome.map(drop) }
    }

    /// Closes the group. Waits for calls on devices; other pending calls end with an error, and later calls fail.
    /// Idempotent.
    pub fn close(&self) {
        let state = &self.0;
        if state.forks != fork::generation() || state.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        *lock(&state.claim) = None;
        state.run_for(&Until::DevicesIdle, DEVICE_COMPLETION_TIME);
        let error = Error::Closed { group: state.name.clone(), reason: DESTROYED.to_owned() };
        // A group that is already dead keeps its first reason.
        let is_first = state.failure.set(error).is_ok();
        state.sleeper.notify();
        let mut engine = lock(&state.engine);
        if let Some(error) = state.failure.get()
            && (engine.has_calls() || state.has_commands() || !is_first && !engine.is_abort_sent)
        {
            state.guarded_poll(&mut engine);
            if !is_first {
                engine.fail(error, Instant::now());
            }
        }
        engine.group.leave();
        lock(&state.handles).clear();
        engine.drop_devices();
    }
}

#[cfg(test)]
impl Communicator {
    /// Runs `action` while the engine is owned.
    pub(crate) fn while_owned(&self, action: impl FnOnce()) {
        let _engine = lock(&self.0.engine);
        action();
    }

    /// Returns true once the other ranks have been sent the reason of the failure.
    pub(crate) fn is_abort_sent(&self) -> bool {
        lock(&self.0.engine).is_abort_sent
    }

    pub(crate) fn cache(&self) -> &Mutex<bind::Cache> {
        &self.0.cache
    }
}

const BARRIER: Call<'static> = Call {
    collective: Collective::Barrier,
    dtype: DType::U8,
    redop: RedOp::Sum,
    root: 0,
    input: Blocks::None,
    output: Blocks::None,
};

/// Longest wait for operations on devices when their group is closed.
const DEVICE_COMPLETION_TIME: Duration = Duration::from_secs(30);

static OPEN_GROUPS: PerProcess<Mutex<Vec<Weak<SharedState>>>> = PerProcess::new();

/// Closes all groups of this process. Called at exit, so that peers see a departure and not a death.
pub fn shutdown() {
    let open: Vec<_> = lock(OPEN_GROUPS.get()).drain(..).filter_map(|group| group.upgrade()).collect();
    for comm in open {
        Communicator(comm).close();
    }
    shutdown::join_closing_threads();
}
