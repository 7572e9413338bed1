//! Inter-node transport: frames over a wire, and channels, credits and messages on top of it.

pub(crate) mod channels;
pub mod fabric;
pub(crate) mod frame;
pub mod interface;
pub(crate) mod known_hosts;
pub(crate) mod layout;
mod messages;
pub(crate) mod tcp;
pub(crate) mod wire;
