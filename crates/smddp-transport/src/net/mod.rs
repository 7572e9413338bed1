//! Between nodes: frames over a wire, and channels, credits and messages on top of them.

pub(crate) mod channels;
pub mod fabric;
pub(crate) mod frame;
pub mod interface;
mod messages;
pub(crate) mod reached;
pub(crate) mod tcp;
pub(crate) mod wire;
pub(crate) mod wiring;
