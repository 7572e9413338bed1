//! Layout of a process's shared memory.
//!
//! ```text
//! page 0         endpoint: doorbell, liveness futex, last error
//! CONTROL..      control blocks, one per communicator, and message rings
//! STAGING..      staging pool: `cap` bytes, then address space for reserves beyond the cap
//! behind it      symmetric memory: tensors
//!
//! control block of one rank in one communicator
//!   line 0         nonce, state              line 1  done (operations finished)
//!   ABORT_REPORT   length and text of the abort reason; valid if the state contains ABORTED
//!   MESSAGE_RINGS  one offset per rank: the message ring to that rank (0: none yet)
//!   headers        HEADERS x HEADER_STRIDE: header of an operation, then payload of a small one
//!   shared page    one page of flags for devices
//!
//! header         tag (seq + 1, written last), call, count, stage (offset of the operation's region, 0: none), payload
//! region         one ENTRY per channel; then per channel one line `published` and one line `read` per reader;
//!                then the slots
//! message ring   line 0: messages taken (updated occasionally), messages confirmed; then per entry: number + 1, tag,
//!                dtype, bytes of the message; then its region's offset, slot bytes and depth, or an inline payload
//! ```

use crate::MAX_ABORT_REPORT;

pub(crate) const LINE: usize = 64;
/// Largest page size of kernels on this architecture, so that page-aligned objects share no page under any kernel.
pub(crate) const PAGE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };
/// Allocation unit of staging memory, in bytes.
pub(crate) const GRAIN: usize = 4 << 10;

pub(crate) const DOORBELL_FLAG: usize = 64;
pub(crate) const DOORBELL_SLEEPERS: usize = 68;
/// Waiters that wait for descriptors too; they are woken through the eventfd.
pub(crate) const DOORBELL_POLLERS: usize = 72;

/// Robust futex that a thread of the process holds; 0: not held.
pub(crate) const LIVENESS_FUTEX: usize = 128;

/// Address of this field in its own process. If the kernel reads it there for another process, that process may read
/// the rest.
pub(crate) const SELF_ADDRESS: usize = 144;

/// Time of the process's last error (nanoseconds of the monotonic clock), then length and text.
pub(crate) const ERROR_TIME: usize = 192;
pub(crate) const ERROR_TEXT: usize = 200;
pub(crate) const MAX_ERROR_BYTES: usize = 1200;

pub(crate) const CONTROL: usize = PAGE;
pub(crate) const CONTROL_BYTES: usize = 256 << 20;
pub(crate) const STAGING: usize = CONTROL + CONTROL_BYTES;
/// Address space (not memory) beyond the cap, for the reserves of started operations.
pub(crate) const RESERVE_BYTES: usize = 1 << 30;

/// Address space behind the reserves, for tensors that other ranks read directly.
pub(crate) const SYMMETRIC_BYTES: usize = 16 << 30;

pub(crate) const NONCE: usize = 0;
pub(crate) const STATE: usize = 8;
pub(crate) const DONE: usize = LINE;
pub(crate) const ABORT_REPORT: usize = 2 * LINE;
pub(crate) const MESSAGE_RINGS: usize = (ABORT_REPORT + 8 + MAX_ABORT_REPORT).next_multiple_of(LINE);

/// Bits of the state. An aborted group is still open until it is closed.
pub(crate) const OPEN: u32 = 1;
pub(crate) const CLOSED: u32 = 2;
pub(crate) const ABORTED: u32 = 4;
/// The rank can read the memory of all other ranks of its node (`process_vm_readv`).
pub(crate) const READS_PEERS: u32 = 8;

/// Number of operations whose headers are kept, which also limits how many operations one rank may be ahead of another.
pub(crate) const HEADERS: u64 = 4;
/// Bytes of a header's fields.
pub(crate) const HEADER_FIELDS: usize = 32;
/// Maximum payload bytes that travel with a header.
pub const HEADER_PAYLOAD_BYTES: usize = 8192;
pub(crate) const HEADER_STRIDE: usize = HEADER_FIELDS + HEADER_PAYLOAD_BYTES + 32;

pub(crate) const TAG: usize = 0;
pub(crate) const CALL: usize = 8;
pub(crate) const COUNT: usize = 16;
pub(crate) const STAGE: usize = 24;

/// Channel entry: offset of its lines, offset of its slots, slot bytes, depth, payload bytes and placement (u64 each,
/// padded).
pub(crate) const ENTRY: usize = 64;
/// Placement of a channel's messages: in slots; in symmetric memory; or in memory that the writer does not share, at
/// an address of the writer. In the last two cases readers always confirm what they have read.
pub(crate) const IN_SLOTS: u64 = 0;
pub(crate) const IN_SYMMETRIC: u64 = 1;
pub(crate) const IN_PRIVATE_MEMORY: u64 = 2;

pub(crate) const RING_ENTRIES: u64 = 16;
/// Offset, in the first line of a ring, of the number of messages that the receiver has received.
pub(crate) const CONFIRMED: usize = 8;
pub(crate) const RING_BYTES: usize = LINE * (1 + RING_ENTRIES as usize);
/// Offset, in an entry, of the location of the message's slots or of an inline payload.
pub(crate) const BODY: usize = 32;
/// Maximum size in bytes of a message that is stored inside its announcement.
pub(crate) const INLINE_BYTES: usize = LINE - BODY;

pub(crate) const fn headers_at(size: usize) -> usize {
    (MESSAGE_RINGS + 8 * size).next_multiple_of(LINE)
}

pub(crate) const fn header_at(size: usize, seq: u64) -> usize {
    headers_at(size) + (seq % HEADERS) as usize * HEADER_STRIDE
}

pub(crate) const fn shared_page_at(size: usize) -> usize {
    (headers_at(size) + HEADERS as usize * HEADER_STRIDE).next_multiple_of(PAGE)
}

pub(crate) const fn block_bytes(size: usize) -> usize {
    shared_page_at(size) + PAGE
}

const _: () = assert!(ERROR_TEXT + 8 + MAX_ERROR_BYTES <= PAGE);
const _: () =
    assert!(HEADER_STRIDE.is_multiple_of(LINE) && (HEADER_FIELDS + HEADER_PAYLOAD_BYTES) <= HEADER_STRIDE);
