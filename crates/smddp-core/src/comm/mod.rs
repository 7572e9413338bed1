//! A communicator: one group's ranks with their own sequence numbers.

mod bytes;
mod devices;
mod drive;
mod estimate;
mod handle;
mod leaving;
mod others;
mod prepare;
mod progress;

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use smddp_plan::{Collective, Counts, Memory, Network, Topology};
use smddp_transport::Board;
use smddp_transport::bootstrap::Claim;
use smddp_transport::fork::{self, PerProcess};
use smddp_transport::{Group, Sleeper};

use self::drive::Target;
use self::handle::Asked;
pub use self::handle::Work;
use crate::bind::{self, Cache, GroupFacts};
use crate::call::{self, Blocks, Call};
use crate::config::Config;
use crate::device::{On, SiteHandle};
use crate::driver::{Driver, Item};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::label::Direction;
use crate::log::{self, Level};
use crate::network::{Known, Origin};
use crate::p2p::Request;
use crate::recorder::{self, Recorder, Taken, Tally};
use crate::sync::lock;
use crate::types::{DType, RedOp};
use crate::wait::SpinPolicy;
use crate::work::{Keep, Shared, in_handler};

/// How a call deviates from what its group does.
#[derive(Default)]
pub struct Options {
    /// Deadline of this call; `None`: the group's.
    pub timeout: Option<Duration>,
    /// Held until the call is over.
    pub keep: Option<Keep>,
    /// The buffers are this device's, and the call comes after what its stream did so far. The call then does not wait for
    /// the device: it is over when the device is through.
    pub on: Option<On>,
}

pub(crate) struct Inner {
    pub(crate) driver: Mutex<Driver>,
    /// Operations and bytes so far, by collective and path.
    tally: Arc<Tally>,
    /// Calls that were bound, for all threads: whoever starts one while another thread drives needs it, too.
    pub(crate) cache: Mutex<Cache>,
    /// What the driver has not yet seen.
    pub(crate) inbox: Mutex<Vec<Item>>,
    /// The inbox is not empty.
    pub(crate) filled: AtomicBool,
    /// Collectives ever submitted.
    submitted: AtomicU64,
    pub(crate) sleeper: Sleeper,
    pub(crate) poison: OnceLock<Error>,
    /// A call has told the caller why the group is dead.
    told: AtomicBool,
    timeout: AtomicU64,
    /// Threads that wait in this group and have released the driver for a signal check.
    long_waits: AtomicUsize,
    closed: AtomicBool,
    /// Claim on this rank, until the group is closed or dead.
    claim: Mutex<Option<Claim>>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) facts: GroupFacts,
    board: Option<Arc<Board>>,
    /// Collectives, by bit, of which a copied input has been logged.
    overlaps: AtomicU16,
    /// The devices that this group has been used on.
    handles: Mutex<Vec<Arc<SiteHandle>>>,
    /// Held while all ranks prepare another device; `handles` is not.
    preparing: Mutex<()>,
    /// How other nodes are reached; empty where there are none.
    way: String,
    pub(crate) name: String,
    pub(crate) forks: u32,
    pub(crate) spin_policy: SpinPolicy,
    pub(crate) config: &'static Config,
}

/// Bytes of a call whose copies nobody notices.
const BRIEF: usize = 32 << 10;

/// One group's ranks. Cheap to clone; any thread may call.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

impl Inner {
    fn usable(&self) -> Result<()> {
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        self.poison.get().map_or(Ok(()), |error| Err(self.tell(error)))
    }

    /// The caller hears why the group is dead.
    pub(crate) fn tell(&self, error: &Error) -> Error {
        self.told.store(true, Ordering::Relaxed);
        error.clone()
    }
}

