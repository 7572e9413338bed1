//! The constants of libfabric's interface that the project uses. They are equal in 1.17 and 2.x unless a comment states
//! otherwise.
//!
//! Source: `rdma/fabric.h`, `rdma/fi_domain.h`, `rdma/fi_endpoint.h`, `rdma/fi_eq.h`, `rdma/fi_errno.h`, `rdma/fi_ext.h`.

use std::ffi::c_int;

/// Capability: messages.
pub const FI_MSG: u64 = 1 << 1;
/// Capability: remote memory access.
pub const FI_RMA: u64 = 1 << 2;
/// Access to a memory region: target buffer of a read by this process.
pub const FI_READ: u64 = 1 << 8;
/// Access to a memory region: source buffer of a write by this process.
pub const FI_WRITE: u64 = 1 << 9;
/// Access to a memory region: receive buffer. In a completion: a receive.
pub const FI_RECV: u64 = 1 << 10;
/// Access to a memory region: send buffer. In a completion: a send.
pub const FI_SEND: u64 = 1 << 11;
/// Flag of `fi_bind`: the queue receives the completions of the transmit side.
pub const FI_TRANSMIT: u64 = FI_SEND;
/// Access to a memory region: source of a peer's read.
pub const FI_REMOTE_READ: u64 = 1 << 12;
/// Access to a memory region: target of a peer's write. In a completion: a peer's write.
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
/// In a completion: the entry has immediate data from the peer.
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;

/// Source of a receive: any peer.
pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
/// Result of the insertion of an invalid address.
pub const FI_ADDR_NOTAVAIL: u64 = u64::MAX;

/// Type of an address vector: addresses are indices.
pub const FI_AV_TABLE: u32 = 2;

/// The caller registers the local buffers of operations.
pub const FI_MR_LOCAL: c_int = 1 << 2;
/// Remote addresses are the virtual addresses of the target process.
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
/// Memory must be backed by pages when it is registered.
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
/// The provider selects the keys of regions.
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
/// The caller binds regions to an endpoint and enables them.
pub const FI_MR_ENDPOINT: c_int = 1 << 9;

/// Threading: all calls are thread-safe.
pub const FI_THREAD_SAFE: u32 = 1;
/// Threading: the caller serializes the calls on one domain.
pub const FI_THREAD_DOMAIN: u32 = 3;

/// Resource management: the provider prevents overruns of queues and buffers.
pub const FI_RM_ENABLED: u32 = 2;

/// Endpoint type: reliable datagrams without connections.
pub const FI_EP_RDM: u32 = 3;

/// Mode: the caller provides half of an `fi_context2` as the context of each operation.
pub const FI_CONTEXT: u64 = 1 << 59;
/// Mode: the caller provides an `fi_context2` as the context of each operation.
pub const FI_CONTEXT2: u64 = 1 << 52;

/// Bus type: PCI.
pub const FI_BUS_PCI: u32 = 2;

/// Command of `fi_control`: returns the wait object.
pub const FI_GETWAIT: c_int = 5;
/// Command of `fi_control`: enables the object.
pub const FI_ENABLE: c_int = 6;

/// Wait object: none.
pub const FI_WAIT_NONE: u32 = 0;
/// Wait object: a file descriptor.
pub const FI_WAIT_FD: u32 = 3;

/// Format of completions: `fi_cq_data_entry`.
pub const FI_CQ_FORMAT_DATA: u32 = 3;

/// Level of the options of an endpoint.
pub const FI_OPT_ENDPOINT: c_int = 0;
/// Option: the provider may call CUDA. `bool`; from 1.18 on.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// Option: the provider may use shared memory between processes of one host. `bool`; from 1.19 on.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;
/// Option: maximum bytes of a message. `size_t`; from 2.0 on.
pub const FI_OPT_MAX_MSG_SIZE: c_int = 12;
/// Option: maximum bytes of a remote memory access. `size_t`; from 2.0 on.
pub const FI_OPT_MAX_RMA_SIZE: c_int = 14;
/// First option number of the provider `efa`.
const FI_OPT_EFA: c_int = -(0xefa << 16);
/// Option: the provider emulates writes with messages instead of using the device. `bool`; from 1.18 on.
pub const FI_OPT_EFA_EMULATED_WRITE: c_int = FI_OPT_EFA + 2;

// Error numbers, as positive numbers. Calls return them negated.

/// The operation cannot continue now, or the queue is empty.
pub const FI_EAGAIN: c_int = libc::EAGAIN;
/// No entry matches.
pub const FI_ENODATA: c_int = libc::ENODATA;
/// The function is not implemented.
pub const FI_ENOSYS: c_int = libc::ENOSYS;
/// The next entry of the completion queue is an error.
pub const FI_EAVAIL: c_int = 259;
