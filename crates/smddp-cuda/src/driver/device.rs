//! A device, over the driver.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::context::Context;
use super::cuda::Cuda;
use super::known::Known;
use super::launch::Kernels;
use super::table::{MemcpyBatch, Required};
use super::types::*;
use crate::device::{
    Address, Copy, Error, Event, Export, Import, Imported, Reduction, Region, Result, Rounding, Stream, Uuid,
    Wait,
};
use crate::kernels;

/// One device as this process uses it. Methods may be called from any thread: each makes the device's primary context
/// current for its own duration where it has to. None but `synchronize` waits for the device; giving memory back may.
///
/// The unsafe methods enqueue, or touch memory: what they name stays valid until the stream has passed them. That is the
/// promise of whoever calls.
#[derive(Debug)]
pub struct Device {
    pub(super) cuda: Arc<Cuda>,
    pub(super) context: Context,
    ordinal: i32,
    device: CUdevice,
    uuid: Uuid,
    description: String,
    no_words: Option<String>,
    /// The highest priority that a stream can have: the lowest number.
    priority: i32,
    /// The driver has a batched copy, and it worked so far.
    batches: AtomicBool,
    kernels: Kernels,
    /// Blocks of a reduction at most.
    most: AtomicU32,
    known: Mutex<Known>,
    /// Streams that were given back, for the next that asks.
    spare: Mutex<Vec<Stream>>,
}

