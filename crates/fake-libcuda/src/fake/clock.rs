//! Vector clocks: who knows of how much of whom.

/// What an actor (a stream, or a process's host threads together) knows: for every actor, up to which of its ticks
/// everything happened before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    ticks: Vec<u64>,
    /// Some of it is known only because a poison value ended a wait: order is no longer promised.
    pub(crate) poisoned: bool,
}

impl Clock {
    pub(crate) fn of(&self, actor: usize) -> u64 {
        self.ticks.get(actor).copied().unwrap_or(0)
    }

    /// The actor's next tick.
    pub(crate) fn tick(&mut self, actor: usize) -> u64 {
        if self.ticks.len() <= actor {
            self.ticks.resize(actor + 1, 0);
        }
        self.ticks[actor] += 1;
        self.ticks[actor]
    }

    /// Learns what `other` knows; whether anything of it was new.
    pub(crate) fn join(&mut self, other: &Clock) -> bool {
        let mut new = false;
        if self.ticks.len() < other.ticks.len() {
            self.ticks.resize(other.ticks.len(), 0);
        }
        for (mine, theirs) in self.ticks.iter_mut().zip(&other.ticks) {
            new |= *theirs > *mine;
            *mine = (*mine).max(*theirs);
        }
        self.poisoned |= other.poisoned;
        new
    }

    /// As [`Self::join`], of a stream by a host that saw it pass: the order is real whatever ended the waits.
    pub(crate) fn join_seen(&mut self, other: &Clock) {
        let poisoned = self.poisoned;
        self.join(other);
        self.poisoned = poisoned;
    }
}
