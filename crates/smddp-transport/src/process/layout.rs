//! Where things lie in a process's shared memory.
//!
//! ```text
//! page 0        endpoint: bell, life, last error
//! CONTROL..     control blocks, one per communicator, and mail rings
//! STAGING..     the staging pool: `cap` bytes, then room for reserves beyond the cap
//! behind it     symmetric memory: tensors
//!
//! control block of one rank in one communicator
//!   line 0   nonce, state                 line 1  done (operations finished)
//!   WHY      length and text of the reason, where the state has POISONED
//!   MAIL     one offset per rank: my mail ring to it (0: none yet)
//!   slots    SLOTS x SLOT_STRIDE: header, then payload of small operations
//!   board    a page of words for devices
//!
//! slot       tag (seq + 1, written last), what, count, stage (offset of the operation's region, 0: none), payload
//! region     one ENTRY per channel, then per channel a line `published` and a line per reader `read`,
//!            then the cells
//! mail ring  line 0 messages taken (told now and then); per entry: number + 1, tag, what, bytes of a message, and its region's
//!            offset, bytes of a cell and depth, or in their place all that it says
//! ```

use crate::MAX_ABORT_REPORT;

pub(crate) const LINE: usize = 64;
/// The largest page that a kernel of this architecture may have: what stands alone in its pages does so under each of them.
pub(crate) const PAGE: usize = if cfg!(target_arch = "x86_64") { 4 << 10 } else { 64 << 10 };
/// What staging memory is cut into.
pub(crate) const GRAIN: usize = 4 << 10;

pub(crate) const DOORBELL_FLAG: usize = 64;
pub(crate) const DOORBELL_SLEEPERS: usize = 68;
/// Sleepers that wait for descriptors too: they are woken through the eventfd.
pub(crate) const DOORBELL_POLLERS: usize = 72;

/// A robust futex that a thread of the process holds; 0: none does.
pub(crate) const LIVENESS_FUTEX: usize = 128;

/// The address of this word in its own process: who reads it there through the kernel may read the rest.
pub(crate) const SELF_ADDRESS: usize = 144;

/// When the process's last error was (nanoseconds of the monotonic clock), its length and text.
pub(crate) const ERROR_TIME: usize = 192;
pub(crate) const ERROR_TEXT: usize = 200;
pub(crate) const MAX_ERROR_BYTES: usize = 1200;

pub(crate) const CONTROL: usize = PAGE;
pub(crate) const CONTROL_BYTES: usize = 256 << 20;
pub(crate) const STAGING: usize = CONTROL + CONTROL_BYTES;
/// Address space (not memory) past the cap, for the reserves of started operations.
pub(crate) const RESERVE_BYTES: usize = 1 << 30;

/// The same behind those, for tensors that other ranks read where they lie.
pub(crate) const SYMMETRIC_BYTES: usize = 16 << 30;

pub(crate) const NONCE: usize = 0;
pub(crate) const STATE: usize = 8;
pub(crate) const DONE: usize = LINE;
pub(crate) const ABORT_REPORT: usize = 2 * LINE;
pub(crate) const MESSAGE_RINGS: usize = (ABORT_REPORT + 8 + MAX_ABORT_REPORT).next_multiple_of(LINE);

/// Bits of the state: a poisoned group is still to be left.
pub(crate) const OPEN: u32 = 1;
pub(crate) const CLOSED: u32 = 2;
pub(crate) const ABORTED: u32 = 4;
/// The rank may read the memory of all others of its node.
pub(crate) const READS_PEERS: u32 = 8;

/// Operations whose headers are kept; also how far a rank may run ahead of another.
pub(crate) const SLOTS: u64 = 4;
pub(crate) const SLOT_HEADER: usize = 32;
pub const SLOT_BYTES: usize = 8192;
pub(crate) const SLOT_STRIDE: usize = SLOT_HEADER + SLOT_BYTES + 32;

pub(crate) const TAG: usize = 0;
pub(crate) const CALL: usize = 8;
pub(crate) const COUNT: usize = 16;
pub(crate) const STAGE: usize = 24;

/// Channel entry: offset of its lines, offset of its cells, cell bytes, depth, payload bytes, and how
/// they lie (u64 each, padded).
pub(crate) const ENTRY: usize = 64;
/// How a channel's messages lie: in cells; in symmetric memory, where readers say what they have read in any case; or, where they do, too,
/// in memory that the writer does not share, at an address of its own.
pub(crate) const IN_CELLS: u64 = 0;
pub(crate) const IN_SYMMETRIC: u64 = 1;
pub(crate) const IN_PRIVATE_MEMORY: u64 = 2;

pub(crate) const RING_ENTRIES: u64 = 16;
/// Offset, in the first line of a ring, of the number of messages that its reader has received.
pub(crate) const CONFIRMED: usize = 8;
pub(crate) const RING_BYTES: usize = LINE * (1 + RING_ENTRIES as usize);
/// Where in an entry the place of a message's cells is written, or the message itself.
pub(crate) const BODY: usize = 32;
/// Messages up to this many bytes lie beside their announcement.
pub(crate) const INLINE_BYTES: usize = LINE - BODY;

pub(crate) const fn slots_at(size: usize) -> usize {
    (MESSAGE_RINGS + 8 * size).next_multiple_of(LINE)
}

pub(crate) const fn slot_at(size: usize, seq: u64) -> usize {
    slots_at(size) + (seq % SLOTS) as usize * SLOT_STRIDE
}

pub(crate) const fn shared_page_at(size: usize) -> usize {
    (slots_at(size) + SLOTS as usize * SLOT_STRIDE).next_multiple_of(PAGE)
}

pub(crate) const fn block_bytes(size: usize) -> usize {
    shared_page_at(size) + PAGE
}

const _: () = assert!(ERROR_TEXT + 8 + MAX_ERROR_BYTES <= PAGE);
const _: () = assert!(SLOT_STRIDE.is_multiple_of(LINE) && (SLOT_HEADER + SLOT_BYTES) <= SLOT_STRIDE);
