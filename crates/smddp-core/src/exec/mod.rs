//! Execution of bound calls: the walk over their steps, and one executor each for host memory and for devices.

pub(crate) mod device;
pub(crate) mod host;
pub(crate) mod relocation;
pub(crate) mod walk;
