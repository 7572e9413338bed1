//! CUDA devices: stream-ordered memory operations and reductions.
//!
//! [`Device`] provides the operations that the executor needs of a GPU. It uses CUDA's [`driver`], which is opened at
//! run time; a missing driver is an error value. `kernels` holds the reduction kernels.
#![warn(missing_docs, clippy::missing_errors_doc)]

mod device;
pub mod driver;
#[doc(hidden)]
pub mod kernels;

pub use device::{
    Address, Copy, Element, Error, Event, Export, Fold, Import, Imported, Kind, MAX_SOURCES, Reduction,
    Region, Result, Rounding, Stream, Uuid, Wait, reached,
};
pub use driver::Device;
