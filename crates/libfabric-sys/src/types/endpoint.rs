//! Endpoints: messages, remote memory access, addresses.
//!
//! Source: `rdma/fi_endpoint.h`, `rdma/fi_rma.h`, `rdma/fi_cm.h`; manual pages fi_endpoint(3), fi_msg(3), fi_rma(3), fi_cm(3).

use std::ffi::{c_int, c_void};

use super::{fi_addr_t, fid, unused};

/// Functions of an endpoint.
#[repr(C)]
pub struct fi_ops_ep {
    /// Size of this table in bytes.
    pub size: usize,
    /// Not called by the project.
    pub cancel: unused,
    /// `fi_getopt`.
    pub getopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *mut c_void, *mut usize) -> c_int>,
    /// `fi_setopt`.
    pub setopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *const c_void, usize) -> c_int>,
    /// Not called by the project.
    pub tx_ctx: unused,
    /// Not called by the project.
    pub rx_ctx: unused,
    /// Not called by the project.
    pub rx_size_left: unused,
    /// Not called by the project.
    pub tx_size_left: unused,
}

/// Functions for messages.
#[repr(C)]
pub struct fi_ops_msg {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_recv`.
    pub recv: Option<
        unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize,
    >,
    /// Not called by the project.
    pub recvv: unused,
    /// Not called by the project.
    pub recvmsg: unused,
    /// `fi_send`.
    pub send: Option<
        unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize,
    >,
    /// Not called by the project.
    pub sendv: unused,
    /// Not called by the project.
    pub sendmsg: unused,
    /// `fi_inject`.
    pub inject: Option<unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, fi_addr_t) -> isize>,
    /// Not called by the project.
    pub senddata: unused,
    /// Not called by the project.
    pub injectdata: unused,
}

/// Functions for addresses and connections.
#[repr(C)]
pub struct fi_ops_cm {
    /// Size of this table in bytes.
    pub size: usize,
    /// Not called by the project.
    pub setname: unused,
    /// `fi_getname`.
    pub getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
    /// Not called by the project.
    pub getpeer: unused,
    /// Not called by the project.
    pub connect: unused,
    /// Not called by the project.
    pub listen: unused,
    /// Not called by the project.
    pub accept: unused,
    /// Not called by the project.
    pub reject: unused,
    /// Not called by the project.
    pub shutdown: unused,
    /// Not called by the project.
    pub join: unused,
}

/// Functions for remote memory access.
#[repr(C)]
pub struct fi_ops_rma {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_read`.
    pub read: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *mut c_void,
            usize,
            *mut c_void,
            fi_addr_t,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    /// Not called by the project.
    pub readv: unused,
    /// Not called by the project.
    pub readmsg: unused,
    /// `fi_write`.
    pub write: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            fi_addr_t,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    /// Not called by the project.
    pub writev: unused,
    /// Not called by the project.
    pub writemsg: unused,
    /// Not called by the project.
    pub inject: unused,
    /// `fi_writedata`.
    pub writedata: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            u64,
            fi_addr_t,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    /// Not called by the project.
    pub injectdata: unused,
}

/// Endpoint.
#[repr(C)]
pub struct fid_ep {
    /// Common part.
    pub fid: fid,
    /// Functions.
    pub ops: *mut fi_ops_ep,
    /// Functions for addresses and connections.
    pub cm: *mut fi_ops_cm,
    /// Functions for messages.
    pub msg: *mut fi_ops_msg,
    /// Functions for remote memory access.
    pub rma: *mut fi_ops_rma,
    /// Functions for tagged messages.
    pub tagged: *mut c_void,
    /// Functions for remote atomic operations.
    pub atomic: *mut c_void,
    /// Functions for collective operations.
    pub collective: *mut c_void,
}

/// Memory for the provider's use until an operation completes, in the modes `FI_CONTEXT` (half of the size) and
/// `FI_CONTEXT2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_context2 {
    /// Memory of the provider.
    pub internal: [*mut c_void; 8],
}
