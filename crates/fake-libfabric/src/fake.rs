//! Root of the simulated library, which `build.rs` compiles separately. See `lib.rs`.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    reason = "implementation of a C interface; every function has the contract of its manual page"
)]
#![allow(dead_code, reason = "the types include structures that only the bindings use")]

mod knob;
mod port;
mod table;
#[path = "../../libfabric-sys/src/types.rs"]
mod types;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use knob::*;
use port::{EAGAIN, EINVAL, Entry, Local, Port, Random, Remote};
use table::{Name, Table};
use types::*;

const ENOSYS: c_int = 38;
const ENOMEM: c_int = 12;
const ENODATA: c_int = 61;
const ENOPROTOOPT: c_int = 92;
const EIO: c_int = 5;
const EAVAIL: c_int = 259;

unsafe extern "C" {
    fn calloc(count: usize, bytes: usize) -> *mut c_void;
    fn free(at: *mut c_void);
    fn strdup(text: *const c_char) -> *mut c_char;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_set(knob: u64, value: u64) {
    of(knob).store(value, Relaxed);
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_get(knob: u64) -> u64 {
    of(knob).load(Relaxed)
}

fn of(knob: u64) -> &'static AtomicU64 {
    static KNOBS: OnceLock<[AtomicU64; 12]> = OnceLock::new();
    let start = || {
        let knobs = [const { AtomicU64::new(0) }; 12];
        for (knob, name) in VARIABLES {
            let value = std::env::var(name).ok().and_then(|value| value.parse().ok());
            knobs[knob as usize].store(value.unwrap_or(0), Relaxed);
        }
        knobs
    };
    &KNOBS.get_or_init(start)[knob as usize]
}

/// Counts and reports a violation of EFA's rules.
fn violation(why: &str) {
    of(WRONG).fetch_add(1, Relaxed);
    eprintln!("fake EFA: {why}");
}

fn violation_if(condition: bool, why: &str) {
    if condition {
        violation(why);
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
        EIO => c"Input/output error".as_ptr(),
        _ => c"some error".as_ptr(),
    }
}

extern "C" fn ignore(_: c_int) {}

/// Changes the process state as the initializers of some providers do.
fn change_process_state() {
    const SIGSTKFLT: c_int = 16;
    // SAFETY: a handler that does nothing.
    unsafe { signal(SIGSTKFLT, ignore) };
    #[cfg(target_arch = "x86_64")]
    {
        let mut mode = 0u32;
        // SAFETY: the control register of this thread, with flush-to-zero and denormals-are-zero set.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode);
            mode |= 0x8040;
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode);
        }
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

/// Memory registration modes that EFA requires: virtual addresses, allocated pages, keys chosen by the provider.
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
    (*tx).size = port::OPERATIONS;
    (*tx).iov_limit = 2;
    (*tx).rma_iov_limit = 1;
    (*(*info).rx_attr).size = port::RECEIVES;
    let ep = (*info).ep_attr;
    (*ep).kind = 3;
    (*ep).max_msg_size = port::ONE_SIDED;
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
    if of(RUDE).load(Relaxed) == 1 {
        change_process_state();
    }
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
    // Reverse bus order: the code that maps devices to ranks must sort them.
    for device in (0..devices).rev() {
        for direct in [false, true].into_iter().filter(|&d| !d || direct) {
            let info = efa(16 + 16 * device, direct);
            (*info).next = *found;
            *found = info;
        }
    }
    if (*found).is_null() { -ENODATA } else { 0 }
}

// The objects. Each is a `Box` that `close` frees, and begins with its libfabric structure.

#[repr(C)]
struct Fabric {
    fid: fid_fabric,
}

#[repr(C)]
struct Domain {
    fid: fid_domain,
    table: Box<Table>,
}

#[repr(C)]
struct Region {
    fid: fid_mr,
    domain: *mut Domain,
    at: u64,
    bytes: u64,
}

#[repr(C)]
struct AddressVector {
    fid: fid_av,
    domain: *mut Domain,
    peers: Vec<Name>,
}

#[repr(C)]
struct Queue {
    fid: fid_cq,
    size: usize,
    endpoint: *mut Endpoint,
}

#[repr(C)]
struct Endpoint {
    fid: fid_ep,
    domain: *mut Domain,
    av: *mut AddressVector,
    port: Port,
}

/// Object classes.
const AV_CLASS: usize = 1;
const QUEUE_CLASS: usize = 2;

/// A zeroed value: a function table without functions.
const fn none<T>() -> T {
    unsafe { std::mem::zeroed() }
}

