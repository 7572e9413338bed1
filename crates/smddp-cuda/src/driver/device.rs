//! Operations of one device.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::context::Context;
use super::cuda::Cuda;
use super::launch::Kernels;
use super::region_cache::RegionCache;
use super::table::{MemcpyBatch, Required};
use super::types::*;
use crate::device::{
    Address, Copy, Error, Event, Export, Import, Imported, Reduction, Region, Result, Rounding, Stream, Uuid,
    Wait,
};
use crate::kernels;

/// One device as used by this process.
///
/// Every thread may call every method. A method makes the device's primary context current for its duration where it
/// needs the context. Only `synchronize` waits for the device by design; a call that frees memory may wait too.
///
/// # Safety
/// The unsafe methods enqueue work or access memory. The caller must keep their arguments' memory valid until the
/// stream has completed the operation.
#[derive(Debug)]
pub struct Device {
    pub(super) cuda: Arc<Cuda>,
    pub(super) context: Context,
    ordinal: i32,
    device: CUdevice,
    uuid: Uuid,
    description: String,
    mem_ops_error: Option<String>,
    /// The highest stream priority: the lowest number.
    priority: i32,
    /// Set while the driver's batched copy is available and has not failed.
    batches: AtomicBool,
    kernels: Kernels,
    /// Maximum number of blocks of a reduction.
    max_blocks: AtomicU32,
    regions: Mutex<RegionCache>,
    /// Released streams for reuse.
    free_streams: Mutex<Vec<Stream>>,
}

impl Cuda {
    /// Returns the device `ordinal` with its primary context.
    ///
    /// The ordinal counts as in torch, in the order of CUDA_VISIBLE_DEVICES. The device retains the context, and the
    /// call creates it if necessary.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an ordinal that does not exist, or a device without unified addressing. [`Error::Driver`]
    /// if a driver call fails.
    pub fn device(self: &Arc<Self>, ordinal: i32) -> Result<Arc<Device>> {
        if !(0..self.count()).contains(&ordinal) {
            return Err(Error::Invalid(format!(
                "CUDA device {ordinal} does not exist: this process sees {} (see CUDA_VISIBLE_DEVICES)",
                self.count()
            )));
        }
        Ok(Arc::new(Device::new(self.clone(), ordinal, self.handle(ordinal)?)?))
    }
}

impl Device {
    fn new(cuda: Arc<Cuda>, ordinal: i32, device: CUdevice) -> Result<Self> {
        let name = cuda.name(device)?;
        let (major, minor) = cuda.version();
        if cuda.attribute(device, UNIFIED_ADDRESSING) == 0 {
            return Err(Error::Invalid(format!("{name} does not support unified addressing")));
        }
        let mem_ops_error = if cuda.table.words.is_none() {
            Some(format!("the driver (CUDA {major}.{minor}) has no 64-bit stream memory operations"))
        } else if cuda.attribute(device, CAN_USE_64_BIT_STREAM_MEM_OPS) == 0 {
            Some(format!("{name} has no 64-bit stream memory operations"))
        } else {
            None
        };
        let context = Context::retain(cuda.clone(), device)?;
        let (mut least, mut greatest) = (0, 0);
        {
            let _current = context.enter()?;
            // SAFETY: the call writes both values.
            unsafe { cuda.table.required.ctx_priorities(&raw mut least, &raw mut greatest) }?;
        }
        let driver = kernel_module().map_or_else(String::new, |version| format!("driver {version}, "));
        Ok(Self {
            description: format!("{name}, {driver}CUDA {major}.{minor}"),
            uuid: cuda.uuid(device)?,
            batches: AtomicBool::new(cuda.table.memcpy_batch.is_some()),
            kernels: Kernels::default(),
            max_blocks: AtomicU32::new(kernels::USUAL_BLOCKS),
            regions: Mutex::default(),
            free_streams: Mutex::default(),
            priority: greatest,
            context,
            cuda,
            ordinal,
            device,
            mem_ops_error,
        })
    }

    fn driver(&self) -> &Required {
        &self.cuda.table.required
    }

