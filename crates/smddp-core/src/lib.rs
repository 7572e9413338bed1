//! The engine: communicators, the executor of bound plans, progress, reductions.
//!
//! Buffers are raw addresses, since they belong to torch; whoever starts a call promises that they live until it
//! is over. The executor and the kernels are the only places that touch them.

mod bind;
mod call;
mod comm;
pub mod config;
mod describe;
pub mod device;
mod driver;
mod error;
mod exact;
mod exec;
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
mod p2p;
pub mod preview;
mod recorder;
mod reduce;
mod report;
mod startup;
mod steps;
mod sync;
mod team;
mod turns;
pub mod types;
mod wait;
mod work;

pub use call::{Blocks, Call, name_of};
pub use comm::{Communicator, Options, Work, shutdown};
pub use config::Config;
pub use device::On;
pub use error::{Error, Result};
pub use exact::set_exact;
pub use recorder::{Taken, dump};
pub use reduce::simd_level;
pub use smddp_cuda::Stream;
pub use smddp_plan::format::named;
pub use smddp_plan::{Algorithm, Collective, Format, Network};
pub use smddp_transport::fork::PerProcess;
pub use smddp_transport::process::{
    Endpoint, SingleCopy, SymmetricBuffer, SymmetricUsage, frames_from, leave_error,
};
pub use smddp_transport::threads::spawn;
pub use startup::{Known, Pending, Store};
pub use types::{DType, RedOp};
pub use wait::cores;
pub use work::{Keep, interrupted, set_interrupt};

/// The network interfaces of this machine with their addresses, in one line.
pub fn interfaces() -> String {
    match smddp_transport::interface::machine::interfaces() {
        Ok(found) => smddp_transport::interface::listing(&found),
        Err(error) => format!("unknown: {error}"),
    }
}
