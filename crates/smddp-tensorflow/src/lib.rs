//! TensorFlow's ops over a communicator: `SmddpStart`, `SmddpWait`, `SmddpBroadcast`, `SmddpGather`.
//!
//! They are registered by TensorFlow's C interface for ops and kernels, whose functions are found in the library that the
//! process has loaded: nothing of TensorFlow's is needed to build, and one build serves every version that has them.
//! Kernels block where they wait, and are no asynchronous ones: `TF_NewAsyncKernelBuilder` hands the kernel the address of
//! a local variable that is gone when the kernel returns.

mod bucket;
mod group;
mod interface;
mod kernel;
mod ops;
mod pack;
mod tensor;
mod ticket;

pub use group::set_group;
pub use kernel::{any_under_way, in_kernel};
pub use ops::register;