    fn free_streams(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.free_streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions(&self) -> MutexGuard<'_, RegionCache> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues all copies in one driver call. Returns false if the driver rejects the batch.
    ///
    /// The driver returns "invalid value" for an unsupported device, for unsupported memory and for invalid copies
    /// alike.
    ///
    /// # Safety
    /// The contract of `copy`.
    unsafe fn copy_batch<'a>(
        &self,
        batch: MemcpyBatch,
        stream: Stream,
        copies: impl Iterator<Item = &'a Copy> + Clone,
    ) -> Result<bool> {
        let mut to: Vec<CUdeviceptr> = copies.clone().map(|copy| copy.to).collect();
        let mut from: Vec<CUdeviceptr> = copies.clone().map(|copy| copy.from).collect();
        let mut bytes: Vec<usize> = copies.map(|copy| copy.bytes).collect();
        let mut attributes = CUmemcpyAttributes {
            src_access_order: MEMCPY_SRC_ACCESS_ORDER_STREAM,
            src_loc_hint: CUmemLocation::default(),
            dst_loc_hint: CUmemLocation::default(),
            flags: MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE,
        };
        // Index of the first copy to which the attributes apply.
        let mut first = 0usize;
        let mut failed = usize::MAX;
        // SAFETY: arrays of equal length and one set of attributes from the first copy on. The driver reads them
        // before the call returns. The signature matches the CUDA release that was requested.
        let code = unsafe {
            match batch {
                MemcpyBatch::Cuda12(call) => call(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    bytes.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    stream.0,
                ),
                MemcpyBatch::Cuda13(call) => call(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    bytes.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    stream.0,
                ),
            }
        };
        if matches!(code, CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_INVALID_VALUE) {
            return Ok(false);
        }
        self.driver().check(c"cuMemcpyBatchAsync", code).map(|()| true)
    }

    fn words(&self) -> Result<&super::table::Words> {
        match (&self.mem_ops_error, &self.cuda.table.words) {
            (None, Some(words)) => Ok(words),
            (why, _) => Err(Error::Invalid(why.clone().unwrap_or_default())),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The field `context` is dropped after this and releases the context.
        if let Ok(_current) = self.context.enter_relaxed() {
            self.kernels.unload(&self.cuda);
            for stream in self.free_streams().drain(..) {
                // SAFETY: created by `create_stream`; the device has no other users in `drop`.
                unsafe { (self.driver().stream_destroy)(stream.0) };
            }
        }
    }
}

fn memory_operation(operation: u32, address: Address, value: u64, flags: u32) -> CUstreamBatchMemOpParams {
    CUstreamBatchMemOpParams { operation, _gap: 0, address, value, flags, _gap2: 0, alias: 0, _pad: 0 }
}

impl Wait {
    fn operation(&self) -> CUstreamBatchMemOpParams {
        memory_operation(STREAM_MEM_OP_WAIT_VALUE_64, self.word, self.value, STREAM_WAIT_VALUE_GEQ)
    }
}

/// Returns true for a default stream. Default streams get no batched copies: the driver rejects them on the legacy
/// one.
fn is_default(stream: Stream) -> bool {
    matches!(stream.0, 0 | STREAM_LEGACY | STREAM_PER_THREAD)
}

/// Version of NVIDIA's kernel module, for example "580.95.05".
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|version| !version.is_empty())
}

#[expect(clippy::missing_safety_doc, reason = "the type documents the one contract of all methods")]
impl Device {
    /// Description of the device, for example "NVIDIA H200, driver 580.95, CUDA 13.0".
    pub fn describe(&self) -> String {
        self.description.clone()
    }

