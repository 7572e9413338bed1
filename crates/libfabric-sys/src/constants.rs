//! Constants of libfabric's interface. They are equal in 1.17 and 2.x unless a comment states otherwise.

use std::ffi::c_int;

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_TAGGED: u64 = 1 << 3;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_TRANSMIT: u64 = FI_SEND;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_TRANSMIT_COMPLETE: u64 = 1 << 27;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
/// From 1.20 on.
pub const FI_MR_DMABUF: u64 = 1 << 40;
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_LOCAL_COMM: u64 = 1 << 51;
pub const FI_REMOTE_COMM: u64 = 1 << 52;
pub const FI_SOURCE: u64 = 1 << 57;

pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
pub const FI_ADDR_NOTAVAIL: u64 = u64::MAX;

pub const FI_AV_UNSPEC: u32 = 0;
pub const FI_AV_MAP: u32 = 1;
pub const FI_AV_TABLE: u32 = 2;

pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_RAW: c_int = 1 << 3;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_MMU_NOTIFY: c_int = 1 << 7;
pub const FI_MR_RMA_EVENT: c_int = 1 << 8;
pub const FI_MR_ENDPOINT: c_int = 1 << 9;
pub const FI_MR_HMEM: c_int = 1 << 10;

pub const FI_PROGRESS_UNSPEC: u32 = 0;
pub const FI_PROGRESS_AUTO: u32 = 1;
pub const FI_PROGRESS_MANUAL: u32 = 2;
/// From 2.0 on: progress on any queue of a domain is progress for the whole domain.
pub const FI_PROGRESS_CONTROL_UNIFIED: u32 = 3;

pub const FI_THREAD_UNSPEC: u32 = 0;
pub const FI_THREAD_SAFE: u32 = 1;
pub const FI_THREAD_DOMAIN: u32 = 3;

pub const FI_RM_UNSPEC: u32 = 0;
pub const FI_RM_DISABLED: u32 = 1;
pub const FI_RM_ENABLED: u32 = 2;

pub const FI_EP_UNSPEC: u32 = 0;
pub const FI_EP_MSG: u32 = 1;
pub const FI_EP_DGRAM: u32 = 2;
pub const FI_EP_RDM: u32 = 3;

/// Mode bits: requirements on the caller of each operation.
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_MSG_PREFIX: u64 = 1 << 58;
pub const FI_RX_CQ_DATA: u64 = 1 << 56;
pub const FI_CONTEXT2: u64 = 1 << 52;

pub const FI_BUS_PCI: u32 = 2;

pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;

pub const FI_WAIT_NONE: u32 = 0;
pub const FI_WAIT_UNSPEC: u32 = 1;
pub const FI_WAIT_FD: u32 = 3;

pub const FI_CQ_FORMAT_DATA: u32 = 3;

pub const FI_OPT_ENDPOINT: c_int = 0;
/// `bool`; from 1.18 on.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// `bool`; from 1.19 on.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;
/// `size_t`; from 2.0 on.
pub const FI_OPT_MAX_MSG_SIZE: c_int = 12;
/// `size_t`; from 2.0 on.
pub const FI_OPT_MAX_RMA_SIZE: c_int = 14;
/// First option number of the provider `efa`.
const FI_OPT_EFA: c_int = -(0xefa << 16);
/// `bool`; from 1.18 on: the provider emulates reads with messages instead of using the device.
pub const FI_OPT_EFA_EMULATED_READ: c_int = FI_OPT_EFA + 1;
/// `bool`; from 1.18 on: the provider emulates writes with messages.
pub const FI_OPT_EFA_EMULATED_WRITE: c_int = FI_OPT_EFA + 2;

pub const FI_HMEM_SYSTEM: u32 = 0;
pub const FI_HMEM_CUDA: u32 = 1;

/// Error numbers that are `errno` values. Calls return them negated.
pub const FI_SUCCESS: c_int = 0;
pub const FI_EAGAIN: c_int = libc::EAGAIN;
pub const FI_ENODATA: c_int = libc::ENODATA;
pub const FI_ENOSYS: c_int = libc::ENOSYS;
pub const FI_ENOPROTOOPT: c_int = libc::ENOPROTOOPT;
pub const FI_EOPNOTSUPP: c_int = libc::EOPNOTSUPP;
pub const FI_ECANCELED: c_int = libc::ECANCELED;
pub const FI_EINVAL: c_int = libc::EINVAL;
/// Error numbers that libfabric defines.
pub const FI_ETOOSMALL: c_int = 257;
pub const FI_EAVAIL: c_int = 259;
pub const FI_EOVERRUN: c_int = 268;
