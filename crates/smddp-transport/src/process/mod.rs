//! State of one process that all its groups share: shared memory, exports, address, doorbell and known peers.

pub(crate) mod activity_query;
mod buffer;
mod control_blocks;
mod credentials;
mod death_watch;
pub(crate) mod doorbell;
pub(crate) mod endpoint;
mod exports;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub(crate) mod incoming;
pub(crate) mod last_error;
pub(crate) mod layout;
pub(crate) mod memory;
mod memory_request;
pub(crate) mod order;
pub(crate) mod peer;
pub(crate) mod pool;
mod room;
mod service;
pub(crate) mod single_copy;
mod staging;
pub(crate) mod status;
mod symmetric;
mod sync;
mod token_registry;
mod undisturbed;

pub use crate::handshake::PROTOCOL;
pub(crate) use crate::handshake::ProcessUid;
pub use buffer::{SymmetricBuffer, SymmetricUsage};
pub(crate) use credentials::{check_user, outer_uid};
pub(crate) use doorbell::Doorbell;
pub use doorbell::Sleeper;
pub use endpoint::Endpoint;
pub use exports::{Exporter, MemoryExport};
pub use frames::{main_thread_location, set_frame_source};
pub use last_error::record_error;
pub use memory::system_call_error;
pub(crate) use memory_request::{ProcessAddress, listen};
pub(crate) use pool::Region;
pub use single_copy::SingleCopy;
pub(crate) use smddp_base::random::bytes as random;
pub(crate) use staging::StagingMemory;
pub use status::{StatusQuery, set_responder};
pub use undisturbed::undisturbed;
