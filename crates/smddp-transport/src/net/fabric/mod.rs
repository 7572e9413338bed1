//! Wire over libfabric.

pub(crate) mod endpoint;
mod group;
pub(crate) mod header;
mod incoming;
mod large_messages;
mod liveness;
pub(crate) mod ofi;
mod outgoing;
mod pair;
pub(crate) mod process_endpoint;
pub mod provider_choice;
mod queues;
pub(crate) mod rail;
mod receive_buffers;
pub(crate) mod registration;
mod send_buffers;
mod slab;
mod transfers;
pub(crate) mod wire;

pub use endpoint::FabricAddress;