impl Cuda {
    /// The device `ordinal`, counted as torch does (in the order of CUDA_VISIBLE_DEVICES), in its primary context,
    /// which is kept alive as long as this is and made if nobody has used the device yet.
    pub fn device(self: &Arc<Self>, ordinal: i32) -> Result<Arc<Device>> {
        if !(0..self.count()).contains(&ordinal) {
            return Err(Error::Invalid(format!(
                "there is no CUDA device {ordinal}: this process sees {} (CUDA_VISIBLE_DEVICES counts)",
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
            return Err(Error::Invalid(format!("{name} has no unified addresses")));
        }
        let no_words = if cuda.table.words.is_none() {
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
            // SAFETY: fills both.
            unsafe { cuda.table.required.ctx_priorities(&raw mut least, &raw mut greatest) }?;
        }
        let driver = kernel_module().map_or_else(String::new, |version| format!("driver {version}, "));
        Ok(Self {
            description: format!("{name}, {driver}CUDA {major}.{minor}"),
            uuid: cuda.uuid(device)?,
            batches: AtomicBool::new(cuda.table.memcpy_batch.is_some()),
            kernels: Kernels::default(),
            most: AtomicU32::new(kernels::USUAL_BLOCKS),
            known: Mutex::default(),
            spare: Mutex::default(),
            priority: greatest,
            context,
            cuda,
            ordinal,
            device,
            no_words,
        })
    }

    fn driver(&self) -> &Required {
        &self.cuda.table.required
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All copies in one call. False where the driver refuses: it has no such call for this device, or not for such memory,
    /// and the manual names only "invalid value" for both, as for copies that cannot be at all.
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
        // The first copy that the one set of attributes is for.
        let mut first = 0usize;
        let mut failed = usize::MAX;
        // SAFETY: arrays of one length, one set of attributes from the first copy on; they are read before the call
        // returns. The signature is that of the release that was asked for.
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
        match (&self.no_words, &self.cuda.table.words) {
            (None, Some(words)) => Ok(words),
            (why, _) => Err(Error::Invalid(why.clone().unwrap_or_default())),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The context is released by its own drop, after this.
        if let Ok(_current) = self.context.enter_relaxed() {
            self.kernels.unload(&self.cuda);
            for stream in self.spare().drain(..) {
                // SAFETY: made by `create_stream`; nobody has the device any more.
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

/// Whether it is one of the default streams, to which no batch is given: the driver refuses it for the legacy one.
fn is_default(stream: Stream) -> bool {
    matches!(stream.0, 0 | STREAM_LEGACY | STREAM_PER_THREAD)
}

/// The version of NVIDIA's kernel module, "580.95.05".
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|version| !version.is_empty())
}

#[expect(clippy::missing_safety_doc, reason = "one contract for all, at the type")]
impl Device {
    /// "NVIDIA H200, driver 580.95, CUDA 13.0".
    pub fn describe(&self) -> String {
        self.description.clone()
    }

    /// CUDA's ordinal in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Whether one process has both, by one opening of the driver.
    pub fn is_beside(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.cuda, &other.cuda)
    }

    /// Why stream-ordered waits and writes on host words are not to be had; `None` where they are.
    pub fn no_words(&self) -> Option<String> {
        self.no_words.clone()
    }

    /// Whether this process can map memory of the device `other` (itself included) and copy from it; yes where only trying
    /// tells.
    ///
    /// Yes for a device that CUDA_VISIBLE_DEVICES hides from this process: the driver opens legacy handles of such devices
    /// (documented since CUDA 10.1), but cannot be asked beforehand whether it will; opening one tells.
    pub fn reaches(&self, other: &Uuid) -> bool {
        let visible = (0..self.cuda.count()).filter_map(|ordinal| self.cuda.handle(ordinal).ok());
        let named = |peer: &CUdevice| self.cuda.uuid(*peer).is_ok_and(|uuid| uuid == *other);
        *other == self.uuid || visible.filter(named).all(|peer| self.cuda.can_access(self.device, peer))
    }

    /// Does now what would wait for the device if it were done by the first reduction: to be called while no stream
    /// waits for a word.
    pub fn prepare(&self) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        self.kernels.prepare(&self.cuda)
    }

    /// A stream that does not wait for the legacy default stream, of the highest priority.
    pub fn create_stream(&self) -> Result<Stream> {
        if let Some(stream) = self.spare().pop() {
            return Ok(stream);
        }
        let _current = self.context.enter_relaxed()?;
        let mut stream = 0;
        // SAFETY: fills the handle.
        unsafe { self.driver().stream_create(&raw mut stream, STREAM_NON_BLOCKING, self.priority) }?;
        Ok(Stream(stream))
    }

    /// Returns at once. The stream stays, for the next that asks: whoever was told of it may come back to it. torch's
    /// allocator records an event on every stream that used a tensor when the tensor goes, however late that is.
    pub fn destroy_stream(&self, stream: Stream) {
        self.spare().push(stream);
    }

    /// An event without timing.
    pub fn create_event(&self) -> Result<Event> {
        let _current = self.context.enter_relaxed()?;
        let mut event = 0;
        // SAFETY: fills the handle.
        unsafe { self.driver().event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(Event(event))
    }

    pub fn destroy_event(&self, event: Event) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: the caller's event, which it does not use again.
            unsafe { (self.driver().event_destroy)(event.0) };
        }
    }

    pub fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: handles; those that are none are refused.
        unsafe { self.driver().event_record(event.0, stream.0) }
    }

    pub fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_wait_event(stream.0, event.0, 0) }
    }

    /// Whether the stream passed the event's last record.
    pub fn passed(&self, event: Event) -> Result<bool> {
        let _current = self.context.enter_relaxed()?;
        // SAFETY: as in `record`.
        match unsafe { (self.driver().event_query)(event.0) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => self.driver().check(c"cuEventQuery", code).map(|()| true),
        }
    }

    /// Whether the stream is being captured into a graph.
    pub fn capturing(&self, stream: Stream) -> Result<bool> {
        let _current = self.context.enter()?;
        let mut status = CAPTURE_STATUS_NONE;
        // SAFETY: fills the number.
        match unsafe { self.driver().stream_is_capturing(stream.0, &raw mut status) } {
            // The legacy default stream, while a stream that synchronises with it is being captured: using it would
            // end that capture.
            Err(Error::Driver { code: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, .. }) => Ok(true),
            asked => asked.map(|()| status != CAPTURE_STATUS_NONE),
        }
    }

