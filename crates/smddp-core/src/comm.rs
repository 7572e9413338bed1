//! A communicator: one group's ranks with their own sequence numbers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use smddp_plan::{Algorithm, Collective, Counts, Network, Topology};
use smddp_transport::Board;
use smddp_transport::fork::{self, PerProcess};
use smddp_transport::{Group, Sleeper};

use crate::bind::{self, Cache, Key, Site};
use crate::call::{self, Blocks, Call};
use crate::config::{Config, Level};
use crate::device::{self, DeviceOp, Landing, Lobby, On};
use crate::drive::{Limit, Target};
use crate::driver::{Driver, Item, Tally};
use crate::error::{Error, Result};
use crate::log;
use crate::network::{Known, Origin};
use crate::p2p::{Direction, Post};
use crate::progress;
use crate::types::{DType, RedOp};
use crate::wait::Habit;
use crate::work::{Keep, Shared};

/// How a call deviates from its group's habits.
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
    /// What went which way so far.
    tally: Arc<Tally>,
    /// Calls that were bound, for all threads: whoever starts one while another thread drives needs it, too.
    pub(crate) cache: Mutex<Cache>,
    /// What the driver has not yet seen.
    pub(crate) inbox: Mutex<Vec<Item>>,
    /// The inbox is not empty.
    pub(crate) mail: AtomicBool,
    /// Collectives ever submitted.
    submitted: AtomicU64,
    pub(crate) sleeper: Sleeper,
    pub(crate) poison: OnceLock<Error>,
    /// A call has told the caller why the group is dead.
    told: AtomicBool,
    timeout: AtomicU64,
    closed: AtomicBool,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) site: Site,
    board: Option<Arc<Board>>,
    /// The devices that this group has been used on.
    lobbies: Mutex<Vec<Arc<Lobby>>>,
    /// How other nodes are reached; empty where there are none.
    way: String,
    pub(crate) name: String,
    pub(crate) forks: u32,
    pub(crate) habit: Habit,
    pub(crate) config: &'static Config,
}

/// One group's ranks. Cheap to clone; any thread may call.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

/// A call under way.
#[derive(Clone)]
pub struct Work {
    shared: Arc<Shared>,
    comm: Option<Arc<Inner>>,
    call: Asked,
    /// Where its buffers are a device's.
    landing: Option<Landing>,
}

