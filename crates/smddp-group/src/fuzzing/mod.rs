//! Fuzz targets of a group: ranks whose peers send arbitrary frames and rank information.

mod device;
mod fabric;
pub(crate) mod feed;
pub(crate) mod line;
mod rank;
mod rank_infos;
mod sink;
mod tcp;

pub use crate::bootstrap::fuzzing::bootstrap;
pub use fabric::fabric;
pub use rank_infos::rank_info;
pub use sink::{messages, sink};
pub use tcp::tcp;
