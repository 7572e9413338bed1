//! Types of the device interface: addresses, streams, regions, reductions and errors.

use std::os::fd::OwnedFd;

/// An address in device memory, or in host memory that is registered with the device (CUDA's unified addressing).
pub type Address = u64;
/// The UUID of a device: the same in every process and container that can access the device.
pub type Uuid = [u8; 16];

/// A stream (`CUstream`). Zero is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// An event (`CUevent`): marks a position in a stream's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// One copy; source and destination do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Destination.
    pub to: Address,
    /// Source.
    pub from: Address,
    /// Number of bytes.
    pub bytes: usize,
}

/// A stream-ordered wait: the stream continues once the word at `word` has [`reached`] `value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Address of the 64-bit word.
    pub word: Address,
    /// Value that releases the wait.
    pub value: u64,
}

/// Returns true if a word with the value `found` satisfies a wait for `value`.
///
/// CUDA compares the signed difference, so a large positive number releases every wait; all ones does not.
pub const fn reached(found: u64, value: u64) -> bool {
    found.wrapping_sub(value) as i64 >= 0
}

/// The allocation that contains an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First address.
    pub base: Address,
    /// Size in bytes.
    pub bytes: usize,
    /// Changes when another allocation takes the same address.
    pub generation: u64,
    /// Kind of the memory, which determines its export.
    pub kind: Kind,
}

/// Kind of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Device memory with a 64-byte IPC handle (`cudaMalloc`).
    Legacy,
    /// Device memory mapped by the virtual memory API (expandable segments). Exported as a file descriptor.
    Mapped,
    /// Device memory that cannot be exported (for example from a memory pool without IPC support). It needs staging.
    Private,
    /// Host memory.
    Host,
}

/// Handle that gives another process access to a region.
#[derive(Debug)]
pub enum Export {
    /// Handle of [`Kind::Legacy`] memory.
    Legacy([u8; 64]),
    /// Passed to the peer with `SCM_RIGHTS`.
    Descriptor(OwnedFd),
}

/// The handle of an [`Export`], borrowed at the importing process.
#[derive(Debug)]
pub enum Import<'a> {
    /// Handle of [`Kind::Legacy`] memory.
    Legacy(&'a [u8; 64]),
    /// Handle of [`Kind::Mapped`] memory.
    Descriptor(&'a OwnedFd),
}

/// A region of another process, mapped into this process; unmapped by [`Device::close`](crate::Device::close).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imported {
    /// First address in this process.
    pub base: Address,
    /// Size in bytes.
    pub bytes: usize,
    /// Set for an import from a file descriptor.
    pub mapped: bool,
}

/// Element types that a device can reduce. The numbers are those of `smddp_core::DType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Element {
    /// 32-bit float.
    F32 = 0,
    /// 64-bit float.
    F64 = 1,
    /// 16-bit float (IEEE 754 binary16).
    F16 = 2,
    /// 16-bit float with the exponent of an f32 (bfloat16).
    BF16 = 3,
    /// 8-bit signed integer.
    I8 = 4,
    /// 16-bit signed integer.
    I16 = 5,
    /// 32-bit signed integer.
    I32 = 6,
    /// 64-bit signed integer.
    I64 = 7,
    /// 8-bit unsigned integer.
    U8 = 8,
    /// 16-bit unsigned integer.
    U16 = 9,
    /// 32-bit unsigned integer.
    U32 = 10,
    /// 64-bit unsigned integer.
    U64 = 11,
    /// Boolean of one byte, 0 or 1.
    Bool = 12,
    /// Complex number of two 32-bit floats.
    C64 = 13,
    /// Complex number of two 64-bit floats.
    C128 = 14,
}

impl Element {
    /// All element types, in the order of their numbers.
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

/// Reduction operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fold {
    /// Sum.
    Sum = 0,
    /// Product.
    Prod = 1,
    /// Minimum.
    Min = 2,
    /// Maximum.
    Max = 3,
    /// Bitwise and.
    Band = 4,
    /// Bitwise or.
    Bor = 5,
    /// Bitwise exclusive or.
    Bxor = 6,
}

impl Fold {
    /// All operators, in the order of their numbers.
    pub const ALL: [Fold; 7] =
        [Fold::Sum, Fold::Prod, Fold::Min, Fold::Max, Fold::Band, Fold::Bor, Fold::Bxor];
}

/// Target format of rounded 32-bit floats; see `smddp_plan::Format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// Integers times one scale for each 256 elements.
    Int8,
}

/// Maximum number of sources of one kernel launch.
pub const MAX_SOURCES: usize = 16;

/// One pass over all sources, in their order. 16-bit floats are accumulated in f32 and rounded once.
///
/// The results are bit-identical to the kernels of smddp-core. Min and max propagate NaN; integers wrap. A bool is 0 or 1:
/// sum, max and or compute "or"; prod, min and and compute "and". Integer division truncates. An integer is
/// multiplied in f64; the result saturates and truncates.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduction {
    /// Type of all elements.
    pub element: Element,
    /// Operator.
    pub fold: Fold,
    /// One to [`MAX_SOURCES`] arrays of `count` elements.
    pub sources: Vec<Address>,
    /// May equal one of the sources; must not overlap them otherwise.
    pub to: Address,
    /// Number of elements of each array.
    pub count: usize,
    /// Divides by this number before rounding (an average). Sums only.
    pub divide: Option<u32>,
    /// Multiplies by this factor before rounding (first pass of premul_sum, with one source). Sums only.
    pub times: Option<f64>,
}

/// Errors of a device, of its driver or of an invalid request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The driver is missing or too old. Contains the reason and the searched locations.
    #[error("no CUDA driver: {0}")]
    Absent(String),
    /// A driver call failed.
    #[error("{call} failed: {name} ({code}){advice}", advice = if .advice.is_empty() { String::new() } else { format!("; {}", .advice) })]
    Driver {
        /// Name of the driver's function.
        call: &'static str,
        /// Error code (`CUresult`).
        code: i32,
        /// Name of the error code.
        name: String,
        /// Remedy; empty if there is none.
        advice: String,
    },
    /// The request is invalid or unsupported.
    #[error("{0}")]
    Invalid(String),
}

/// Result of a device operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;
