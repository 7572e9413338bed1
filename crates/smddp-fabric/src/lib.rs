//! Wire over libfabric.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod endpoint;
mod group;
pub mod header;
#[allow(unsafe_code)]
mod incoming;
#[allow(unsafe_code)]
mod large_messages;
mod liveness;
pub(crate) mod ofi;
#[allow(unsafe_code)]
mod outgoing;
mod pair;
pub mod process_endpoint;
#[allow(unsafe_code)]
pub mod provider_choice;
mod queues;
#[allow(unsafe_code)]
pub mod rail;
#[allow(unsafe_code)]
mod receive_buffers;
#[allow(unsafe_code)]
pub mod registration;
#[allow(unsafe_code)]
mod send_buffers;
mod slab;
#[allow(unsafe_code)]
mod transfers;
#[allow(unsafe_code)]
pub mod wire;

pub use endpoint::FabricAddress;
