//! Frames over our own sockets: the default between nodes.
//!
//! A process listens once, on the chosen interface; a communicator has its own connections, made when first needed
//! and used in both directions. A rank sends to a peer over one connection only, so the order of its frames is the
//! order of that stream. Where both ends of a pair have called each other, they turn to the connection that the lower
//! rank made: acknowledgements then travel with the data of the other direction. A rank calls once for each class, so a
//! second call in its name is refused and the first goes on.
//!
//! Only the silence of a host ends a connection, never a peer that takes nothing for a while (`silence`). What may pass is
//! tried again, and what this process lacks is told as that (`call`).
//!
//! A group that uses another wire has such a listener, too: connections over which nothing is sent tell of a process's
//! end (`watch`), and the service thread answers for a rank that does not drive (`straggler_query`).

pub(crate) mod address;
mod class_sink;
mod connecting;
mod connection;
mod dial;
mod endpoint;
mod frame_reader;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod host_liveness;
mod process_liveness;
mod seal;
mod sideband;
pub(crate) mod straggler_query;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use address::TcpAddress;
pub(crate) use dial::connect;
pub(crate) use endpoint::{GroupListener, TcpEndpoint};
pub(crate) use process_liveness::ProcessLiveness;
pub(crate) use sideband::Sideband;
pub(crate) use wire::TcpWire;
