//! What is set by the environment, and what every call goes through.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::types::*;

pub(crate) type Answer<T = ()> = Result<T, CUresult>;

pub(crate) struct Settings {
    pub(crate) version: i32,
    pub(crate) seed: u64,
    pub(crate) memory: usize,
    pub(crate) memops: bool,
    pub(crate) ipc: bool,
    pub(crate) peer: bool,
    pub(crate) no_batch: u64,
    pub(crate) bad_jit: bool,
    /// Bytes of the smallest allocation of which a handle is given.
    pub(crate) least_export: usize,
    /// Calls that make something wait for all streams.
    pub(crate) waits: bool,
    /// All streams of a device share a queue.
    pub(crate) one_queue: bool,
    /// The numbers of the devices that this process sees.
    pub(crate) visible: Vec<usize>,
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

/// Read once, at the first call.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let devices = number("FAKE_CUDA_DEVICES", 1).min(32) as usize;
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            // As CUDA does: the list ends at the first that is none.
            Ok(list) => list
                .split(',')
                .map_while(|entry| entry.trim().parse().ok().filter(|&device| device < devices))
                .collect(),
            Err(_) => (0..devices).collect(),
        };
        Settings {
            version: number("FAKE_CUDA_VERSION", 13000) as i32,
            seed: number("FAKE_CUDA_SEED", 0),
            memory: number("FAKE_CUDA_MEMORY", 16 << 30) as usize,
            memops: number("FAKE_CUDA_NO_MEMOPS", 0) == 0,
            ipc: number("FAKE_CUDA_NO_IPC", 0) == 0,
            peer: number("FAKE_CUDA_NO_PEER", 0) == 0,
            no_batch: number("FAKE_CUDA_NO_BATCH", 0),
            least_export: number("FAKE_CUDA_LEAST_EXPORT", 0) as usize,
            waits: number("FAKE_CUDA_WAITS", 0) != 0,
            one_queue: std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|text| text.trim() == "1"),
            bad_jit: number("FAKE_CUDA_BAD_JIT", 0) != 0,
            visible,
        }
    })
}

/// The process that called cuInit.
static OWNER: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);
/// What broke the context.
static BROKEN: AtomicI32 = AtomicI32::new(CUDA_SUCCESS);
static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
static RETAINED: Mutex<[u32; 32]> = Mutex::new([0; 32]);
static NUMBERS: AtomicU64 = AtomicU64::new(1);

thread_local! {
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

/// From now on every call fails with `code`, as in a context whose work went wrong.
pub(crate) fn break_context(code: CUresult, why: &str) {
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
    match broken() {
        CUDA_SUCCESS => call().err().unwrap_or(CUDA_SUCCESS),
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

pub(crate) fn retain(device: usize) -> CUcontext {
    lock(&RETAINED)[device] += 1;
    FIRST_CONTEXT + device
}

pub(crate) fn release(device: usize) -> Answer {
    let mut retained = lock(&RETAINED);
    retained[device] = retained[device].checked_sub(1).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    Ok(())
}

pub(crate) fn retained() -> u64 {
    lock(&RETAINED).iter().map(|&n| u64::from(n)).sum()
}

fn device_of(context: CUcontext) -> Answer<usize> {
    let device = context.checked_sub(FIRST_CONTEXT).filter(|&d| d < 32).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if lock(&RETAINED)[device] > 0 { Ok(device) } else { Err(CUDA_ERROR_CONTEXT_IS_DESTROYED) }
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
