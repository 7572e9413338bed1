//! Programs in few bytes a step: at 8,192 ranks there are millions.

use crate::ir::{Program, Span, Step};

/// What a lane does, cut to what takes time. A step that takes several messages and sends one is several of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// Into my channel `a`.
    Send,
    /// The next message of channel `b` of rank `a`, as its reader `reader`.
    Take,
    /// Move `a` times the span through memory.
    Work,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Action {
    pub(super) verb: Verb,
    pub(super) reader: u16,
    pub(super) lag: u32,
    pub(super) a: u32,
    pub(super) b: u32,
    /// The blocks whose segments it works on.
    pub(super) first: u32,
    pub(super) blocks: u32,
}

/// The lanes of all ranks, one behind the other.
#[derive(Default)]
pub(super) struct Tapes {
    pub(super) actions: Vec<Action>,
    pub(super) lanes: Vec<LaneTape>,
}

/// One lane: its rank, its actions, and the lag of its last step.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneTape {
    pub(super) rank: u32,
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) max_lag: u32,
    /// Steps ascend by lag.
    pub(super) sorted: bool,
}

impl Tapes {
    /// Adds the lanes of `rank`. `memory`: copying and reducing cost time. `flat`: a single segment, so lags are
    /// dropped.
    pub(super) fn push(&mut self, rank: usize, program: &Program, memory: bool, flat: bool) {
        for lane in &program.lanes {
            let begin = self.actions.len() as u32;
            for timed in lane {
                let lag = if flat { 0 } else { timed.lag as u32 };
                self.step(lag, &timed.step, memory);
            }
            let actions = &self.actions[begin as usize..];
            self.lanes.push(LaneTape {
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
