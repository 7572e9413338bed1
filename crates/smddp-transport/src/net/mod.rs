//! Between nodes: frames over a wire, and channels, credits and messages on top of them.

pub(crate) mod frame;
pub mod interface;
pub(crate) mod wire;
