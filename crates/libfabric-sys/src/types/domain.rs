//! Fabrics, domains, address vectors and memory regions.
//!
//! Source: `rdma/fabric.h`, `rdma/fi_domain.h`; manual pages fi_fabric(3), fi_domain(3), fi_av(3), fi_mr(3).

use std::ffi::{c_char, c_int, c_void};

use super::{fi_addr_t, fi_cq_attr, fi_info, fid, fid_cq, fid_ep, iovec, unused};

/// Functions of a fabric.
#[repr(C)]
pub struct fi_ops_fabric {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_domain`.
    pub domain: Option<
        unsafe extern "C" fn(*mut fid_fabric, *mut fi_info, *mut *mut fid_domain, *mut c_void) -> c_int,
    >,
    /// Not called by the project.
    pub passive_ep: unused,
    /// Not called by the project.
    pub eq_open: unused,
    /// Not called by the project.
    pub wait_open: unused,
    /// `fi_trywait`.
    pub trywait: Option<unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, c_int) -> c_int>,
    /// Not called by the project.
    pub domain2: unused,
}

/// Fabric: a network, and the provider that gives access to it.
#[repr(C)]
pub struct fid_fabric {
    /// Common part.
    pub fid: fid,
    /// Functions.
    pub ops: *mut fi_ops_fabric,
    /// Interface version of the request, packed.
    pub api_version: u32,
}

/// Functions of a domain.
#[repr(C)]
pub struct fi_ops_domain {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_av_open`.
    pub av_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_av_attr, *mut *mut fid_av, *mut c_void) -> c_int,
    >,
    /// `fi_cq_open`.
    pub cq_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_cq_attr, *mut *mut fid_cq, *mut c_void) -> c_int,
    >,
    /// `fi_endpoint`.
    pub endpoint:
        Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int>,
    /// Not called by the project.
    pub scalable_ep: unused,
    /// Not called by the project.
    pub cntr_open: unused,
    /// Not called by the project.
    pub poll_open: unused,
    /// Not called by the project.
    pub stx_ctx: unused,
    /// Not called by the project.
    pub srx_ctx: unused,
    /// Not called by the project.
    pub query_atomic: unused,
    /// Not called by the project.
    pub query_collective: unused,
    /// Not called by the project.
    pub endpoint2: unused,
}

/// Functions for memory registration.
#[repr(C)]
pub struct fi_ops_mr {
    /// Size of this table in bytes.
    pub size: usize,
    /// Not called by the project.
    pub reg: unused,
    /// Not called by the project.
    pub regv: unused,
    /// `fi_mr_regattr`.
    pub regattr: Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

/// Domain: one device, with its endpoints, queues and registered memory.
#[repr(C)]
pub struct fid_domain {
    /// Common part.
    pub fid: fid,
    /// Functions.
    pub ops: *mut fi_ops_domain,
    /// Functions for memory registration.
    pub mr: *mut fi_ops_mr,
}

/// Attributes of an address vector.
#[repr(C)]
pub struct fi_av_attr {
    /// Type: `FI_AV_TABLE` and others. `type` in C.
    pub kind: u32,
    /// Bits of an address that select a receive context.
    pub rx_ctx_bits: c_int,
    /// Expected number of addresses.
    pub count: usize,
    /// Expected number of endpoints of one host.
    pub ep_per_node: usize,
    /// Name of a shared vector, or null.
    pub name: *const c_char,
    /// Mapping address of a shared vector, or null.
    pub map_addr: *mut c_void,
    /// Flags of the vector.
    pub flags: u64,
}

/// Functions of an address vector.
#[repr(C)]
pub struct fi_ops_av {
    /// Size of this table in bytes.
    pub size: usize,
    /// `fi_av_insert`.
    pub insert: Option<
        unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut fi_addr_t, u64, *mut c_void) -> c_int,
    >,
    /// Not called by the project.
    pub insertsvc: unused,
    /// Not called by the project.
    pub insertsym: unused,
    /// `fi_av_remove`.
    pub remove: Option<unsafe extern "C" fn(*mut fid_av, *mut fi_addr_t, usize, u64) -> c_int>,
    /// Not called by the project.
    pub lookup: unused,
    /// `fi_av_straddr`.
    pub straddr:
        Option<unsafe extern "C" fn(*mut fid_av, *const c_void, *mut c_char, *mut usize) -> *const c_char>,
    /// Not called by the project.
    pub av_set: unused,
}

/// Address vector: peers' addresses, by `fi_addr_t`.
#[repr(C)]
pub struct fid_av {
    /// Common part.
    pub fid: fid,
    /// Functions.
    pub ops: *mut fi_ops_av,
}

/// Attributes of a memory region.
#[repr(C)]
pub struct fi_mr_attr {
    /// Buffers of the region.
    pub mr_iov: *const iovec,
    /// Number of buffers.
    pub iov_count: usize,
    /// Permitted operations: `FI_SEND`, `FI_REMOTE_WRITE` and others.
    pub access: u64,
    /// Reserved; 0.
    pub offset: u64,
    /// Key that the caller selects, unless the provider selects it (`FI_MR_PROV_KEY`).
    pub requested_key: u64,
    /// Context of the registration.
    pub context: *mut c_void,
    /// Bytes of `auth_key`.
    pub auth_key_size: usize,
    /// Authorization key, or null.
    pub auth_key: *mut u8,
    /// Memory type: system memory (0), CUDA (1) and others.
    pub iface: u32,
    /// A union in C; `cuda` is its device number.
    pub device: u64,
    /// Data for the memory type, or null.
    pub hmem_data: *mut c_void,
    /// Page size of the memory in bytes; 0 if unknown.
    pub page_size: usize,
    /// Region that contains this one, or null.
    pub base_mr: *const fid_mr,
    /// Expected number of regions within this one.
    pub sub_mr_cnt: usize,
}

/// Registered memory region.
#[repr(C)]
pub struct fid_mr {
    /// Common part.
    pub fid: fid,
    /// Descriptor of the region for local operations.
    pub mem_desc: *mut c_void,
    /// Key of the region for remote operations.
    pub key: u64,
}
