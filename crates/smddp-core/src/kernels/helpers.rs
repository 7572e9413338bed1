//! Threads that help whoever waits for a call with its large copies and reductions. They share out the elements, never the operands of
//! one, so the bits are what one thread makes.
//!
//! Only a thread that waits is helped: what the progress thread does goes on beside a computation, which has the cores.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, Thread};

use smddp_transport::fork::PerProcess;

use crate::config::Config;
use crate::config::cores;
use crate::kernels::float_mode::set_default_float_mode;
use crate::sync::job_gate::JobGate;
use crate::sync::lock;

/// Bytes from which a piece is shared out; parts are multiples of the other.
const WORTH_SHARING: usize = 64 << 10;
const PART: usize = 16 << 10;
/// Threads of a rank at most, where nobody says how many.
const MOST: usize = 4;
/// Looks for a job before a helper sleeps: some tens of microseconds.
const LOOKS: u32 = 1 << 10;

thread_local! {
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// This thread is never helped.
pub(crate) fn stay_alone() {
    ALONE.set(true);
}

/// Calls `part` with (first byte, bytes) for parts that make up `bytes` bytes: on this thread, and on others where it pays.
///
/// # Safety
/// `part` may run on several threads at a time, each with other bytes.
///
/// # Panics
/// If a part panics, on this thread or on a helper: the call is incomplete then.
#[inline]
pub(crate) unsafe fn share_out(bytes: usize, part: impl Fn(usize, usize)) {
    if bytes < WORTH_SHARING || ALONE.get() {
        return part(0, bytes);
    }
    match team() {
        // SAFETY: the caller's promise.
        Some(team) => unsafe { team.share_out(bytes, &part) },
        None => part(0, bytes),
    }
}

/// Whether a rank of this process has helpers.
pub(crate) fn has_helpers() -> bool {
    wanted() > 1
}

fn wanted() -> usize {
    Config::get().map_or(1, |config| config.threads.unwrap_or_else(usual))
}

static TEAM: PerProcess<OnceLock<Option<Arc<Team>>>> = PerProcess::new();

/// The process's, made when something large is first to be done.
fn team() -> Option<&'static Team> {
    TEAM.get().get_or_init(|| Team::new(wanted().saturating_sub(1))).as_deref()
}

/// Threads where nobody says how many, from this rank's share of the cores.
fn usual() -> usize {
    let allowed = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let ranks = cores::local_ranks();
    // A launcher that gave each rank some has shared them out already.
    let share = if allowed * ranks <= cores::cores() { allowed } else { allowed / ranks };
    // Of two cores the other is better left to what else there is: eight ranks on sixteen gained as often as they lost.
    if share > 2 { share.min(MOST) } else { 1 }
}

/// What there is to do, as all who take part see it.
#[derive(Clone, Copy)]
struct Job {
    part: *const dyn Fn(usize, usize),
    bytes: usize,
    /// Bytes of each part but the last.
    each: usize,
}

struct Team {
    turns: JobGate,
    job: UnsafeCell<Option<Job>>,
    /// Bytes of it that somebody has taken.
    taken: AtomicUsize,
    /// Whoever has it leads.
    lead: Mutex<()>,
    /// Payload of a part that panicked on a helper.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    helpers: Vec<Helper>,
}

#[derive(Default)]
struct Helper {
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

// SAFETY: `job` is written by the leader alone, while none stands and nobody is inside; helpers read it while they are inside a turn.
unsafe impl Sync for Team {}
// SAFETY: as above; a job's addresses are used while its leader waits.
unsafe impl Send for Team {}
impl UnwindSafe for Team {}
impl RefUnwindSafe for Team {}

impl Team {
    /// `None` without helpers, or where no thread is to be had.
    fn new(helpers: usize) -> Option<Arc<Self>> {
        if helpers == 0 {
            return None;
        }
        let team = Arc::new(Self {
            turns: JobGate::default(),
            job: UnsafeCell::new(None),
            taken: AtomicUsize::new(0),
            lead: Mutex::new(()),
            panic: Mutex::default(),
            helpers: (0..helpers).map(|_| Helper::default()).collect(),
        });
        let start = |place| {
            let team = team.clone();
            thread::Builder::new()
                .name(format!("smddp-helper-{place}"))
                .spawn(move || team.help(place))
                .is_ok()
        };
        // As many as there can be: a job is done by whoever comes.
        let started = (0..helpers).filter(|&place| start(place)).count();
        (started > 0).then_some(team)
    }