/// What a work stands for, for errors.
#[derive(Clone, Copy)]
enum Asked {
    Collective(Collective),
    Message(Direction),
    Leaving,
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Collective(collective) => f.write_str(call::name_of(*collective)),
            Self::Message(direction) => write!(f, "{direction}"),
            Self::Leaving => f.write_str("destroy_process_group"),
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
    pub fn over(link: Group, nodes: &[usize], name: &str, timeout: Duration) -> Self {
        let (rank, size) = (link.rank(), link.size());
        let way = link.way();
        let topology = Topology::from_labels(nodes);
        let (slot, assumed) = (link.slot_bytes(), Site::assumed(&way));
        let reach = link.reach().clone();
        let site = Site { rank, topology, slot, reach, assumed, network: OnceLock::new() };
        let (sleeper, board) = (link.sleeper(), link.board());
        let config = Config::get().unwrap_or_else(|_| {
            static FALLBACK: OnceLock<Config> = OnceLock::new();
            FALLBACK.get_or_init(Config::default)
        });
        let tally = Arc::new(Tally::default());
        let comm = Self(Arc::new(Inner {
            driver: Mutex::new(Driver::new(link, name.to_owned(), tally.clone())),
            tally,
            cache: Mutex::default(),
            inbox: Mutex::default(),
            mail: AtomicBool::new(false),
            submitted: AtomicU64::new(0),
            sleeper,
            poison: OnceLock::new(),
            told: AtomicBool::new(false),
            timeout: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            rank,
            size,
            site,
            board,
            lobbies: Mutex::default(),
            name: name.to_owned(),
            forks: fork::generation(),
            habit: Habit::new(config.spin, !way.is_empty()),
            way,
            config,
        }));
        comm.set_timeout(timeout);
        let mut live = lock(LIVE.get());
        live.retain(|known| known.strong_count() > 0);
        live.push(Arc::downgrade(&comm.0));
        comm
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

    fn timeout(&self, options: &Options) -> Duration {
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

    /// Ranks known to have begun the newest collective that was started here; only this rank while another thread
    /// waits in this group.
    pub fn arrived(&self) -> Vec<usize> {
        let Some(driver) = self.0.try_drive() else { return vec![self.0.rank] };
        let next = driver.next;
        (0..self.0.size)
            .filter(|&r| next == 0 || r == self.0.rank || driver.link.arrived(r, next - 1) == Some(true))
            .collect()
    }

    /// The way a collective on a whole buffer of `bytes` takes, in words.
    pub fn path(&self, collective: Collective, dtype: DType, bytes: usize) -> String {
        if self.0.size == 1 {
            return "one rank: a copy at most".to_owned();
        }
        let counts = Counts::of_buffer(collective, bytes / dtype.size(), self.0.size);
        let key = Key { collective, dtype, redop: 0, factor: 0, root: 0, counts, device: None };
        bind::told(&self.way(), &bind::decided(&key, &self.0.site, self.0.config))
    }

    /// What bytes go through: "shm", "tcp eth0 10.0.0.1", or both.
    pub fn way(&self) -> String {
        let inside = self.0.site.topology.node_sizes().1 > 1;
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
        (self.0.site.topology.nodes() > 1).then(|| self.0.site.network.get().copied().unwrap_or(assumed))
    }

    /// Makes it known, for a communicator over a link of the caller's own: before its first call, and the same on all
    /// ranks. `false`: it was known already.
    pub fn set_network(&self, known: Known) -> bool {
        let first = self.0.site.network.set(known).is_ok();
        if first {
            lock(&self.0.driver).link.expect(known.network.under_way());
        }
        first
    }

    /// The quickest way to `rank` and back that the kernel has seen, if one sees any.
    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        lock(&self.0.driver).link.round_trip(rank)
    }

    pub(crate) fn config(&self) -> &'static Config {
        self.0.config
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.0.site.topology
    }

    /// Node of each rank, numbered by first appearance.
    pub fn nodes(&self) -> Vec<usize> {
        (0..self.0.size).map(|rank| self.0.site.topology.node_of(rank)).collect()
    }

    /// What went which way so far: collective, algorithm, operations, bytes of their whole buffers.
    pub fn taken(&self) -> Vec<(Collective, Algorithm, u64, u64)> {
        let ways = Collective::ALL.into_iter().flat_map(|c| Algorithm::ALL.map(|a| (c, a)));
        ways.map(|(c, a)| (c, a, self.0.tally.get(c, a)))
            .filter(|(.., (operations, _))| *operations > 0)
            .map(|(c, a, (operations, bytes))| (c, a, operations, bytes))
            .collect()
    }

    /// Makes `call` with the calling thread driving; returns when it is over.
    ///
    /// On `Interrupted` the call goes on by itself and `options.keep` is held until it is over.
    ///
    /// # Safety
    /// The buffers of `call` are valid, and written by nobody else, until this returns anything but
    /// `Interrupted`; in that case until the call is over.
    pub unsafe fn run(&self, call: &Call<'_>, options: Options) -> Result<()> {
        let inner = &self.0;
        inner.usable()?;
        let counts = call::check(call, inner.rank, inner.size)?;
        let timeout = self.timeout(&options);
        if options.on.is_none()
            && let Some(mut driver) = inner.try_drive()
        {
            let op = inner.prepare(driver.spare.take(), call, counts, timeout, None)?;
            inner.collect(&mut driver);
            let number = driver.enqueue(op);
            inner.submitted.fetch_add(1, Ordering::Relaxed);
            let outcome = inner.drive(&mut driver, &Target::Number(number), &mut Limit::new(None));
            let outcome = outcome.unwrap_or(Ok(()));
            if outcome == Err(Error::Interrupted)
                && let Some(op) = driver.queue.iter_mut().find(|op| op.seq == number)
            {
                op.work = Some(Arc::new(Shared::new(options.keep)));
            }
            if driver.pending() {
                inner.leave(driver);
            }
            return outcome;
        }
        // SAFETY: the caller's promise; `wait` returns when the work is over, or the work holds `keep`.
        unsafe { self.start(call, options) }?.wait(None)
    }

