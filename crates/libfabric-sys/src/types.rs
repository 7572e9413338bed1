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

use std::ffi::{c_char, c_int, c_void};

pub type fi_addr_t = u64;

/// Equal to the system's `iovec`, so that this file has no dependency.
#[repr(C)]
pub struct iovec {
    pub iov_base: *mut c_void,
    pub iov_len: usize,
}

#[repr(C)]
pub struct fi_info {
    pub next: *mut fi_info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut fid,
    pub tx_attr: *mut fi_tx_attr,
    pub rx_attr: *mut fi_rx_attr,
    pub ep_attr: *mut fi_ep_attr,
    pub domain_attr: *mut fi_domain_attr,
    pub fabric_attr: *mut fi_fabric_attr,
    pub nic: *mut fid_nic,
}

#[repr(C)]
pub struct fi_tx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct fi_rx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

#[repr(C)]
pub struct fi_ep_attr {
    pub kind: u32,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order_raw_size: usize,
    pub max_order_war_size: usize,
    pub max_order_waw_size: usize,
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

#[repr(C)]
pub struct fi_domain_attr {
    pub domain: *mut fid_domain,
    pub name: *mut c_char,
    pub threading: u32,
    pub control_progress: u32,
    pub data_progress: u32,
    pub resource_mgmt: u32,
    pub av_type: u32,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct fi_fabric_attr {
    pub fabric: *mut fid_fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub struct fi_device_attr {
    pub name: *mut c_char,
    pub device_id: *mut c_char,
    pub device_version: *mut c_char,
    pub vendor_id: *mut c_char,
    pub driver: *mut c_char,
    pub firmware: *mut c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_pci_attr {
    pub domain_id: u16,
    pub bus_id: u8,
    pub device_id: u8,
    pub function_id: u8,
}

#[repr(C)]
pub struct fi_bus_attr {
    pub bus_type: u32,
    /// The only member of a union in C.
    pub pci: fi_pci_attr,
}

#[repr(C)]
pub struct fi_link_attr {
    pub address: *mut c_char,
    pub mtu: usize,
    /// Bits per second; 0 if unknown.
    pub speed: usize,
    pub state: u32,
    pub network_type: *mut c_char,
}

#[repr(C)]
pub struct fid {
    pub fclass: usize,
    pub context: *mut c_void,
    pub ops: *mut fi_ops,
}

#[repr(C)]
pub struct fi_ops {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
    pub ops_open:
        Option<unsafe extern "C" fn(*mut fid, *const c_char, u64, *mut *mut c_void, *mut c_void) -> c_int>,
    pub tostr: Option<unsafe extern "C" fn(*const fid, *mut c_char, usize) -> c_int>,
    pub ops_set:
        Option<unsafe extern "C" fn(*mut fid, *const c_char, u64, *mut c_void, *mut c_void) -> c_int>,
}

/// Placeholder for a function that the project does not call.
pub type unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub struct fi_ops_fabric {
    pub size: usize,
    pub domain: Option<
        unsafe extern "C" fn(*mut fid_fabric, *mut fi_info, *mut *mut fid_domain, *mut c_void) -> c_int,
    >,
    pub passive_ep: unused,
    pub eq_open: unused,
    pub wait_open: unused,
    pub trywait: Option<unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, c_int) -> c_int>,
    pub domain2: unused,
}

#[repr(C)]
pub struct fid_fabric {
    pub fid: fid,
    pub ops: *mut fi_ops_fabric,
    pub api_version: u32,
}

#[repr(C)]
pub struct fid_nic {
    pub fid: fid,
    pub device_attr: *mut fi_device_attr,
    pub bus_attr: *mut fi_bus_attr,
    pub link_attr: *mut fi_link_attr,
    pub prov_attr: *mut c_void,
}

#[repr(C)]
pub struct fi_av_attr {
    pub kind: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct fi_ops_av {
    pub size: usize,
    pub insert: Option<
        unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut fi_addr_t, u64, *mut c_void) -> c_int,
    >,
    pub insertsvc: unused,
    pub insertsym: unused,
    pub remove: Option<unsafe extern "C" fn(*mut fid_av, *mut fi_addr_t, usize, u64) -> c_int>,
    pub lookup: unused,
    pub straddr:
        Option<unsafe extern "C" fn(*mut fid_av, *const c_void, *mut c_char, *mut usize) -> *const c_char>,
    pub av_set: unused,
}

#[repr(C)]
pub struct fid_av {
    pub fid: fid,
    pub ops: *mut fi_ops_av,
}

#[repr(C)]
pub struct fid_mr {
    pub fid: fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub struct fi_mr_attr {
    pub mr_iov: *const iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: u32,
    /// A union in C; `cuda` is its device number.
    pub device: u64,
    pub hmem_data: *mut c_void,
    pub page_size: usize,
    pub base_mr: *const fid_mr,
    pub sub_mr_cnt: usize,
}

#[repr(C)]
pub struct fi_ops_domain {
    pub size: usize,
    pub av_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_av_attr, *mut *mut fid_av, *mut c_void) -> c_int,
    >,
    pub cq_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_cq_attr, *mut *mut fid_cq, *mut c_void) -> c_int,
    >,
    pub endpoint:
        Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int>,
    pub scalable_ep: unused,
    pub cntr_open: unused,
    pub poll_open: unused,
    pub stx_ctx: unused,
    pub srx_ctx: unused,
    pub query_atomic: unused,
    pub query_collective: unused,
    pub endpoint2: unused,
}

#[repr(C)]
pub struct fi_ops_mr {
    pub size: usize,
    pub reg: unused,
    pub regv: unused,
    pub regattr: Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

#[repr(C)]
pub struct fid_domain {
    pub fid: fid,
    pub ops: *mut fi_ops_domain,
    pub mr: *mut fi_ops_mr,
}

#[repr(C)]
pub struct fi_ops_ep {
    pub size: usize,
    pub cancel: unused,
    pub getopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *mut c_void, *mut usize) -> c_int>,
    pub setopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *const c_void, usize) -> c_int>,
    pub tx_ctx: unused,
    pub rx_ctx: unused,
    pub rx_size_left: unused,
    pub tx_size_left: unused,
}

#[repr(C)]
pub struct fi_ops_msg {
    pub size: usize,
    pub recv: Option<
        unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize,
    >,
    pub recvv: unused,
    pub recvmsg: unused,
    pub send: Option<
        unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, *mut c_void, fi_addr_t, *mut c_void) -> isize,
    >,
    pub sendv: unused,
    pub sendmsg: unused,
    pub inject: Option<unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, fi_addr_t) -> isize>,
    pub senddata: unused,
    pub injectdata: unused,
}

