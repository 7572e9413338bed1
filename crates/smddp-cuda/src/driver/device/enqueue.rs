//! Stream-ordered operations of a device: waits and writes of words, copies, reductions.

use std::sync::atomic::Ordering;

use super::Device;
use crate::device::{Address, Copy, Error, Reduction, Result, Rounding, Stream, Wait};
use crate::driver::table::{MemcpyBatch, Words};
use crate::driver::types::*;
use crate::kernels;

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

#[expect(clippy::missing_safety_doc, reason = "the type documents the one contract of all methods")]
impl Device {
    /// Enqueues waits for all given words, in as few driver calls as possible.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the device has no stream memory operations
    /// ([`Device::mem_ops_error`]). [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Invalid`](crate::Error::Invalid) if the device has no stream memory operations
    /// ([`Device::mem_ops_error`]). [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
        words: &Words,
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
    /// [`Error::Invalid`](crate::Error::Invalid) if the device has no stream memory operations
    /// ([`Device::mem_ops_error`]). [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Invalid`](crate::Error::Invalid) for an unaligned address, [`Error::Driver`](crate::Error::Driver)
    /// if a driver call fails.
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

    /// Enqueues a reduction; see [`Reduction`].
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for an invalid or unsupported reduction (see [`Reduction`]).
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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

    fn words(&self) -> Result<&Words> {
        match (&self.mem_ops_error, &self.cuda.table.words) {
            (None, Some(words)) => Ok(words),
            (why, _) => Err(Error::Invalid(why.clone().unwrap_or_default())),
        }
    }
}
