//! Vector clocks: the steps of all pipelines that happened before a step.

/// A step of a pipeline, counted in that pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VectorTime {
    pub(super) pipeline: usize,
    pub(super) tick: u32,
}

impl VectorTime {
    /// Before all steps.
    pub(super) const NEVER: Self = Self { pipeline: 0, tick: 0 };
}

/// The last step of each pipeline that happened before now. An empty clock orders nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Vec<u32>);

impl Clock {
    pub(super) fn new(pipelines: usize) -> Self {
        Self(vec![0; pipelines])
    }

    /// Advances the clock by a step of `pipeline`, its owner.
    pub(super) fn tick(&mut self, pipeline: usize) -> VectorTime {
        self.0[pipeline] += 1;
        VectorTime { pipeline, tick: self.0[pipeline] }
    }

    pub(super) fn includes(&self, time: VectorTime) -> bool {
        self.0[time.pipeline] >= time.tick
    }

    /// Merges `other` into this clock.
    pub(super) fn join(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// Pool of clocks for reuse: each message in flight has some, and they are large.
#[derive(Debug, Default)]
pub(super) struct ClockPool(Vec<Clock>);

impl ClockPool {
    /// Merges `clock` into `kept`.
    pub(super) fn merge(&mut self, kept: &mut Clock, clock: &Clock) {
        if kept.0.is_empty() {
            *kept = self.0.pop().unwrap_or_default();
            kept.0.clone_from(&clock.0);
        } else {
            kept.join(clock);
        }
    }

    /// Clears `kept` and returns its memory to the pool.
    pub(super) fn clear(&mut self, kept: &mut Clock) {
        if !kept.0.is_empty() {
            self.0.push(std::mem::take(kept));
        }
    }
}
