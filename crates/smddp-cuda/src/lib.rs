//! Devices: memory that a stream moves, in stream order, while the host goes on.
//!
//! [`Device`] is what the executor needs of a GPU, through CUDA's [`driver`], found at run time; where there is none, that is
//! a value. `kernels` is what it reduces with.

mod device;
pub mod driver;
#[doc(hidden)]
pub mod kernels;

pub use device::{
    Address, Copy, Element, Error, Event, Export, Fold, Import, Imported, Kind, MAX_SOURCES, Reduction,
    Region, Result, Rounding, Stream, Uuid, Wait, reached,
};
pub use driver::Device;