#[repr(C)]
pub struct fi_ops_cm {
    pub size: usize,
    pub setname: unused,
    pub getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
    pub getpeer: unused,
    pub connect: unused,
    pub listen: unused,
    pub accept: unused,
    pub reject: unused,
    pub shutdown: unused,
    pub join: unused,
}

#[repr(C)]
pub struct fi_ops_rma {
    pub size: usize,
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
    pub readv: unused,
    pub readmsg: unused,
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
    pub writev: unused,
    pub writemsg: unused,
    pub inject: unused,
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
    pub injectdata: unused,
}

#[repr(C)]
pub struct fid_ep {
    pub fid: fid,
    pub ops: *mut fi_ops_ep,
    pub cm: *mut fi_ops_cm,
    pub msg: *mut fi_ops_msg,
    pub rma: *mut fi_ops_rma,
    pub tagged: *mut c_void,
    pub atomic: *mut c_void,
    pub collective: *mut c_void,
}

#[repr(C)]
pub struct fi_cq_attr {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_cq_data_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub struct fi_cq_err_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// From 1.20 on.
    pub src_addr: fi_addr_t,
}

#[repr(C)]
pub struct fi_ops_cq {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    pub readfrom: unused,
    pub readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
    pub sread: unused,
    pub sreadfrom: unused,
    pub signal: unused,
    pub strerror:
        Option<unsafe extern "C" fn(*mut fid_cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char>,
}

#[repr(C)]
pub struct fid_cq {
    pub fid: fid,
    pub ops: *mut fi_ops_cq,
}

/// Memory for the provider's use until an operation completes, in the modes `FI_CONTEXT` (half of the size) and
/// `FI_CONTEXT2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_context2 {
    pub internal: [*mut c_void; 8],
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Sizes and offsets that a C compiler computes from the headers of 1.17 on 64-bit Linux.
    #[test]
    fn layouts_are_those_of_c() {
        let sizes = [
            (size_of::<fi_info>(), 120),
            (size_of::<fi_tx_attr>(), 80),
            (size_of::<fi_rx_attr>(), 64),
            (size_of::<fi_ep_attr>(), 96),
            (size_of::<fi_domain_attr>(), 192),
            (size_of::<fi_fabric_attr>(), 32),
            (size_of::<fi_device_attr>(), 48),
            (size_of::<fi_pci_attr>(), 6),
            (size_of::<fi_bus_attr>(), 12),
            (size_of::<fi_link_attr>(), 40),
            (size_of::<fid>(), 24),
            (size_of::<fi_ops>(), 56),
            (size_of::<fi_ops_fabric>(), 56),
            (size_of::<fid_fabric>(), 40),
            (size_of::<fid_nic>(), 56),
            (size_of::<fi_av_attr>(), 48),
            (size_of::<fi_ops_av>(), 64),
            (size_of::<fid_av>(), 32),
            (size_of::<fid_mr>(), 40),
            (size_of::<fi_ops_domain>(), 96),
            (size_of::<fi_ops_mr>(), 32),
            (size_of::<fid_domain>(), 40),
            (size_of::<fi_ops_ep>(), 64),
            (size_of::<fi_ops_msg>(), 80),
            (size_of::<fi_ops_cm>(), 80),
            (size_of::<fi_ops_rma>(), 80),
            (size_of::<fid_ep>(), 80),
            (size_of::<fi_cq_attr>(), 40),
            (size_of::<fi_cq_data_entry>(), 40),
            (size_of::<fi_ops_cq>(), 64),
            (size_of::<fid_cq>(), 32),
            (size_of::<fi_context2>(), 64),
        ];
        for (i, (here, there)) in sizes.into_iter().enumerate() {
            assert_eq!(here, there, "size {i}");
        }
        let offsets = [
            (offset_of!(fi_domain_attr, mr_mode), 36),
            (offset_of!(fi_domain_attr, caps), 136),
            (offset_of!(fi_domain_attr, tclass), 184),
            (offset_of!(fi_info, nic), 112),
            (offset_of!(fi_tx_attr, inject_size), 40),
            (offset_of!(fi_ep_attr, max_msg_size), 16),
            (offset_of!(fi_mr_attr, iface), 64),
            (offset_of!(fi_mr_attr, device), 72),
            (offset_of!(fi_cq_err_entry, err_data_size), 72),
            (offset_of!(fi_ops_ep, setopt), 24),
            (offset_of!(fi_ops_msg, send), 32),
            (offset_of!(fi_ops_rma, writedata), 64),
            (offset_of!(fi_ops_cm, getname), 16),
            (offset_of!(fi_ops_fabric, trywait), 40),
            (offset_of!(fid_ep, rma), 48),
            (offset_of!(fi_ops_cq, strerror), 56),
        ];
        for (i, (here, there)) in offsets.into_iter().enumerate() {
            assert_eq!(here, there, "offset {i}");
        }
    }

    #[test]
    fn iovec_matches_the_system_layout() {
        assert_eq!(size_of::<iovec>(), size_of::<libc::iovec>());
        assert_eq!(offset_of!(iovec, iov_len), offset_of!(libc::iovec, iov_len));
    }

    /// In 1.17 both structures have 80 bytes.
    #[test]
    fn caller_allocated_structures_have_the_size_of_2_x() {
        assert_eq!(size_of::<fi_mr_attr>(), 112);
        assert_eq!(size_of::<fi_cq_err_entry>(), 88);
    }
}
