//! What was written to a word, in its modification order, and what a reader learns from it.

use std::ops::Range;
use std::sync::Arc;

use crate::clock::Clock;

/// Values near 1 << 62 are poison, whatever a protocol counts from there.
const POISON: Range<u64> = 1 << 61..3 << 61;

/// Whether a word that holds `found` lets a wait for `value` through: the signed difference, as CUDA compares.
pub(crate) fn reached(found: u64, value: u64) -> bool {
    found.wrapping_sub(value) as i64 >= 0
}

#[derive(Debug)]
struct Write {
    value: u64,
    /// What the writer knew. `None`: written past the checker, so it orders nothing.
    knows: Option<Arc<Clock>>,
}

/// A word's writes, since it last went down: words of a protocol only rise, and where one was started anew nothing
/// older counts.
#[derive(Debug)]
pub(crate) struct Word {
    writes: Vec<Write>,
}

impl Word {
    /// A word that holds `value`, of unknown origin.
    pub(crate) fn new(value: u64) -> Self {
        Self { writes: vec![Write { value, knows: None }] }
    }

    /// The word holds `value` now: takes note if it was written past the checker.
    pub(crate) fn holds(&mut self, value: u64) {
        if self.writes.last().is_none_or(|last| last.value != value) {
            self.push(value, None);
        }
    }

    pub(crate) fn write(&mut self, value: u64, knows: Arc<Clock>) {
        self.push(value, Some(knows));
    }

    fn push(&mut self, value: u64, knows: Option<Arc<Clock>>) {
        if self.writes.last().is_some_and(|last| !reached(value, last.value)) {
            self.writes.clear();
        }
        self.writes.push(Write { value, knows });
    }

    /// What a wait for `value` may count on: the knowledge of the *first* write that lets it through, whichever it
    /// really saw. The outer `None`: there is none yet.
    pub(crate) fn lets_through(&self, value: u64) -> Option<Option<Clock>> {
        // Values rise by less than half the circle each, so the reached ones are at the end; but poison may lie more
        // than half the circle above an old value, so this is no place for a binary search.
        let first = self.writes.iter().rposition(|write| !reached(write.value, value)).map_or(0, |k| k + 1);
        self.writes.get(first).map(Self::learned)
    }

    /// What a reader of the value that the word holds learns.
    pub(crate) fn read(&self) -> Option<Clock> {
        self.writes.last().and_then(Self::learned)
    }

    fn learned(write: &Write) -> Option<Clock> {
        let mut clock = write.knows.as_deref().cloned()?;
        clock.poisoned |= POISON.contains(&write.value);
        Some(clock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knowing(ticks: u64) -> Arc<Clock> {
        let mut clock = Clock::default();
        for _ in 0..ticks {
            clock.tick(0);
        }
        Arc::new(clock)
    }

    #[test]
    fn a_wait_learns_of_the_first_write_that_lets_it_through() {
        let mut word = Word::new(0);
        (1..=5).for_each(|value| word.write(value * 10, knowing(value)));
        assert_eq!(word.lets_through(11).unwrap().unwrap().of(0), 2);
        assert_eq!(word.lets_through(20).unwrap().unwrap().of(0), 2);
        assert_eq!(word.lets_through(50).unwrap().unwrap().of(0), 5);
        assert!(word.lets_through(51).is_none());
        assert_eq!(word.lets_through(0), Some(None), "the initial value orders nothing");
    }

    #[test]
    fn values_compare_by_their_signed_difference() {
        let mut word = Word::new(u64::MAX - 1);
        assert!(word.lets_through(1).is_none());
        word.write(2, knowing(1));
        assert_eq!(word.lets_through(1).unwrap().unwrap().of(0), 1);
    }

    #[test]
    fn poison_lets_every_wait_through_and_says_so() {
        let mut word = Word::new(3);
        word.write(4, knowing(1));
        word.write(1 << 62, knowing(2));
        assert!(!word.lets_through(4).unwrap().unwrap().poisoned);
        assert!(word.lets_through(5).unwrap().unwrap().poisoned);
    }

    #[test]
    fn a_write_past_the_checker_lets_through_and_orders_nothing() {
        let mut word = Word::new(0);
        word.write(1, knowing(1));
        word.holds(1);
        assert!(word.lets_through(2).is_none());
        word.holds(2);
        assert_eq!(word.lets_through(2), Some(None));
    }

    #[test]
    fn a_word_started_anew_forgets() {
        let mut word = Word::new(0);
        word.write(9, knowing(1));
        word.write(0, knowing(2));
        assert!(word.lets_through(1).is_none());
    }
}