    /// CUDA ordinal in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Returns the UUID of the device.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Returns true if both devices belong to one opened driver of this process.
    pub fn shares_driver(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.cuda, &other.cuda)
    }

    /// Reason why stream-ordered waits and writes on host words are unavailable; `None` if they are available.
    pub fn mem_ops_error(&self) -> Option<String> {
        self.mem_ops_error.clone()
    }

    /// Returns true if this process can map memory of the device `other` (which may be itself) and copy from it.
    ///
    /// Also returns true if only an attempt can decide: for a device that CUDA_VISIBLE_DEVICES hides from this
    /// process. The driver opens legacy handles of such devices (documented since CUDA 10.1), but has no query for
    /// it.
    pub fn reaches(&self, other: &Uuid) -> bool {
        let visible = (0..self.cuda.count()).filter_map(|ordinal| self.cuda.handle(ordinal).ok());
        let named = |peer: &CUdevice| self.cuda.uuid(*peer).is_ok_and(|uuid| uuid == *other);
        *other == self.uuid || visible.filter(named).all(|peer| self.cuda.can_access(self.device, peer))
    }

    /// Loads the reduction kernels, which otherwise happens at the first reduction and waits for the device.
    ///
    /// Call it while no stream waits for a word.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn prepare(&self) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        self.kernels.prepare(&self.cuda)
    }

    /// Creates a non-blocking stream (no synchronization with the legacy default stream) of the highest priority.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn create_stream(&self) -> Result<Stream> {
        if let Some(stream) = self.free_streams().pop() {
            return Ok(stream);
        }
        let _current = self.context.enter_relaxed()?;
        let mut stream = 0;
        // SAFETY: the call writes the handle.
        unsafe { self.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING, self.priority) }?;
        Ok(Stream(stream))
    }

    /// Releases a stream for reuse without destroying it; returns immediately.
    ///
    /// Other code may use the handle later: torch's allocator records an event on every stream that used a tensor
    /// when it frees the tensor.
    pub fn destroy_stream(&self, stream: Stream) {
        self.free_streams().push(stream);
    }

    /// Creates an event without timing.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn create_event(&self) -> Result<Event> {
        let _current = self.context.enter_relaxed()?;
        let mut event = 0;
        // SAFETY: the call writes the handle.
        unsafe { self.driver().event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(Event(event))
    }

    /// Destroys an event that the caller does not use again.
    pub fn destroy_event(&self, event: Event) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: the caller's event, which it does not use again.
            unsafe { (self.driver().event_destroy)(event.0) };
        }
    }

    /// Records the position of `event` in the order of `stream`.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the driver rejects invalid handles.
        unsafe { self.driver().event_record(event.0, stream.0) }
    }

    /// Enqueues a wait of `stream` for the last recorded position of `event`.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_wait_event(stream.0, event.0, 0) }
    }

    /// Returns true if the stream completed the last recorded work of the event.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn passed(&self, event: Event) -> Result<bool> {
        let _current = self.context.enter_relaxed()?;
        // SAFETY: as in `record`.
        match unsafe { (self.driver().event_query)(event.0) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => self.driver().check(c"cuEventQuery", code).map(|()| true),
        }
    }

    /// Returns true if a graph capture of the stream is active.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn capturing(&self, stream: Stream) -> Result<bool> {
        let _current = self.context.enter()?;
        let mut status = CAPTURE_STATUS_NONE;
        // SAFETY: the call writes the number.
        match unsafe { self.driver().stream_is_capturing(stream.0, &raw mut status) } {
            // The legacy default stream during the capture of a stream that synchronizes with it. Its use would
            // invalidate that capture.
            Err(Error::Driver { code: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, .. }) => Ok(true),
            asked => asked.map(|()| status != CAPTURE_STATUS_NONE),
        }
    }

    /// Blocks the calling thread until the stream is empty. For tests and shutdown.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_synchronize(stream.0) }
    }

    /// Enqueues waits for all given words, in as few driver calls as possible.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the device lacks such operations ([`Self::mem_ops_error`]). [`Error::Driver`] if the driver
    /// rejects the call.
    pub unsafe fn wait_words(&self, stream: Stream, waits: &[Wait]) -> Result<()> {
        if waits.is_empty() {
            return Ok(());
        }
        let words = self.words()?;
        let _current = self.context.enter()?;
        if let [Wait { word, value }] = *waits {
            // SAFETY: the caller guarantees the word.
            let code = unsafe { (words.wait)(stream.0, word, value, STREAM_WAIT_VALUE_GEQ) };
            return self.driver().check(c"cuStreamWaitValue64", code);
        }
        // SAFETY: the caller guarantees the words.
        unsafe { self.batch(words, stream, waits.iter().map(Wait::operation)) }
    }

    /// Enqueues a write, all waits and a second write, in this order, as by `write_word` and `wait_words`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the device lacks such operations ([`Self::mem_ops_error`]). [`Error::Driver`] if the driver
    /// rejects the call.
    pub unsafe fn write_and_wait_words(
        &self,
        stream: Stream,
        before: Option<(Address, u64)>,
        waits: &[Wait],
        after: Option<(Address, u64)>,
    ) -> Result<()> {
        match (before, waits, after) {
            // SAFETY: the caller guarantees the words.
            (None, waits, None) => return unsafe { self.wait_words(stream, waits) },
            (Some((word, value)), [], None) | (None, [], Some((word, value))) => {
                // SAFETY: as above.
                return unsafe { self.write_word(stream, word, value) };
            }
            _ => {}
        }
        let words = self.words()?;
        let _current = self.context.enter()?;
        let write = |(word, value)| {
            memory_operation(STREAM_MEM_OP_WRITE_VALUE_64, word, value, STREAM_WRITE_VALUE_DEFAULT)
        };
        let waits = waits.iter().map(Wait::operation);
        // SAFETY: the caller guarantees the words.
        unsafe {
            self.batch(words, stream, before.map(write).into_iter().chain(waits).chain(after.map(write)))
        }
    }

    /// Enqueues the operations in their order, in as few driver calls as possible.
    ///
    /// # Safety
    /// The caller guarantees the words; the context is current.
    unsafe fn batch(
        &self,
        words: &super::table::Words,
        stream: Stream,
        operations: impl Iterator<Item = CUstreamBatchMemOpParams>,
    ) -> Result<()> {
        let mut operations: Vec<_> = operations.collect();
        for chunk in operations.chunks_mut(MAX_BATCH_MEM_OPS) {
            // SAFETY: the count is that of the slice, which is read before the call returns; the caller guarantees
            // the words.
            let code = unsafe { (words.batch)(stream.0, chunk.len() as u32, chunk.as_mut_ptr(), 0) };
            self.driver().check(c"cuStreamBatchMemOp", code)?;
        }
        Ok(())
    }

    /// Enqueues a write of a 64-bit word. All earlier work of the stream is visible system-wide before the write.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the device lacks such operations ([`Self::mem_ops_error`]). [`Error::Driver`] if the driver
    /// rejects the call.
    pub unsafe fn write_word(&self, stream: Stream, word: Address, value: u64) -> Result<()> {
        let words = self.words()?;
        let _current = self.context.enter()?;
        // SAFETY: the caller guarantees the word.
        let code = unsafe { (words.write)(stream.0, word, value, STREAM_WRITE_VALUE_DEFAULT) };
        self.driver().check(c"cuStreamWriteValue64", code)
    }

    /// Enqueues copies, which may complete in any order.
    ///
    /// Several copies form one batch, which prefers the copy engines, if the driver supports batches.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub unsafe fn copy(&self, stream: Stream, copies: &[Copy]) -> Result<()> {
        let _current = self.context.enter()?;
        // The driver rejects a batch that contains an empty copy.
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let batches = !is_default(stream) && self.batches.load(Ordering::Relaxed);
        let batch = self.cuda.table.memcpy_batch.filter(|_| batches && copies.clone().nth(1).is_some());
        if let Some(batch) = batch
            // SAFETY: the caller's contract.
            && unsafe { self.copy_batch(batch, stream, copies.clone()) }?
        {
            return Ok(());
        }
        for copy in copies {
            // SAFETY: the caller's contract.
            unsafe { self.driver().memcpy_async(copy.to, copy.from, copy.bytes, stream.0) }?;
        }
        if batch.is_some() {
            // The single copies succeeded, so the batch call is unsupported. Disables further attempts.
            self.batches.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Enqueues copies of memory that kernels of this device can access: by one kernel launch where that is faster.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub unsafe fn copy_few(&self, stream: Stream, copies: &[Copy]) -> Result<()> {
        for chunk in copies.chunks(kernels::MAX_COPIES) {
            // SAFETY: the caller's contract.
            unsafe {
                match kernels::copy(chunk) {
                    None => self.copy(stream, chunk)?,
                    launch => self.launch(stream, launch)?,
                }
            }
        }
        Ok(())
    }

    /// Enqueues a conversion of 32-bit floats to a format and back; see [`kernels::round`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unsupported request; [`Error::Driver`] if a driver call fails.
    pub unsafe fn round(
        &self,
        stream: Stream,
        rounding: Rounding,
        addresses: (Address, Address),
        count: usize,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.launch(stream, kernels::round(rounding, addresses, count, self.max_blocks())?) }
    }

    /// Enqueues a reduction by one kernel launch.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unsupported request; [`Error::Driver`] if a driver call fails.
    pub unsafe fn reduce(&self, stream: Stream, reduction: &Reduction) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.launch(stream, kernels::launch(reduction, self.max_blocks())?) }
    }

    /// Limits the number of SMs that each later reduction occupies.
    pub fn set_max_sms(&self, multiprocessors: u32) {
        self.max_blocks.store(multiprocessors, Ordering::Relaxed);
    }

    fn max_blocks(&self) -> u32 {
        self.max_blocks.load(Ordering::Relaxed)
    }

    unsafe fn launch(&self, stream: Stream, launch: Option<kernels::Launch>) -> Result<()> {
        let Some(launch) = launch else { return Ok(()) };
        let _current = self.context.enter()?;
        // SAFETY: the caller's contract.
        unsafe { self.kernels.launch(&self.cuda, stream, &launch) }
    }

    /// Allocates device memory of kind `Kind::Legacy`.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn allocate(&self, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: the call writes the address.
        unsafe { self.driver().mem_alloc(&raw mut address, bytes) }?;
        Ok(address)
    }

    /// Frees device memory. The caller guarantees that no stream uses it any more.
    ///
    /// The driver first waits for all work on the device. Therefore no stream may wait for a word that this thread
    /// has still to write, or whose writer waits for this thread.
    pub unsafe fn free(&self, address: Address) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: allocated by `allocate`, by the caller's contract.
            unsafe { (self.driver().mem_free)(address) };
        }
    }

    /// Allocates page-aligned host memory that the device accesses at the same address.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let _current = self.context.enter_relaxed()?;
        let mut memory = std::ptr::null_mut();
        let flags = MEMHOSTALLOC_PORTABLE | MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the call writes the pointer.
        unsafe { self.driver().mem_host_alloc(&raw mut memory, bytes, flags) }?;
        Ok(memory.cast())
    }

    /// Frees host memory. The contract is that of `free`.
    pub unsafe fn free_host(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: allocated by `allocate_host`, by the caller's contract.
            unsafe { (self.driver().mem_free_host)(memory.cast()) };
        }
    }

    /// Registers page-aligned memory of this process with the device. Returns its device address.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let memory: *mut c_void = memory.cast();
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller keeps the memory mapped while it is registered.
        unsafe { self.driver().mem_host_register(memory, bytes, flags) }?;
        let mut address = 0;
        // SAFETY: registered above; flags must be 0.
        if let Err(error) = unsafe { self.driver().mem_host_get_device_pointer(&raw mut address, memory, 0) }
        {
            // SAFETY: registered above and not yet used.
            unsafe { (self.driver().mem_host_unregister)(memory) };
            return Err(error);
        }
        Ok(address)
    }

    /// Unregisters host memory. The contract is that of `free`.
    pub unsafe fn unregister(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: registered by `register`, by the caller's contract.
            unsafe { (self.driver().mem_host_unregister)(memory.cast()) };
        }
    }

    /// Returns the allocation that contains `address`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for memory that is not registered with CUDA, and for memory of another device.
    pub fn region(&self, address: Address) -> Result<Region> {
        let _current = self.context.enter()?;
        if let Some(region) =
            self.regions().find(address, |generation| self.cuda.is_buffer(address, generation))
        {
            return Ok(region);
        }
        let region = self.cuda.region(self.ordinal, address)?;
        self.regions().insert(region);
        Ok(region)
    }

    /// Returns true if the memory at `address` belongs to this device, so that its kernels can access it.
    pub fn owns(&self, address: Address) -> bool {
        let current = self.context.enter();
        current.is_ok() && self.cuda.owner(address) == Some(self.ordinal)
    }

    /// Exports a region to other processes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for memory that cannot be exported; [`Error::Driver`] if a driver call fails.
    pub fn export(&self, region: &Region) -> Result<Export> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.export(region)
    }

    /// Maps a region of `bytes` bytes that another process exported.
    ///
    /// # Errors
    /// [`Error::Driver`] if a driver call fails.
    pub fn import(&self, import: Import<'_>, bytes: usize) -> Result<Imported> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.import(self.device, &import, bytes)
    }

    /// Unmaps an imported region. The contract is that of `free`.
    pub fn close(&self, imported: Imported) {
        if let Ok(_current) = self.context.enter_relaxed() {
            self.cuda.close(imported);
        }
    }
}
