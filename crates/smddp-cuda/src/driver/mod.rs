//! CUDA devices through the driver API, `libcuda.so.1`, opened at run time.
//!
//! The build needs and links nothing of CUDA. [`Cuda::open`] finds the library and looks up its functions by name
//! (`table`). A missing or old library is [`Error::Absent`](crate::Error), which lists the searched locations. The
//! device's primary context shares streams and memory with torch.
//!
//! | side effect | calls |
//! |---|---|
//! | may wait for work on the device (forbidden while a stream waits for a word) | freeing, registering and closing memory, allocating, loading the reductions |
//! | would invalidate a graph capture of the caller without the relaxed mode around it | the same, and the query of an event |
//! | none | all calls that enqueue, `region`, `capturing`, `record`, `wait_event` |

mod attributes;
mod context;
mod cuda;
mod device;
mod errors;
mod host;
mod launch;
mod load;
mod region_cache;
mod share;
mod table;
mod types;

pub use cuda::Cuda;
pub use device::Device;
pub use load::SONAME;
