//! Calls through libfabric's function tables, with the names of the static inline functions in its headers.
//!
//! A function that is missing in a provider's table returns `-FI_ENOSYS`. Other errors are negative error numbers too.
//!
//! Source: the headers under `rdma/`; each function has a manual page of its name.
//!
//! # Safety
//! For every function in this module:
//! - The library opened the objects, and they are not closed yet.
//! - Pointers satisfy the manual page of the same name.
//! - Buffers and contexts of an operation live until its completion is read.
//! - At most one thread uses a domain at a time, unless it was opened with `FI_THREAD_SAFE`.

#![allow(clippy::missing_safety_doc, reason = "the module documentation has one contract for all functions")]

use std::ffi::{c_char, c_int, c_void};

use crate::constants::{FI_ENABLE, FI_ENOSYS, FI_GETWAIT};
use crate::types::*;

/// Calls `table.entry(arguments)` if the table contains the entry and it is not null; otherwise returns `-FI_ENOSYS`.
macro_rules! call {
    ($table:expr, $kind:ty, $entry:ident, $($argument:expr),*) => {{
        let table: *mut $kind = $table;
        // SAFETY: by the contract of this module the table belongs to a live object. Its first field is its size in
        // bytes, and an entry beyond that size is not read.
        let found = unsafe {
            if table.is_null() || (*table).size <= std::mem::offset_of!($kind, $entry) {
                None
            } else {
                (*table).$entry
            }
        };
        match found {
            // SAFETY: the contract of this module.
            Some(f) => unsafe { f($($argument),*) },
            None => -(FI_ENOSYS as i32) as _,
        }
    }};
}

/// Closes an object and frees it.
pub unsafe fn fi_close(object: *mut fid) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*object).ops };
    call!(ops, fi_ops, close, object)
}

/// Binds an object to another one: an endpoint to a queue or an address vector, or a memory region to an endpoint.
pub unsafe fn fi_bind(object: *mut fid, to: *mut fid, flags: u64) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*object).ops };
    call!(ops, fi_ops, bind, object, to, flags)
}

/// Executes a command (`FI_ENABLE`, `FI_GETWAIT`) on an object.
pub unsafe fn fi_control(object: *mut fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*object).ops };
    call!(ops, fi_ops, control, object, command, argument)
}

/// Enables an endpoint, or a memory region that is bound to an endpoint.
pub unsafe fn fi_enable(object: *mut fid) -> c_int {
    // SAFETY: the contract of this module.
    unsafe { fi_control(object, FI_ENABLE, std::ptr::null_mut()) }
}

/// Stores the file descriptor of a queue that was opened with `FI_WAIT_FD`.
pub unsafe fn fi_getwait(queue: *mut fid, fd: *mut c_int) -> c_int {
    // SAFETY: the contract of this module.
    unsafe { fi_control(queue, FI_GETWAIT, fd.cast()) }
}

/// Opens a domain of a fabric.
pub unsafe fn fi_domain(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    domain: *mut *mut fid_domain,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*fabric).ops };
    call!(ops, fi_ops_fabric, domain, fabric, info, domain, context)
}

/// Returns 0 if it is safe to sleep on the descriptors of these queues, `-FI_EAGAIN` if a queue has entries.
pub unsafe fn fi_trywait(fabric: *mut fid_fabric, fids: *mut *mut fid, count: c_int) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*fabric).ops };
    call!(ops, fi_ops_fabric, trywait, fabric, fids, count)
}

/// Opens an address vector of a domain.
pub unsafe fn fi_av_open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    av: *mut *mut fid_av,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*domain).ops };
    call!(ops, fi_ops_domain, av_open, domain, attr, av, context)
}

/// Returns the number of the `count` addresses that were inserted.
pub unsafe fn fi_av_insert(
    av: *mut fid_av,
    address: *const c_void,
    count: usize,
    found: *mut fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*av).ops };
    call!(ops, fi_ops_av, insert, av, address, count, found, flags, context)
}

/// Opens a completion queue of a domain.
pub unsafe fn fi_cq_open(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    cq: *mut *mut fid_cq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*domain).ops };
    call!(ops, fi_ops_domain, cq_open, domain, attr, cq, context)
}

