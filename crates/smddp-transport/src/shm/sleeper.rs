//! Where the threads of this process sleep while nothing moves.

use std::os::fd::RawFd;
use std::time::Duration;

use super::endpoint::Bell;

/// The bell of this process; a group of one rank has none.
#[derive(Clone)]
pub struct Sleeper(pub(super) Option<Bell>);

impl Sleeper {
    /// Wakes all who sleep.
    pub fn ring(&self) {
        self.0.iter().for_each(Bell::ring);
    }

    /// I am about to sleep: what is published from here on rings. One more look at the wires comes now, which sees what was
    /// published before; then [`Sleeper::sleep`] with this ticket, unless there was something; then [`Sleeper::rise`].
    pub fn drowse(&self) -> u32 {
        self.0.as_ref().map_or(0, Bell::drowse)
    }

    /// Sleeps until it rings after `ticket` was taken, one of `fds` is ready, or the time is up.
    pub fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration) {
        self.0.iter().for_each(|bell| bell.sleep(ticket, fds, at_most));
    }

    pub fn rise(&self) {
        self.0.iter().for_each(Bell::rise);
    }
}
