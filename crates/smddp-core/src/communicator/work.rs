//! The handle of a call under way.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smddp_plan::Collective;
use smddp_transport::fork;

use crate::call;
use crate::call::message_label::Direction;
use crate::device::DeviceCompletion;
use crate::engine::progress_loop::Until;
use crate::engine::progress_thread;
use crate::engine::shared::SharedState;
use crate::error::{Error, Result};
use crate::sync::completion::Completion;

/// A call under way.
#[derive(Clone)]
pub struct Work {
    pub(super) shared: Arc<Completion>,
    pub(super) comm: Arc<SharedState>,
    pub(super) call: CallName,
    /// Where its buffers are a device's.
    pub(super) completion: Option<DeviceCompletion>,
}

/// What a work stands for, for errors.
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
    /// Drives the call until it is over. `timeout`: give up waiting after that; the call itself goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if self.shared.is_done() {
            return self.outcome();
        }
        let comm = &self.comm;
        if !comm.wait_until(&Until::Done(&self.shared), timeout)? {
            return Err(Error::Timeout {
                what: format!("wait for {}", self.call),
                group: comm.name.clone(),
                after: timeout.unwrap_or_default(),
                missing: Vec::new(),
                detail: "the call goes on; wait again, or look at what the other ranks do".to_owned(),
            });
        }
        self.outcome()
    }

    /// How it ended, as the caller hears it.
    fn outcome(&self) -> Result<()> {
        let outcome = self.shared.outcome();
        if outcome.is_err() {
            self.comm.abort_reported.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// Whether it is over, well or not; on a device: whether that is through.
    pub fn is_done(&self) -> bool {
        let through = |completion: &DeviceCompletion| {
            completion.handle.is_done(completion.number) && !completion.handle.released()
        };
        self.shared.is_done() || self.completion.as_ref().is_some_and(through)
    }

    /// Returns whether only calls such as [`Self::poll`] move the call on: no thread could be started for that.
    pub fn needs_polling(&self) -> bool {
        !progress_thread::runs()
    }

    /// Moves the call on, where no other thread does so, without waiting. Returns whether it is over.
    pub fn poll(&self) -> bool {
        if self.comm.forks == fork::generation()
            && let Some(mut engine) = self.comm.try_own()
        {
            self.comm.guarded_poll(&mut engine);
            engine.group.flush();
            self.comm.release(engine);
        }
        self.is_done()
    }

    /// Whether the host has nothing to add to it any more; on host memory: whether it is over.
    pub fn is_enqueued(&self) -> bool {
        self.shared.is_done() || self.completion.as_ref().is_some_and(DeviceCompletion::enqueued)
    }

    /// What comes next on `stream`, one of the device's, is after this call. Waits for the other ranks to make the call, and
    /// not for the device. Raises the call's error if it has failed already. For calls on the host this is `wait`.
    pub fn wait_stream(&self, stream: smddp_cuda::Stream) -> Result<()> {
        let (Some(completion), comm) = (&self.completion, &self.comm) else { return self.wait(None) };
        if !self.is_enqueued() {
            comm.wait_until(&Until::Enqueued(&self.shared, completion), None)?;
        }
        // If it failed, what is left of it on the device still uses its memory.
        let waits = completion.wait_stream(stream);
        if let Some(error) = self.error() {
            return Err(error);
        }
        waits.map_err(|error| Error::System {
            what: format!("wait for {} on group `{}`", self.call, comm.name),
            reason: error.to_string(),
        })
    }

    /// The error it ended with.
    pub fn error(&self) -> Option<Error> {
        if self.shared.is_done() { self.outcome().err() } else { None }
    }

    /// The rank that a receive was matched with.
    pub fn source(&self) -> Option<usize> {
        self.shared.source()
    }

    /// Calls back once when the host has nothing to add to it any more, as [`Self::is_enqueued`] says, from whatever thread
    /// does the last of it; at once if that is so already.
    pub fn on_enqueued(&self, callback: Box<dyn FnOnce() + Send>) {
        self.shared.on_enqueued(callback);
    }

    /// Calls back once when done, from whatever thread ends the call; at once if it is over already.
    pub fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.shared.on_done(callback);
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("done", &self.is_done()).finish()
    }
}
