//! A program of several lanes while it is written.

use crate::ir::{Channel, Lane, Program, Span, Step, Timed};
use std::collections::BTreeMap;

/// What a lane does. The executor asks the lanes in this order: what starts flows first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// My own parts, to other nodes.
    Leave,
    /// My contributions, to the entries of my node.
    Give,
    /// Reduces, and sends sums up.
    Up,
    /// Takes what comes down from other nodes, and hands it on.
    Enter,
    /// Parts of my own node's homes.
    Near,
    /// Takes what entries of my node hand on.
    Share,
}

/// A lane: its role, and a number where a role has several.
pub(super) type At = (Role, usize);

#[derive(Default)]
pub(super) struct Weave {
    channels: Vec<Channel>,
    lanes: BTreeMap<At, Lane>,
    pub(super) scratch_blocks: usize,
}

impl Weave {
    /// A new channel of mine; returns its number.
    pub(super) fn channel(&mut self, mut readers: Vec<usize>) -> usize {
        readers.sort_unstable();
        self.channels.push(Channel { readers });
        self.channels.len() - 1
    }

    pub(super) fn step(&mut self, at: At, lag: usize, step: Step) {
        self.lanes.entry(at).or_default().push(Timed { lag, step });
    }

    pub(super) fn send(&mut self, at: At, lag: usize, channel: usize, source: Span, tee: Option<Span>) {
        self.step(at, lag, Step::Send { channel, source, tee });
    }

    /// Steps of a lane ascend by lag; those of one lag stay in the order in which they came.
    pub(super) fn done(self) -> Program {
        let mut lanes: Vec<Lane> = self.lanes.into_values().collect();
        lanes.iter_mut().for_each(|lane| lane.sort_by_key(|timed| timed.lag));
        Program { channels: self.channels, lanes, scratch_blocks: self.scratch_blocks, semaphores: 0 }
    }
}
