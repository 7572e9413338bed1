//! What the executor asks of a device.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// A place in device memory, or in host memory that the device knows: one address space (CUDA calls it unified).
pub type Address = u64;
/// A device's name for itself: the same in every process and container that sees it.
pub type Uuid = [u8; 16];

/// A queue of device work: a `CUstream`. Zero is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A place in a stream's order: a `CUevent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// One copy; source and destination do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    pub to: Address,
    pub from: Address,
    pub bytes: usize,
}

/// A stream goes on once the word at `word` has [`reached`] `value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub word: Address,
    pub value: u64,
}

/// Whether a word that holds `found` lets a wait for `value` through: CUDA compares the signed difference, so what
/// releases every wait is a large positive number, not all ones.
pub const fn reached(found: u64, value: u64) -> bool {
    found.wrapping_sub(value) as i64 >= 0
}

/// Which process's which allocation an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub base: Address,
    pub bytes: usize,
    /// Another allocation at the same address later has another number.
    pub generation: u64,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Device memory that has a handle of 64 bytes (cudaMalloc).
    Legacy,
    /// Device memory mapped by virtual-memory calls (expandable segments), exported as a descriptor.
    Mapped,
    /// Device memory that other processes cannot have (a pool not made for it): it has to be staged.
    Private,
    /// Host memory.
    Host,
}

/// How another process gets at a region.
#[derive(Debug)]
pub enum Export {
    Legacy([u8; 64]),
    /// Sent by SCM_RIGHTS.
    Descriptor(OwnedFd),
}

/// The same at the importing side.
#[derive(Debug)]
pub enum Import<'a> {
    Legacy(&'a [u8; 64]),
    Descriptor(&'a OwnedFd),
}

/// A region of another process, mapped here; given back by [`Device::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imported {
    pub base: Address,
    pub bytes: usize,
    /// It came as a descriptor.
    pub mapped: bool,
}

/// Element types that a device can reduce; the numbers are those of `smddp_core::DType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 3,
    I8 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    U8 = 8,
    U16 = 9,
    U32 = 10,
    U64 = 11,
    Bool = 12,
    C64 = 13,
    C128 = 14,
}

impl Element {
    pub const ALL: [Element; 15] = [
        Element::F32,
        Element::F64,
        Element::F16,
        Element::BF16,
        Element::I8,
        Element::I16,
        Element::I32,
        Element::I64,
        Element::U8,
        Element::U16,
        Element::U32,
        Element::U64,
        Element::Bool,
        Element::C64,
        Element::C128,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Element::I8 | Element::U8 | Element::Bool => 1,
            Element::F16 | Element::BF16 | Element::I16 | Element::U16 => 2,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::F64 | Element::I64 | Element::U64 | Element::C64 => 8,
            Element::C128 => 16,
        }
    }
}

/// How sources become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fold {
    Sum = 0,
    Prod = 1,
    Min = 2,
    Max = 3,
    Band = 4,
    Bor = 5,
    Bxor = 6,
}

impl Fold {
    pub const ALL: [Fold; 7] =
        [Fold::Sum, Fold::Prod, Fold::Min, Fold::Max, Fold::Band, Fold::Bor, Fold::Bxor];
}

/// Sources that one kernel launch takes.
pub const MAX_SOURCES: usize = 16;

/// One pass over all sources, in their order, accumulating in f32 for 16-bit floats and rounding once.
///
/// The arithmetic is that of `smddp_core::reduce`, bit for bit: min and max let a NaN win, integers wrap, a bool is 0 or 1
/// (sum, max and or are "or"; prod, min and and are "and"), integers divide truncating and multiply by way of f64,
/// saturating and truncating.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduction {
    pub element: Element,
    pub fold: Fold,
    /// One to [`MAX_SOURCES`] arrays of `count` elements.
    pub sources: Vec<Address>,
    /// May be one of the sources, overlaps none otherwise.
    pub to: Address,
    pub count: usize,
    /// The last step before rounding: divide by this (an average). Sums only.
    pub divide: Option<u32>,
    /// The last step before rounding: multiply by this (premul_sum's first pass, over one source). Sums only.
    pub times: Option<f64>,
}

