//! Engine owned by the current thread. Its release hands pending work over to the progress thread.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

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

/// Registers the group with the progress thread when the engine is released, if the group needs further progress.
struct Handover<'a> {
    state: &'a Arc<SharedState>,
    /// Work is pending.
    pending: bool,
    /// The caller continues with the group.
    keeps: bool,
}

impl Drop for Handover<'_> {
    #[inline]
    fn drop(&mut self) {
        if (self.pending || self.state.engine.has_commands()) && !self.keeps {
            progress_thread::register(self.state);
        }
    }
}

impl OwnedEngine<'_> {
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
        for command in commands.drain(..) {
            self.engine.apply(command);
        }
        self.engine.taken = commands;
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
        let engine = &*self.engine;
        self.handover.pending = engine.pending() && !(engine.device_only && engine.only_devices());
    }
}

impl SharedState {
    /// Returns the engine if no other thread owns it.
    #[inline]
    pub(crate) fn try_own(self: &Arc<Self>) -> Option<OwnedEngine<'_>> {
        let engine = self.engine.try_own()?;
        Some(OwnedEngine { engine, handover: Handover { state: self, pending: false, keeps: false } })
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
