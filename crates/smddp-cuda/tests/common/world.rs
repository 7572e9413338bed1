//! A checked world of the fake driver. Its processes are threads of this process, and it reports every missing order.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fake_libcuda::PATH;
use smddp_cuda::driver::Cuda;
use smddp_cuda::{Address, Device, Stream};

/// Returns a function of the fake driver that the crate does not call.
///
/// # Safety
/// `F` is the type of the function.
pub(crate) unsafe fn function<F: std::marker::Copy>(name: &CStr) -> F {
    let path = CString::new(PATH).unwrap();
    // SAFETY: the library is never unloaded; the name is one of its functions.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(handle, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        std::mem::transmute_copy::<*mut c_void, F>(&found)
    }
}

/// A wait that was enqueued, or that the settings left out.
#[derive(Clone, Debug)]
pub(crate) struct RecordedWait {
    /// "process.stream.number". Stable between runs if each host enqueues the same operations on each of its streams.
    pub(crate) id: String,
    /// Address of the word; 0 for an event.
    pub(crate) word: Address,
    /// No write that satisfies it was enqueued before it.
    pub(crate) early: bool,
    /// The wait ordered the stream after work that was not ordered before it already.
    pub(crate) needed: bool,
    pub(crate) description: String,
}

/// The drop panics if reports are unread. Only one world exists at a time: a second one waits for the first to end.
pub(crate) struct World {
    _exclusive: MutexGuard<'static, ()>,
    processes: AtomicUsize,
    read: AtomicUsize,
}

impl World {
    /// Creates a world with settings as "NAME=VALUE", separated by spaces.
    pub(crate) fn new(settings: &str) -> Self {
        static EXCLUSIVE: Mutex<()> = Mutex::new(());
        let exclusive = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let settings = CString::new(settings).unwrap();
        // SAFETY: the type of that function; the world is not in use yet.
        unsafe { function::<unsafe extern "C" fn(*const c_char)>(c"fake_begin")(settings.as_ptr()) };
        Self { _exclusive: exclusive, processes: AtomicUsize::new(0), read: AtomicUsize::new(0) }
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self::new(&format!("FAKE_CUDA_SEED={}", seed + 1))
    }

    /// Makes this thread another process of the world. They are numbered from 0.
    pub(crate) fn process(&self) -> usize {
        let rank = self.processes.fetch_add(1, SeqCst);
        become_process(rank);
        rank
    }

    /// All reported errors, as "Race: ..." with the operations.
    pub(crate) fn reports(&self) -> Vec<String> {
        let reports = query(c"reports");
        self.read.store(reports.len(), SeqCst);
        reports
    }

    /// All enqueued waits, including the wait that the settings left out.
    pub(crate) fn waits(&self) -> Vec<RecordedWait> {
        let wait = |text: String| {
            let mut parts = text.splitn(5, ' ');
            let mut part = || parts.next().unwrap().to_owned();
            let (id, word) = (part(), part().parse().unwrap());
            let (early, needed) = (part() == "true", part() == "true");
            RecordedWait { id, word, early, needed, description: part() }
        };
        query(c"waits").into_iter().map(wait).collect()
    }

    /// Calls that a driver might block until the device is idle, made while a stream waits. Not errors in themselves.
    pub(crate) fn stalls(&self) -> Vec<String> {
        query(c"stalls")
    }

    /// Descriptions of everything that is still allocated, registered, imported or created. Retries, because other
    /// threads may still be releasing resources.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let leaks = query(c"leaks");
            if leaks.is_empty() || begun.elapsed() > Duration::from_secs(20) {
                return leaks;
            }
            std::thread::yield_now();
        }
    }

    /// Runs all streams until each is empty or blocked in a wait. Then orders all completed work before all later
    /// host accesses, for a test that reads results.
    pub(crate) fn settle(&self) {
        // SAFETY: the type of that function.
        unsafe { function::<unsafe extern "C" fn()>(c"fake_settle")() };
    }

    /// Settles the world and reports the streams that are blocked in a wait. Returns all reports.
    pub(crate) fn end(&self) -> Vec<String> {
        // SAFETY: the type of that function.
        unsafe { function::<unsafe extern "C" fn()>(c"fake_end")() };
        self.reports()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let read = self.read.load(SeqCst);
        let reports = self.end();
        let unread = &reports[read.min(reports.len())..];
        unread.iter().for_each(|report| eprintln!("{report}"));
        if !unread.is_empty() && !std::thread::panicking() {
            panic!("{} unread errors, listed above", unread.len());
        }
    }
}

