//! One device through libfabric: fabric, domain, address vector, completion queue and endpoint, opened together.

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;

use libfabric_sys::calls::*;
use libfabric_sys::*;

use super::contexts::Contexts;
use crate::rail::{Completion, Context, LocalMemory, Posted, Rail, RailLimits, Registered, RemoteMemory};

/// Rail over a libfabric endpoint.
pub(crate) struct OfiRail {
    /// Info that the endpoint was opened with; it also keeps the library open.
    info: InfoList,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    address_vector: *mut fid_av,
    queue: *mut fid_cq,
    endpoint: *mut fid_ep,
    regions: Vec<*mut fid_mr>,
    contexts: Contexts,
    pub(super) limits: RailLimits,
    address: Vec<u8>,
    /// Descriptor that becomes readable with completions.
    fd: Option<RawFd>,
    next_key: u64,
}

// SAFETY: libfabric's objects are not bound to a thread. The endpoint that owns the rail is behind a mutex, as
// `FI_THREAD_DOMAIN` requires.
unsafe impl Send for OfiRail {}

/// Maximum numbers of receive buffers and operations that a rail uses, even if the provider allows more.
pub(crate) const RECEIVES: usize = 8192;
pub(crate) const OPERATIONS: usize = 512;
/// Maximum number of completions per poll.
const POLL_BATCH: usize = 16;

impl OfiRail {
    pub(super) fn open(info: InfoList) -> Result<Self, String> {
        let limits = limits(&info);
        let mut rail = Self {
            info,
            fabric: std::ptr::null_mut(),
            domain: std::ptr::null_mut(),
            address_vector: std::ptr::null_mut(),
            queue: std::ptr::null_mut(),
            endpoint: std::ptr::null_mut(),
            regions: Vec::new(),
            contexts: Contexts::default(),
            limits,
            address: Vec::new(),
            fd: None,
            next_key: 1,
        };
        // `drop` closes the objects opened before a failed step.
        rail.open_all()?;
        Ok(rail)
    }

    fn checked(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == 0 { Ok(()) } else { Err(format!("{call}: {}", self.info.library().error(-code))) }
    }

    fn open_all(&mut self) -> Result<(), String> {
        let info = self.info.as_ptr();
        let null = std::ptr::null_mut::<c_void>();
        // SAFETY: the info is live and owned by this rail. Every object is opened from the one before it, and `drop` closes them
        // in reverse order.
        unsafe {
            self.fabric = self
                .info
                .library()
                .open_fabric((*info).fabric_attr)
                .map_err(|code| format!("fi_fabric: {}", self.info.library().error(code)))?;
            let code = fi_domain(self.fabric, info, &raw mut self.domain, null);
            self.checked("fi_domain", code)?;
            let mut address_vector: fi_av_attr = std::mem::zeroed();
            address_vector.kind = (*(*info).domain_attr).av_type;
            let code = fi_av_open(self.domain, &raw mut address_vector, &raw mut self.address_vector, null);
            self.checked("fi_av_open", code)?;
            self.open_queue()?;
            let code = fi_endpoint(self.domain, info, &raw mut self.endpoint, null);
            self.checked("fi_endpoint", code)?;
            self.options();
            let endpoint = &raw mut (*self.endpoint).fid;
            let code = fi_bind(endpoint, &raw mut (*self.address_vector).fid, 0);
            self.checked("fi_ep_bind (av)", code)?;
            let code = fi_bind(endpoint, &raw mut (*self.queue).fid, FI_TRANSMIT | FI_RECV);
            self.checked("fi_ep_bind (cq)", code)?;
            self.checked("fi_enable", fi_enable(endpoint))?;
        }
        self.read_endpoint_limits()
    }

