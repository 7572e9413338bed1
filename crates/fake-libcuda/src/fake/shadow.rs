//! The relevant earlier accesses to each byte of an allocation.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::clock::Clock;

/// Kind of an access. Words are atomic, so their accesses do not race with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Read,
    Write,
    AtomicRead,
    AtomicWrite,
}

impl Touch {
    pub(crate) fn writes(self) -> bool {
        matches!(self, Touch::Write | Touch::AtomicWrite)
    }

    fn atomic(self) -> bool {
        matches!(self, Touch::AtomicRead | Touch::AtomicWrite)
    }

    fn conflicts(self, other: Touch) -> bool {
        (self.writes() || other.writes()) && !(self.atomic() && other.atomic())
    }

    /// Returns true if everything that conflicts with `earlier` conflicts with this too.
    fn covers(self, earlier: Touch) -> bool {
        match self {
            Touch::Write => true,
            Touch::Read => !earlier.writes(),
            Touch::AtomicWrite => earlier.atomic(),
            Touch::AtomicRead => earlier == Touch::AtomicRead,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) actor: usize,
    pub(crate) tick: u64,
    pub(crate) touch: Touch,
    /// Made after an abort value ended a wait: its order is not checked.
    pub(crate) after_abort: bool,
    pub(crate) by: Arc<str>,
}

impl Access {
    fn same(&self, other: &Access) -> bool {
        (self.actor, self.tick, self.touch) == (other.actor, other.tick, other.touch)
    }
}

/// Adjacent bytes with the same history.
#[derive(Clone, Debug, Default)]
struct Stretch {
    accesses: Vec<Access>,
    written: bool,
}

impl Stretch {
    fn same(&self, other: &Stretch) -> bool {
        self.written == other.written
            && self.accesses.len() == other.accesses.len()
            && self.accesses.iter().zip(&other.accesses).all(|(a, b)| a.same(b))
    }
}

/// Result of an access to a range.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Earlier accesses that are not ordered before this one, with the common bytes.
    pub(crate) races: Vec<(Range<usize>, Access)>,
    /// Bytes that were read before any write.
    pub(crate) unwritten: Option<Range<usize>>,
}

/// Access history of an allocation: stretches by their first byte, without gaps or end.
///
/// An access is dropped when a later access, ordered after it, *covers* it. An access that races with the dropped one
/// cannot be ordered after the later one, so it races with the later one too. Every race is therefore detected, and a
/// byte keeps at most one access per concurrent actor.
#[derive(Debug)]
pub(crate) struct Shadow {
    stretches: BTreeMap<usize, Stretch>,
}

impl Shadow {
    pub(crate) fn new(written: bool) -> Self {
        Self { stretches: BTreeMap::from([(0, Stretch { accesses: Vec::new(), written })]) }
    }

    /// Makes `at` the first byte of a stretch.
    fn split(&mut self, at: usize) {
        if let Some((start, stretch)) = self.stretches.range(..=at).next_back()
            && *start < at
        {
            let rest = stretch.clone();
            self.stretches.insert(at, rest);
        }
    }

    /// Records an access to the bytes of `range` by an actor with the clock `clock`.
    pub(crate) fn touch(&mut self, range: Range<usize>, access: &Access, clock: &Clock) -> Found {
        let mut found = Found::default();
        if range.is_empty() {
            return found;
        }
        self.split(range.start);
        self.split(range.end);
        let starts: Vec<usize> = self.stretches.range(range.clone()).map(|(start, _)| *start).collect();
        for (k, &start) in starts.iter().enumerate() {
            let end = starts.get(k + 1).copied().unwrap_or(range.end);
            let Some(stretch) = self.stretches.get_mut(&start) else { continue };
            if !access.touch.writes() && !stretch.written && !access.after_abort {
                let first = found.unwritten.as_ref().map_or(start, |range| range.start);
                found.unwritten = Some(first..end);
                // Reports the bytes once.
                stretch.written = true;
            }
            stretch.accesses.retain(|earlier| {
                let ordered = clock.of(earlier.actor) >= earlier.tick;
                let excused = access.after_abort || earlier.after_abort;
                if !ordered && !excused && access.touch.conflicts(earlier.touch) {
                    match found.races.last_mut() {
                        Some((range, known)) if range.end == start && known.same(earlier) => range.end = end,
                        _ => found.races.push((start..end, earlier.clone())),
                    }
                }
                !(ordered && access.touch.covers(earlier.touch))
            });
            stretch.accesses.push(access.clone());
            stretch.written |= access.touch.writes();
        }
        self.merge(&starts, range.end);
        found
    }

