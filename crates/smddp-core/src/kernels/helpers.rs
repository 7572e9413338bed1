//! Helper threads for large copies and reductions of a waiting thread. They split the elements, never the operands of
//! one element, so the bits equal those of a single thread.
//!
//! Only waiting threads use helpers: work of the progress thread overlaps with a computation, which needs the cores.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, Thread};

use smddp_base::fork::PerProcess;

use crate::config::Config;
use crate::config::cores;
use crate::kernels::float_mode::set_default_float_mode;
use crate::sync::job_gate::JobGate;
use crate::sync::lock;

/// Minimum bytes of a piece that is split, and alignment of its parts in bytes.
const MIN_SPLIT_BYTES: usize = 64 << 10;
const PART_ALIGNMENT: usize = 16 << 10;
/// Maximum threads of a rank by default.
const MAX_THREADS: usize = 4;
/// Polls before a helper sleeps: some tens of microseconds.
const MAX_SPINS: u32 = 1 << 10;

thread_local! {
    static HELPERS_DISABLED: Cell<bool> = const { Cell::new(false) };
}

/// Disables helpers for the calling thread.
pub(crate) fn disable_helpers() {
    HELPERS_DISABLED.set(true);
}

/// Calls `part` with (first byte, bytes) for parts that cover `bytes` bytes, on this thread, and on helpers if that
/// is faster.
///
/// # Safety
/// `part` may run on several threads at a time, each with other bytes.
///
/// # Panics
/// If a part panics, on this thread or on a helper: the call is incomplete then.
#[inline]
pub(crate) unsafe fn split_work(bytes: usize, part: impl Fn(usize, usize)) {
    if bytes < MIN_SPLIT_BYTES || HELPERS_DISABLED.get() {
        return part(0, bytes);
    }
    match pool() {
        // SAFETY: the caller's contract.
        Some(pool) => unsafe { pool.split_work(bytes, &part) },
        None => part(0, bytes),
    }
}

/// Returns true if ranks of this process have helpers.
pub(crate) fn has_helpers() -> bool {
    thread_count() > 1
}

fn thread_count() -> usize {
    Config::get().map_or(1, |config| config.threads.unwrap_or_else(default_threads))
}

static POOL: PerProcess<OnceLock<Option<Arc<HelperPool>>>> = PerProcess::new();

/// Returns the pool of the process, created for the first large piece.
fn pool() -> Option<&'static HelperPool> {
    POOL.get().get_or_init(|| HelperPool::new(thread_count().saturating_sub(1))).as_deref()
}

/// Default number of threads, from this rank's share of the cores.
fn default_threads() -> usize {
    let allowed = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let ranks = cores::local_ranks();
    // A launcher that limited each rank to some cores has divided them already.
    let share = if allowed * ranks <= cores::cores() { allowed } else { allowed / ranks };
    // With two cores per rank, the other core is left to other work: eight ranks on sixteen cores gained as often as
    // they lost.
    if share > 2 { share.min(MAX_THREADS) } else { 1 }
}

/// A job, as seen by all its threads.
#[derive(Clone, Copy)]
struct Job {
    part: *const dyn Fn(usize, usize),
    bytes: usize,
    /// Bytes of each part except the last.
    part_bytes: usize,
}

struct HelperPool {
    gate: JobGate,
    job: UnsafeCell<Option<Job>>,
    /// Bytes of the job that threads have claimed.
    claimed: AtomicUsize,
    /// Held by the thread that leads a job.
    leader_lock: Mutex<()>,
    /// Payload of a part that panicked on a helper.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    helpers: Vec<Helper>,
}

#[derive(Default)]
struct Helper {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

// SAFETY: only the leader writes `job`, while no job is open and no helper is inside the gate. Helpers read it inside
// the gate.
unsafe impl Sync for HelperPool {}
// SAFETY: as above; the addresses of a job are used only while its leader waits.
unsafe impl Send for HelperPool {}
impl UnwindSafe for HelperPool {}
impl RefUnwindSafe for HelperPool {}

impl HelperPool {
    /// Returns `None` without helpers, or if no thread can be created.
    fn new(helpers: usize) -> Option<Arc<Self>> {
        if helpers == 0 {
            return None;
        }
        let pool = Arc::new(Self {
            gate: JobGate::default(),
            job: UnsafeCell::new(None),
            claimed: AtomicUsize::new(0),
            leader_lock: Mutex::new(()),
            panic: Mutex::default(),
            helpers: (0..helpers).map(|_| Helper::default()).collect(),
        });
        let start = |index| {
            let pool = pool.clone();
            thread::Builder::new()
                .name(format!("smddp-helper-{index}"))
                .spawn(move || pool.run_helper(index))
                .is_ok()
        };
        // Continues with fewer helpers if some threads cannot be created: any number of threads completes a job.
        let started = (0..helpers).filter(|&index| start(index)).count();
        (started > 0).then_some(pool)
    }

