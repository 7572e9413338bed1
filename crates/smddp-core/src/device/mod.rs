//! Collectives on device memory: control messages over the group's channels, data on a stream of the device.
//!
//! A message between ranks of a node is a descriptor: a region of the sender's memory, and the value that the
//! sender's *progress* flag has once the data is ready. The reader's stream waits for the flag and copies from the
//! mapped memory of the peer. Nothing is staged, and no processor waits. Two rules prevent deadlocks between streams.
//! A message is published only after the work that produces its data is enqueued. A stream waits only for published
//! values. Therefore everything that a stream waits for is already enqueued.
//!
//! A message between nodes, or within a node whose devices cannot map each other's memory, is copied to pinned
//! memory. The host sends it once the stream has passed the copy. The receiver copies it to its device.
//!
//! Unsafe code is in `exec` and `site`, with addresses from the caller of [`crate::Communicator::start`], and in
//! `flags` and `pinned_slots`, with pages that they own.

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
pub(crate) use discovery::driver_error;
pub use discovery::{cuda, cuda_version, device};
pub(crate) use flags::{DeviceFlags, FlagPages};
pub(crate) use regions::ProbeAllocation;
pub(crate) use site::{DeviceSite, MIN_SLAB_BYTES};
pub(crate) use site_handle::DeviceSiteHandle;

/// The device of a call's buffers, and the stream in whose order the call runs.
#[derive(Clone)]
pub struct DeviceStream {
    /// Device of the buffers.
    pub device: Arc<Device>,
    /// Stream of that device.
    pub stream: Stream,
}

/// Maximum number of sites of a group. Each has its own lines in the pages of the ranks.
pub(crate) const MAX_SITES: usize = 4;
