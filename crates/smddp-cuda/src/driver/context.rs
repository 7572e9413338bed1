//! The device's primary context, current where a call needs it.

use std::sync::Arc;

use super::cuda::Cuda;
use super::types::*;
use crate::device::Result;

/// A share in a device's primary context: the one in which torch's streams and memory are.
#[derive(Debug)]
pub(super) struct Context {
    cuda: Arc<Cuda>,
    device: CUdevice,
    handle: CUcontext,
}

impl Context {
    pub(super) fn retain(cuda: Arc<Cuda>, device: CUdevice) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: fills the handle; given back in `drop`.
        unsafe { cuda.table.required.primary_retain(&raw mut handle, device) }?;
        Ok(Self { cuda, device, handle })
    }

    pub(super) fn handle(&self) -> CUcontext {
        self.handle
    }

    /// Makes the context current for this thread until the guard goes; costs one look where it is already.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        let table = &self.cuda.table;
        let mut current = 0;
        // SAFETY: fills the handle.
        unsafe { table.required.ctx_get_current(&raw mut current) }?;
        let pushed = current != self.handle;
        if pushed {
            // SAFETY: a context of which a share is held.
            unsafe { table.required.ctx_push(self.handle) }?;
        }
        Ok(Current { context: self, pushed, mode: None })
    }

    /// The same, for calls that would end a graph capture that another part of the program has under way. They touch
    /// none of its streams, so it is safe, and this thread says so for their duration.
    pub(super) fn enter_relaxed(&self) -> Result<Current<'_>> {
        let mut current = self.enter()?;
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: swaps this thread's mode with the number.
        unsafe { self.cuda.table.required.exchange_capture_mode(&raw mut mode) }?;
        current.mode = Some(mode);
        Ok(current)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the share that `retain` took. At the end of the process the driver has shut down already and says
        // so; there is nothing left to give back then, so the code is not looked at.
        unsafe { (self.cuda.table.required.primary_release)(self.device) };
    }
}

/// The context is current while this lives, on the thread that made it.
pub(super) struct Current<'a> {
    context: &'a Context,
    pushed: bool,
    /// This thread's capture mode before, where it was changed.
    mode: Option<i32>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let required = &self.context.cuda.table.required;
        if let Some(mut mode) = self.mode {
            // SAFETY: puts back what `enter_relaxed` found.
            unsafe { (required.exchange_capture_mode)(&raw mut mode) };
        }
        if self.pushed {
            let mut popped = 0;
            // SAFETY: takes off what `enter` put on; calls in between left the stack as it was.
            unsafe { (required.ctx_pop)(&raw mut popped) };
        }
    }
}
