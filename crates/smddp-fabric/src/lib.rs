//! Wire over libfabric.

#![warn(missing_docs)]

pub mod endpoint;
mod group;
pub mod header;
mod incoming;
mod large_messages;
mod liveness;
pub(crate) mod ofi;
mod outgoing;
mod pair;
pub mod process_endpoint;
pub mod provider_choice;
mod queues;
pub mod rail;
mod receive_buffers;
pub mod registration;
mod send_buffers;
mod slab;
mod transfers;
pub mod wire;

pub use endpoint::FabricAddress;