    /// Opens the completion queue, with a descriptor to sleep on if the provider has one.
    unsafe fn open_queue(&mut self) -> Result<(), String> {
        // SAFETY: a plain C structure, for which zero is a valid value.
        let mut attr: fi_cq_attr = unsafe { std::mem::zeroed() };
        attr.size = self.limits.completions;
        attr.format = FI_CQ_FORMAT_DATA;
        attr.wait_obj = FI_WAIT_FD;
        // SAFETY: the domain is open; a queue is opened at most once.
        unsafe {
            let mut fd = -1;
            let context = std::ptr::null_mut();
            if fi_cq_open(self.domain, &raw mut attr, &raw mut self.queue, context) == 0 {
                if fi_getwait(&raw mut (*self.queue).fid, &raw mut fd) == 0 && fd >= 0 {
                    self.fd = Some(fd);
                }
                return Ok(());
            }
            attr.wait_obj = FI_WAIT_NONE;
            let code = fi_cq_open(self.domain, &raw mut attr, &raw mut self.queue, context);
            self.checked("fi_cq_open", code)
        }
    }

    /// Disables the provider's use of shared memory and of the CUDA API. A provider without an option lacks the feature too.
    fn options(&mut self) {
        let off = false;
        for name in [FI_OPT_SHARED_MEMORY_PERMITTED, FI_OPT_CUDA_API_PERMITTED] {
            // SAFETY: an open endpoint and a `bool`, as both options take.
            unsafe { fi_setopt(self.endpoint, FI_OPT_ENDPOINT, name, (&raw const off).cast(), 1) };
        }
    }

    fn option<T: Default>(&self, name: c_int) -> Option<T> {
        let mut value = T::default();
        let mut len = size_of::<T>();
        // SAFETY: an open endpoint, and room for `len` bytes of a number or a flag.
        let code =
            unsafe { fi_getopt(self.endpoint, FI_OPT_ENDPOINT, name, (&raw mut value).cast(), &raw mut len) };
        (code == 0 && len == size_of::<T>()).then_some(value)
    }

    /// Reads the limits and the address, which only an enabled endpoint reports.
    fn read_endpoint_limits(&mut self) -> Result<(), String> {
        // Read as a byte: a provider may write any number there.
        if let Some(emulated) = self.option::<u8>(FI_OPT_EFA_EMULATED_WRITE).filter(|_| self.is_efa()) {
            self.limits.writes &= emulated == 0;
        }
        // Since version 2.0, each kind of operation has a limit.
        if let Some(limit) = self.option::<usize>(FI_OPT_MAX_MSG_SIZE).filter(|&m| m > 0) {
            self.limits.message = limit;
        }
        if let Some(limit) = self.option::<usize>(FI_OPT_MAX_RMA_SIZE).filter(|&m| m > 0) {
            self.limits.one_sided = limit;
        }
        let mut address = vec![0; 256];
        let mut len = address.len();
        // SAFETY: an enabled endpoint, and room for `len` bytes.
        let code = unsafe { fi_getname(self.endpoint, address.as_mut_ptr().cast(), &raw mut len) };
        self.checked("fi_getname", code)?;
        address.truncate(len);
        self.address = address;
        Ok(())
    }

    fn is_efa(&self) -> bool {
        self.info.iter().next().is_some_and(|i| i.provider() == "efa")
    }

    fn mr_mode(&self) -> c_int {
        // SAFETY: the info is live, and its attributes were checked at selection.
        unsafe { (*(*self.info.as_ptr()).domain_attr).mr_mode }
    }

    fn posted(&mut self, call: &str, code: isize, at: *mut c_void) -> Result<Posted, String> {
        if code == 0 {
            return Ok(Posted::Accepted);
        }
        self.contexts.give(at);
        if code == -(FI_EAGAIN as isize) {
            return Ok(Posted::QueueFull);
        }
        Err(format!("{call}: {}", self.info.library().error(-code as i32)))
    }

