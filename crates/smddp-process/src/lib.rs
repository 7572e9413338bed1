//! State of one process that all its groups share: shared memory, exports, address, doorbell and known peers.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod activity_query;
mod buffer;
mod control_blocks;
#[allow(unsafe_code)]
mod credentials;
pub mod deadlock_probe;
#[allow(unsafe_code)]
mod death_watch;
mod deferred_answer;
#[allow(unsafe_code)]
pub mod doorbell;
pub mod endpoint;
mod exports;
#[allow(unsafe_code)]
mod frames;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod incoming;
pub mod last_error;
pub mod layout;
#[allow(unsafe_code)]
pub mod memory;
mod memory_request;
pub mod order;
pub mod peer;
pub mod pool;
mod room;
pub mod send_probe;
mod service;
#[allow(unsafe_code)]
pub mod single_copy;
mod staging;
pub mod status;
mod symmetric;
mod sync;
mod token_registry;
#[allow(unsafe_code)]
mod undisturbed;

pub use activity_query::STOPPED;
pub use buffer::{SymmetricBuffer, SymmetricUsage};
pub use control_blocks::ControlBlock;
pub use credentials::{check_user, outer_uid};
pub use doorbell::{Doorbell, Sleeper};
pub use endpoint::Endpoint;
pub use exports::{Exporter, MemoryExport};
pub use frames::{main_thread_location, set_frame_source};
pub use last_error::record_error;
pub use memory::system_call_error;
pub use memory_request::{ProcessAddress, listen};
pub use pool::Region;
pub use single_copy::SingleCopy;
pub use staging::StagingMemory;
pub use status::{StatusQuery, set_responder};
pub use undisturbed::undisturbed;