impl Communicator {
    /// A communicator over a group; `nodes[r]` is the node of rank `r`.
    pub fn over(group: Group, nodes: &[usize], name: &str, timeout: Duration) -> Self {
        let (rank, size) = (group.rank(), group.size());
        let way = group.way();
        let topology = Topology::from_labels(nodes);
        let (slot, assumed) = (group.slot_bytes(), GroupFacts::assumed(&way));
        let reach = group.reach().clone();
        let (network, canonical) = (OnceLock::new(), OnceLock::new());
        let facts = GroupFacts { rank, topology, slot, reach, assumed, network, canonical };
        let (sleeper, board) = (group.sleeper(), group.board());
        let config = Config::get().unwrap_or_else(|_| {
            static FALLBACK: OnceLock<Config> = OnceLock::new();
            FALLBACK.get_or_init(Config::default)
        });
        let tally = Arc::new(Tally::default());
        let told = (name, if way.is_empty() { "shm" } else { way.as_str() });
        let recorder = Recorder::new(told, rank, &facts.topology, tally.clone(), config.recorder);
        group.about(recorder::about(name, rank));
        let comm = Self(Arc::new(Inner {
            driver: Mutex::new(Driver::new(group, name.to_owned(), tally.clone(), recorder)),
            tally,
            cache: Mutex::default(),
            inbox: Mutex::default(),
            filled: AtomicBool::new(false),
            submitted: AtomicU64::new(0),
            sleeper,
            poison: OnceLock::new(),
            told: AtomicBool::new(false),
            timeout: AtomicU64::new(0),
            long_waits: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            claim: Mutex::default(),
            rank,
            size,
            facts,
            board,
            overlaps: AtomicU16::new(0),
            handles: Mutex::default(),
            preparing: Mutex::default(),
            name: name.to_owned(),
            forks: fork::generation(),
            spin_policy: SpinPolicy::new(config.spin, !way.is_empty()),
            way,
            config,
        }));
        comm.set_timeout(timeout);
        let mut live = lock(LIVE.get());
        live.retain(|known| known.strong_count() > 0);
        live.push(Arc::downgrade(&comm.0));
        comm
    }

