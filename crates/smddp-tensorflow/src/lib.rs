//! TensorFlow ops on a communicator: `SmddpStart`, `SmddpWait`, `SmddpBroadcast`, `SmddpGather`.
//!
//! They are registered through TensorFlow's C interface for ops and kernels. Its functions are resolved in the library that
//! the process has loaded. The build needs no TensorFlow, and one build supports all versions with these functions.
//! The kernels are synchronous and block: `TF_NewAsyncKernelBuilder` passes the address of a local variable to the kernel,
//! which is invalid after the kernel returns.

#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

mod bucket;
mod group;
mod interface;
mod kernel;
mod ops;
mod pack;
mod tensor;
mod ticket;

pub use group::set_group;
pub use kernel::{in_kernel, is_any_running};
pub use ops::register;