/// Returns a list from the fake driver.
pub(crate) fn query(list: &CStr) -> Vec<String> {
    type Query = unsafe extern "C" fn(*const c_char, *mut u8, usize) -> usize;
    // SAFETY: the type of that function.
    let query = unsafe { function::<Query>(c"fake_query") };
    let mut text = vec![0; 1 << 16];
    loop {
        // SAFETY: the call writes at most the given number of bytes.
        let bytes = unsafe { query(list.as_ptr(), text.as_mut_ptr(), text.len()) };
        if bytes <= text.len() {
            text.truncate(bytes);
            return String::from_utf8(text).unwrap().split_terminator('\x1e').map(str::to_owned).collect();
        }
        text.resize(2 * bytes, 0);
    }
}

/// Makes this thread the process `rank`.
pub(crate) fn become_process(rank: usize) {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn(usize)>(c"fake_process")(rank) };
}

/// Opens a device for the process that this thread represents.
pub(crate) fn open_device(ordinal: i32) -> Arc<Device> {
    Cuda::open(Some(PATH.as_ref())).unwrap().device(ordinal).unwrap()
}

/// Returns the kinds of the reported errors, for example "Race".
pub(crate) fn faults(reports: &[String]) -> Vec<String> {
    reports.iter().map(|report| report.split_once(':').unwrap().0.to_owned()).collect()
}

/// Asserts that the world has found no errors; shows them otherwise.
#[track_caller]
pub(crate) fn assert_clean(world: &World, case: &str) {
    let reports = world.end();
    assert!(reports.is_empty(), "{case}: {} errors\n{}", reports.len(), reports.join("\n"));
}

/// Writes memory of this process from the host.
pub(crate) fn upload(device: &Device, to: Address, data: &[u8]) {
    device.report_host_access(to, data.len(), true);
    // SAFETY: the fake's device memory is mapped in this process and belongs to the test.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
}

/// Reads memory of this process from the host.
pub(crate) fn download(device: &Device, from: Address, bytes: usize) -> Vec<u8> {
    device.report_host_access(from, bytes, false);
    // SAFETY: as in `upload`.
    unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec()
}

/// Begins or ends a graph capture of a stream on the first device of the process that this thread represents.
pub(crate) fn capture(stream: Stream, on: bool) {
    type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
    type Begin = unsafe extern "C" fn(u64, i32) -> i32;
    type End = unsafe extern "C" fn(u64, *mut usize) -> i32;
    let (mut context, mut graph) = (0usize, 0usize);
    // SAFETY: the types of these functions.
    unsafe {
        assert_eq!(function::<Retain>(c"cuDevicePrimaryCtxRetain")(&raw mut context, 0), 0);
        assert_eq!(function::<unsafe extern "C" fn(usize) -> i32>(c"cuCtxPushCurrent_v2")(context), 0);
        let code = match on {
            true => function::<Begin>(c"cuStreamBeginCapture_v2")(stream.0, 0),
            false => function::<End>(c"cuStreamEndCapture")(stream.0, &raw mut graph),
        };
        assert_eq!(code, 0);
        let pop = function::<unsafe extern "C" fn(*mut usize) -> i32>(c"cuCtxPopCurrent_v2");
        assert_eq!(pop(&raw mut context), 0);
        assert_eq!(function::<unsafe extern "C" fn(i32) -> i32>(c"cuDevicePrimaryCtxRelease_v2")(0), 0);
    }
}
