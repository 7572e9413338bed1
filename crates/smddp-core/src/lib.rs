//! The engine: communicators, the executor of bound plans, progress, reductions.
//!
//! Buffers are raw addresses, since they belong to torch; whoever starts a call promises that they live until it
//! is over. The executor and the kernels are the only places that touch them.

mod bind;
mod call;
mod comm;
pub mod config;
mod deadline;
mod describe;
pub mod device;
mod driver;
mod error;
mod exact;
mod exec;
pub mod files;
mod float_mode;
#[cfg(test)]
mod for_tests;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod head;
mod key;
mod label;
mod ledger;
pub mod log;
pub mod network;
mod op;
mod overlap;
mod p2p;
pub mod preview;
mod recorder;
mod reduce;
mod relocation;
mod report;
mod startup;
mod steps;
mod sync;
mod team;
mod turns;
pub mod types;
mod wait;
mod work;
#[cfg(test)]
mod work_tests;

pub use call::{Blocks, Call, name_of};
pub use comm::{Communicator, Options, Work, shutdown};
pub use config::Config;
pub use deadline::{after, duration};
pub use device::On;
pub use error::{Error, Result};
pub use exact::set_exact;
pub use recorder::{Taken, dump};
pub use reduce::simd_level;
pub use smddp_cuda::Stream;
pub use smddp_plan::format::named;
pub use smddp_plan::{Algorithm, Collective, Format, Network};
pub use smddp_transport::fork::PerProcess;
pub use smddp_transport::host_name;
pub use smddp_transport::process::{
    Endpoint, SingleCopy, SymmetricBuffer, SymmetricUsage, frames_from, leave_error, refused, undisturbed,
};
pub use smddp_transport::threads::spawn;
pub use startup::{Deletion, Known, MAX_RANKS, Pending, Store, check_size};
pub use types::{DType, RedOp};
pub use wait::cores;
pub use work::{Keep, interrupted, set_interrupt};

/// `port` at the address of the network interface that groups use between nodes (`SMDDP_SOCKET_IFNAME`).
///
/// # Errors
/// [`Error::Config`] for bad settings, and where no interface fits them.
pub fn network_address(port: u16) -> Result<std::net::SocketAddr> {
    let config = Config::get()?;
    let chosen = smddp_transport::interface::choose(&config.interface, config.family);
    let chosen = chosen.map_err(|error| Error::Config(error.to_string()))?;
    Ok(chosen.address.with_port(port))
}

/// The network interfaces of this machine with their addresses, in one line.
pub fn interfaces() -> String {
    match smddp_transport::interface::machine::interfaces() {
        Ok(found) => smddp_transport::interface::listing(&found),
        Err(error) => format!("unknown: {error}"),
    }
}
