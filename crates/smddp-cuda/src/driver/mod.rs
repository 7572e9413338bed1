//! CUDA devices through the driver's own interface, `libcuda.so.1`, found at run time.
//!
//! Nothing is linked and nothing of CUDA's is needed to build. [`Cuda::open`] looks for the library and takes its
//! functions by name (`table`); without one, or with one that is too old, that is [`Error::Absent`](crate::Error),
//! which says what was looked at. Streams and memory are shared with torch in the device's primary context.
//!
//! | what a call may do besides | which |
//! |---|---|
//! | wait for work on the device (never while a stream waits for a word) | freeing, registering and closing memory, allocating, loading the reductions |
//! | end the caller's graph capture, were it not for the relaxed mode around it | the same, and asking whether an event has passed |
//! | nothing | all that enqueues, `region`, `capturing`, `record`, `wait_event` |

mod attributes;
mod context;
mod cuda;
mod device;
mod errors;
mod host;
mod known;
mod launch;
mod load;
mod share;
mod table;
mod types;

pub use cuda::Cuda;
pub use device::Device;
pub use load::SONAME;