    fn event(&mut self, entry: &fi_cq_data_entry, events: &mut Vec<Completion>) -> Option<Completion> {
        let context = self.contexts.give(entry.op_context);
        if entry.flags & FI_RECV == 0 && entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA) != 0 {
            // A context here belongs to a receive: remote writes end no other operation of this process.
            events.extend(context.map(Completion::BufferConsumed));
            return Some(Completion::RemoteWrite(entry.data as u32));
        }
        match context {
            Some(context) if entry.flags & FI_RECV != 0 => Some(Completion::Received(context, entry.len)),
            Some(context) => Some(Completion::Done(context)),
            // Not an operation of this process: the provider reports a peer's read or write without a request.
            None => None,
        }
    }

    fn failure(&mut self) -> Option<Completion> {
        // SAFETY: a plain C structure, for which zero is a valid value.
        let mut entry: fi_cq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open, and the entry has the size of the newest libfabric's.
        let count = unsafe { fi_cq_readerr(self.queue, &raw mut entry, 0) };
        if count < 1 {
            return None;
        }
        let context = self.contexts.give(entry.op_context);
        let mut text = self.info.library().error(entry.err);
        // SAFETY: the error data are valid until the queue is read again.
        let more = unsafe {
            let null = std::ptr::null_mut();
            fi_cq_strerror(self.queue, entry.prov_errno, entry.err_data, null, 0)
        };
        if !more.is_null() {
            // SAFETY: a null-terminated string of the provider.
            let more = unsafe { std::ffi::CStr::from_ptr(more) }.to_string_lossy();
            if more != text && !more.is_empty() {
                text = format!("{text} ({more})");
            }
        }
        Some(Completion::Failed(context, text))
    }
}

// SAFETY: libfabric reports each operation once, after its last access to the memory, with the length of a received message.
// `Contexts` finds the operation of a report. `drop` closes the endpoint and the registrations, which ends all accesses.
unsafe impl Rail for OfiRail {
    fn limits(&self) -> RailLimits {
        self.limits
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> Result<Registered, String> {
        let mode = self.mr_mode();
        let iov = iovec { iov_base: at.cast(), iov_len: bytes };
        // SAFETY: a plain C structure, for which zero is a valid value.
        let mut attr: fi_mr_attr = unsafe { std::mem::zeroed() };
        attr.mr_iov = &raw const iov;
        attr.iov_count = 1;
        attr.access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        attr.requested_key = self.next_key;
        self.next_key += 1;
        let mut region = std::ptr::null_mut();
        // SAFETY: the domain is open, and the attributes live through the call. The caller keeps the memory.
        let code = unsafe { fi_mr_regattr(self.domain, &raw const attr, 0, &raw mut region) };
        self.checked("fi_mr_regattr", code)?;
        self.regions.push(region);
        if mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: both are open, and the region is not enabled yet, as this mode requires.
            let code = unsafe {
                let object = &raw mut (*region).fid;
                match fi_bind(object, &raw mut (*self.endpoint).fid, 0) {
                    0 => fi_enable(object),
                    code => code,
                }
            };
            self.checked("fi_mr_bind", code)?;
        }
        let base = if mode & FI_MR_VIRT_ADDR != 0 { at as u64 } else { 0 };
        // SAFETY: the region is open.
        let (desc, key) = unsafe { ((*region).mem_desc as usize, (*region).key) };
        Ok(Registered { desc, key, base })
    }

