//! Between nodes: frames over a wire, and channels, credits and messages on top of them.

pub(crate) mod frame;
pub(crate) mod wire;
