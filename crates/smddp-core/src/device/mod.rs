//! Collectives on device memory: control over the group's own link, data on a stream of the device.
//!
//! A message between ranks of a node is a few words: which region of the writer's memory, and the value that the
//! writer's *progress* word reaches when the data is there. The reader's stream waits for the word and copies from the
//! peer's memory, mapped here; nothing is staged, and no processor waits. Two rules keep streams from waiting for each
//! other for ever: a message is published only after the work that makes its data was enqueued, and a stream waits only
//! for what was published. So everything a stream waits for is in some queue already.
//!
//! A message over a wire (or within a node whose devices cannot reach each other) is copied to pinned memory, sent by
//! the host when the stream has passed, and copied to the device at the other end.
//!
//! Unsafe code is in `exec` and `site`, with addresses that the caller of [`crate::Communicator::start`] promised, and in `words`
//! and `bounce`, with pages of their own.

mod agree;
mod bounce;
mod exec;
mod flight;
mod found;
mod reduction;
mod regions;
mod site;
mod words;

use std::sync::Arc;

use smddp_cuda::{Device, Stream};
use smddp_plan::{Buffer, Program, Step};

pub(crate) use agree::agree;
pub(crate) use exec::{DeviceOp, Trouble, advance};
pub(crate) use flight::{Flight, Landing};
pub use found::{cuda, device, look_for_cuda};
pub(crate) use site::{Lobby, Site};

/// The device on which a call's buffers are, and the stream in whose order the call is made.
#[derive(Clone)]
pub struct On {
    pub device: Arc<Device>,
    pub stream: Stream,
}

/// How messages between ranks of a node go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// The reader copies from the writer's memory.
    Reference,
    /// Through pinned memory and the group's link.
    Host,
}

/// Where a call's buffers are, as far as its binding depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Number of the group's site; all ranks have the same.
    pub(crate) site: usize,
    pub(crate) way: Way,
}

/// Sites of one group: each has its lines in the ranks' pages.
pub(crate) const MOST_SITES: usize = 4;
/// Bytes of a message by reference.
pub(crate) const DESCRIPTOR: usize = 64;
/// Whether a program writes any block of Out or Scratch twice: then what it sent by reference would change under its
/// readers.
pub(crate) fn rewrites(program: &Program) -> bool {
    let mut written = Vec::new();
    for timed in program.lanes.iter().flatten() {
        let to = match &timed.step {
            Step::Send { tee, .. } => *tee,
            Step::Receive { to, .. } | Step::Copy { to, .. } => Some(*to),
            Step::Reduce { to, .. } => *to,
        };
        for span in to.into_iter().filter(|span| span.buffer != Buffer::In) {
            written.extend((span.block..span.block + span.blocks).map(|block| (span.buffer, block)));
        }
    }
    let all = written.len();
    written.sort_unstable();
    written.dedup();
    written.len() < all
}