fn fid<T>(class: usize) -> fid {
    fid { fclass: class, context: null_mut(), ops: std::ptr::from_ref(Functions::<T>::ALL).cast_mut() }
}

fn open<T>(object: T) -> *mut T {
    of(OPEN).fetch_add(1, Relaxed);
    Box::into_raw(Box::new(object))
}

/// The functions that every object has.
struct Functions<T>(T);

impl<T> Functions<T> {
    const ALL: &'static fi_ops = &fi_ops {
        size: size_of::<fi_ops>(),
        close: Some(close::<T>),
        bind: Some(bind),
        control: Some(control),
        ..none()
    };
}

unsafe extern "C" fn close<T>(object: *mut fid) -> c_int {
    of(OPEN).fetch_sub(1, Relaxed);
    drop(Box::from_raw(object.cast::<T>()));
    0
}

/// Binds an endpoint to its address vector or its completion queue.
unsafe extern "C" fn bind(object: *mut fid, to: *mut fid, _: u64) -> c_int {
    let endpoint = object.cast::<Endpoint>();
    match (*to).fclass {
        AV_CLASS => (*endpoint).av = to.cast(),
        QUEUE_CLASS => {
            let queue = to.cast::<Queue>();
            (*queue).endpoint = endpoint;
            (*endpoint).port.completions = (*queue).size;
        }
        _ => return -EINVAL,
    }
    0
}

unsafe extern "C" fn control(_: *mut fid, command: c_int, _: *mut c_void) -> c_int {
    // Only FI_ENABLE is supported.
    if command == 6 { 0 } else { -ENOSYS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_fabric(
    attr: *mut fi_fabric_attr,
    fabric: *mut *mut fid_fabric,
    _context: *mut c_void,
) -> c_int {
    violation_if(
        attr.is_null() || (*attr).prov_name.is_null(),
        "fi_fabric: the attributes have no provider name",
    );
    let ops = (&raw const FABRIC).cast_mut();
    *fabric = open(Fabric { fid: fid_fabric { fid: fid::<Fabric>(0), ops, api_version: 0 } }).cast();
    0
}

unsafe extern "C" fn domain(
    _: *mut fid_fabric,
    info: *mut fi_info,
    found: *mut *mut fid_domain,
    _: *mut c_void,
) -> c_int {
    violation_if((*info).nic.is_null(), "fi_domain: the info has no device");
    let (ops, mr) = ((&raw const DOMAIN).cast_mut(), (&raw const MEMORY).cast_mut());
    *found = open(Domain { fid: fid_domain { fid: fid::<Domain>(0), ops, mr }, table: Table::new(token()) })
        .cast();
    0
}

/// Returns a number that is unique among the devices of this machine.
fn token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let number = u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Relaxed);
    Random(now as u64 ^ number.rotate_left(20)).next() | 1
}

/// As short as the table of an old provider: callers must not read beyond its size.
static FABRIC: fi_ops_fabric =
    fi_ops_fabric { size: std::mem::offset_of!(fi_ops_fabric, trywait), domain: Some(domain), ..none() };

unsafe extern "C" fn av_open(
    domain: *mut fid_domain,
    attr: *mut fi_av_attr,
    found: *mut *mut fid_av,
    _: *mut c_void,
) -> c_int {
    violation_if((*attr).kind != 2, "fi_av_open: the type is not FI_AV_TABLE");
    let fid = fid_av { fid: fid::<AddressVector>(AV_CLASS), ops: (&raw const ADDRESS_VECTOR).cast_mut() };
    *found = open(AddressVector { fid, domain: domain.cast(), peers: Vec::new() }).cast();
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
    violation_if(
        (*attr).format != 3 || (*attr).size == 0,
        "fi_cq_open: the format is not FI_CQ_FORMAT_DATA, or the size is 0",
    );
    let fid = fid_cq { fid: fid::<Queue>(QUEUE_CLASS), ops: (&raw const QUEUE).cast_mut() };
    *found = open(Queue { fid, size: (*attr).size, endpoint: null_mut() }).cast();
    0
}

