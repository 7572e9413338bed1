//! Compact encoding of programs: 8,192 ranks have millions of steps.

use crate::ir::{Program, Span, Step};

/// Timed action of a pipeline. A step that takes several messages and sends one becomes several actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// Send on own channel `a`.
    Send,
    /// Take the next message of channel `b` of rank `a`, as reader number `reader`.
    Take,
    /// Move `a` times the bytes of the span through memory.
    Work,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Action {
    pub(super) verb: Verb,
    pub(super) reader: u16,
    pub(super) lag: u32,
    pub(super) a: u32,
    pub(super) b: u32,
    /// Blocks whose segments the action processes.
    pub(super) first: u32,
    pub(super) blocks: u32,
}

/// Pipelines of all ranks, concatenated.
#[derive(Default)]
pub(super) struct Traces {
    pub(super) actions: Vec<Action>,
    pub(super) pipelines: Vec<PipelineTrace>,
}

/// One pipeline: its rank, its actions, and the lag of its last step.
#[derive(Clone, Copy, Debug)]
pub(super) struct PipelineTrace {
    pub(super) rank: u32,
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) max_lag: u32,
    /// True if steps ascend by lag.
    pub(super) sorted: bool,
}

impl Traces {
    /// Adds the pipelines of `rank`. With `memory`, copies and reductions cost time. With `flat`, there is a
    /// single segment and lags are dropped.
    pub(super) fn push(&mut self, rank: usize, program: &Program, memory: bool, flat: bool) {
        for pipeline in &program.pipelines {
            let begin = self.actions.len() as u32;
            for timed in pipeline {
                let lag = if flat { 0 } else { timed.lag as u32 };
                self.step(lag, &timed.step, memory);
            }
            let actions = &self.actions[begin as usize..];
            self.pipelines.push(PipelineTrace {
                rank: rank as u32,
                begin,
                end: self.actions.len() as u32,
                max_lag: actions.iter().map(|action| action.lag).max().unwrap_or(0),
                sorted: actions.is_sorted_by_key(|action| action.lag),
            });
        }
    }

    fn step(&mut self, lag: u32, step: &Step, memory: bool) {
        for source in step.sources() {
            let action = Self::action(Verb::Take, lag, source.rank, source.channel, source.message);
            self.actions.push(Action { reader: source.reader as u16, ..action });
        }
        if memory {
            match step {
                Step::Copy { source, .. } => self.actions.push(Self::action(Verb::Work, lag, 1, 0, *source)),
                Step::Reduce { from, own, .. } => {
                    let span = own.map(|(_, span)| span).or_else(|| from.first().map(|f| f.taken()));
                    let inputs = from.len() + usize::from(own.is_some());
                    self.actions.extend(span.map(|span| Self::action(Verb::Work, lag, inputs, 0, span)));
                }
                _ => {}
            }
        }
        if let Some((channel, span)) = step.published() {
            self.actions.push(Self::action(Verb::Send, lag, channel, 0, span));
        }
    }

    fn action(verb: Verb, lag: u32, a: usize, b: usize, span: Span) -> Action {
        let (first, blocks) = (span.block as u32, span.blocks as u32);
        Action { verb, reader: 0, lag, a: a as u32, b: b as u32, first, blocks }
    }
}
