//! Settings from the environment, and state common to all calls.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::check::{self, WaitId};
use crate::types::*;

pub(crate) type Answer<T = ()> = Result<T, CUresult>;

pub(crate) struct Settings {
    pub(crate) version: i32,
    pub(crate) seed: u64,
    pub(crate) memory: usize,
    pub(crate) memops: bool,
    pub(crate) ipc: bool,
    /// Pairs of device numbers: the first device cannot access the memory of the second.
    unreachable: Vec<(usize, usize)>,
    pub(crate) no_batch: u64,
    pub(crate) bad_jit: bool,
    /// Size in bytes of the smallest allocation that can be exported.
    pub(crate) least_export: usize,
    /// Calls that acquire resources wait for all streams.
    pub(crate) waits: bool,
    /// All streams of a device share one queue.
    pub(crate) one_queue: bool,
    /// Granularity of physical memory in bytes.
    pub(crate) granularity: usize,
    /// The wait that a checked world leaves out.
    pub(crate) drop_wait: Option<WaitId>,
    /// Time limit of a checked world for its streams; after it they count as blocked.
    pub(crate) patience: Duration,
    /// Numbers of the devices visible to this process.
    pub(crate) visible: Vec<usize>,
}

impl Settings {
    /// Returns true if a device (an ordinal of this process) can access the memory of the device `number`.
    pub(crate) fn reaches(&self, device: usize, number: usize) -> bool {
        !self.unreachable.contains(&(self.visible[device], number))
    }
}

static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the settings, which are read at the first call and at the begin of a checked world.
pub(crate) fn settings() -> &'static Settings {
    if SETTINGS.load(SeqCst).is_null() {
        set("");
    }
    unsafe { &*SETTINGS.load(SeqCst) }
}

/// Reads all settings. Those of a world ("NAME=VALUE", separated by spaces) take precedence over the environment.
pub(crate) fn set(world: &str) {
    let text = |name: &str| {
        let value = world.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        value.map(str::to_owned).or_else(|| std::env::var(name).ok())
    };
    let number =
        |name: &str, otherwise| text(name).and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise);
    let devices = number("FAKE_CUDA_DEVICES", 1).min(32) as usize;
    let visible = match text("CUDA_VISIBLE_DEVICES") {
        // As in CUDA, the list ends at the first invalid entry.
        Some(list) => list
            .split(',')
            .map_while(|entry| entry.trim().parse().ok().filter(|&device| device < devices))
            .collect(),
        None => (0..devices).collect(),
    };
    let pairs = || (0..devices).flat_map(|one| (0..devices).map(move |other| (one, other)));
    let unreachable = match text("FAKE_CUDA_NO_PEER").as_deref() {
        None | Some("0") => Vec::new(),
        Some(value) => pairs()
            .filter(|&(one, other)| one != other && (value == "1" || value == format!("{one}-{other}")))
            .collect(),
    };
    let drop_wait = text("FAKE_CUDA_DROP").and_then(|text| {
        let mut parts = text.split('.').map_while(|part| part.parse::<u64>().ok());
        Some((parts.next()? as usize, parts.next()? as usize, parts.next()?))
    });
    let settings = Settings {
        version: number("FAKE_CUDA_VERSION", 13000) as i32,
        seed: number("FAKE_CUDA_SEED", 0),
        memory: number("FAKE_CUDA_MEMORY", 16 << 30) as usize,
        memops: number("FAKE_CUDA_NO_MEMOPS", 0) == 0,
        ipc: number("FAKE_CUDA_NO_IPC", 0) == 0,
        unreachable,
        granularity: number("FAKE_CUDA_GRANULARITY", 2 << 20) as usize,
        drop_wait,
        patience: Duration::from_millis(number("FAKE_CUDA_PATIENCE", 20_000)),
        no_batch: number("FAKE_CUDA_NO_BATCH", 0),
        least_export: number("FAKE_CUDA_LEAST_EXPORT", 0) as usize,
        waits: number("FAKE_CUDA_WAITS", 0) != 0,
        one_queue: text("CUDA_DEVICE_MAX_CONNECTIONS").is_some_and(|text| text.trim() == "1"),
        bad_jit: number("FAKE_CUDA_BAD_JIT", 0) != 0,
        visible,
    };
    // Never freed: calls in progress may still use the previous settings.
    SETTINGS.store(Box::leak(Box::new(settings)), SeqCst);
}

/// The process that called cuInit.
static OWNER: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);
/// Error code that broke the context.
static BROKEN: AtomicI32 = AtomicI32::new(CUDA_SUCCESS);
static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
static RETAINED: Mutex<BTreeMap<CUcontext, u32>> = Mutex::new(BTreeMap::new());
static NUMBERS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static PROCESS: Cell<usize> = const { Cell::new(0) };
    static CONTEXTS: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that is unused in this process.
pub(crate) fn fresh() -> u64 {
    NUMBERS.fetch_add(1, SeqCst)
}

