//! A program while it is written.

use crate::ir::{Channel, Lane, Program, Source, Span, Step, Timed};
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

/// The lane of a program that has one.
pub(super) const ONE: At = (Role::Near, 0);

#[derive(Default)]
pub(super) struct Draft {
    channels: Vec<Channel>,
    lanes: BTreeMap<At, Lane>,
    pub(super) scratch_blocks: usize,
}

impl Draft {
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

    pub(super) fn receive(&mut self, at: At, lag: usize, from: Source, to: Span) {
        self.step(at, lag, Step::Receive { from, to, forward: None });
    }

    /// What comes in goes out as it is.
    pub(super) fn copy(&mut self, at: At, source: Span, to: Span) {
        self.step(at, 0, Step::Copy { source, to, finish: false });
    }

    /// Steps of a lane ascend by lag; those of one lag stay in the order in which they came.
    pub(super) fn done(self) -> Program {
        let mut lanes: Vec<Lane> = self.lanes.into_values().collect();
        lanes.iter_mut().for_each(|lane| lane.sort_by_key(|timed| timed.lag));
        Program { channels: self.channels, lanes, scratch_blocks: self.scratch_blocks }
    }
}
