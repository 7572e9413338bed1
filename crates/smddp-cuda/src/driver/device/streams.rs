//! Streams and events of a device.

use super::Device;
use crate::device::{Error, Event, Result, Stream};
use crate::driver::types::*;

impl Device {
    /// Creates a non-blocking stream (no synchronization with the legacy default stream) of the highest priority.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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

    /// Enqueues a record of the event: it passes once the stream completes its earlier work.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the driver rejects invalid handles.
        unsafe { self.driver().event_record(event.0, stream.0) }
    }

    /// Enqueues a wait for the last record of the event.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_wait_event(stream.0, event.0, 0) }
    }

    /// Returns true if the stream completed the last recorded work of the event.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
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
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        let _current = self.context.enter_relaxed()?;
        // SAFETY: as in `record`.
        unsafe { self.driver().stream_synchronize(stream.0) }
    }
}
