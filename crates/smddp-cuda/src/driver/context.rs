//! The device's primary context, made current for the calls that need it.

use std::sync::Arc;

use super::cuda::Cuda;
use super::types::*;
use crate::device::Result;

/// A reference to a device's primary context, which also contains torch's streams and memory.
#[derive(Debug)]
pub(super) struct Context {
    cuda: Arc<Cuda>,
    device: CUdevice,
    handle: CUcontext,
}

impl Context {
    pub(super) fn retain(cuda: Arc<Cuda>, device: CUdevice) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the call writes the handle; `drop` releases it.
        unsafe { cuda.table.required.primary_retain(&raw mut handle, device) }?;
        Ok(Self { cuda, device, handle })
    }

    pub(super) fn handle(&self) -> CUcontext {
        self.handle
    }

    /// Makes the context current on this thread until the guard is dropped. Costs one query if it is current already.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        let table = &self.cuda.table;
        let mut current = 0;
        // SAFETY: the call writes the handle.
        unsafe { table.required.ctx_get_current(&raw mut current) }?;
        let pushed = current != self.handle;
        if pushed {
            // SAFETY: a retained context.
            unsafe { table.required.ctx_push(self.handle) }?;
        }
        Ok(Current { context: self, pushed, mode: None })
    }

    /// Enters the context in relaxed capture mode, for calls that would invalidate another thread's graph capture.
    ///
    /// These calls use none of the captured streams, so the relaxed mode is safe. It applies to this thread while the
    /// guard exists.
    pub(super) fn enter_relaxed(&self) -> Result<Current<'_>> {
        let mut current = self.enter()?;
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the call exchanges this thread's mode with the number.
        unsafe { self.cuda.table.required.exchange_capture_mode(&raw mut mode) }?;
        current.mode = Some(mode);
        Ok(current)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: releases the reference that `retain` took. At process exit the driver has already shut down and
        // returns an error. Nothing is left to release in that case, so the code is ignored.
        unsafe { (self.cuda.table.required.primary_release)(self.device) };
    }
}

/// Guard: the context is current on the creating thread while this exists.
pub(super) struct Current<'a> {
    context: &'a Context,
    pushed: bool,
    /// Previous capture mode of this thread; set if it was changed.
    mode: Option<i32>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let required = &self.context.cuda.table.required;
        if let Some(mut mode) = self.mode {
            // SAFETY: restores the mode that `enter_relaxed` replaced.
            unsafe { (required.exchange_capture_mode)(&raw mut mode) };
        }
        if self.pushed {
            let mut popped = 0;
            // SAFETY: pops the context that `enter` pushed; calls in between left the stack unchanged.
            unsafe { (required.ctx_pop)(&raw mut popped) };
        }
    }
}