unsafe extern "C" fn endpoint(
    domain: *mut fid_domain,
    _: *mut fi_info,
    found: *mut *mut fid_ep,
    _: *mut c_void,
) -> c_int {
    let domain = domain.cast::<Domain>();
    let Ok(port) = Port::open((*domain).table.name(), of(TAKES).load(Relaxed) != 0) else { return -EIO };
    let fid = fid_ep {
        fid: fid::<Endpoint>(0),
        ops: (&raw const ENDPOINT).cast_mut(),
        cm: (&raw const NAMES).cast_mut(),
        msg: (&raw const MESSAGES).cast_mut(),
        rma: (&raw const ONE_SIDED).cast_mut(),
        tagged: null_mut(),
        atomic: null_mut(),
        collective: null_mut(),
    };
    *found = open(Endpoint { fid, domain, av: null_mut(), port }).cast();
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
    domain: *mut fid,
    attr: *const fi_mr_attr,
    _: u64,
    found: *mut *mut fid_mr,
) -> c_int {
    // One range is supported, and fields that newer versions appended must be zero.
    let a = &*attr;
    violation_if(
        a.iov_count != 1 || a.access == 0 || a.iface != 0,
        "fi_mr_regattr: expected one range, an access mode and host memory",
    );
    let appended = !a.hmem_data.is_null() || a.page_size != 0 || !a.base_mr.is_null() || a.sub_mr_cnt != 0;
    violation_if(appended, "fi_mr_regattr: a field of a newer version is not zero");
    let domain = domain.cast::<Domain>();
    let (at, bytes) = ((*a.mr_iov).iov_base as u64, (*a.mr_iov).iov_len as u64);
    let key = 0x5000_0000 + of(REGIONS).fetch_add(1, Relaxed) * 7919;
    if !(*domain).table.register(key, at, bytes) {
        return -ENOMEM;
    }
    let fid = fid_mr { fid: fid::<Region>(0), mem_desc: null_mut(), key };
    let region = open(Region { fid, domain, at, bytes });
    (*region).fid.mem_desc = region.cast();
    *found = region.cast();
    0
}

impl Drop for Region {
    fn drop(&mut self) {
        unsafe { (*self.domain).table.deregister(self.fid.key) };
    }
}

static MEMORY: fi_ops_mr = fi_ops_mr { size: size_of::<fi_ops_mr>(), regattr: Some(regattr), ..none() };

unsafe extern "C" fn insert(
    av: *mut fid_av,
    address: *const c_void,
    count: usize,
    found: *mut fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    violation_if(address.is_null() || count != 1, "fi_av_insert: expected exactly one address");
    let av = &mut *av.cast::<AddressVector>();
    let name = Name::of(address.cast::<[u8; Name::BYTES]>().read_unaligned());
    if !(*av.domain).table.add_peer(name) {
        return -ENOMEM;
    }
    of(INSERTED).fetch_add(1, Relaxed);
    *found = av.peers.len() as u64;
    av.peers.push(name);
    1
}

static ADDRESS_VECTOR: fi_ops_av = fi_ops_av { size: size_of::<fi_ops_av>(), insert: Some(insert), ..none() };

unsafe extern "C" fn read(queue: *mut fid_cq, room: *mut c_void, count: usize) -> isize {
    let queue = queue.cast::<Queue>();
    let port = &mut (*(*queue).endpoint).port;
    let entries = port.read(count);
    for (at, entry) in entries.iter().enumerate() {
        let Entry { context, flags, bytes, data, .. } = *entry;
        let line = fi_cq_data_entry { op_context: context, flags, len: bytes, buf: null_mut(), data };
        room.cast::<fi_cq_data_entry>().add(at).write(line);
    }
    match entries.len() {
        0 if port.has_failed() => -(EAVAIL as isize),
        0 => -(EAGAIN as isize),
        count => count as isize,
    }
}

unsafe extern "C" fn readerr(queue: *mut fid_cq, room: *mut fi_cq_err_entry, _: u64) -> isize {
    let queue = queue.cast::<Queue>();
    let Some(entry) = (*(*queue).endpoint).port.failed() else { return -(EAGAIN as isize) };
    (*room).op_context = entry.context;
    (*room).flags = entry.flags;
    (*room).err = entry.error;
    1
}

static QUEUE: fi_ops_cq =
    fi_ops_cq { size: size_of::<fi_ops_cq>(), read: Some(read), readerr: Some(readerr), ..none() };

unsafe extern "C" fn setopt(_: *mut fid, _: c_int, name: c_int, value: *const c_void, len: usize) -> c_int {
    if of(NO_OPTIONS).load(Relaxed) != 0 {
        return -ENOPROTOOPT;
    }
    violation_if(len != 1 || *value.cast::<u8>() != 0, "fi_setopt: expected a one-byte value of 0");
    of(OPTIONS).fetch_or(1 << name, Relaxed);
    0
}

