//! The libfabric structures that the project uses, in C layout.
//!
//! Structures that the *library* allocates (`fi_info` and its attributes) have the layout of symbol version FABRIC_1.3,
//! which every libfabric from 1.9 to 2.x exports. Fields that later versions append are not declared and never read.
//! Structures that the *caller* allocates (`fi_mr_attr`, `fi_cq_err_entry`) have the size of 2.x, because a new
//! provider may read or write the appended fields. Enumerations are plain numbers, because a library may return a value
//! that is newer than this file.
//!
//! Function pointers in the tables are `Option`, because a provider may omit them. The `size` of a table is the number of
//! its bytes that exist.

#![allow(non_camel_case_types, reason = "C names, as in libfabric's manual pages")]

#[path = "types/domain.rs"]
mod domain;
#[path = "types/endpoint.rs"]
mod endpoint;
#[path = "types/info.rs"]
mod info;
#[path = "types/nic.rs"]
mod nic;
#[path = "types/queue.rs"]
mod queue;
#[cfg(test)]
#[path = "types/tests.rs"]
mod tests;

use std::ffi::{c_char, c_int, c_void};

pub use domain::*;
pub use endpoint::*;
pub use info::*;
pub use nic::*;
pub use queue::*;

/// Address of a peer in an address vector.
pub type fi_addr_t = u64;

/// Equal to the system's `iovec`, so that this file has no dependency.
#[repr(C)]
pub struct iovec {
    /// Start of the buffer.
    pub iov_base: *mut c_void,
    /// Bytes of the buffer.
    pub iov_len: usize,
}

/// Common first field of all objects.
#[repr(C)]
pub struct fid {
    /// Class of the object.
    pub fclass: usize,
    /// Context that the caller passed when it opened the object.
    pub context: *mut c_void,
    /// Functions that all objects have.
    pub ops: *mut fi_ops,
}

/// Functions that all objects have.
#[repr(C)]
pub struct fi_ops {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_close`.
    pub close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    /// Binds an object to another one: `fi_ep_bind`, `fi_mr_bind`.
    pub bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    /// `fi_control`.
    pub control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
    /// `fi_open_ops`.
    pub ops_open:
        Option<unsafe extern "C" fn(*mut fid, *const c_char, u64, *mut *mut c_void, *mut c_void) -> c_int>,
    /// Text form of an object.
    pub tostr: Option<unsafe extern "C" fn(*const fid, *mut c_char, usize) -> c_int>,
    /// `fi_set_ops`.
    pub ops_set:
        Option<unsafe extern "C" fn(*mut fid, *const c_char, u64, *mut c_void, *mut c_void) -> c_int>,
}

/// Placeholder for a function that the project does not call.
pub type unused = Option<unsafe extern "C" fn()>;
