//! Completion queues.
//!
//! Source: `rdma/fi_eq.h`; manual page fi_cq(3).

use std::ffi::{c_char, c_int, c_void};

use super::{fi_addr_t, fid, unused};

/// Attributes of a completion queue.
#[repr(C)]
pub struct fi_cq_attr {
    /// Minimum number of entries; 0 for the provider's default.
    pub size: usize,
    /// Flags of the queue.
    pub flags: u64,
    /// Structure of its entries: `FI_CQ_FORMAT_DATA` and others.
    pub format: u32,
    /// Object to wait on: `FI_WAIT_FD` and others.
    pub wait_obj: u32,
    /// Processor that should handle interrupts, with the flag `FI_AFFINITY`.
    pub signaling_vector: c_int,
    /// Condition of blocking reads.
    pub wait_cond: u32,
    /// Wait set, or null.
    pub wait_set: *mut c_void,
}

/// Completion in the format `FI_CQ_FORMAT_DATA`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_cq_data_entry {
    /// Context that the caller passed to the operation.
    pub op_context: *mut c_void,
    /// Kind of the operation: `FI_SEND`, `FI_REMOTE_CQ_DATA` and others.
    pub flags: u64,
    /// Bytes that were transferred.
    pub len: usize,
    /// Receive buffer, for multi-receive buffers only.
    pub buf: *mut c_void,
    /// Immediate data from the peer.
    pub data: u64,
}

/// Completion with an error.
#[repr(C)]
pub struct fi_cq_err_entry {
    /// Context that the caller passed to the operation.
    pub op_context: *mut c_void,
    /// Kind of the operation: `FI_SEND`, `FI_REMOTE_CQ_DATA` and others.
    pub flags: u64,
    /// Bytes that were transferred.
    pub len: usize,
    /// Receive buffer, for multi-receive buffers only.
    pub buf: *mut c_void,
    /// Immediate data from the peer.
    pub data: u64,
    /// Tag of the message.
    pub tag: u64,
    /// Bytes that did not fit into the receive buffer.
    pub olen: usize,
    /// libfabric's error number, positive.
    pub err: c_int,
    /// Error number of the provider, for `fi_cq_strerror`.
    pub prov_errno: c_int,
    /// Data of the provider for `fi_cq_strerror`.
    pub err_data: *mut c_void,
    /// Bytes of `err_data`.
    pub err_data_size: usize,
    /// From 1.20 on.
    pub src_addr: fi_addr_t,
}

/// Functions of a completion queue.
#[repr(C)]
pub struct fi_ops_cq {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_cq_read`.
    pub read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    /// Not called by the project.
    pub readfrom: unused,
    /// `fi_cq_readerr`.
    pub readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
    /// Not called by the project.
    pub sread: unused,
    /// Not called by the project.
    pub sreadfrom: unused,
    /// Not called by the project.
    pub signal: unused,
    /// `fi_cq_strerror`.
    pub strerror:
        Option<unsafe extern "C" fn(*mut fid_cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char>,
}

/// Completion queue.
#[repr(C)]
pub struct fid_cq {
    /// Common part.
    pub fid: fid,
    /// Functions.
    pub ops: *mut fi_ops_cq,
}
