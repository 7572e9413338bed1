//! Frames over libfabric, or over a simulation of what EFA does.

mod buffers;
mod bulk;
pub mod choose;
pub(crate) mod current;
pub(crate) mod engine;
mod incoming;
pub(crate) mod message;
pub(crate) mod ofi;
mod outgoing;
mod pair;
pub(crate) mod provider;
mod queues;
mod receives;
mod slab;
pub mod srd;
pub(crate) mod staging;
mod transfers;
pub(crate) mod wire;

pub use engine::FabricAddress;
