//! What a device is asked, and what it answers with.

use std::os::fd::OwnedFd;

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

/// A region of another process, mapped here; given back by [`Device::close`](crate::Device::close).
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

/// What 32-bit floats are rounded to: see `smddp_plan::Format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Bf16,
    F16,
    /// Whole numbers times a scale for each 256 elements.
    Int8,
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