    /// Returns when all ranks of the group have called it.
    pub fn barrier(&self, options: Options) -> Result<()> {
        let (collective, dtype, redop) = (Collective::Barrier, DType::U8, RedOp::Sum);
        let call = Call { collective, dtype, redop, root: 0, input: Blocks::None, output: Blocks::None };
        // SAFETY: a barrier has no buffers.
        unsafe { self.run(&call, options) }
    }

    /// Starts `call`; it goes on by itself.
    ///
    /// # Safety
    /// The buffers of `call` are valid, and written by nobody else, until the work is done. `options.keep` is the
    /// way to see to that.
    pub unsafe fn start(&self, call: &Call<'_>, options: Options) -> Result<Work> {
        let inner = &self.0;
        inner.usable()?;
        let counts = call::check(call, inner.rank, inner.size)?;
        let timeout = self.timeout(&options);
        let device = options.on.as_ref().map(|on| self.board_device(on, call)).transpose()?;
        let shared = Arc::new(Shared::new(options.keep));
        let spare = inner.try_drive().and_then(|mut driver| driver.spare.take());
        let mut op = inner.prepare(spare, call, counts, timeout, device)?;
        op.work = Some(shared.clone());
        op.submitted = Some(Instant::now());
        let landing = {
            let mut inbox = lock(&inner.inbox);
            // Numbers have the order of the inbox.
            let landing = op.device.as_mut().map(|device| {
                device.number = device.lobby.number();
                device.landing()
            });
            inbox.push(Item::Collective(op));
            inner.submitted.fetch_add(1, Ordering::Relaxed);
            inner.mail.store(true, Ordering::Release);
            landing
        };
        self.submitted();
        let call = Asked::Collective(call.collective);
        Ok(Work { shared, comm: Some(inner.clone()), call, landing })
    }

    /// What a call on a device has besides: its place in the order of the caller's stream. The first call on a device meets
    /// all ranks of the group, which all make it.
    fn board_device(&self, on: &On, call: &Call<'_>) -> Result<Box<DeviceOp>> {
        let name = call::name_of(call.collective);
        let refused = |error: smddp_cuda::Error| Error::System {
            what: format!("{name} on group `{}`, {}", self.0.name, on.device.describe()),
            why: error.to_string(),
        };
        if on.device.capturing(on.stream).map_err(refused)? {
            return Err(Error::Invalid(format!(
                "{name}: the stream is being captured into a CUDA graph, which smddp cannot be part of: its operations wait for \
                 words whose values differ from run to run; call it outside the graph"
            )));
        }
        let lobby = self.lobby(on)?;
        let after = lobby.mark(on.stream).map_err(refused)?;
        Ok(Box::new(DeviceOp::new(lobby, after, call.redop)))
    }

    /// This group's site on a device; made by all ranks together at the first call there.
    pub fn prepare_device(&self, on: &On) -> Result<()> {
        self.lobby(on).map(drop)
    }

