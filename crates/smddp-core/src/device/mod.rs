//! Collectives on device memory: control over the group's own channels, data on a stream of the device.
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

pub(crate) mod completion;
mod discovery;
mod flags;
mod pinned_slots;
pub(crate) mod reduction;
mod regions;
pub(crate) mod site;
pub(crate) mod site_handle;

use std::sync::Arc;

use smddp_cuda::{Device, Stream};

pub(crate) use completion::{DeviceCompletion, Enqueued};
pub(crate) use discovery::refused;
pub use discovery::{cuda, device, look_for_cuda};
pub(crate) use flags::{Pages, Words};
pub(crate) use regions::Sample;
pub(crate) use site::{LEAST_SLAB, Site};
pub(crate) use site_handle::SiteHandle;

/// The device on which a call's buffers are, and the stream in whose order the call is made.
#[derive(Clone)]
pub struct On {
    pub device: Arc<Device>,
    pub stream: Stream,
}

/// Sites of one group: each has its lines in the ranks' pages.
pub(crate) const MOST_SITES: usize = 4;