/// What a device, its driver or the use of them came to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no driver, or it is too old: why, and what was looked at.
    #[error("no CUDA driver: {0}")]
    Absent(String),
    /// A call of the driver failed.
    #[error("{call} failed: {name} ({code}){advice}", advice = if .advice.is_empty() { String::new() } else { format!("; {}", .advice) })]
    Driver { call: &'static str, code: i32, name: String, advice: String },
    /// What was asked cannot be done.
    #[error("{0}")]
    Invalid(String),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One device as this process uses it. Methods may be called from any thread: each makes the device's primary context
/// current for its own duration where it has to. None but `synchronize` waits for the device.
///
/// The unsafe methods enqueue: the memory they name stays valid until the stream has passed them. That is the promise
/// of whoever calls.
#[expect(clippy::missing_safety_doc, reason = "one contract for all, above")]
pub trait Device: Send + Sync {
    /// "NVIDIA H200, driver 580.95, CUDA 13.0".
    fn describe(&self) -> String;
    /// CUDA's ordinal in this process.
    fn ordinal(&self) -> i32;
    fn uuid(&self) -> Uuid;
    /// Why stream-ordered waits and writes on host words are not to be had; `None` where they are.
    fn no_words(&self) -> Option<String>;
    /// Whether this process can map memory of the device `other` (itself included) and copy from it; yes where only trying
    /// tells.
    fn reaches(&self, other: &Uuid) -> bool;
    /// Does now what would wait for the device if it were done by the first reduction: to be called while no stream
    /// waits for a word.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Whether memory can be allocated, freed, mapped and closed while a stream waits for a word. NVIDIA's manual says of no
    /// such call that it can.
    fn maps_beside_streams(&self) -> bool {
        false
    }

    /// A stream that does not wait for the legacy default stream, of the highest priority.
    fn create_stream(&self) -> Result<Stream>;
    fn destroy_stream(&self, stream: Stream);
    /// An event without timing.
    fn create_event(&self) -> Result<Event>;
    fn destroy_event(&self, event: Event);
    fn record(&self, event: Event, stream: Stream) -> Result<()>;
    fn wait_event(&self, stream: Stream, event: Event) -> Result<()>;
    /// Whether the stream passed the event's last record.
    fn passed(&self, event: Event) -> Result<bool>;
    /// Whether the stream is being captured into a graph.
    fn capturing(&self, stream: Stream) -> Result<bool>;
    /// Blocks this thread until the stream is empty: for tests and for leaving.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// The stream waits for all of these, in as few calls of the driver as it has.
    unsafe fn wait_words(&self, stream: Stream, waits: &[Wait]) -> Result<()>;
    /// The stream writes a word of eight bytes, after everything before it is visible everywhere.
    unsafe fn write_word(&self, stream: Stream, word: Address, value: u64) -> Result<()>;
    /// Copies, in any order among themselves, batched where the driver has it.
    unsafe fn copy(&self, stream: Stream, copies: &[Copy]) -> Result<()>;
    unsafe fn reduce(&self, stream: Stream, reduction: &Reduction) -> Result<()>;

    /// The host reads a word that streams and other processes write; what they wrote before is visible then.
    unsafe fn load(&self, word: Address) -> u64 {
        // SAFETY: the caller's promise: an aligned word of host memory, reached as an atomic by all.
        unsafe { AtomicU64::from_ptr(word as *mut u64) }.load(Ordering::Acquire)
    }
    /// Whether such a word has [`reached`] `value`. What was written before it did is visible then; of what came later
    /// nothing is promised (a mock holds the host to that).
    unsafe fn has_reached(&self, word: Address, value: u64) -> bool {
        // SAFETY: the caller's promise.
        reached(unsafe { self.load(word) }, value)
    }
    /// The host writes such a word, after everything that this thread did before.
    unsafe fn store(&self, word: Address, value: u64) {
        // SAFETY: as in `load`.
        unsafe { AtomicU64::from_ptr(word as *mut u64) }.store(value, Ordering::Release);
    }
    /// The processor is about to read (or write) memory that streams use too: for mocks that check the order.
    fn host_touches(&self, _address: Address, _bytes: usize, _writes: bool) {}

    /// Device memory of our own, of kind [`Kind::Legacy`].
    fn allocate(&self, bytes: usize) -> Result<Address>;
    /// Waits for nothing: the caller knows that no stream uses it any more.
    unsafe fn free(&self, address: Address);
    /// Host memory that the device reaches at the same address; page aligned.
    fn allocate_host(&self, bytes: usize) -> Result<*mut u8>;
    unsafe fn free_host(&self, memory: *mut u8);
    /// Makes memory of this process known to the device; page aligned. Gives the address under which it is known.
    unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<Address>;
    unsafe fn unregister(&self, memory: *mut u8);

    /// The allocation in which `address` lies. An error for memory that is no device's and not known to one, and for
    /// memory of another device than this.
    fn region(&self, address: Address) -> Result<Region>;
    fn export(&self, region: &Region) -> Result<Export>;
    /// Maps another process's region of `bytes`.
    fn import(&self, import: Import<'_>, bytes: usize) -> Result<Imported>;
    fn close(&self, imported: Imported);
}
