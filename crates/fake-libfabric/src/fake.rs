//! See `lib.rs`. Compiled by `build.rs` as a library of its own.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    reason = "C's interface from its other side; every function has the contract of its manual page"
)]
#![allow(dead_code, reason = "the types are all of libfabric's that are known")]

mod knob;
#[path = "../../libfabric-sys/src/types.rs"]
mod types;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use knob::*;
use types::*;

const ENOSYS: c_int = 38;
const EAGAIN: c_int = 11;
const ENODATA: c_int = 61;
const EINVAL: c_int = 22;
const ENOPROTOOPT: c_int = 92;

unsafe extern "C" {
    fn calloc(count: usize, bytes: usize) -> *mut c_void;
    fn free(at: *mut c_void);
    fn strdup(text: *const c_char) -> *mut c_char;
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_set(what: u64, value: u64) {
    of(what).store(value, Relaxed);
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_get(what: u64) -> u64 {
    of(what).load(Relaxed)
}

fn of(knob: u64) -> &'static AtomicU64 {
    static KNOBS: [AtomicU64; 10] = [const { AtomicU64::new(0) }; 10];
    &KNOBS[knob as usize]
}

fn wrong(condition: bool) {
    if condition {
        of(WRONG).fetch_add(1, Relaxed);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fi_version() -> u32 {
    match of(VERSION).load(Relaxed) {
        0 => 0x0002_0001,
        version => version as u32,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fi_strerror(number: c_int) -> *const c_char {
    match number {
        ENODATA => c"No data available".as_ptr(),
        _ => c"some error".as_ptr(),
    }
}

unsafe fn new<T>() -> *mut T {
    calloc(1, size_of::<T>()).cast()
}

unsafe fn empty_info() -> *mut fi_info {
    let info = new::<fi_info>();
    (*info).tx_attr = new();
    (*info).rx_attr = new();
    (*info).ep_attr = new();
    (*info).domain_attr = new();
    (*info).fabric_attr = new();
    info
}

unsafe fn copy<T>(from: *const T, to: *mut T) {
    if !from.is_null() && !to.is_null() {
        std::ptr::copy_nonoverlapping(from, to, 1);
    }
}

unsafe fn text(at: *const c_char) -> *mut c_char {
    if at.is_null() { null_mut() } else { strdup(at) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_dupinfo(info: *const fi_info) -> *mut fi_info {
    let fresh = empty_info();
    if info.is_null() {
        return fresh;
    }
    copy((*info).tx_attr, (*fresh).tx_attr);
    copy((*info).rx_attr, (*fresh).rx_attr);
    copy((*info).ep_attr, (*fresh).ep_attr);
    copy((*info).domain_attr, (*fresh).domain_attr);
    copy((*info).fabric_attr, (*fresh).fabric_attr);
    (*fresh).caps = (*info).caps;
    (*fresh).mode = (*info).mode;
    let domain = (*fresh).domain_attr;
    (*domain).name = text((*domain).name);
    let fabric = (*fresh).fabric_attr;
    (*fabric).name = text((*fabric).name);
    (*fabric).prov_name = text((*fabric).prov_name);
    if !(*info).nic.is_null() {
        (*fresh).nic = nic((*(*(*info).nic).bus_attr).pci.bus_id);
    }
    fresh
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_freeinfo(info: *mut fi_info) {
    let mut info = info;
    while !info.is_null() {
        let next = (*info).next;
        free((*(*info).domain_attr).name.cast());
        free((*(*info).fabric_attr).name.cast());
        free((*(*info).fabric_attr).prov_name.cast());
        if !(*info).nic.is_null() {
            free((*(*(*info).nic).device_attr).name.cast());
            free((*(*info).nic).device_attr.cast());
            free((*(*info).nic).bus_attr.cast());
            free((*(*info).nic).link_attr.cast());
            free((*info).nic.cast());
        }
        free((*info).tx_attr.cast());
        free((*info).rx_attr.cast());
        free((*info).ep_attr.cast());
        free((*info).domain_attr.cast());
        free((*info).fabric_attr.cast());
        free(info.cast());
        info = next;
    }
}

unsafe fn nic(bus: u8) -> *mut fid_nic {
    let nic = new::<fid_nic>();
    (*nic).device_attr = new();
    (*(*nic).device_attr).name = strdup(format!("rdmap{bus}s27\0").as_ptr().cast());
    (*nic).bus_attr = new();
    (*(*nic).bus_attr).bus_type = 2;
    (*(*nic).bus_attr).pci = fi_pci_attr { domain_id: 0, bus_id: bus, device_id: 0x1b, function_id: 0 };
    (*nic).link_attr = new();
    (*(*nic).link_attr).speed = 100_000_000_000;
    nic
}

/// What a caller has to offer for EFA: virtual addresses, pages that are there, keys by the provider.
const MR: c_int = 1 << 4 | 1 << 5 | 1 << 6;
const MR_LOCAL: c_int = 1 << 2;
const CONTEXT2: u64 = 1 << 52;

unsafe fn efa(bus: u8, direct: bool) -> *mut fi_info {
    let info = empty_info();
    (*info).caps = 1 << 1 | 1 << 2;
    (*info).mode = if direct { CONTEXT2 } else { 0 };
    (*info).addr_format = 13;
    let tx = (*info).tx_attr;
    (*tx).inject_size = 32;
    (*tx).size = 4096;
    (*tx).iov_limit = 2;
    (*tx).rma_iov_limit = 1;
    (*(*info).rx_attr).size = 8192;
    let ep = (*info).ep_attr;
    (*ep).kind = 3;
    (*ep).max_msg_size = 1 << 30;
    let domain = (*info).domain_attr;
    let kind = if direct { "dgrm" } else { "rdm" };
    (*domain).name = strdup(format!("rdmap{bus}s27-{kind}\0").as_ptr().cast());
    (*domain).av_type = 2;
    (*domain).data_progress = if direct { 1 } else { 2 };
    (*domain).mr_mode = MR | if direct { MR_LOCAL } else { 0 };
    (*domain).mr_key_size = 4;
    (*domain).cq_data_size = 4;
    (*domain).mr_iov_limit = 1;
    let fabric = (*info).fabric_attr;
    (*fabric).name = strdup(if direct { c"efa-direct" } else { c"efa" }.as_ptr());
    (*fabric).prov_name = strdup(c"efa".as_ptr());
    (*info).nic = nic(bus);
    info
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_getinfo(
    version: u32,
    _node: *const c_char,
    _service: *const c_char,
    _flags: u64,
    hints: *const fi_info,
    found: *mut *mut fi_info,
) -> c_int {
    *found = null_mut();
    if version > fi_version() {
        return -ENOSYS;
    }
    let (mut modes, mut mode) = (0, 0);
    if !hints.is_null() {
        modes = (*(*hints).domain_attr).mr_mode;
        mode = (*hints).mode;
        let name = (*(*hints).fabric_attr).prov_name;
        let kind = (*(*hints).ep_attr).kind;
        if !name.is_null() && CStr::from_ptr(name) != c"efa" || kind != 0 && kind != 3 {
            return -ENODATA;
        }
    }
    if modes & MR != MR {
        return -ENODATA;
    }
    let devices = of(DEVICES).load(Relaxed) as u8;
    let direct = modes & MR_LOCAL != 0 && mode & CONTEXT2 != 0 && version >= 0x0002_0000;
    // Not in the bus's order: who maps devices to ranks has to sort them.
    for device in (0..devices).rev() {
        for direct in [false, true].into_iter().filter(|&d| !d || direct) {
            let info = efa(16 + 16 * device, direct);
            (*info).next = *found;
            *found = info;
        }
    }
    if (*found).is_null() { -ENODATA } else { 0 }
}

// What follows are the objects. Each is a box that its `close` frees.

/// A table of no functions.
const fn none<T>() -> T {
    unsafe { std::mem::zeroed() }
}

unsafe fn open<T>(object: *mut T) -> *mut T {
    of(OPEN).fetch_add(1, Relaxed);
    (*object.cast::<fid>()).ops = (&raw const FID).cast_mut();
    object
}

unsafe extern "C" fn close(object: *mut fid) -> c_int {
    of(OPEN).fetch_sub(1, Relaxed);
    free(object.cast());
    0
}

unsafe extern "C" fn bind(_: *mut fid, _: *mut fid, _: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut fid, command: c_int, _: *mut c_void) -> c_int {
    // FI_ENABLE alone.
    if command == 6 { 0 } else { -ENOSYS }
}

static FID: fi_ops = fi_ops {
    size: size_of::<fi_ops>(),
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ..none()
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_fabric(
    attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    wrong(attr.is_null() || (*attr).prov_name.is_null());
    *fabric = open(new::<fid_fabric>());
    (**fabric).ops = (&raw const FABRIC).cast_mut();
    0
}

unsafe extern "C" fn domain(
    _: *mut fid_fabric,
    info: *mut fi_info,
    found: *mut *mut fid_domain,
    _: *mut c_void,
) -> c_int {
    wrong((*info).nic.is_null());
    *found = open(new::<fid_domain>());
    (**found).ops = (&raw const DOMAIN).cast_mut();
    (**found).mr = (&raw const MEMORY).cast_mut();
    0
}

/// As short as an old provider's: what lies behind must not be looked at.
static FABRIC: fi_ops_fabric = fi_ops_fabric {
    size: std::mem::offset_of!(fi_ops_fabric, trywait),
    domain: Some(domain),
    ..none()
};

unsafe extern "C" fn av_open(
    _: *mut fid_domain,
    attr: *mut fi_av_attr,
    found: *mut *mut fid_av,
    _: *mut c_void,
) -> c_int {
    wrong((*attr).kind != 2);
    *found = open(new::<fid_av>());
    (**found).ops = (&raw const BOOK).cast_mut();
    0
}

unsafe extern "C" fn cq_open(
    _: *mut fid_domain,
    attr: *mut fi_cq_attr,
    found: *mut *mut fid_cq,
    _: *mut c_void,
) -> c_int {
    if (*attr).wait_obj != 0 {
        return -ENOSYS;
    }
    wrong((*attr).format != 3 || (*attr).size == 0);
    *found = open(new::<fid_cq>());
    (**found).ops = (&raw const QUEUE).cast_mut();
    0
}

unsafe extern "C" fn endpoint(
    _: *mut fid_domain,
    _: *mut fi_info,
    found: *mut *mut fid_ep,
    _: *mut c_void,
) -> c_int {
    *found = open(new::<fid_ep>());
    (**found).ops = (&raw const ENDPOINT).cast_mut();
    (**found).cm = (&raw const NAMES).cast_mut();
    (**found).msg = (&raw const MESSAGES).cast_mut();
    0
}

static DOMAIN: fi_ops_domain = fi_ops_domain {
    size: size_of::<fi_ops_domain>(),
    av_open: Some(av_open),
    cq_open: Some(cq_open),
    endpoint: Some(endpoint),
    ..none()
};

unsafe extern "C" fn regattr(
    _: *mut fid,
    attr: *const fi_mr_attr,
    _: u64,
    found: *mut *mut fid_mr,
) -> c_int {
    // One range, and nothing in what newer versions have appended.
    let a = &*attr;
    wrong(a.iov_count != 1 || a.access == 0 || a.iface != 0);
    wrong(!a.hmem_data.is_null() || a.page_size != 0 || !a.base_mr.is_null() || a.sub_mr_cnt != 0);
    *found = open(new::<fid_mr>());
    let region = of(REGIONS).fetch_add(1, Relaxed);
    (**found).key = 0x5000_0000 + region * 7919;
    (**found).mem_desc = (*found).cast();
    0
}

static MEMORY: fi_ops_mr = fi_ops_mr { size: size_of::<fi_ops_mr>(), regattr: Some(regattr), ..none() };

unsafe extern "C" fn insert(
    _: *mut fid_av,
    address: *const c_void,
    count: usize,
    found: *mut fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    wrong(address.is_null() || count != 1);
    *found = of(INSERTED).fetch_add(1, Relaxed);
    1
}

static BOOK: fi_ops_av = fi_ops_av {
    size: size_of::<fi_ops_av>(),
    insert: Some(insert),
    ..none()
};

unsafe extern "C" fn read(_: *mut fid_cq, _: *mut c_void, _: usize) -> isize {
    -(EAGAIN as isize)
}

static QUEUE: fi_ops_cq = fi_ops_cq {
    size: size_of::<fi_ops_cq>(),
    read: Some(read),
    ..none()
};

unsafe extern "C" fn setopt(_: *mut fid, _: c_int, name: c_int, value: *const c_void, len: usize) -> c_int {
    if of(NO_OPTIONS).load(Relaxed) != 0 {
        return -ENOPROTOOPT;
    }
    wrong(len != 1 || *value.cast::<u8>() != 0);
    of(OPTIONS).fetch_or(1 << name, Relaxed);
    0
}

unsafe extern "C" fn getopt(_: *mut fid, _: c_int, name: c_int, value: *mut c_void, len: *mut usize) -> c_int {
    if of(NO_OPTIONS).load(Relaxed) != 0 {
        return -ENOPROTOOPT;
    }
    match name {
        12 if *len >= 8 => *value.cast::<usize>() = 8912,
        14 if *len >= 8 => *value.cast::<usize>() = 1 << 30,
        n if n == 2 - (0xefa << 16) && *len >= 1 => {
            *value.cast::<u8>() = of(EMULATED_WRITE).load(Relaxed) as u8;
            *len = 1;
        }
        _ => return -ENOPROTOOPT,
    }
    0
}

static ENDPOINT: fi_ops_ep = fi_ops_ep {
    size: size_of::<fi_ops_ep>(),
    getopt: Some(getopt),
    setopt: Some(setopt),
    ..none()
};

unsafe extern "C" fn getname(object: *mut fid, address: *mut c_void, len: *mut usize) -> c_int {
    if *len < 32 {
        return -EINVAL;
    }
    *len = 32;
    address.cast::<u8>().write_bytes(0xfe, 32);
    address.cast::<u64>().write_unaligned(object as u64);
    0
}

static NAMES: fi_ops_cm = fi_ops_cm {
    size: size_of::<fi_ops_cm>(),
    getname: Some(getname),
    ..none()
};

unsafe extern "C" fn recv(
    _: *mut fid_ep,
    _: *mut c_void,
    _: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    context: *mut c_void,
) -> isize {
    wrong(desc.is_null() || context.is_null() || from != u64::MAX);
    of(POSTED).fetch_add(1, Relaxed);
    0
}

/// No one-sided table, and no sends: a call of them would be -FI_ENOSYS.
static MESSAGES: fi_ops_msg = fi_ops_msg {
    size: size_of::<fi_ops_msg>(),
    recv: Some(recv),
    ..none()
};