unsafe extern "C" fn getopt(
    _: *mut fid,
    _: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    if of(NO_OPTIONS).load(Relaxed) != 0 {
        return -ENOPROTOOPT;
    }
    match name {
        12 if *len >= 8 => *value.cast::<usize>() = port::MESSAGE,
        14 if *len >= 8 => *value.cast::<usize>() = port::ONE_SIDED,
        n if n == 2 - (0xefa << 16) && *len >= 1 => {
            *value.cast::<u8>() = of(EMULATED_WRITE).load(Relaxed) as u8;
            *len = 1;
        }
        _ => return -ENOPROTOOPT,
    }
    0
}

static ENDPOINT: fi_ops_ep =
    fi_ops_ep { size: size_of::<fi_ops_ep>(), getopt: Some(getopt), setopt: Some(setopt), ..none() };

unsafe extern "C" fn getname(object: *mut fid, address: *mut c_void, len: *mut usize) -> c_int {
    if *len < Name::BYTES {
        return -EINVAL;
    }
    *len = Name::BYTES;
    let endpoint = object.cast::<Endpoint>();
    address.cast::<[u8; Name::BYTES]>().write_unaligned((*(*endpoint).domain).table.name().bytes());
    0
}

static NAMES: fi_ops_cm = fi_ops_cm { size: size_of::<fi_ops_cm>(), getname: Some(getname), ..none() };

/// Returns the local memory of an operation, or `None` if it is not registered.
unsafe fn local(at: *const c_void, bytes: usize, desc: *mut c_void, context: *mut c_void) -> Option<Local> {
    let region = desc.cast::<Region>();
    let start = at as u64;
    let inside =
        !region.is_null() && start >= (*region).at && start + bytes as u64 <= (*region).at + (*region).bytes;
    violation_if(!inside, "the descriptor does not cover the memory of the operation");
    violation_if(context.is_null(), "the operation has no context");
    inside.then_some(Local { at: at.cast_mut().cast(), bytes, context })
}

unsafe fn peer(endpoint: *mut Endpoint, address: fi_addr_t) -> Option<Name> {
    let av = (*endpoint).av.as_ref()?;
    let found = av.peers.get(address as usize).copied();
    violation_if(found.is_none(), "the address is not in the address vector");
    found
}

unsafe extern "C" fn recv(
    endpoint: *mut fid_ep,
    at: *mut c_void,
    bytes: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    context: *mut c_void,
) -> isize {
    violation_if(from != u64::MAX, "fi_recv: receiving from one peer is not supported");
    let Some(local) = local(at, bytes, desc, context) else { return -(EINVAL as isize) };
    of(POSTED).fetch_add(1, Relaxed);
    (*endpoint.cast::<Endpoint>()).port.receive(local) as isize
}

unsafe extern "C" fn send(
    endpoint: *mut fid_ep,
    at: *const c_void,
    bytes: usize,
    desc: *mut c_void,
    to: fi_addr_t,
    context: *mut c_void,
) -> isize {
    let endpoint = endpoint.cast::<Endpoint>();
    let (Some(local), Some(to)) = (local(at, bytes, desc, context), peer(endpoint, to)) else {
        return -(EINVAL as isize);
    };
    (*endpoint).port.send(to, local) as isize
}

static MESSAGES: fi_ops_msg =
    fi_ops_msg { size: size_of::<fi_ops_msg>(), recv: Some(recv), send: Some(send), ..none() };

unsafe extern "C" fn read_from(
    endpoint: *mut fid_ep,
    at: *mut c_void,
    bytes: usize,
    desc: *mut c_void,
    from: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let endpoint = endpoint.cast::<Endpoint>();
    let (Some(local), Some(from)) = (local(at, bytes, desc, context), peer(endpoint, from)) else {
        return -(EINVAL as isize);
    };
    (*endpoint).port.one_sided(from, local, Remote { at: address, key }, None) as isize
}

unsafe extern "C" fn write_data(
    endpoint: *mut fid_ep,
    at: *const c_void,
    bytes: usize,
    desc: *mut c_void,
    data: u64,
    to: fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    violation_if(of(EMULATED_WRITE).load(Relaxed) != 0, "fi_writedata: the device does not support writes");
    violation_if(data > u64::from(u32::MAX), "fi_writedata: the immediate data has more than 32 bits");
    let endpoint = endpoint.cast::<Endpoint>();
    let (Some(local), Some(to)) = (local(at, bytes, desc, context), peer(endpoint, to)) else {
        return -(EINVAL as isize);
    };
    (*endpoint).port.one_sided(to, local, Remote { at: address, key }, Some(data as u32)) as isize
}

static ONE_SIDED: fi_ops_rma = fi_ops_rma {
    size: size_of::<fi_ops_rma>(),
    read: Some(read_from),
    writedata: Some(write_data),
    ..none()
};
