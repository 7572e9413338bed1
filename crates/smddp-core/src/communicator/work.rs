//! Handle of an asynchronous call.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smddp_base::fork;
use smddp_plan::Collective;

use crate::call;
use crate::call::message_label::Direction;
use crate::device::DeviceCompletion;
use crate::engine::progress_thread;
use crate::engine::shared::SharedState;
use crate::engine::waiting::Until;
use crate::error::{Error, Result};
use crate::sync::completion::Completion;

/// An asynchronous call.
#[derive(Clone)]
pub struct Work {
    pub(super) shared: Arc<Completion>,
    pub(super) comm: Arc<SharedState>,
    pub(super) call: CallName,
    /// Completion on the device, for calls on device buffers.
    pub(super) completion: Option<DeviceCompletion>,
}

/// Name of a call, for errors.
#[derive(Clone, Copy)]
pub(super) enum CallName {
    Collective(Collective),
    Message(Direction),
}

impl std::fmt::Display for CallName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Collective(collective) => f.write_str(call::name_of(*collective)),
            Self::Message(direction) => write!(f, "{direction}"),
        }
    }
}

impl Work {
    /// Waits until the call is over. After `timeout` the wait fails with [`Error::Timeout`] and the call continues.
    ///
    /// # Errors
    /// [`Error::Timeout`] after `timeout`, [`Error::Interrupted`] if a signal ended the wait; the call
    /// continues in both cases. [`Error::Forked`] in a forked child. Otherwise the outcome of the call, as
    /// [`Communicator::run`](super::Communicator::run) returns it.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.shared.is_done() {
            return self.outcome();
        }
        let comm = &self.comm;
        if !comm.wait_until(&Until::Work(&self.shared, None), timeout)? {
            return Err(Error::Timeout {
                operation: format!("wait for {}", self.call),
                group: comm.name.clone(),
                after: timeout.unwrap_or_default(),
                missing: Vec::new(),
                detail: "the call goes on; wait again, or check the state of the other ranks".to_owned(),
            });
        }
        self.outcome()
    }

    /// Returns the outcome and records that an error has been reported to the caller.
    fn outcome(&self) -> Result<()> {
        let outcome = self.shared.outcome();
        if outcome.is_err() {
            self.comm.abort_reported.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// Returns true if the call is over, with or without an error. On a device: if the device has completed it.
    pub fn is_done(&self) -> bool {
        let through = |completion: &DeviceCompletion| {
            completion.handle.is_done(completion.number) && !completion.handle.released()
        };
        self.shared.is_done() || self.completion.as_ref().is_some_and(through)
    }

    /// Returns true if only calls such as [`Self::poll`] advance the call, because no progress thread could be
    /// started.
    pub fn needs_polling(&self) -> bool {
        !progress_thread::runs()
    }

    /// Advances the call without waiting, unless another thread owns the engine. Returns true if the call is over.
    pub fn poll(&self) -> bool {
        if self.comm.forks == fork::generation()
            && let Some(mut engine) = self.comm.try_own()
        {
            engine.poll_once();
        }
        self.is_done()
    }

    /// Returns true if the host has no more work for the call; for host buffers, if the call is over.
    pub fn is_enqueued(&self) -> bool {
        self.shared.is_done() || self.completion.as_ref().is_some_and(DeviceCompletion::enqueued)
    }

    /// Makes later work on `stream`, a stream of the call's device, wait for this call. Waits for the other ranks
    /// to make the call, but not for the device. Returns the call's error if it has failed already. For calls on
    /// host buffers this is `wait`.
    ///
    /// # Errors
    /// The error of the call if it has failed. [`Error::System`] if the driver rejects the wait.
    /// [`Error::Interrupted`] and [`Error::Forked`] as for [`Work::wait`].
    pub fn wait_stream(&self, stream: smddp_cuda::Stream) -> Result<()> {
        let (Some(completion), comm) = (&self.completion, &self.comm) else { return self.wait(None) };
        if !self.is_enqueued() {
            comm.wait_until(&Until::Work(&self.shared, Some(completion)), None)?;
        }
        // After a failure, the remaining work on the device still uses the call's memory.
        let waits = completion.wait_stream(stream);
        if let Some(error) = self.error() {
            return Err(error);
        }
        waits.map_err(|error| Error::System {
            operation: format!("wait for {} on group `{}`", self.call, comm.name),
            reason: error.to_string(),
        })
    }

    /// Returns the call's error.
    pub fn error(&self) -> Option<Error> {
        if self.shared.is_done() { self.outcome().err() } else { None }
    }

    /// Returns the source rank that a recv was matched with.
    pub fn source(&self) -> Option<usize> {
        self.shared.source()
    }

    /// Calls `callback` once when the host has no more work for the call (see [`Self::is_enqueued`]), on the thread
    /// that completes that work. Immediately if that is the case already.
    pub fn on_enqueued(&self, callback: Box<dyn FnOnce() + Send>) {
        self.note_other_waits();
        self.shared.on_enqueued(callback);
    }

    /// Calls `callback` once when the call is over, on the thread that completes it. Immediately if it is over
    /// already.
    pub fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.note_other_waits();
        self.shared.on_done(callback);
    }

    /// Records that the code behind a callback may wait for the call.
    fn note_other_waits(&self) {
        self.comm.recorder.waited.set_uncertain(matches!(self.call, CallName::Message(_)));
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish()
    }
}
