//! Discovery: the devices that `fi_getinfo` lists, and copies of the list.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::knob::{self, Rule};
use crate::port::{self, byte_limits};
use crate::simulation::Simulation;
use crate::types::*;
use crate::{ENODATA, ENOSYS, fi_version};

unsafe extern "C" {
    fn calloc(count: usize, bytes: usize) -> *mut c_void;
    fn free(at: *mut c_void);
    fn strdup(text: *const c_char) -> *mut c_char;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
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
const MR: c_int = VIRTUAL_ADDRESSES | 1 << 5 | 1 << 6;
const VIRTUAL_ADDRESSES: c_int = 1 << 4;
const MR_LOCAL: c_int = 1 << 2;
const CONTEXT2: u64 = 1 << 52;

unsafe fn efa(simulation: &Simulation, bus: u8, direct: bool) -> *mut fi_info {
    let info = empty_info();
    (*info).caps = 1 << 1 | 1 << 2;
    (*info).mode = if direct { CONTEXT2 } else { 0 };
    (*info).addr_format = 13;
    let tx = (*info).tx_attr;
    (*tx).inject_size = 32;
    (*tx).size = simulation.limit(knob::OPERATIONS, port::OPERATIONS);
    (*tx).iov_limit = 2;
    (*tx).rma_iov_limit = 1;
    (*(*info).rx_attr).size = simulation.limit(knob::RECEIVES, port::RECEIVES);
    let ep = (*info).ep_attr;
    (*ep).kind = 3;
    (*ep).max_msg_size = byte_limits(simulation).1;
    let domain = (*info).domain_attr;
    let kind = if direct { "dgrm" } else { "rdm" };
    (*domain).name = strdup(format!("rdmap{bus}s27-{kind}\0").as_ptr().cast());
    (*domain).av_type = 2;
    (*domain).data_progress = if direct { 1 } else { 2 };
    let addresses = if simulation.enforces(Rule::Address) { 0 } else { VIRTUAL_ADDRESSES };
    (*domain).mr_mode = MR & !addresses | if direct { MR_LOCAL } else { 0 };
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
    let simulation = Simulation::selected();
    if simulation.get(knob::CHANGES_PROCESS_STATE) == 1 {
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
    let devices = simulation.get(knob::DEVICES) as u8;
    let direct = modes & MR_LOCAL != 0 && mode & CONTEXT2 != 0 && version >= 0x0002_0000;
    // Reverse bus order: the code that maps devices to ranks must sort them.
    for device in (0..devices).rev() {
        for direct in [false, true].into_iter().filter(|&d| !d || direct) {
            let info = efa(simulation, 16 + 16 * device, direct);
            (*info).next = *found;
            *found = info;
        }
    }
    if (*found).is_null() { -ENODATA } else { 0 }
}
