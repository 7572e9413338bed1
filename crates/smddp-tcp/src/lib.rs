//! TCP transport: frames over TCP sockets, the default between nodes.
//!
//! A process has one listening socket, on the selected interface. Each communicator has its own connections, which are
//! opened on first use and carry both directions. A rank sends the frames of a class to a peer over one connection
//! only, so their order is the order of that stream. If both ranks of a pair have connected to each other, both switch
//! to the connection that the lower rank opened: TCP acknowledgements then travel with the data of the other direction.
//! A rank connects once per class, so a second connection that claims its rank is rejected and the first one is kept.
//!
//! A connection fails if the peer's host does not respond, never because the peer does not read for a while
//! (`host_liveness`). Transient connection errors are retried, and local errors are reported as local (`connecting`).
//!
//! A group that uses another wire has such a listener, too. Idle connections detect the end of a peer's process
//! (`process_liveness`), and the service thread answers queries for a rank that makes no progress (`straggler_query`) and for
//! `smddp status` (`status_query`).

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod address;
#[allow(unsafe_code)]
mod class_sink;
pub mod connecting;
#[allow(unsafe_code)]
mod connection;
pub mod deadlock_probe;
pub mod dial;
pub mod endpoint;
#[allow(unsafe_code)]
mod frame_reader;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod host_liveness;
#[allow(unsafe_code)]
pub mod links;
mod process_liveness;
mod seal;
pub mod sideband;
pub mod status_query;
pub mod straggler_query;
#[cfg(test)]
mod tests;
#[allow(unsafe_code)]
pub mod wire;

pub use address::TcpAddress;
pub use dial::connect;
pub use endpoint::{GroupListener, TcpEndpoint};
pub use process_liveness::ProcessLiveness;
pub use sideband::Sideband;
pub use wire::TcpWire;
