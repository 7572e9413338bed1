//! A checked world of the fake driver: its processes are threads of this one, and it tells of every order that is missing.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fake_libcuda::PATH;
use smddp_cuda::driver::Cuda;
use smddp_cuda::{Address, Device, Stream};

/// A function of the fake that the crate does not call.
///
/// # Safety
/// `F` is its type.
pub(crate) unsafe fn function<F: std::marker::Copy>(name: &CStr) -> F {
    let path = CString::new(PATH).unwrap();
    // SAFETY: opened already, or opened for good now; the name is one of its functions.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(handle, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        std::mem::transmute_copy::<*mut c_void, F>(&found)
    }
}

/// A wait that was enqueued, or would have been.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// "process.stream.number": stable from run to run as long as each host enqueues the same on each of its streams.
    pub(crate) id: String,
    /// Of what is waited for; 0: an event.
    pub(crate) word: Address,
    /// Nothing that lets it through was enqueued before it.
    pub(crate) early: bool,
    /// The stream did not know already all that it learnt from it.
    pub(crate) needed: bool,
    pub(crate) what: String,
}

/// Reports that nobody read make its drop panic. One at a time: a second one waits for the first to end.
pub(crate) struct World {
    _turn: MutexGuard<'static, ()>,
    processes: AtomicUsize,
    read: AtomicUsize,
}

impl World {
    /// Settings as "NAME=VALUE", with spaces between.
    pub(crate) fn new(settings: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let settings = CString::new(settings).unwrap();
        // SAFETY: the type of that function; nobody uses the world before.
        unsafe { function::<unsafe extern "C" fn(*const c_char)>(c"fake_begin")(settings.as_ptr()) };
        Self { _turn: turn, processes: AtomicUsize::new(0), read: AtomicUsize::new(0) }
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self::new(&format!("FAKE_CUDA_SEED={}", seed + 1))
    }

    /// Another process, which this thread is from now on. They are numbered from 0.
    pub(crate) fn process(&self) -> usize {
        let rank = self.processes.fetch_add(1, SeqCst);
        become_process(rank);
        rank
    }

    /// Mistakes found so far, of all kinds: "Race: ..." and the operations.
    pub(crate) fn reports(&self) -> Vec<String> {
        let reports = tell(c"reports");
        self.read.store(reports.len(), SeqCst);
        reports
    }

    /// Waits enqueued so far, the one left out too.
    pub(crate) fn waits(&self) -> Vec<Seen> {
        let wait = |text: String| {
            let mut parts = text.splitn(5, ' ');
            let mut part = || parts.next().unwrap().to_owned();
            let (id, word) = (part(), part().parse().unwrap());
            let (early, needed) = (part() == "true", part() == "true");
            Seen { id, word, early, needed, what: part() }
        };
        tell(c"waits").into_iter().map(wait).collect()
    }

    /// Calls so far that a driver might have held until the device was idle, at a bad time. No mistakes by themselves.
    pub(crate) fn stalls(&self) -> Vec<String> {
        tell(c"stalls")
    }

    /// What is still allocated, registered, imported or created, in words. What another thread lets go of, it lets go of
    /// soon.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let leaks = tell(c"leaks");
            if leaks.is_empty() || begun.elapsed() > Duration::from_secs(20) {
                return leaks;
            }
            std::thread::yield_now();
        }
    }

    /// Lets all streams go on until each is empty or stands at a wait, and then orders all that is done before all that
    /// any host does from now on: a test that looks at results.
    pub(crate) fn settle(&self) {
        // SAFETY: the type of that function.
        unsafe { function::<unsafe extern "C" fn()>(c"fake_settle")() };
    }

    /// The same; then streams that stand at a wait are reported. Gives all reports.
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
            panic!("{} mistakes that nobody asked about, above", unread.len());
        }
    }
}

/// What the fake knows of something.
pub(crate) fn tell(what: &CStr) -> Vec<String> {
    type Tell = unsafe extern "C" fn(*const c_char, *mut u8, usize) -> usize;
    // SAFETY: the type of that function.
    let tell = unsafe { function::<Tell>(c"fake_tell") };
    let mut text = vec![0; 1 << 16];
    loop {
        // SAFETY: writes so many bytes at most.
        let bytes = unsafe { tell(what.as_ptr(), text.as_mut_ptr(), text.len()) };
        if bytes <= text.len() {
            text.truncate(bytes);
            return String::from_utf8(text).unwrap().split_terminator('\x1e').map(str::to_owned).collect();
        }
        text.resize(2 * bytes, 0);
    }
}

/// This thread is that process from now on.
pub(crate) fn become_process(rank: usize) {
    // SAFETY: the type of that function.
    unsafe { function::<unsafe extern "C" fn(usize)>(c"fake_process")(rank) };
}

/// A device as the process uses it that this thread is.
pub(crate) fn open_device(ordinal: i32) -> Arc<Device> {
    Cuda::open(Some(PATH.as_ref())).unwrap().device(ordinal).unwrap()
}

/// Kinds of mistakes, "Race" or so.
pub(crate) fn faults(reports: &[String]) -> Vec<String> {
    reports.iter().map(|report| report.split_once(':').unwrap().0.to_owned()).collect()
}

/// Nothing was found, or what was is shown.
#[track_caller]
pub(crate) fn assert_clean(world: &World, what: &str) {
    let reports = world.end();
    assert!(reports.is_empty(), "{what}: {} mistakes\n{}", reports.len(), reports.join("\n"));
}

/// The processor writes memory of its process's.
pub(crate) fn upload(device: &Device, to: Address, data: &[u8]) {
    device.host_touches(to, data.len(), true);
    // SAFETY: the fake's memory is mapped here, and the test's own.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
}

/// The processor reads it.
pub(crate) fn download(device: &Device, from: Address, bytes: usize) -> Vec<u8> {
    device.host_touches(from, bytes, false);
    // SAFETY: as in `upload`.
    unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec()
}

/// Whether a stream of the process that this thread is, on its first device, is being captured from now on.
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
