//! What is set by the environment, and what every call goes through.

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
    /// (device, other), by their numbers: the first does not reach the other's memory.
    unreachable: Vec<(usize, usize)>,
    pub(crate) no_batch: u64,
    pub(crate) bad_jit: bool,
    /// Bytes of the smallest allocation of which a handle is given.
    pub(crate) least_export: usize,
    /// Calls that make something wait for all streams.
    pub(crate) waits: bool,
    /// All streams of a device share a queue.
    pub(crate) one_queue: bool,
    /// Of physical memory.
    pub(crate) granularity: usize,
    /// The wait of a checked world that is left out.
    pub(crate) drop_wait: Option<WaitId>,
    /// How long a checked world waits for its streams before they count as stuck.
    pub(crate) patience: Duration,
    /// The numbers of the devices that this process sees.
    pub(crate) visible: Vec<usize>,
}

impl Settings {
    /// Whether a device, as this process counts, reaches the memory of another one, by its number.
    pub(crate) fn reaches(&self, device: usize, number: usize) -> bool {
        !self.unreachable.contains(&(self.visible[device], number))
    }
}

static SETTINGS: AtomicPtr<Settings> = AtomicPtr::new(std::ptr::null_mut());

/// Read at the first call, and where a checked world begins.
pub(crate) fn settings() -> &'static Settings {
    if SETTINGS.load(SeqCst).is_null() {
        set("");
    }
    unsafe { &*SETTINGS.load(SeqCst) }
}

/// Reads all settings, those of a world ("NAME=VALUE", with spaces between) before the environment's.
pub(crate) fn set(world: &str) {
    let text = |name: &str| {
        let told = world.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        told.map(str::to_owned).or_else(|| std::env::var(name).ok())
    };
    let number =
        |name: &str, otherwise| text(name).and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise);
    let devices = number("FAKE_CUDA_DEVICES", 1).min(32) as usize;
    let visible = match text("CUDA_VISIBLE_DEVICES") {
        // As CUDA does: the list ends at the first that is none.
        Some(list) => list
            .split(',')
            .map_while(|entry| entry.trim().parse().ok().filter(|&device| device < devices))
            .collect(),
        None => (0..devices).collect(),
    };
    let pairs = || (0..devices).flat_map(|one| (0..devices).map(move |other| (one, other)));
    let unreachable = match text("FAKE_CUDA_NO_PEER").as_deref() {
        None | Some("0") => Vec::new(),
        Some(told) => pairs()
            .filter(|&(one, other)| one != other && (told == "1" || told == format!("{one}-{other}")))
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
    // For good: calls under way may still look at the one before.
    SETTINGS.store(Box::leak(Box::new(settings)), SeqCst);
}

/// The process that called cuInit.
static OWNER: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);
/// What broke the context.
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

/// A number that this process has not used.
pub(crate) fn fresh() -> u64 {
    NUMBERS.fetch_add(1, SeqCst)
}

pub(crate) fn initialise() -> Answer {
    let me = u64::from(std::process::id());
    match OWNER.compare_exchange(0, me, SeqCst, SeqCst) {
        Ok(_) => {
            extern "C" fn ended() {
                ENDED.store(true, SeqCst);
            }
            unsafe { crate::os::atexit(ended) };
        }
        // A fork of the process that did.
        Err(owner) if owner != me => return Err(CUDA_ERROR_NOT_INITIALIZED),
        Err(_) => {}
    }
    if settings().visible.is_empty() { Err(CUDA_ERROR_NO_DEVICE) } else { Ok(()) }
}

pub(crate) fn broken() -> CUresult {
    BROKEN.load(SeqCst)
}

/// From now on every call fails with `code`, as in a context whose work went wrong. A checked world is told, and goes on.
pub(crate) fn break_context(code: CUresult, why: &str) {
    if check::here(|world, rank| world.report("Unknown", why, &[&format!("rank {rank}")])).is_some() {
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

/// Every call but those that come before cuInit.
pub(crate) fn answer(name: &'static str, call: impl FnOnce() -> Answer) -> CUresult {
    count(name);
    let owner = OWNER.load(SeqCst);
    if ENDED.load(SeqCst) {
        return CUDA_ERROR_DEINITIALIZED;
    }
    if owner != u64::from(std::process::id()) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    check::shake();
    match broken() {
        CUDA_SUCCESS => call().inspect_err(|&code| check::refused(name, code)).err().unwrap_or(CUDA_SUCCESS),
        code => code,
    }
}

/// Defines functions of the driver's; the body is `Answer`.
#[macro_export]
macro_rules! api {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> CUresult {
                $crate::state::answer(stringify!($name), || $body)
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

/// A new world: no context is retained, and none broken.
pub(crate) fn forget() {
    lock(&RETAINED).clear();
    BROKEN.store(CUDA_SUCCESS, SeqCst);
}

/// The process whose context it is: there is one of each device for each process of a checked world.
pub(crate) fn process_of(context: CUcontext) -> usize {
    context.saturating_sub(FIRST_CONTEXT) / 32
}

/// This thread's process where no context is current.
pub(crate) fn become_process(process: usize) {
    PROCESS.set(process);
}

/// The process that calls: 0, but in a checked world.
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

/// The device whose context is current.
pub(crate) fn current() -> Answer<usize> {
    let context = contexts(|contexts| contexts.last().copied())?.ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    device_of(context)
}

pub(crate) fn give<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    unsafe { to.write(value) };
    Ok(())
}