    /// Merges adjacent stretches with equal histories.
    fn merge(&mut self, starts: &[usize], end: usize) {
        for &at in starts.iter().chain([&end]) {
            let Some(stretch) = self.stretches.get(&at) else { continue };
            let before = self.stretches.range(..at).next_back();
            if before.is_some_and(|(_, before)| before.same(stretch)) {
                self.stretches.remove(&at);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn stretches(&self) -> usize {
        self.stretches.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn access(actor: usize, clock: &mut Clock, touch: Touch) -> Access {
        Access { actor, tick: clock.tick(actor), touch, after_abort: false, by: "".into() }
    }

    /// Random numbers by splitmix64.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)) % bound
        }
    }

    #[test]
    fn unordered_accesses_race_on_their_common_bytes() {
        let mut shadow = Shadow::new(true);
        let (mut a, mut b) = (Clock::default(), Clock::default());
        let write = access(0, &mut a, Touch::Write);
        assert!(shadow.touch(10..20, &write, &a).races.is_empty());
        let read = access(1, &mut b, Touch::Read);
        assert!(shadow.touch(20..30, &read, &b).races.is_empty());
        let found = shadow.touch(15..25, &read, &b);
        assert_eq!(found.races.len(), 1);
        assert_eq!(found.races[0].0, 15..20);
        b.join(&a);
        let read = access(1, &mut b, Touch::Read);
        assert!(shadow.touch(0..100, &read, &b).races.is_empty());
    }

    #[test]
    fn race_with_a_dropped_write_is_detected() {
        let mut shadow = Shadow::new(true);
        let (mut a, mut b, mut c) = (Clock::default(), Clock::default(), Clock::default());
        shadow.touch(0..8, &access(0, &mut a, Touch::Write), &a);
        b.join(&a);
        shadow.touch(0..8, &access(1, &mut b, Touch::Write), &b);
        // Ordered after the first write only.
        c.join(&a);
        let found = shadow.touch(0..8, &access(2, &mut c, Touch::Read), &c);
        assert_eq!(found.races.len(), 1);
        assert_eq!(found.races[0].1.actor, 1);
    }

    #[test]
    fn write_races_with_reads_of_several_actors() {
        let mut shadow = Shadow::new(true);
        let mut clocks = [Clock::default(), Clock::default(), Clock::default()];
        for (actor, clock) in clocks.iter_mut().enumerate() {
            shadow.touch(0..8, &access(actor, clock, Touch::Read), clock);
        }
        let [mut a, b, _] = clocks;
        a.join(&b);
        let found = shadow.touch(0..8, &access(0, &mut a, Touch::Write), &a);
        assert_eq!(found.races.iter().map(|(_, access)| access.actor).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn pruned_history_detects_the_same_races_as_a_full_history() {
        const BYTES: usize = 24;
        const ACTORS: u64 = 4;
        let kinds = [Touch::Read, Touch::Write, Touch::AtomicRead, Touch::AtomicWrite];
        for seed in 0..300 {
            let mut random = Random(seed);
            let mut shadow = Shadow::new(true);
            let mut clocks: [Clock; ACTORS as usize] = Default::default();
            let mut all: Vec<(Range<usize>, Access)> = Vec::new();
            for iteration in 0..120 {
                let actor = random.below(ACTORS) as usize;
                if random.below(3) == 0 {
                    let other = clocks[random.below(ACTORS) as usize].clone();
                    clocks[actor].join(&other);
                }
                let start = random.below(BYTES as u64) as usize;
                let end = start + 1 + random.below((BYTES - start) as u64) as usize;
                let touch = kinds[random.below(4) as usize];
                let now = access(actor, &mut clocks[actor], touch);
                let races = |(range, earlier): &(Range<usize>, Access), byte: usize| {
                    let ordered = clocks[actor].of(earlier.actor) >= earlier.tick;
                    range.contains(&byte) && !ordered && touch.conflicts(earlier.touch)
                };
                let expected: Vec<usize> =
                    (start..end).filter(|byte| all.iter().any(|earlier| races(earlier, *byte))).collect();
                let found = shadow.touch(start..end, &now, &clocks[actor]).races;
                let found: BTreeSet<usize> = found.into_iter().flat_map(|(range, _)| range).collect();
                assert_eq!(
                    found.into_iter().collect::<Vec<_>>(),
                    expected,
                    "seed {seed}, iteration {iteration}"
                );
                all.push((start..end, now));
            }
        }
    }

    #[test]
    fn atomic_accesses_race_with_plain_accesses_only() {
        for (first, second, races) in [
            (Touch::AtomicWrite, Touch::AtomicWrite, 0),
            (Touch::AtomicWrite, Touch::AtomicRead, 0),
            (Touch::AtomicRead, Touch::Read, 0),
            (Touch::AtomicRead, Touch::Write, 1),
            (Touch::AtomicWrite, Touch::Read, 1),
            (Touch::Read, Touch::AtomicWrite, 1),
            (Touch::Write, Touch::AtomicRead, 1),
        ] {
            let mut shadow = Shadow::new(true);
            let (mut a, mut b) = (Clock::default(), Clock::default());
            shadow.touch(0..8, &access(0, &mut a, first), &a);
            let found = shadow.touch(0..8, &access(1, &mut b, second), &b);
            assert_eq!(found.races.len(), races, "{first:?} then {second:?}");
        }
    }

    #[test]
    fn history_length_is_bounded() {
        let mut shadow = Shadow::new(false);
        let (mut a, mut b) = (Clock::default(), Clock::default());
        for iteration in 0..1000 {
            for piece in 0..4 {
                let at = (iteration * 37 + piece * 1000) % 9000;
                let touch = if piece % 2 == 0 { Touch::Write } else { Touch::Read };
                shadow.touch(at..at + 500, &access(0, &mut a, touch), &a);
            }
            b.join(&a);
            let found = shadow.touch(0..1 << 20, &access(1, &mut b, Touch::Write), &b);
            assert!(found.races.is_empty());
            a.join(&b);
            assert_eq!(shadow.stretches(), 2, "iteration {iteration}: the accessed bytes, and the rest");
        }
    }

    #[test]
    fn uninitialized_bytes_are_reported_once() {
        let mut shadow = Shadow::new(false);
        let mut a = Clock::default();
        shadow.touch(0..16, &access(0, &mut a, Touch::Write), &a);
        let read = access(0, &mut a, Touch::Read);
        assert_eq!(shadow.touch(8..32, &read, &a).unwritten, Some(16..32));
        assert_eq!(shadow.touch(8..32, &read, &a).unwritten, None);
    }
}