    fn lobby(&self, on: &On) -> Result<Arc<Lobby>> {
        let inner = &self.0;
        let mut lobbies = lock(&inner.lobbies);
        if let Some(known) = lobbies.iter().find(|lobby| lobby.device.ordinal() == on.device.ordinal()) {
            return Ok(known.clone());
        }
        let (lobby, site) = device::agree(self, on, lobbies.len(), lobbies.first(), inner.board.clone())?;
        lock(&inner.inbox).push(Item::Site(Box::new(site)));
        inner.mail.store(true, Ordering::Release);
        lobbies.push(lobby.clone());
        Ok(lobby)
    }

    /// The stream on which this group moves memory of that device, and the way it goes, in words; `None` before the first
    /// call there.
    pub fn on_device(&self, ordinal: i32) -> Option<(smddp_cuda::Stream, String)> {
        let lobbies = lock(&self.0.lobbies);
        let lobby = lobbies.iter().find(|lobby| lobby.device.ordinal() == ordinal)?;
        Some((lobby.stream, lobby.path.clone()))
    }

    /// Gets a submitted item going, here if nobody drives.
    fn submitted(&self) {
        match self.0.try_drive() {
            Some(mut driver) => {
                self.0.turn(&mut driver);
                driver.link.flush();
                self.0.leave(driver);
            }
            None => {
                // The one who drives sleeps perhaps; and if it leaves now, the progress thread takes over.
                progress::register(&self.0);
                self.0.sleeper.ring();
            }
        }
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
    /// As for [`Communicator::start`].
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
        let post = Post {
            direction,
            ptr,
            count,
            dtype,
            tag,
            timeout,
            submitted: Instant::now(),
            work: shared.clone(),
        };
        {
            let mut inbox = lock(&inner.inbox);
            inbox.push(Item::Post(post));
            inner.mail.store(true, Ordering::Release);
        }
        self.submitted();
        Ok(Work { shared, comm: Some(inner.clone()), call: Asked::Message(direction), landing: None })
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
                    inner.poison.get().map(|error| driver.fail(error))
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
    /// closed in any case.
    pub fn finish(&self, limit: Duration) -> Result<()> {
        let inner = &self.0;
        let mut outcome = Ok(false);
        if inner.forks == fork::generation() && inner.size > 1 && !inner.closed.load(Ordering::Acquire) {
            inner.land(LANDING);
            let begun = Instant::now();
            let left = || limit.saturating_sub(begun.elapsed());
            if inner.poison.get().is_none() {
                outcome = inner.compare(|step| {
                    let (shared, comm) = (step.work.clone(), Some(inner.clone()));
                    Work { shared, comm, call: Asked::Leaving, landing: None }.wait(Some(left()))
                });
            }
            match &outcome {
                Ok(true) => inner.deliver(left()),
                Ok(false) => {}
                Err(why) => {
                    log::say(
                        Level::Info,
                        &format!(
                            "group `{}` is left, and not all ranks were held against each other: {why}",
                            inner.name
                        ),
                    );
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
        outcome.map(drop)
    }

    /// Leaves in good order: calls on devices are waited for, other pending calls end with an error, later ones raise.
    /// Idempotent.
    pub fn close(&self) {
        let inner = &self.0;
        if inner.forks != fork::generation() || inner.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        inner.land(LANDING);
        let error = Error::Closed { group: inner.name.clone(), why: "it was destroyed".to_owned() };
        // A group that is already dead stays dead for its first reason.
        let fresh = inner.poison.set(error).is_ok();
        inner.sleeper.ring();
        let mut driver = lock(&inner.driver);
        if let Some(error) = inner.poison.get()
            && (driver.waited_for() || inner.has_mail())
        {
            inner.turn(&mut driver);
            if !fresh {
                driver.fail(error);
            }
        }
        driver.link.leave();
        lock(&inner.lobbies).clear();
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

    pub(crate) fn cache(&self) -> &Mutex<Cache> {
        &self.0.cache
    }
}

/// What was called for on devices may take this long to end when its group is closed.
const LANDING: Duration = Duration::from_secs(30);

impl Work {
    /// Drives the call until it is over. `timeout`: give up waiting after that; the call itself goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.shared.is_done() {
            return self.outcome();
        }
        let Some(comm) = &self.comm else { return Ok(()) };
        if !comm.reach(&Target::Work(&self.shared), timeout)? {
            return Err(Error::Timeout {
                what: format!("wait for {}", self.call),
                group: comm.name.clone(),
                after: timeout.unwrap_or_default(),
                missing: Vec::new(),
                detail: "the call goes on; wait again, or look at what the other ranks do".to_owned(),
            });
        }
        self.outcome()
    }

    /// How it ended, as the caller hears it.
    fn outcome(&self) -> Result<()> {
        let outcome = self.shared.outcome();
        if let (Err(_), Some(comm), false) = (&outcome, &self.comm, matches!(self.call, Asked::Leaving)) {
            comm.told.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// Whether it is over, well or not; on a device: whether that is through.
    pub fn is_done(&self) -> bool {
        let through = |landing: &Landing| landing.lobby.is_done(landing.number) && !landing.lobby.released();
        self.shared.is_done() || self.landing.as_ref().is_some_and(through)
    }

    /// Whether the host has nothing to add to it any more; on host memory: whether it is over.
    pub fn is_enqueued(&self) -> bool {
        self.shared.is_done() || self.landing.as_ref().is_some_and(Landing::enqueued)
    }

    /// Whether [`Self::wait_stream`] would wait here, now: the host stays until the other ranks have made the call, too.
    pub fn keeps_host(&self) -> bool {
        !self.is_enqueued()
            && self.landing.as_ref().is_none_or(|landing| landing.lobby.keeps_host(landing.number))
    }

    /// What comes next on `stream`, one of the device's, is after this call. Does not wait for the device. Waits for the
    /// other ranks to make the call, unless `SMDDP_CUDA_AHEAD` lets the stream do that and the group knows the memory that
    /// its calls use. Raises the call's error if it has failed already. For calls on the host this is `wait`.
    pub fn wait_stream(&self, stream: smddp_cuda::Stream) -> Result<()> {
        let (Some(landing), Some(comm)) = (&self.landing, &self.comm) else { return self.wait(None) };
        if self.keeps_host() {
            comm.reach(&Target::Enqueued(&self.shared, landing), None)?;
        } else if !self.is_enqueued()
            && let Some(mut driver) = comm.try_drive()
        {
            comm.turn(&mut driver);
            driver.link.flush();
            comm.leave(driver);
        }
        // If it failed, what is left of it on the device still uses its memory.
        let waits = landing.wait_stream(stream);
        if let Some(error) = self.error() {
            return Err(error);
        }
        waits.map_err(|error| Error::System {
            what: format!("wait for {} on group `{}`", self.call, comm.name),
            why: error.to_string(),
        })
    }

    /// The error it ended with.
    pub fn error(&self) -> Option<Error> {
        if self.shared.is_done() { self.outcome().err() } else { None }
    }

    /// The rank that a receive was matched with.
    pub fn source(&self) -> Option<usize> {
        self.shared.source()
    }

    /// Calls back once when the host has nothing to add to it any more, as [`Self::is_enqueued`] says, from whatever thread
    /// does the last of it; at once if that is so already.
    pub fn on_enqueued(&self, callback: Box<dyn FnOnce() + Send>) {
        self.shared.on_enqueued(callback);
    }

    /// Calls back once when done, from whatever thread ends the call; at once if it is over already.
    pub fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.shared.on_done(callback);
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish()
    }
}

static LIVE: PerProcess<Mutex<Vec<Weak<Inner>>>> = PerProcess::new();

/// Leaves all groups of this process in good order: the exit hook, so that an exit is no death to the peers.
pub fn shutdown() {
    let live: Vec<_> = lock(LIVE.get()).drain(..).filter_map(|known| known.upgrade()).collect();
    for comm in live {
        Communicator(comm).close();
    }
}
