//! Devices: memory that a stream moves, in stream order, while the host goes on.
//!
//! [`Device`] is what the executor needs of a GPU. [`driver`] is CUDA's, found at run time; where there is none, that is
//! a value; `kernels` is what it reduces with. `mock` is host memory with threads as streams, which reports every access
//! that no wait orders.

mod device;
pub mod driver;
#[doc(hidden)]
pub mod kernels;
#[cfg(feature = "mock")]
pub mod mock;

pub use device::{
    Address, Copy, Device, Element, Error, Event, Export, Fold, Import, Imported, Kind, MAX_SOURCES,
    Reduction, Region, Result, Stream, Uuid, Wait, reached,
};
