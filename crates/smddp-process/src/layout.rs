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

use smddp_base::MAX_ABORT_REPORT;

/// Bytes of a cache line.
pub const LINE: usize = 64;
/// Largest page size of kernels on this architecture, so that page-aligned objects share no page under any kernel.
pub const PAGE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };
/// Allocation unit of staging memory, in bytes.
pub const GRAIN: usize = 4 << 10;

/// Offset of the doorbell: a futex that each notification changes.
pub const DOORBELL_FLAG: usize = 64;
/// Offset of the number of threads that wait for the doorbell.
pub const DOORBELL_SLEEPERS: usize = 68;
/// Waiters that wait for descriptors too; they are woken through the eventfd.
pub const DOORBELL_POLLERS: usize = 72;

/// Robust futex that a thread of the process holds; 0: not held.
pub const LIVENESS_FUTEX: usize = 128;

/// Address of this field in its own process. If the kernel reads it there for another process, that process may read
/// the rest.
pub const SELF_ADDRESS: usize = 144;

/// Time of the process's last error (nanoseconds of the monotonic clock), then length and text.
pub const ERROR_TIME: usize = 192;
/// Offset of the length and the text of the process's last error.
pub const ERROR_TEXT: usize = 200;
/// Maximum bytes of the text of the last error.
pub const MAX_ERROR_BYTES: usize = 1200;

/// Offset of the control blocks.
pub const CONTROL: usize = PAGE;
/// Bytes for the control blocks of all groups.
pub const CONTROL_BYTES: usize = 256 << 20;
/// Offset of the staging pool.
pub const STAGING: usize = CONTROL + CONTROL_BYTES;
/// Address space (not memory) beyond the cap, for the reserves of started operations.
pub const RESERVE_BYTES: usize = 1 << 30;

/// Address space behind the reserves, for tensors that other ranks read directly.
pub const SYMMETRIC_BYTES: usize = 16 << 30;

/// Offset in a control block: number of the group that owns it.
pub const NONCE: usize = 0;
/// Offset in a control block: state of the rank, a bit set of the constants below.
pub const STATE: usize = 8;
/// Offset in a control block: number of operations that the rank has finished.
pub const DONE: usize = LINE;
/// Offset in a control block: length and text of the abort report.
pub const ABORT_REPORT: usize = 2 * LINE;
/// Offset in a control block: offsets of the message rings, 8 bytes per rank.
pub const MESSAGE_RINGS: usize = (ABORT_REPORT + 8 + MAX_ABORT_REPORT).next_multiple_of(LINE);

/// Bits of the state. An aborted group is still open until it is closed.
pub const OPEN: u32 = 1;
/// The rank has left the group.
pub const CLOSED: u32 = 2;
/// The rank has aborted the group.
pub const ABORTED: u32 = 4;
/// The rank can read the memory of all other ranks of its node (`process_vm_readv`).
pub const READS_PEERS: u32 = 8;

/// Number of operations whose headers are kept, which also limits how many operations one rank may be ahead of another.
pub const HEADERS: u64 = 4;
/// Bytes of a header's fields.
pub const HEADER_FIELDS: usize = 32;
/// Maximum payload bytes that travel with a header.
pub const HEADER_PAYLOAD_BYTES: usize = 8192;
/// Bytes from one header to the next.
pub const HEADER_STRIDE: usize = HEADER_FIELDS + HEADER_PAYLOAD_BYTES + 32;

/// Offset in a header: sequence number of the operation plus one.
pub const TAG: usize = 0;
/// Offset in a header: first half of the fingerprint.
pub const CALL: usize = 8;
/// Offset in a header: second half of the fingerprint.
pub const COUNT: usize = 16;
/// Offset in a header: offset of the channel entries in the writer's memory.
pub const STAGE: usize = 24;

/// Channel entry: offset of its lines, offset of its slots, slot bytes, depth, payload bytes and placement (u64 each,
/// padded).
pub const ENTRY: usize = 64;
/// Placement of a channel's messages: in slots; in symmetric memory; or in memory that the writer does not share, at
/// an address of the writer. In the last two cases readers always confirm what they have read.
pub const IN_SLOTS: u64 = 0;
/// The messages are in symmetric memory.
pub const IN_SYMMETRIC: u64 = 1;
/// The messages are in memory that the writer does not share.
pub const IN_PRIVATE_MEMORY: u64 = 2;

/// Number of announcements that a message ring holds.
pub const RING_ENTRIES: u64 = 16;
/// Offset, in the first line of a ring, of the number of messages that the receiver has received.
pub const CONFIRMED: usize = 8;
/// Bytes of a message ring.
pub const RING_BYTES: usize = LINE * (1 + RING_ENTRIES as usize);
/// Offset, in an entry, of the location of the message's slots or of an inline payload.
pub const BODY: usize = 32;
/// Maximum size in bytes of a message that is stored inside its announcement.
pub const INLINE_BYTES: usize = LINE - BODY;

/// Returns the offset of the headers in a control block of a group of `size` ranks.
pub const fn headers_at(size: usize) -> usize {
    (MESSAGE_RINGS + 8 * size).next_multiple_of(LINE)
}

/// Returns the offset of the header of operation `seq`.
pub const fn header_at(size: usize, seq: u64) -> usize {
    headers_at(size) + (seq % HEADERS) as usize * HEADER_STRIDE
}

/// Returns the offset of the page of flags.
pub const fn shared_page_at(size: usize) -> usize {
    (headers_at(size) + HEADERS as usize * HEADER_STRIDE).next_multiple_of(PAGE)
}

/// Returns the bytes of a control block.
pub const fn block_bytes(size: usize) -> usize {
    shared_page_at(size) + PAGE
}

const _: () = assert!(ERROR_TEXT + 8 + MAX_ERROR_BYTES <= PAGE);
const _: () =
    assert!(HEADER_STRIDE.is_multiple_of(LINE) && (HEADER_FIELDS + HEADER_PAYLOAD_BYTES) <= HEADER_STRIDE);