    fn insert(&mut self, address: &[u8]) -> Result<u64, String> {
        let mut found = FI_ADDR_NOTAVAIL;
        // SAFETY: the address vector is open; the address is that of a peer's endpoint of the same provider.
        let count = unsafe {
            let null = std::ptr::null_mut();
            fi_av_insert(self.address_vector, address.as_ptr().cast(), 1, &raw mut found, 0, null)
        };
        if count == 1 && found != FI_ADDR_NOTAVAIL {
            return Ok(found);
        }
        Err(format!("fi_av_insert inserted no address: {}", self.info.library().error(-count.min(0))))
    }

    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let at = self.contexts.take(context);
        let desc = local.desc as *mut c_void;
        // SAFETY: the endpoint is enabled; the caller keeps the buffer until the completion, and the slot of the context stays too.
        let code = unsafe { fi_recv(self.endpoint, local.at.cast(), local.bytes, desc, FI_ADDR_UNSPEC, at) };
        self.posted("fi_recv", code, at)
    }

    unsafe fn send(&mut self, to: u64, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let at = self.contexts.take(context);
        let desc = local.desc as *mut c_void;
        // SAFETY: as in `receive`.
        let code = unsafe { fi_send(self.endpoint, local.at.cast(), local.bytes, desc, to, at) };
        self.posted("fi_send", code, at)
    }

    unsafe fn one_sided(
        &mut self,
        peer: u64,
        local: LocalMemory,
        RemoteMemory { address, key }: RemoteMemory,
        write: Option<u32>,
        context: Context,
    ) -> Result<Posted, String> {
        let at = self.contexts.take(context);
        let (buf, bytes, desc) = (local.at.cast(), local.bytes, local.desc as *mut c_void);
        // SAFETY: as in `receive`.
        let (call, code) = unsafe {
            match write.map(u64::from) {
                None => ("fi_read", fi_read(self.endpoint, buf, bytes, desc, peer, address, key, at)),
                Some(number) => {
                    let code = fi_writedata(self.endpoint, buf, bytes, desc, number, peer, address, key, at);
                    ("fi_writedata", code)
                }
            }
        };
        self.posted(call, code, at)
    }

    fn poll(&mut self, events: &mut Vec<Completion>) {
        let mut entries = [const { std::mem::MaybeUninit::<fi_cq_data_entry>::uninit() }; POLL_BATCH];
        // SAFETY: the queue was opened for entries of this format, and there is room for `POLL_BATCH` of them.
        let count = unsafe { fi_cq_read(self.queue, entries.as_mut_ptr().cast(), POLL_BATCH) };
        match count {
            0.. => {
                for entry in &entries[..count as usize] {
                    // SAFETY: the provider has written the first `count` entries.
                    let entry = unsafe { entry.assume_init() };
                    let event = self.event(&entry, events);
                    events.extend(event);
                }
            }
            c if c == -(FI_EAGAIN as isize) => {}
            c if c == -(FI_EAVAIL as isize) => events.extend(self.failure()),
            c => {
                let reason = self.info.library().error(-c as i32);
                events.push(Completion::Failed(None, format!("fi_cq_read: {reason}")));
            }
        }
    }

    /// Returns the descriptor if it is safe to sleep on it now.
    fn wait_sources(&mut self) -> Option<RawFd> {
        let fd = self.fd?;
        // SAFETY: both objects are open.
        let code = unsafe {
            let mut queue = &raw mut (*self.queue).fid;
            fi_trywait(self.fabric, &raw mut queue, 1)
        };
        (code == 0).then_some(fd)
    }
}

impl Drop for OfiRail {
    fn drop(&mut self) {
        // SAFETY: each object was opened once and is closed once, after the objects opened from it; null objects were not opened.
        // Closing the endpoint ends its operations.
        unsafe {
            for &region in &self.regions {
                fi_close(&raw mut (*region).fid);
            }
            if let Some(endpoint) = self.endpoint.as_mut() {
                fi_close(&raw mut endpoint.fid);
            }
            if let Some(queue) = self.queue.as_mut() {
                fi_close(&raw mut queue.fid);
            }
            if let Some(address_vector) = self.address_vector.as_mut() {
                fi_close(&raw mut address_vector.fid);
            }
            if let Some(domain) = self.domain.as_mut() {
                fi_close(&raw mut domain.fid);
            }
            if let Some(fabric) = self.fabric.as_mut() {
                fi_close(&raw mut fabric.fid);
            }
        }
    }
}

/// Returns the limits that the provider reports before an endpoint is open.
fn limits(info: &InfoList) -> RailLimits {
    let raw = info.as_ptr();
    // SAFETY: a live info of an RDM endpoint, whose attributes were checked at selection.
    unsafe {
        let (ep, domain) = (&*(*raw).ep_attr, &*(*raw).domain_attr);
        let (tx, rx) = (&*(*raw).tx_attr, &*(*raw).rx_attr);
        let operations = if tx.size == 0 { OPERATIONS } else { tx.size.min(OPERATIONS) };
        let receives = if rx.size == 0 { RECEIVES } else { rx.size.min(RECEIVES) };
        RailLimits {
            message: ep.max_msg_size,
            one_sided: ep.max_msg_size,
            operations,
            receives,
            completions: operations + receives,
            writes: domain.cq_data_size >= 4,
            holds_messages: domain.resource_mgmt == FI_RM_ENABLED,
        }
    }
}