    /// # Safety
    /// As of the function of that name.
    unsafe fn share_out(&self, bytes: usize, part: &dyn Fn(usize, usize)) {
        // Of two threads that wait for different groups one is helped.
        let _lead = match self.lead.try_lock() {
            Ok(lead) => lead,
            // A part of an earlier job panicked, which is over.
            Err(TryLockError::Poisoned(lead)) => lead.into_inner(),
            Err(TryLockError::WouldBlock) => return part(0, bytes),
        };
        let each = (bytes / (2 * (self.helpers.len() + 1))).next_multiple_of(PART);
        // SAFETY: `part` outlives its job, which is over before this returns.
        let part =
            unsafe { std::mem::transmute::<&dyn Fn(usize, usize), &'static dyn Fn(usize, usize)>(part) };
        let job = Job { part, bytes, each };
        // SAFETY: whoever led before waited until nobody was inside.
        unsafe { *self.job.get() = Some(job) };
        self.taken.store(0, Ordering::Relaxed);
        // Of a job that also panicked here.
        *lock(&self.panic) = None;
        self.turns.open();
        // Waits for the helpers, though a part panics here: they use `part`.
        let standing = Standing(self);
        for helper in &self.helpers {
            if helper.asleep.load(Ordering::Relaxed)
                && let Some(thread) = helper.thread.get()
            {
                thread.unpark();
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.take_part(job) };
        drop(standing);
        let panic = lock(&self.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Takes parts until none is left.
    ///
    /// # Safety
    /// The job is not over before this returns.
    unsafe fn take_part(&self, job: Job) {
        loop {
            let at = self.taken.fetch_add(job.each, Ordering::Relaxed);
            if at >= job.bytes {
                return;
            }
            // SAFETY: it lives as long as the job.
            unsafe { (*job.part)(at, job.each.min(job.bytes - at)) };
        }
    }

    fn help(&self, place: usize) {
        let helper = &self.helpers[place];
        let _ = helper.thread.set(thread::current());
        stay_alone();
        set_default_float_mode();
        let (mut last, mut looks) = (0, 0);
        loop {
            if let Some(turn) = self.turns.open_job(last) {
                (last, looks) = (turn, 0);
                if self.turns.enter(turn) {
                    // SAFETY: it stands until this has left.
                    let parts =
                        || unsafe { (*self.job.get()).into_iter().for_each(|job| self.take_part(job)) };
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(parts)) {
                        lock(&self.panic).get_or_insert(panic);
                    }
                    self.turns.leave();
                }
                continue;
            }
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
                continue;
            }
            looks = 0;
            helper.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.turns.open_job(last).is_none() {
                thread::park();
            }
            helper.asleep.store(false, Ordering::Relaxed);
        }
    }
}

/// A job that stands; dropping it ends the job and waits for the helpers.
struct Standing<'a>(&'a Team);

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        let turns = &self.0.turns;
        turns.close();
        let mut looks = 0;
        while !turns.is_empty() {
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn every_byte_is_done_once_by_whoever_takes_it() {
        let team = Team::new(3).unwrap();
        for round in 0..2_000 {
            let bytes = WORTH_SHARING + round * 37;
            let done: Vec<AtomicU64> = (0..bytes.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            let part = |at: usize, bytes: usize| {
                for byte in at..at + bytes {
                    done[byte / 64].fetch_add(1, Ordering::Relaxed);
                }
            };
            // SAFETY: the parts are counted by atomics.
            unsafe { team.share_out(bytes, &part) };
            for (line, count) in done.iter().enumerate() {
                assert_eq!(count.load(Ordering::Relaxed), (bytes - 64 * line).min(64) as u64);
            }
            // Now and then they have gone to sleep.
            if round % 100 == 0 {
                thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        assert!(team.helpers.iter().all(|helper| helper.thread.get().is_some()), "all helpers came");
    }

    /// Whichever thread panics, the leader returns with the panic, and the team works afterwards.
    #[test]
    fn panicking_part_ends_the_call_on_every_thread() {
        let team = Team::new(2).unwrap();
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
                    // Leaves the rest to the other side, which is to fail.
                    while fail.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                }
            };
            // SAFETY: the parts use no bytes.
            let outcome =
                catch_unwind(AssertUnwindSafe(|| unsafe { team.share_out(WORTH_SHARING * 8, &part) }));
            assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&"a part failed"), "round {round}");
            assert!(team.turns.is_empty(), "a helper is still inside");
        }
        let total = AtomicUsize::new(0);
        // SAFETY: an atomic.
        unsafe { team.share_out(WORTH_SHARING, &|_, bytes| _ = total.fetch_add(bytes, Ordering::Relaxed)) };
        assert_eq!(total.into_inner(), WORTH_SHARING);
    }

    #[test]
    fn several_leaders_do_their_own_when_somebody_else_is_helped() {
        let team = Team::new(2).unwrap();
        let total = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let part = |_: usize, bytes: usize| {
                            total.fetch_add(bytes as u64, Ordering::Relaxed);
                        };
                        // SAFETY: an atomic.
                        unsafe { team.share_out(WORTH_SHARING, &part) };
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 1_500 * WORTH_SHARING as u64);
    }
}
