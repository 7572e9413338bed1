//! Core of smddp: communicators, the executor of bound plans, progress, reductions.
//!
//! Buffers are raw addresses, since torch owns them. The caller guarantees that they are valid until its call is
//! over. Only the executor and the kernels access them.
#![warn(missing_docs, clippy::missing_errors_doc)]

mod bind;
mod call;
mod communicator;
pub mod config;
pub mod device;
mod engine;
mod error;
mod exec;
mod failure;
#[cfg(test)]
mod for_tests;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod kernels;
pub mod log;
mod observe;
pub mod preview;
mod startup;
mod sync;

pub use call::lossless::set_lossless;
pub use call::{Blocks, Call, name_of, types};
pub use communicator::{Communicator, Options, Work, shutdown};
pub use config::Config;
pub use config::cores::cores;
pub use config::files;
pub use config::network;
pub use device::DeviceStream;
pub use error::{Error, Result};
pub use kernels::simd_level;
pub use observe::recorder::{Counters, dump};
pub use smddp_base::fork::PerProcess;
pub use smddp_base::host_name;
pub use smddp_base::lock;
pub use smddp_base::threads::spawn;
pub use smddp_cuda::Stream;
pub use smddp_plan::format::variant_name;
pub use smddp_plan::{Algorithm, Collective, Format, Network};
pub use smddp_process::{
    Endpoint, SingleCopy, SymmetricBuffer, SymmetricUsage, record_error, set_frame_source, system_call_error,
    undisturbed,
};
pub use startup::{Deletion, MAX_RANKS, ParentGroup, Pending, Store, check_size};
pub use sync::completion::{KeepAlive, interrupted, set_interrupt};
pub use sync::deadline::{after, duration};
pub use types::{DType, RedOp};

/// Returns `port` at the address of the network interface that groups use between nodes (`SMDDP_SOCKET_IFNAME`).
///
/// # Errors
/// [`Error::Config`] for invalid settings, or if no interface matches them.
pub fn network_address(port: u16) -> Result<std::net::SocketAddr> {
    let config = Config::get()?;
    let chosen = smddp_net::interface::choose(&config.interface, config.family);
    let chosen = chosen.map_err(|error| Error::Config(error.to_string()))?;
    Ok(chosen.address.with_port(port))
}

/// Lists the network interfaces of this machine with their addresses in one line.
pub fn interfaces() -> String {
    match smddp_net::interface::machine::interfaces() {
        Ok(found) => smddp_net::interface::listing(&found),
        Err(error) => format!("unknown: {error}"),
    }
}