/// Opens an endpoint of a domain.
pub unsafe fn fi_endpoint(
    domain: *mut fid_domain,
    info: *mut fi_info,
    ep: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*domain).ops };
    call!(ops, fi_ops_domain, endpoint, domain, info, ep, context)
}

/// Registers the memory that `attr` describes.
pub unsafe fn fi_mr_regattr(
    domain: *mut fid_domain,
    attr: *const fi_mr_attr,
    flags: u64,
    mr: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: the contract of this module.
    let (ops, object) = unsafe { ((*domain).mr, &raw mut (*domain).fid) };
    call!(ops, fi_ops_mr, regattr, object, attr, flags, mr)
}

/// Sets an option of an endpoint to the `len` bytes at `value`.
pub unsafe fn fi_setopt(
    ep: *mut fid_ep,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: the contract of this module.
    let (ops, object) = unsafe { ((*ep).ops, &raw mut (*ep).fid) };
    call!(ops, fi_ops_ep, setopt, object, level, name, value, len)
}

/// Reads an option of an endpoint. `len`: bytes of `value`; then bytes of the option.
pub unsafe fn fi_getopt(
    ep: *mut fid_ep,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: the contract of this module.
    let (ops, object) = unsafe { ((*ep).ops, &raw mut (*ep).fid) };
    call!(ops, fi_ops_ep, getopt, object, level, name, value, len)
}

/// Reads the address of an endpoint. `len`: bytes of `address`; then bytes of the endpoint's address.
pub unsafe fn fi_getname(ep: *mut fid_ep, address: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the contract of this module.
    let (ops, object) = unsafe { ((*ep).cm, &raw mut (*ep).fid) };
    call!(ops, fi_ops_cm, getname, object, address, len)
}

/// Posts a receive buffer of `len` bytes.
pub unsafe fn fi_recv(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*ep).msg };
    call!(ops, fi_ops_msg, recv, ep, buf, len, desc, from, context)
}

/// Sends a message of `len` bytes.
pub unsafe fn fi_send(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    to: fi_addr_t,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*ep).msg };
    call!(ops, fi_ops_msg, send, ep, buf, len, desc, to, context)
}

/// Reads `len` bytes from a peer's registered memory.
#[expect(clippy::too_many_arguments, reason = "C's signature")]
pub unsafe fn fi_read(
    ep: *mut fid_ep,
    buf: *mut c_void,
    len: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*ep).rma };
    call!(ops, fi_ops_rma, read, ep, buf, len, desc, from, address, key, context)
}

/// Writes `len` bytes to a peer's registered memory and delivers the immediate data `data` to the peer.
#[expect(clippy::too_many_arguments, reason = "C's signature")]
pub unsafe fn fi_writedata(
    ep: *mut fid_ep,
    buf: *const c_void,
    len: usize,
    desc: *mut c_void,
    data: u64,
    to: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*ep).rma };
    call!(ops, fi_ops_rma, writedata, ep, buf, len, desc, data, to, address, key, context)
}

/// Returns the number of entries that were read, `-FI_EAGAIN` for an empty queue, or `-FI_EAVAIL` if the next entry is an
/// error (see [`fi_cq_readerr`]).
pub unsafe fn fi_cq_read(cq: *mut fid_cq, entries: *mut c_void, count: usize) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*cq).ops };
    call!(ops, fi_ops_cq, read, cq, entries, count)
}

/// Reads the next entry if it is an error. Returns the number of entries that were read, or `-FI_EAGAIN`.
pub unsafe fn fi_cq_readerr(cq: *mut fid_cq, entry: *mut fi_cq_err_entry, flags: u64) -> isize {
    // SAFETY: the contract of this module.
    let ops = unsafe { (*cq).ops };
    call!(ops, fi_ops_cq, readerr, cq, entry, flags)
}

/// Returns the provider's text for an error entry, or null if the provider has no text.
pub unsafe fn fi_cq_strerror(
    cq: *mut fid_cq,
    prov_errno: c_int,
    err_data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: the contract of this module.
    unsafe {
        let ops = (*cq).ops;
        if ops.is_null() || (*ops).size <= std::mem::offset_of!(fi_ops_cq, strerror) {
            return std::ptr::null();
        }
        match (*ops).strerror {
            Some(f) => f(cq, prov_errno, err_data, buf, len),
            None => std::ptr::null(),
        }
    }
}
