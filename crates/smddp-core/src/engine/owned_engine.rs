//! Engine owned by the current thread. Its release notifies the other ranks of published data, hands pending work over
//! to the progress thread, and completes the calls of a failed group.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::engine::fail::EndedCalls;
use crate::engine::operation::Operation;
use crate::engine::progress_thread;
use crate::engine::shared::SharedState;
use crate::engine::{Command, Engine};
use crate::sync::ownership::Owned;

/// Engine of a group, owned by this thread until the drop.
pub(crate) struct OwnedEngine<'a> {
    // Dropped in this order.
    engine: Owned<'a, Engine, Command>,
    handover: Handover<'a>,
}

/// Work after the release of the engine. Registers the group with the progress thread, if the group needs further
/// progress.
struct Handover<'a> {
    state: &'a Arc<SharedState>,
    /// Work is pending.
    pending: bool,
    /// The caller continues to poll the group, so the drop does not register it.
    keeps: bool,
    /// Calls to complete after the release.
    ended: Option<Box<EndedCalls>>,
}

impl Drop for Handover<'_> {
    #[inline]
    fn drop(&mut self) {
        if (self.pending || self.state.engine.has_commands()) && !self.keeps {
            progress_thread::register(self.state);
        }
        if let Some(ended) = self.ended.take() {
            ended.complete(self.state);
        }
    }
}

impl<'a> OwnedEngine<'a> {
    pub(super) fn state(&self) -> &'a Arc<SharedState> {
        self.handover.state
    }

    /// Passes submitted commands to the engine, in their order.
    #[inline]
    pub(crate) fn take_commands(&mut self) {
        if self.handover.state.engine.has_commands() {
            self.apply_commands();
        }
    }

    #[cold]
    fn apply_commands(&mut self) {
        let mut commands = std::mem::take(&mut self.engine.taken);
        self.engine.take_commands(&mut commands);
        let mut end = None;
        for command in commands.drain(..) {
            match command {
                Command::Abort(_) | Command::Close(_) => {
                    if matches!(command, Command::Close(_)) {
                        self.engine.is_closing = true;
                        self.engine.recorder.closed();
                    }
                    end = end.or(Some(command));
                }
                _ => self.engine.apply(command),
            }
        }
        self.engine.taken = commands;
        // Last, because a panic of the transport here must not drop other commands.
        if let Some(end) = end {
            self.engine.apply(end);
        }
    }

    /// Releases the engine without registering the group. Returns true if commands are left.
    #[must_use]
    pub(crate) fn release_unregistered(mut self) -> bool {
        self.handover.keeps = true;
        let state = self.handover.state;
        drop(self);
        state.engine.has_commands()
    }
}

impl Deref for OwnedEngine<'_> {
    type Target = Engine;

    #[inline]
    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for OwnedEngine<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl Drop for OwnedEngine<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_running() {
            self.guard(|engine| engine.group.flush());
        }
        let engine = &mut *self.engine;
        self.handover.pending = engine.pending() && !(engine.device_only && engine.only_devices());
        if engine.has_failed() {
            self.handover.ended = engine.ended.take();
        }
        if engine.facts.is_querying && !(engine.is_running() && engine.has_calls()) {
            // No later check continues or ends the query.
            engine.cancel_query();
        }
    }
}

impl SharedState {
    /// Returns the engine if no other thread owns it.
    #[inline]
    pub(crate) fn try_own(self: &Arc<Self>) -> Option<OwnedEngine<'_>> {
        let engine = self.engine.try_own()?;
        Some(OwnedEngine {
            engine,
            handover: Handover { state: self, pending: false, keeps: false, ended: None },
        })
    }

    /// Returns a completed operation whose memory the next one may use, if no other thread owns the engine.
    pub(crate) fn take_spare(self: &Arc<Self>) -> Option<Box<Operation>> {
        let mut engine = self.engine.try_own()?;
        let spare = engine.spare.take();
        if engine.release() {
            progress_thread::register(self);
        }
        spare
    }
}
