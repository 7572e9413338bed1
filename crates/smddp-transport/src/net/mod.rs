//! Between nodes: frames over a wire, and channels, credits and messages on top of them.

pub mod fabric;
pub(crate) mod frame;
pub mod interface;
mod letters;
pub(crate) mod link;
pub(crate) mod tcp;
pub(crate) mod wire;
pub(crate) mod wiring;