    /// # Safety
    /// As [`split_work`].
    unsafe fn split_work(&self, bytes: usize, part: &dyn Fn(usize, usize)) {
        // Two threads may wait for different groups; only one gets helpers.
        let _lead = match self.leader_lock.try_lock() {
            Ok(leader_lock) => leader_lock,
            // A part of an earlier, completed job panicked.
            Err(TryLockError::Poisoned(leader_lock)) => leader_lock.into_inner(),
            Err(TryLockError::WouldBlock) => return part(0, bytes),
        };
        let part_bytes = (bytes / (2 * (self.helpers.len() + 1))).next_multiple_of(PART_ALIGNMENT);
        // SAFETY: `part` outlives the job, which ends before this function returns.
        let part =
            unsafe { std::mem::transmute::<&dyn Fn(usize, usize), &'static dyn Fn(usize, usize)>(part) };
        let job = Job { part, bytes, part_bytes };
        // SAFETY: the previous leader waited until no helper was inside the gate.
        unsafe { *self.job.get() = Some(job) };
        self.claimed.store(0, Ordering::Relaxed);
        // Discards the panic of an earlier job that also panicked on its leader.
        *lock(&self.panic) = None;
        self.gate.open();
        // Its drop waits for the helpers even if a part panics here, because they use `part`.
        let open_job = OpenJob(self);
        for helper in &self.helpers {
            if helper.asleep.load(Ordering::Relaxed)
                && let Some(thread) = helper.thread.get()
            {
                thread.unpark();
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.run_parts(job) };
        drop(open_job);
        let panic = lock(&self.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs parts until all are claimed.
    ///
    /// # Safety
    /// The job must not end before this returns.
    unsafe fn run_parts(&self, job: Job) {
        loop {
            let at = self.claimed.fetch_add(job.part_bytes, Ordering::Relaxed);
            if at >= job.bytes {
                return;
            }
            // SAFETY: `part` lives as long as the job.
            unsafe { (*job.part)(at, job.part_bytes.min(job.bytes - at)) };
        }
    }

    fn run_helper(&self, index: usize) {
        let helper = &self.helpers[index];
        let _ = helper.thread.set(thread::current());
        disable_helpers();
        set_default_float_mode();
        let (mut last, mut spins) = (0, 0);
        loop {
            if let Some(ticket) = self.gate.open_job(last) {
                (last, spins) = (ticket, 0);
                if self.gate.enter(ticket) {
                    // SAFETY: the job stays open until this helper has left the gate.
                    let parts =
                        || unsafe { (*self.job.get()).into_iter().for_each(|job| self.run_parts(job)) };
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(parts)) {
                        lock(&self.panic).get_or_insert(panic);
                    }
                    self.gate.leave();
                }
                continue;
            }
            spins += 1;
            if spins < MAX_SPINS {
                std::hint::spin_loop();
                continue;
            }
            spins = 0;
            helper.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.gate.open_job(last).is_none() {
                thread::park();
            }
            helper.asleep.store(false, Ordering::Relaxed);
        }
    }
}

/// An open job. Dropping it closes the job and waits for the helpers.
struct OpenJob<'a>(&'a HelperPool);

impl Drop for OpenJob<'_> {
    fn drop(&mut self) {
        let gate = &self.0.gate;
        gate.close();
        let mut spins = 0;
        while !gate.is_empty() {
            spins += 1;
            if spins < MAX_SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_byte_is_processed_exactly_once() {
        let pool = HelperPool::new(3).unwrap();
        for round in 0..2_000 {
            let bytes = MIN_SPLIT_BYTES + round * 37;
            let done: Vec<AtomicU64> = (0..bytes.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            let part = |at: usize, bytes: usize| {
                for byte in at..at + bytes {
                    done[byte / 64].fetch_add(1, Ordering::Relaxed);
                }
            };
            // SAFETY: the parts use atomics only.
            unsafe { pool.split_work(bytes, &part) };
            for (line, count) in done.iter().enumerate() {
                assert_eq!(count.load(Ordering::Relaxed), (bytes - 64 * line).min(64) as u64);
            }
            // Lets the helpers fall asleep from time to time.
            if round % 100 == 0 {
                thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        assert!(pool.helpers.iter().all(|helper| helper.thread.get().is_some()), "all helpers took part");
    }

    /// A panic on any thread reaches the leader, and the pool remains usable.
    #[test]
    fn panicking_part_ends_the_call_on_every_thread() {
        let pool = HelperPool::new(2).unwrap();
        for round in 0..200 {
            let leader = thread::current().id();
            let on_helper = round % 2 == 0;
            let fail = AtomicBool::new(true);
            let part = |_: usize, _: usize| {
                if (thread::current().id() != leader) == on_helper {
                    if fail.swap(false, Ordering::Relaxed) {
                        resume_unwind(Box::new("a part failed"));
                    }
                } else {
                    // Leaves the remaining parts to the thread that is to fail.
                    while fail.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                }
            };
            // SAFETY: the parts use no bytes.
            let outcome =
                catch_unwind(AssertUnwindSafe(|| unsafe { pool.split_work(MIN_SPLIT_BYTES * 8, &part) }));
            assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&"a part failed"), "round {round}");
            assert!(pool.gate.is_empty(), "a helper is still inside the gate");
        }
        let total = AtomicUsize::new(0);
        // SAFETY: the part uses an atomic only.
        unsafe {
            pool.split_work(MIN_SPLIT_BYTES, &|_, bytes| _ = total.fetch_add(bytes, Ordering::Relaxed))
        };
        assert_eq!(total.into_inner(), MIN_SPLIT_BYTES);
    }

    #[test]
    fn concurrent_leaders_without_helpers_do_their_own_work() {
        let pool = HelperPool::new(2).unwrap();
        let total = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let part = |_: usize, bytes: usize| {
                            total.fetch_add(bytes as u64, Ordering::Relaxed);
                        };
                        // SAFETY: the part uses an atomic only.
                        unsafe { pool.split_work(MIN_SPLIT_BYTES, &part) };
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 1_500 * MIN_SPLIT_BYTES as u64);
    }
}
