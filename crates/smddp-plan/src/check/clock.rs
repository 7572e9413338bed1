//! Vector clocks: what a lane knows to have happened, at itself and at all others.

/// A lane's step, counted at that lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) lane: usize,
    pub(super) tick: u32,
}

impl Moment {
    /// Before everything.
    pub(super) const NEVER: Self = Self { lane: 0, tick: 0 };
}

/// The last step of each lane that happened before now. An empty one knows nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<u32>);

impl Clock {
    pub(super) fn new(lanes: usize) -> Self {
        Self(vec![0; lanes])
    }

    /// `lane` (whose clock this is) takes a step.
    pub(super) fn tick(&mut self, lane: usize) -> Moment {
        self.0[lane] += 1;
        Moment { lane, tick: self.0[lane] }
    }

    pub(super) fn knows(&self, moment: Moment) -> bool {
        self.0[moment.lane] >= moment.tick
    }

    /// Learns all that `other` knows.
    pub(super) fn join(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// Clocks to be used again: each message under way has some, and they are large.
#[derive(Debug, Default)]
pub(super) struct Spare(Vec<Clock>);

impl Spare {
    /// `kept` learns all that `clock` knows.
    pub(super) fn keep(&mut self, kept: &mut Clock, clock: &Clock) {
        if kept.0.is_empty() {
            *kept = self.0.pop().unwrap_or_default();
            kept.0.clone_from(&clock.0);
        } else {
            kept.join(clock);
        }
    }

    /// `kept` knows nothing any more.
    pub(super) fn forget(&mut self, kept: &mut Clock) {
        if !kept.0.is_empty() {
            self.0.push(std::mem::take(kept));
        }
    }
}