    /// Blocks this thread until the stream is empty: for tests and for leaving.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_synchronize(stream.0) }
    }

    /// The stream waits for all of these, in as few calls of the driver as it has.
    pub unsafe fn wait_words(&self, stream: Stream, waits: &[Wait]) -> Result<()> {
        if waits.is_empty() {
            return Ok(());
        }
        let words = self.words()?;
        let _current = self.context.enter()?;
        if let [Wait { word, value }] = *waits {
            // SAFETY: the caller's word.
            let code = unsafe { (words.wait)(stream.0, word, value, STREAM_WAIT_VALUE_GEQ) };
            return self.driver().check(c"cuStreamWaitValue64", code);
        }
        // SAFETY: the caller's words.
        unsafe { self.batch(words, stream, waits.iter().map(Wait::operation)) }
    }

    /// The stream writes a word, waits for all of these and writes another word, as by `write_word` and `wait_words`.
    pub unsafe fn words_in_turn(
        &self,
        stream: Stream,
        before: Option<(Address, u64)>,
        waits: &[Wait],
        after: Option<(Address, u64)>,
    ) -> Result<()> {
        match (before, waits, after) {
            // SAFETY: the caller's words.
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
        // SAFETY: the caller's words.
        unsafe {
            self.batch(words, stream, before.map(write).into_iter().chain(waits).chain(after.map(write)))
        }
    }

    /// In their order, in as few calls as there can be.
    ///
    /// # Safety
    /// The words are the caller's; the context is current.
    unsafe fn batch(
        &self,
        words: &super::table::Words,
        stream: Stream,
        operations: impl Iterator<Item = CUstreamBatchMemOpParams>,
    ) -> Result<()> {
        let mut operations: Vec<_> = operations.collect();
        for some in operations.chunks_mut(MAX_BATCH_MEM_OPS) {
            // SAFETY: as many operations as said, read before the call returns; the caller's words.
            let code = unsafe { (words.batch)(stream.0, some.len() as u32, some.as_mut_ptr(), 0) };
            self.driver().check(c"cuStreamBatchMemOp", code)?;
        }
        Ok(())
    }

    /// The stream writes a word of eight bytes, after everything before it is visible everywhere.
    pub unsafe fn write_word(&self, stream: Stream, word: Address, value: u64) -> Result<()> {
        let words = self.words()?;
        let _current = self.context.enter()?;
        // SAFETY: the caller's word.
        let code = unsafe { (words.write)(stream.0, word, value, STREAM_WRITE_VALUE_DEFAULT) };
        self.driver().check(c"cuStreamWriteValue64", code)
    }

    /// Copies, in any order among themselves, batched where the driver has it.
    ///
    /// Several copies are one batch, which prefers the copy engines, where the driver has batches.
    pub unsafe fn copy(&self, stream: Stream, copies: &[Copy]) -> Result<()> {
        let _current = self.context.enter()?;
        // Batches with an empty copy are refused as a whole.
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let batches = !is_default(stream) && self.batches.load(Ordering::Relaxed);
        let batch = self.cuda.table.memcpy_batch.filter(|_| batches && copies.clone().nth(1).is_some());
        if let Some(batch) = batch
            // SAFETY: the caller's promise.
            && unsafe { self.copy_batch(batch, stream, copies.clone()) }?
        {
            return Ok(());
        }
        for copy in copies {
            // SAFETY: the caller's promise.
            unsafe { self.driver().memcpy_async(copy.to, copy.from, copy.bytes, stream.0) }?;
        }
        if batch.is_some() {
            // It was the batch and not its copies: not tried again.
            self.batches.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The same for memory that kernels of this device reach: by a launch instead of several copies where that is quicker.
    pub unsafe fn copy_few(&self, stream: Stream, copies: &[Copy]) -> Result<()> {
        for some in copies.chunks(kernels::MOST_COPIES) {
            // SAFETY: the caller's promise.
            unsafe {
                match kernels::copy(some) {
                    None => self.copy(stream, some)?,
                    launch => self.launch(stream, launch)?,
                }
            }
        }
        Ok(())
    }

    /// 32-bit floats as they come out of a format, see [`kernels::round`].
    pub unsafe fn round(
        &self,
        stream: Stream,
        rounding: Rounding,
        places: (Address, Address),
        count: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, kernels::round(rounding, places, count, self.most())?) }
    }

    pub unsafe fn reduce(&self, stream: Stream, reduction: &Reduction) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, kernels::launch(reduction, self.most())?) }
    }

    /// Reductions take no more than so many multiprocessors from now on.
    pub fn take_at_most(&self, multiprocessors: u32) {
        self.most.store(multiprocessors, Ordering::Relaxed);
    }

    fn most(&self) -> u32 {
        self.most.load(Ordering::Relaxed)
    }

    unsafe fn launch(&self, stream: Stream, launch: Option<kernels::Launch>) -> Result<()> {
        let Some(launch) = launch else { return Ok(()) };
        let _current = self.context.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(&self.cuda, stream, &launch) }
    }

    /// Device memory of our own, of kind [`Kind::Legacy`].
    pub fn allocate(&self, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: fills the address.
        unsafe { self.driver().mem_alloc(&raw mut address, bytes) }?;
        Ok(address)
    }

    /// Waits for nothing: the caller knows that no stream uses it any more.
    ///
    /// The driver waits for all work on the device first. So no stream may be waiting for a word that this thread has
    /// yet to write, or whose writer waits for this thread.
    pub unsafe fn free(&self, address: Address) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: what `allocate` gave, by the caller's promise.
            unsafe { (self.driver().mem_free)(address) };
        }
    }

    /// Host memory that the device reaches at the same address; page aligned.
    pub fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let _current = self.context.enter_relaxed()?;
        let mut memory = std::ptr::null_mut();
        let flags = MEMHOSTALLOC_PORTABLE | MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: fills the pointer.
        unsafe { self.driver().mem_host_alloc(&raw mut memory, bytes, flags) }?;
        Ok(memory.cast())
    }

    /// As `free`.
    pub unsafe fn free_host(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: what `allocate_host` gave, by the caller's promise.
            unsafe { (self.driver().mem_free_host)(memory.cast()) };
        }
    }

    /// Makes memory of this process known to the device; page aligned. Gives the address under which it is known.
    pub unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let memory: *mut c_void = memory.cast();
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's memory, mapped as long as it is registered.
        unsafe { self.driver().mem_host_register(memory, bytes, flags) }?;
        let mut address = 0;
        // SAFETY: registered above; flags 0 by contract.
        if let Err(error) = unsafe { self.driver().mem_host_get_device_pointer(&raw mut address, memory, 0) }
        {
            // SAFETY: registered above, and nobody knows.
            unsafe { (self.driver().mem_host_unregister)(memory) };
            return Err(error);
        }
        Ok(address)
    }

    /// As `free`.
    pub unsafe fn unregister(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: what `register` was given, by the caller's promise.
            unsafe { (self.driver().mem_host_unregister)(memory.cast()) };
        }
    }

    /// The allocation in which `address` lies. An error for memory that is no device's and not known to one, and for
    /// memory of another device than this.
    pub fn region(&self, address: Address) -> Result<Region> {
        let _current = self.context.enter()?;
        if let Some(region) =
            self.known().find(address, |generation| self.cuda.is_buffer(address, generation))
        {
            return Ok(region);
        }
        let region = self.cuda.region(self.ordinal, address)?;
        self.known().learn(region);
        Ok(region)
    }

    /// Whether the memory at `address` is this device's own, so that its kernels reach it.
    pub fn owns(&self, address: Address) -> bool {
        let current = self.context.enter();
        current.is_ok() && self.cuda.owner(address) == Some(self.ordinal)
    }

    pub fn export(&self, region: &Region) -> Result<Export> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.export(region)
    }

    /// Maps another process's region of `bytes`.
    pub fn import(&self, import: Import<'_>, bytes: usize) -> Result<Imported> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.import(self.device, &import, bytes)
    }

    /// As `free`.
    pub fn close(&self, imported: Imported) {
        if let Ok(_current) = self.context.enter_relaxed() {
            self.cuda.close(imported);
        }
    }
}
