//! The writes to a word in modification order, and the clock that a reader gets from them.

use std::ops::Range;
use std::sync::Arc;

use crate::clock::Clock;

/// Values around 1 << 62 are abort values; protocols may count upwards from there.
const ABORT_VALUES: Range<u64> = 1 << 61..3 << 61;

/// Returns true if a word with the value `found` satisfies a wait for `value`: the signed difference, as in CUDA.
pub(crate) fn reached(found: u64, value: u64) -> bool {
    found.wrapping_sub(value) as i64 >= 0
}

#[derive(Debug)]
struct Write {
    value: u64,
    /// Clock of the writer. `None` for a write outside the checker, which orders nothing.
    clock: Option<Arc<Clock>>,
}

/// The writes of a word since it last decreased. Words of a protocol only increase, so a decrease is a restart and
/// older writes are irrelevant.
#[derive(Debug)]
pub(crate) struct Word {
    writes: Vec<Write>,
}

impl Word {
    /// A word with the value `value` of unknown origin.
    pub(crate) fn new(value: u64) -> Self {
        Self { writes: vec![Write { value, clock: None }] }
    }

    /// Records the current value if it was written outside the checker.
    pub(crate) fn observe(&mut self, value: u64) {
        if self.writes.last().is_none_or(|last| last.value != value) {
            self.push(value, None);
        }
    }

    pub(crate) fn write(&mut self, value: u64, clock: Arc<Clock>) {
        self.push(value, Some(clock));
    }

    fn push(&mut self, value: u64, clock: Option<Arc<Clock>>) {
        if self.writes.last().is_some_and(|last| !reached(value, last.value)) {
            self.writes.clear();
        }
        self.writes.push(Write { value, clock });
    }

    /// Returns the clock of the *first* write that satisfies a wait for `value`, whichever write the wait observed.
    /// The outer `None` means that no write satisfies it yet.
    pub(crate) fn clock_for(&self, value: u64) -> Option<Option<Clock>> {
        // Each write adds less than half of the value range, so the satisfying writes are at the end. An abort value
        // may be more than half of the range above an old value, so a binary search would be wrong.
        let first = self.writes.iter().rposition(|write| !reached(write.value, value)).map_or(0, |k| k + 1);
        self.writes.get(first).map(Self::learned)
    }

    /// Returns the clock for a reader of the current value.
    pub(crate) fn read(&self) -> Option<Clock> {
        self.writes.last().and_then(Self::learned)
    }

    fn learned(write: &Write) -> Option<Clock> {
        let mut clock = write.clock.as_deref().cloned()?;
        clock.after_abort |= ABORT_VALUES.contains(&write.value);
        Some(clock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock_at(ticks: u64) -> Arc<Clock> {
        let mut clock = Clock::default();
        for _ in 0..ticks {
            clock.tick(0);
        }
        Arc::new(clock)
    }

    #[test]
    fn wait_gets_the_clock_of_the_first_satisfying_write() {
        let mut word = Word::new(0);
        (1..=5).for_each(|value| word.write(value * 10, clock_at(value)));
        assert_eq!(word.clock_for(11).unwrap().unwrap().of(0), 2);
        assert_eq!(word.clock_for(20).unwrap().unwrap().of(0), 2);
        assert_eq!(word.clock_for(50).unwrap().unwrap().of(0), 5);
        assert!(word.clock_for(51).is_none());
        assert_eq!(word.clock_for(0), Some(None), "the initial value orders nothing");
    }

    #[test]
    fn values_compare_by_signed_difference() {
        let mut word = Word::new(u64::MAX - 1);
        assert!(word.clock_for(1).is_none());
        word.write(2, clock_at(1));
        assert_eq!(word.clock_for(1).unwrap().unwrap().of(0), 1);
    }

    #[test]
    fn abort_value_satisfies_every_wait_and_marks_the_clock() {
        let mut word = Word::new(3);
        word.write(4, clock_at(1));
        word.write(1 << 62, clock_at(2));
        assert!(!word.clock_for(4).unwrap().unwrap().after_abort);
        assert!(word.clock_for(5).unwrap().unwrap().after_abort);
    }

    #[test]
    fn write_outside_the_checker_satisfies_but_orders_nothing() {
        let mut word = Word::new(0);
        word.write(1, clock_at(1));
        word.observe(1);
        assert!(word.clock_for(2).is_none());
        word.observe(2);
        assert_eq!(word.clock_for(2), Some(None));
    }

    #[test]
    fn decreasing_value_resets_the_history() {
        let mut word = Word::new(0);
        word.write(9, clock_at(1));
        word.write(0, clock_at(2));
        assert!(word.clock_for(1).is_none());
    }
}
