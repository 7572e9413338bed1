//! `fi_info` and its attributes.
//!
//! Source: `rdma/fabric.h`; manual pages fi_getinfo(3), fi_endpoint(3), fi_domain(3), fi_fabric(3).

use std::ffi::{c_char, c_int, c_void};

use super::{fid, fid_domain, fid_fabric, fid_nic};

/// One entry of a `fi_getinfo` result, or the hints for it.
#[repr(C)]
pub struct fi_info {
    /// Next entry of the list, or null.
    pub next: *mut fi_info,
    /// Capabilities: `FI_MSG`, `FI_RMA` and others.
    pub caps: u64,
    /// Mode bits: requirements on the caller.
    pub mode: u64,
    /// Format of the addresses.
    pub addr_format: u32,
    /// Bytes of `src_addr`.
    pub src_addrlen: usize,
    /// Bytes of `dest_addr`.
    pub dest_addrlen: usize,
    /// Source address, or null.
    pub src_addr: *mut c_void,
    /// Destination address, or null.
    pub dest_addr: *mut c_void,
    /// Connection request or passive endpoint, or null.
    pub handle: *mut fid,
    /// Attributes of the transmit side.
    pub tx_attr: *mut fi_tx_attr,
    /// Attributes of the receive side.
    pub rx_attr: *mut fi_rx_attr,
    /// Attributes of the endpoint.
    pub ep_attr: *mut fi_ep_attr,
    /// Attributes of the domain.
    pub domain_attr: *mut fi_domain_attr,
    /// Attributes of the fabric.
    pub fabric_attr: *mut fi_fabric_attr,
    /// Network device, or null if the provider does not report it.
    pub nic: *mut fid_nic,
}

/// Attributes of the transmit side of an endpoint.
#[repr(C)]
pub struct fi_tx_attr {
    /// Capabilities of this side.
    pub caps: u64,
    /// Mode bits of this side.
    pub mode: u64,
    /// Default flags of its operations.
    pub op_flags: u64,
    /// Ordering guarantees between messages, as bits.
    pub msg_order: u64,
    /// Ordering guarantees between completions, as bits.
    pub comp_order: u64,
    /// Maximum bytes of an injected message.
    pub inject_size: usize,
    /// Number of operations that fit into the queue.
    pub size: usize,
    /// Maximum number of buffers of one operation.
    pub iov_limit: usize,
    /// Maximum number of remote buffers of one operation.
    pub rma_iov_limit: usize,
    /// Traffic class.
    pub tclass: u32,
}

/// Attributes of the receive side of an endpoint.
#[repr(C)]
pub struct fi_rx_attr {
    /// Capabilities of this side.
    pub caps: u64,
    /// Mode bits of this side.
    pub mode: u64,
    /// Default flags of its operations.
    pub op_flags: u64,
    /// Ordering guarantees between messages, as bits.
    pub msg_order: u64,
    /// Ordering guarantees between completions, as bits.
    pub comp_order: u64,
    /// Bytes that the provider may buffer for unexpected messages.
    pub total_buffered_recv: usize,
    /// Number of operations that fit into the queue.
    pub size: usize,
    /// Maximum number of buffers of one operation.
    pub iov_limit: usize,
}

/// Attributes of an endpoint.
#[repr(C)]
pub struct fi_ep_attr {
    /// Type: `FI_EP_RDM` and others. `type` in C.
    pub kind: u32,
    /// Wire protocol.
    pub protocol: u32,
    /// Version of the wire protocol.
    pub protocol_version: u32,
    /// Maximum bytes of one message or transfer.
    pub max_msg_size: usize,
    /// Bytes that the provider reserves at the start of each buffer in the mode `FI_MSG_PREFIX`.
    pub msg_prefix_size: usize,
    /// Maximum bytes of transfers with ordered reads after writes.
    pub max_order_raw_size: usize,
    /// Maximum bytes of transfers with ordered writes after reads.
    pub max_order_war_size: usize,
    /// Maximum bytes of transfers with ordered writes after writes.
    pub max_order_waw_size: usize,
    /// Layout of message tags.
    pub mem_tag_format: u64,
    /// Number of transmit contexts.
    pub tx_ctx_cnt: usize,
    /// Number of receive contexts.
    pub rx_ctx_cnt: usize,
    /// Bytes of `auth_key`.
    pub auth_key_size: usize,
    /// Authorization key, or null.
    pub auth_key: *mut u8,
}

/// Attributes of a domain.
#[repr(C)]
pub struct fi_domain_attr {
    /// Open domain, or null.
    pub domain: *mut fid_domain,
    /// Name, for example `rdmap0s6-rdm`.
    pub name: *mut c_char,
    /// Required serialization of calls: `FI_THREAD_SAFE` and others.
    pub threading: u32,
    /// Progress model of control operations.
    pub control_progress: u32,
    /// Progress model of data transfers.
    pub data_progress: u32,
    /// Overrun protection: `FI_RM_ENABLED` and others.
    pub resource_mgmt: u32,
    /// Type of address vectors.
    pub av_type: u32,
    /// Requirements on memory registration: the `FI_MR_` bits.
    pub mr_mode: c_int,
    /// Bytes of a registration key.
    pub mr_key_size: usize,
    /// Bytes of immediate data in a completion.
    pub cq_data_size: usize,
    /// Maximum number of completion queues.
    pub cq_cnt: usize,
    /// Maximum number of endpoints.
    pub ep_cnt: usize,
    /// Maximum number of transmit contexts.
    pub tx_ctx_cnt: usize,
    /// Maximum number of receive contexts.
    pub rx_ctx_cnt: usize,
    /// Maximum number of transmit contexts of one endpoint.
    pub max_ep_tx_ctx: usize,
    /// Maximum number of receive contexts of one endpoint.
    pub max_ep_rx_ctx: usize,
    /// Maximum number of endpoints that share a transmit context.
    pub max_ep_stx_ctx: usize,
    /// Maximum number of endpoints that share a receive context.
    pub max_ep_srx_ctx: usize,
    /// Maximum number of counters.
    pub cntr_cnt: usize,
    /// Maximum number of buffers of one memory region.
    pub mr_iov_limit: usize,
    /// Capabilities of the domain.
    pub caps: u64,
    /// Mode bits of the domain.
    pub mode: u64,
    /// Authorization key, or null.
    pub auth_key: *mut u8,
    /// Bytes of `auth_key`.
    pub auth_key_size: usize,
    /// Maximum bytes of provider data in an error entry.
    pub max_err_data: usize,
    /// Maximum number of memory regions.
    pub mr_cnt: usize,
    /// Traffic class.
    pub tclass: u32,
}

/// Attributes of a fabric.
#[repr(C)]
pub struct fi_fabric_attr {
    /// Open fabric, or null.
    pub fabric: *mut fid_fabric,
    /// Name, for example `efa-direct`.
    pub name: *mut c_char,
    /// Name of the provider, for example `efa`.
    pub prov_name: *mut c_char,
    /// Version of the provider, packed.
    pub prov_version: u32,
    /// Interface version of the request, packed.
    pub api_version: u32,
}
