//! One device through libfabric: fabric, domain, address book, completion queue and endpoint, opened together.

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;

use libfabric_sys::calls::*;
use libfabric_sys::*;

use super::contexts::Contexts;
use crate::net::fabric::rail::{
    Context, Event, LocalMemory, Posted, Rail, RailLimits, Registered, RemoteMemory,
};

pub(crate) struct OfiRail {
    /// What the endpoint was opened with; its library too.
    info: InfoList,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    book: *mut fid_av,
    queue: *mut fid_cq,
    endpoint: *mut fid_ep,
    regions: Vec<*mut fid_mr>,
    contexts: Contexts,
    pub(super) limits: RailLimits,
    address: Vec<u8>,
    /// Tells of completions.
    fd: Option<RawFd>,
    next_key: u64,
}

// SAFETY: libfabric's objects belong to no thread; the engine that owns the rail is behind a mutex, which is what
// `FI_THREAD_DOMAIN` asks for.
unsafe impl Send for OfiRail {}

/// Receive buffers and operations that are asked for, of what the provider has.
pub(crate) const RECEIVES: usize = 8192;
pub(crate) const OPERATIONS: usize = 512;
/// Completions that one look takes.
const LOOK: usize = 16;

impl OfiRail {
    pub(super) fn open(info: InfoList) -> Result<Self, String> {
        let limits = limits(&info);
        let mut rail = Self {
            info,
            fabric: std::ptr::null_mut(),
            domain: std::ptr::null_mut(),
            book: std::ptr::null_mut(),
            queue: std::ptr::null_mut(),
            endpoint: std::ptr::null_mut(),
            regions: Vec::new(),
            contexts: Contexts::default(),
            limits,
            address: Vec::new(),
            fd: None,
            next_key: 1,
        };
        // What is open when a step fails is closed by `drop`.
        rail.open_all()?;
        Ok(rail)
    }

    fn checked(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 { Ok(()) } else { Err(format!("{what}: {}", self.info.library().error(-code))) }
    }

    fn open_all(&mut self) -> Result<(), String> {
        let info = self.info.as_ptr();
        let null = std::ptr::null_mut::<c_void>();
        // SAFETY: the info is live and owned by this rail; every object is opened from the one before it, and closed
        // in the opposite order by `drop`.
        unsafe {
            self.fabric = self
                .info
                .library()
                .open_fabric((*info).fabric_attr)
                .map_err(|code| format!("fi_fabric: {}", self.info.library().error(code)))?;
            let code = fi_domain(self.fabric, info, &raw mut self.domain, null);
            self.checked("fi_domain", code)?;
            let mut book: fi_av_attr = std::mem::zeroed();
            book.kind = (*(*info).domain_attr).av_type;
            let code = fi_av_open(self.domain, &raw mut book, &raw mut self.book, null);
            self.checked("fi_av_open", code)?;
            self.open_queue()?;
            let code = fi_endpoint(self.domain, info, &raw mut self.endpoint, null);
            self.checked("fi_endpoint", code)?;
            self.options();
            let endpoint = &raw mut (*self.endpoint).fid;
            let code = fi_bind(endpoint, &raw mut (*self.book).fid, 0);
            self.checked("fi_ep_bind (av)", code)?;
            let code = fi_bind(endpoint, &raw mut (*self.queue).fid, FI_TRANSMIT | FI_RECV);
            self.checked("fi_ep_bind (cq)", code)?;
            self.checked("fi_enable", fi_enable(endpoint))?;
        }
        self.look_at_endpoint()
    }

