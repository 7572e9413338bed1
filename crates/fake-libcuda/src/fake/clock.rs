//! Vector clocks.

/// Clock of an actor (a stream, or all host threads of a process). For every actor, it holds the last tick up to
/// which all of its operations happened before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    ticks: Vec<u64>,
    /// Part of the order comes from an abort value that ended a wait, so the order is not guaranteed any more.
    pub(crate) after_abort: bool,
}

impl Clock {
    pub(crate) fn of(&self, actor: usize) -> u64 {
        self.ticks.get(actor).copied().unwrap_or(0)
    }

    /// Advances the actor's own component and returns it.
    pub(crate) fn tick(&mut self, actor: usize) -> u64 {
        if self.ticks.len() <= actor {
            self.ticks.resize(actor + 1, 0);
        }
        self.ticks[actor] += 1;
        self.ticks[actor]
    }

    /// Joins the clock with `other`. Returns true if that changed a component.
    pub(crate) fn join(&mut self, other: &Clock) -> bool {
        let mut new = false;
        if self.ticks.len() < other.ticks.len() {
            self.ticks.resize(other.ticks.len(), 0);
        }
        for (mine, theirs) in self.ticks.iter_mut().zip(&other.ticks) {
            new |= *theirs > *mine;
            *mine = (*mine).max(*theirs);
        }
        self.after_abort |= other.after_abort;
        new
    }

    /// Like [`Self::join`], for a host that observed a stream's completion: the order holds whatever ended the waits.
    pub(crate) fn join_seen(&mut self, other: &Clock) {
        let after_abort = self.after_abort;
        self.join(other);
        self.after_abort = after_abort;
    }
}