    /// Keeps the claim of this process on its rank until the group is closed or dead.
    pub(crate) fn hold(&self, claim: Claim) {
        let mut held = lock(&self.0.claim);
        // `die` sets the reason before it releases the claim, so a group that dies meanwhile keeps none.
        if self.0.poison.get().is_none() {
            *held = Some(claim);
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

    /// Deadline of calls that have none of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.0.timeout.store(nanos, Ordering::Relaxed);
    }

    pub(crate) fn timeout(&self, options: &Options) -> Duration {
        options.timeout.unwrap_or_else(|| Duration::from_nanos(self.0.timeout.load(Ordering::Relaxed)))
    }

    /// Collectives started so far.
    pub fn sequence(&self) -> u64 {
        self.0.submitted.load(Ordering::Relaxed)
    }

    /// Why the group is dead, if it is.
    pub fn error(&self) -> Option<Error> {
        self.0.poison.get().cloned()
    }

    /// The way a collective on a whole buffer of `bytes` takes, in words.
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
            exact: false,
        };
        bind::described(&self.way(), &bind::decided(&key, &self.0.facts, self.0.config))
    }

    /// What bytes go through: "shm", "tcp eth0 10.0.0.1", or both.
    pub fn way(&self) -> String {
        let inside = self.0.facts.topology.node_sizes().1 > 1;
        match (inside, self.0.way.as_str()) {
            (_, "") => "shm".to_owned(),
            (true, way) => format!("shm + {way}"),
            (false, way) => way.to_owned(),
        }
    }

    /// What the choice of segments and algorithms goes by between nodes, and where it is from; `None` in a group of one
    /// node.
    pub fn network(&self) -> Option<Known> {
        let assumed = Known { network: Network::ASSUMED, origin: Origin::Assumed };
        (self.0.facts.topology.nodes() > 1).then(|| self.0.facts.network.get().copied().unwrap_or(assumed))
    }

    /// Makes it known, for a communicator over a group of the caller's own: before its first call, and the same on all
    /// ranks. `false`: it was known already.
    pub fn set_network(&self, known: Known) -> bool {
        let first = self.0.facts.network.set(known).is_ok();
        if first {
            lock(&self.0.driver).group.expect(known.network.under_way());
        }
        first
    }

    /// The quickest way to `rank` and back that the kernel has seen, if one sees any.
    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        lock(&self.0.driver).group.round_trip(rank)
    }

    pub(crate) fn config(&self) -> &'static Config {
        self.0.config
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.0.facts.topology
    }

    /// Node of each rank, numbered by first appearance.
    pub fn nodes(&self) -> Vec<usize> {
        (0..self.0.size).map(|rank| self.0.facts.topology.node_of(rank)).collect()
    }

    /// Operations and bytes so far, by collective and path.
    pub fn taken(&self) -> Vec<Taken> {
        self.0.tally.taken().collect()
    }

    /// Makes `call` with the calling thread driving; returns when it is over.
    ///
    /// After an error no memory of the caller is used any more. On [`Error::Interrupted`] the operation goes on with copies
    /// of its buffers, so the other ranks can finish; where other ranks read the buffers themselves the group ends instead.
    /// Only buffers of a device stay in use, in the order of its stream, and `options.keep` is held until then.
    ///
    /// # Safety
    /// The buffers of `call` are valid and no other thread writes to them until this returns.
    pub unsafe fn run(&self, call: &Call<'_>, options: Options) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run_with(call, options, false, |wait| wait()) }
    }

    /// The same where what takes long is to be done in some other state, such as without an interpreter's lock: `aside` calls
    /// what it is given there. A call of few bytes that the others have made already is over without it.
    ///
    /// # Safety
    /// As for [`Communicator::run`].
    pub unsafe fn run_aside(
        &self,
        call: &Call<'_>,
        options: Options,
        aside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        if call.bytes() <= BRIEF {
            // SAFETY: the caller's promise.
            return unsafe { self.run_with(call, options, true, aside) };
        }
        let (mut outcome, mut options) = (Ok(()), Some(options));
        aside(&mut || {
            if let Some(options) = options.take() {
                // SAFETY: the caller's promise.
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
        brief: bool,
        aside: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        let inner = &self.0;
        inner.usable()?;
        if options.on.is_none()
            && let Some(mut driver) = inner.try_drive()
        {
            let op = inner.made(&mut driver, call, self.timeout(&options))?;
            inner.collect(&mut driver);
            let number = driver.next;
            if let Some(Err(error)) = inner.guard(&mut driver, |driver| driver.enter(op)) {
                inner.die(&mut driver, error);
            }
            inner.submitted.fetch_add(1, Ordering::Relaxed);
            let target = Target::Number(number);
            let mut outcome = inner.reached(&driver, &target);
            if outcome.is_some() {
                driver.group.flush();
            } else if brief {
                outcome = inner.drive_briefly(&mut driver, &target);
            }
            if let Some(outcome) = outcome {
                if driver.pending() {
                    inner.leave(driver);
                }
                return outcome;
            }
            let mut held = Some(driver);
            aside(&mut || {
                if let Some(driver) = held.take() {
                    outcome = Some(inner.complete(driver, number));
                }
            });
            // The buffers are in use until the operation is over, whatever `aside` did.
            let rest = held.take().map(|driver| inner.complete(driver, number));
            return outcome.or(rest).unwrap_or(Ok(()));
        }
        let mut outcome = Ok(());
        let mut options = Some(options);
        aside(&mut || {
            if let Some(options) = options.take() {
                let on_device = options.on.is_some();
                // SAFETY: the caller's promise; `wait` returns when the work is over, or is interrupted: then the work gives
                // the buffers back, or holds `keep` where they are a device's.
                outcome = unsafe { self.start(call, options) }.and_then(|work| {
                    let outcome = work.wait(None);
                    if outcome == Err(Error::Interrupted) && !on_device {
                        inner.detach(&work.shared);
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

    /// Waits at a barrier as [`Communicator::barrier`] does, and calls `check` after each pause, the first of which is `pause`.
    /// Pauses grow to ten times `pause`.
    ///
    /// # Errors
    /// The barrier's, or that of `check`, which aborts the group.
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

    /// Starts `call`; it goes on by itself.
    ///
    /// # Safety
    /// The buffers of `call` are valid, and written by nobody else, until the work is done. `options.keep` is the
    /// way to see to that.
    pub unsafe fn start(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        // SAFETY: the caller's promise.
        let work = unsafe { self.begin(call, options) }?;
        self.0.get_going();
        Ok(work)
    }

    /// The same for who has `stream`, one of the device's, wait for it at once, as by [`Work::wait_stream`], whose outcome comes
    /// with it: this thread drives, and no other is told of the call.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    pub unsafe fn start_for(
        &self,
        call: &Call<'_>,
        options: Options,
        stream: smddp_cuda::Stream,
    ) -> Result<(Work, Result<()>)> {
        // SAFETY: the caller's promise.
        let work = unsafe { self.begin(call, options) }?;
        let waits = work.wait_stream(stream);
        Ok((work, waits))
    }

    /// A call that is submitted, and with which nobody goes on yet.
    ///
    /// # Safety
    /// As for [`Communicator::start`].
    unsafe fn begin(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        let inner = &self.0;
        inner.usable()?;
        let counts = call::check(call, inner.rank, inner.size)?;
        let timeout = self.timeout(&options);
        let device = options.on.as_ref().map(|on| self.device_op(on, call)).transpose()?;
        let shared = Arc::new(Shared::new(options.keep));
        let spare = inner.try_drive().and_then(|mut driver| driver.spare.take());
        let mut op = inner.prepare(spare, call, counts, timeout, device)?;
        op.work = Some(shared.clone());
        op.submitted = Some(Instant::now());
        let mut completion = None;
        inner.submit(|| {
            // Numbers have the order of the inbox.
            completion = op.device.as_mut().map(|device| {
                device.number = device.handle.number();
                device.completion()
            });
            inner.submitted.fetch_add(1, Ordering::Relaxed);
            Item::Collective(op)
        });
        let call = Asked::Collective(call.collective);
        Ok(Work { shared, comm: inner.clone(), call, completion })
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
        let inner = &self.0;
        inner.usable()?;
        if options.on.is_some() {
            return Err(Error::Invalid(format!(
                "{direction} on group `{}`: messages are moved by the processor; give it a copy in host memory",
                inner.name
            )));
        }
        match direction {
            Direction::To(rank) | Direction::From(rank) if rank >= inner.size => {
                return Err(Error::Invalid(format!("rank {rank} is not in this group of {}", inner.size)));
            }
            Direction::To(rank) | Direction::From(rank) if rank == inner.rank => {
                return Err(Error::Invalid(format!("rank {rank} cannot send to or receive from itself")));
            }
            _ => {}
        }
        let timeout = self.timeout(&options);
        let shared = Arc::new(Shared::new(options.keep));
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
        inner.get_message_going(post);
        Ok(Work { shared, comm: inner.clone(), call: Asked::Message(direction), completion: None })
    }

    /// All waiters, here and at the peers, raise. Never blocks.
    pub fn abort(&self, reason: &str) {
        let inner = &self.0;
        if inner.forks != fork::generation() {
            return;
        }
        let _ =
            inner.poison.set(Error::Closed { group: inner.name.clone(), why: format!("aborted: {reason}") });
        match inner.try_drive() {
            Some(mut driver) => {
                inner.guard(&mut driver, |driver| {
                    inner.look(driver);
                    inner.poison.get().map(|error| driver.fail(error, Instant::now()))
                });
            }
            // Whoever drives sees it at its next look.
            None => progress::register(inner),
        }
        inner.sleeper.ring();
    }

    /// Leaves in good order, together with the other ranks, which all do: waits for them for `limit` at most, and holds what
    /// each called against what the others did. [`Error::Mismatch`] where that differs and no call has raised so: another
    /// root, a message that nobody received. Ranks that are late or gone are not held against, which is no error. The group is
    /// closed in any case, and at once where a signal handler that interrupted a call leaves. [`Error::Interrupted`] if a signal ended the wait: the group is closed then, too.
    pub fn finish(&self, limit: Duration) -> Result<()> {
        let inner = &self.0;
        let mut outcome = Ok(false);
        let mut interrupted = false;
        let open = inner.forks == fork::generation() && !inner.closed.load(Ordering::Acquire);
        if open && inner.size > 1 && !in_handler() {
            inner.drive_to(&Target::Landed, COMPLETION);
            let begun = Instant::now();
            let left = || limit.saturating_sub(begun.elapsed());
            if inner.poison.get().is_none() {
                outcome = inner.compare(|work| match inner.reach(&Target::Work(work), Some(left()))? {
                    true => work.outcome(),
                    false => Err(Error::Closed {
                        group: inner.name.clone(),
                        why: "its time to leave was over".to_owned(),
                    }),
                });
            }
            match &outcome {
                Ok(true) => inner.drive_to(&Target::Delivered, left()),
                Ok(false) => {}
                Err(why) => {
                    log::say(
                        Level::Info,
                        &format!(
                            "group `{}` is left, and not all ranks were held against each other: {why}",
                            inner.name
                        ),
                    );
                    interrupted = *why == Error::Interrupted;
                    inner.forget_leaving();
                }
            }
            // What ended the group, if no call has told it yet.
            outcome = match inner.poison.get() {
                Some(error @ Error::Mismatch { .. }) if !inner.told.load(Ordering::Relaxed) => {
                    Err(error.clone())
                }
                _ => Ok(true),
            };
        }
        self.close();
        if interrupted { Err(Error::Interrupted) } else { outcome.map(drop) }
    }

    /// Leaves in good order: calls on devices are waited for, other pending calls end with an error, later ones raise.
    /// Idempotent.
    pub fn close(&self) {
        let inner = &self.0;
        if inner.forks != fork::generation() || inner.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        *lock(&inner.claim) = None;
        inner.drive_to(&Target::Landed, COMPLETION);
        let error = Error::Closed { group: inner.name.clone(), why: DESTROYED.to_owned() };
        // A group that is already dead stays dead for its first reason.
        let fresh = inner.poison.set(error).is_ok();
        inner.sleeper.ring();
        let mut driver = lock(&inner.driver);
        if let Some(error) = inner.poison.get()
            && (driver.waited_for() || inner.has_items() || !fresh && !driver.announced)
        {
            inner.turn(&mut driver);
            if !fresh {
                driver.fail(error, Instant::now());
            }
        }
        driver.group.leave();
        lock(&inner.handles).clear();
        driver.forget_devices();
    }
}

#[cfg(test)]
impl Communicator {
    /// What is done while some thread drives.
    pub(crate) fn driving(&self, what: impl FnOnce()) {
        let _driver = lock(&self.0.driver);
        what();
    }

    /// Returns true once the other ranks have been sent the reason why the group is dead.
    pub(crate) fn has_announced(&self) -> bool {
        lock(&self.0.driver).announced
    }

    pub(crate) fn cache(&self) -> &Mutex<Cache> {
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

/// Reason of calls after [`Communicator::close`].
const DESTROYED: &str = "it was destroyed";

/// What was called for on devices may take this long to end when its group is closed.
const COMPLETION: Duration = Duration::from_secs(30);

static LIVE: PerProcess<Mutex<Vec<Weak<Inner>>>> = PerProcess::new();

/// Leaves all groups of this process in good order: the exit hook, so that an exit is no death to the peers.
pub fn shutdown() {
    let live: Vec<_> = lock(LIVE.get()).drain(..).filter_map(|known| known.upgrade()).collect();
    for comm in live {
        Communicator(comm).close();
    }
    leaving::last_words_said();
}