pub(crate) fn initialise() -> Answer {
    let pid = u64::from(std::process::id());
    match OWNER.compare_exchange(0, pid, SeqCst, SeqCst) {
        Ok(_) => {
            extern "C" fn ended() {
                ENDED.store(true, SeqCst);
            }
            unsafe { crate::os::atexit(ended) };
        }
        // A fork of the initialising process.
        Err(owner) if owner != pid => return Err(CUDA_ERROR_NOT_INITIALIZED),
        Err(_) => {}
    }
    if settings().visible.is_empty() { Err(CUDA_ERROR_NO_DEVICE) } else { Ok(()) }
}

pub(crate) fn broken() -> CUresult {
    BROKEN.load(SeqCst)
}

/// Makes every later call fail with `code`, as after a sticky error. A checked world reports the error and continues.
pub(crate) fn break_context(code: CUresult, why: &str) {
    if check::with_caller(|world, rank| world.report("Unknown", why, &[&format!("rank {rank}")])).is_some() {
        return;
    }
    eprintln!("fake CUDA ({}): {why}", std::process::id());
    let _ = BROKEN.compare_exchange(CUDA_SUCCESS, code, SeqCst, SeqCst);
}

pub(crate) fn count(name: &'static str) {
    *lock(&CALLS).get_or_insert_with(HashMap::new).entry(name).or_default() += 1;
}

pub(crate) fn calls(name: &str) -> u64 {
    lock(&CALLS).as_ref().and_then(|calls| calls.get(name).copied()).unwrap_or(0)
}

/// Runs a driver call, except calls that are allowed before cuInit.
pub(crate) fn run_call(name: &'static str, call: impl FnOnce() -> Answer) -> CUresult {
    count(name);
    let owner = OWNER.load(SeqCst);
    if ENDED.load(SeqCst) {
        return CUDA_ERROR_DEINITIALIZED;
    }
    if owner != u64::from(std::process::id()) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    check::delay_at_random();
    match broken() {
        CUDA_SUCCESS => call().inspect_err(|&code| check::record_failure(name, code)).err().unwrap_or(CUDA_SUCCESS),
        code => code,
    }
}

/// Defines driver functions whose bodies return `Answer`.
#[macro_export]
macro_rules! api {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
                $crate::state::run_call(stringify!($name), || $body)
            }
        )*
    };
}

const FIRST_CONTEXT: CUcontext = 0xC0_0000;

pub(crate) fn check_device(device: CUdevice) -> Answer<usize> {
    let device = usize::try_from(device).map_err(|_| CUDA_ERROR_INVALID_DEVICE)?;
    if device < settings().visible.len() { Ok(device) } else { Err(CUDA_ERROR_INVALID_DEVICE) }
}

fn primary(device: usize) -> CUcontext {
    FIRST_CONTEXT + process() * 32 + device
}

pub(crate) fn retain(device: usize) -> CUcontext {
    let context = primary(device);
    *lock(&RETAINED).entry(context).or_default() += 1;
    context
}

pub(crate) fn release(device: usize) -> Answer {
    let mut retained = lock(&RETAINED);
    let shares = retained.get_mut(&primary(device)).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    *shares = shares.checked_sub(1).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    Ok(())
}

pub(crate) fn retained() -> u64 {
    lock(&RETAINED).values().map(|&n| u64::from(n)).sum()
}

/// Resets the state for a new world: no retained contexts, no sticky error.
pub(crate) fn reset() {
    lock(&RETAINED).clear();
    BROKEN.store(CUDA_SUCCESS, SeqCst);
}

/// Returns the process of a context. Each process of a checked world has one context per device.
pub(crate) fn process_of(context: CUcontext) -> usize {
    context.saturating_sub(FIRST_CONTEXT) / 32
}

/// Sets the process of this thread for calls without a current context.
pub(crate) fn become_process(process: usize) {
    PROCESS.set(process);
}

/// Returns the calling process; 0 outside a checked world.
pub(crate) fn process() -> usize {
    let context = contexts(|contexts| contexts.last().copied()).ok().flatten();
    context.map_or_else(|| PROCESS.get(), process_of)
}

fn device_of(context: CUcontext) -> Answer<usize> {
    let retained = lock(&RETAINED).get(&context).copied().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if retained > 0 { Ok((context - FIRST_CONTEXT) % 32) } else { Err(CUDA_ERROR_CONTEXT_IS_DESTROYED) }
}

pub(crate) fn contexts<T>(f: impl FnOnce(&mut Vec<CUcontext>) -> T) -> Answer<T> {
    CONTEXTS.try_with(|contexts| f(&mut contexts.borrow_mut())).map_err(|_| CUDA_ERROR_DEINITIALIZED)
}

pub(crate) fn push(context: CUcontext) -> Answer {
    device_of(context)?;
    contexts(|contexts| contexts.push(context))
}

/// Returns the device whose context is current.
pub(crate) fn current() -> Answer<usize> {
    let context = contexts(|contexts| contexts.last().copied())?.ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    device_of(context)
}

pub(crate) fn write_out<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    unsafe { to.write(value) };
    Ok(())
}
