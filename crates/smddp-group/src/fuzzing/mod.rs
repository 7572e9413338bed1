//! Fuzz targets of a group: ranks whose peers send arbitrary frames and rank information.

#[allow(unsafe_code)]
mod device;
#[allow(unsafe_code)]
mod fabric;
#[allow(unsafe_code)]
pub(crate) mod feed;
#[allow(unsafe_code)]
pub(crate) mod line;
#[allow(unsafe_code)]
mod rank;
mod rank_infos;
mod sink;
mod tcp;

pub use crate::bootstrap::fuzzing::bootstrap;
pub use fabric::fabric;
pub use rank_infos::rank_info;
pub use sink::{messages, sink};
pub use tcp::tcp;