    /// With a descriptor to sleep on, where the provider has one.
    unsafe fn open_queue(&mut self) -> Result<(), String> {
        // SAFETY: a plain C structure, of which zero is a valid value.
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

    /// What is better off; a provider that does not know an option has not got the thing either.
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

    /// What only an enabled endpoint tells.
    fn look_at_endpoint(&mut self) -> Result<(), String> {
        // As a byte: a provider may put any number there.
        if let Some(emulated) = self.option::<u8>(FI_OPT_EFA_EMULATED_WRITE).filter(|_| self.is_efa()) {
            self.limits.writes &= emulated == 0;
        }
        // From 2.0 on there is a limit for each kind of operation.
        if let Some(most) = self.option::<usize>(FI_OPT_MAX_MSG_SIZE).filter(|&m| m > 0) {
            self.limits.message = most;
        }
        if let Some(most) = self.option::<usize>(FI_OPT_MAX_RMA_SIZE).filter(|&m| m > 0) {
            self.limits.one_sided = most;
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
        // SAFETY: the info is live, and its attributes were looked at when it was chosen.
        unsafe { (*(*self.info.as_ptr()).domain_attr).mr_mode }
    }

    fn posted(&mut self, what: &str, code: isize, at: *mut c_void) -> Result<Posted, String> {
        if code == 0 {
            return Ok(Posted::Yes);
        }
        self.contexts.give(at);
        if code == -(FI_EAGAIN as isize) {
            return Ok(Posted::Again);
        }
        Err(format!("{what}: {}", self.info.library().error(-code as i32)))
    }

    fn event(&mut self, entry: &fi_cq_data_entry, events: &mut Vec<Event>) -> Option<Event> {
        let context = self.contexts.give(entry.op_context);
        if entry.flags & FI_RECV == 0 && entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA) != 0 {
            // Only receives are posted for others to end.
            events.extend(context.map(Event::Taken));
            return Some(Event::Written(entry.data as u32));
        }
        match context {
            Some(context) if entry.flags & FI_RECV != 0 => Some(Event::Received(context, entry.len)),
            Some(context) => Some(Event::Done(context)),
            // Nobody's: a peer has read from or written to this process, and the provider says so unasked.
            None => None,
        }
    }

    fn failure(&mut self) -> Option<Event> {
        // SAFETY: a plain C structure, of which zero is a valid value.
        let mut entry: fi_cq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open, the entry has the size of the newest libfabric's.
        let count = unsafe { fi_cq_readerr(self.queue, &raw mut entry, 0) };
        if count < 1 {
            return None;
        }
        let context = self.contexts.give(entry.op_context);
        let mut text = self.info.library().error(entry.err);
        // SAFETY: the error's data are valid until the queue is read again.
        let more = unsafe {
            let null = std::ptr::null_mut();
            fi_cq_strerror(self.queue, entry.prov_errno, entry.err_data, null, 0)
        };
        if !more.is_null() {
            // SAFETY: a null-terminated string of the provider's.
            let more = unsafe { std::ffi::CStr::from_ptr(more) }.to_string_lossy();
            if more != text && !more.is_empty() {
                text = format!("{text} ({more})");
            }
        }
        Some(Event::Failed(context, text))
    }
}

impl Rail for OfiRail {
    fn limits(&self) -> RailLimits {
        self.limits
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> Result<Registered, String> {
        let mode = self.mr_mode();
        let iov = iovec { iov_base: at.cast(), iov_len: bytes };
        // SAFETY: a plain C structure, of which zero is a valid value.
        let mut attr: fi_mr_attr = unsafe { std::mem::zeroed() };
        attr.mr_iov = &raw const iov;
        attr.iov_count = 1;
        attr.access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        attr.requested_key = self.next_key;
        self.next_key += 1;
        let mut region = std::ptr::null_mut();
        // SAFETY: the domain is open, the attributes live through the call; the caller keeps the memory.
        let code = unsafe { fi_mr_regattr(self.domain, &raw const attr, 0, &raw mut region) };
        self.checked("fi_mr_regattr", code)?;
        self.regions.push(region);
        if mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: both are open, and the region was not enabled yet, as this mode asks for.
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
        // SAFETY: the book is open; the address is what a peer's endpoint of the same provider gave.
        let count = unsafe {
            let null = std::ptr::null_mut();
            fi_av_insert(self.book, address.as_ptr().cast(), 1, &raw mut found, 0, null)
        };
        if count == 1 && found != FI_ADDR_NOTAVAIL {
            return Ok(found);
        }
        Err(format!("fi_av_insert took no address: {}", self.info.library().error(-count.min(0))))
    }

    unsafe fn receive(&mut self, local: LocalMemory, context: Context) -> Result<Posted, String> {
        let at = self.contexts.take(context);
        let desc = local.desc as *mut c_void;
        // SAFETY: the endpoint is enabled; buffer and context stay until the completion (the caller's promise).
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

    fn poll(&mut self, events: &mut Vec<Event>) {
        let mut entries = [const { std::mem::MaybeUninit::<fi_cq_data_entry>::uninit() }; LOOK];
        // SAFETY: the queue was opened for entries of this format, and there is room for `LOOK` of them.
        let count = unsafe { fi_cq_read(self.queue, entries.as_mut_ptr().cast(), LOOK) };
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
                events.push(Event::Failed(None, format!("fi_cq_read: {reason}")));
            }
        }
    }

    /// The descriptor, and whether it is safe to sleep on it now.
    fn interest(&mut self) -> Option<RawFd> {
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
        // SAFETY: each object was opened once, is closed once, after what was opened from it; null ones were not
        // opened. Operations under way end with the endpoint.
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
            if let Some(book) = self.book.as_mut() {
                fi_close(&raw mut book.fid);
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

/// What the provider says before anything is open.
fn limits(info: &InfoList) -> RailLimits {
    let raw = info.as_ptr();
    // SAFETY: a live info of an RDM endpoint, whose attributes were looked at when it was chosen.
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
            patient: domain.resource_mgmt == FI_RM_ENABLED,
        }
    }
}
