//! Builder for programs.

use crate::ir::{Channel, Pipeline, Program, Source, Span, Step, Timed};
use std::collections::BTreeMap;

/// Role of a pipeline. The executor polls pipelines in this order, so that data that starts a flow has
/// priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Sends own parts to other nodes.
    Leave,
    /// Sends own contributions to the entries of the node.
    Give,
    /// Reduces, and sends sums up.
    Up,
    /// Receives parts from other nodes and forwards them.
    Enter,
    /// Handles parts whose homes are on the own node.
    Local,
    /// Receives parts from the entries of the node.
    Share,
}

/// Key of a pipeline: its role, and an index among the pipelines of that role.
pub(super) type At = (Role, usize);

/// Key of the pipeline in a program that has one.
pub(super) const ONE: At = (Role::Local, 0);

#[derive(Default)]
pub(super) struct Draft {
    channels: Vec<Channel>,
    pipelines: BTreeMap<At, Pipeline>,
    pub(super) scratch_blocks: usize,
}

impl Draft {
    /// Adds a channel of this rank; returns its number.
    pub(super) fn channel(&mut self, mut readers: Vec<usize>) -> usize {
        readers.sort_unstable();
        self.channels.push(Channel { readers });
        self.channels.len() - 1
    }

    pub(super) fn step(&mut self, at: At, lag: usize, step: Step) {
        self.pipelines.entry(at).or_default().push(Timed { lag, step });
    }

    pub(super) fn send(&mut self, at: At, lag: usize, channel: usize, source: Span, tee: Option<Span>) {
        self.step(at, lag, Step::Send { channel, source, tee });
    }

    pub(super) fn receive(&mut self, at: At, lag: usize, from: Source, to: Span) {
        self.step(at, lag, Step::Receive { from, to, forward: None });
    }

    /// Copies an input span to an output span.
    pub(super) fn copy(&mut self, at: At, source: Span, to: Span) {
        self.step(at, 0, Step::Copy { source, to, finish: false });
    }

    /// Builds the program. Steps of a pipeline are sorted by lag; steps with equal lag keep their insertion
    /// order.
    pub(super) fn done(self) -> Program {
        let mut pipelines: Vec<Pipeline> = self.pipelines.into_values().collect();
        pipelines.iter_mut().for_each(|pipeline| pipeline.sort_by_key(|timed| timed.lag));
        Program { channels: self.channels, pipelines, scratch_blocks: self.scratch_blocks }
    }
}
