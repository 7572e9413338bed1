//! Ring of the newest operations of a group. The group's engine writes without waiting, and any thread may read
//! concurrently. Entries that are overwritten during a read are omitted.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use smddp_base::CallFingerprint;

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Running,
    Ok,
    Failed,
}

/// One operation. Times are in ticks; 0 if not reached yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) seq: u64,
    pub(super) fingerprint: CallFingerprint,
    pub(super) bytes: u64,
    pub(super) submitted: u64,
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) outcome: Outcome,
}

/// One cache line: number + 1, fingerprint (two words), bytes, submitted, started, ended, outcome.
#[derive(Default)]
#[repr(align(64))]
struct Row([AtomicU64; 8]);

impl Row {
    fn set(&self, at: usize, word: u64) {
        self.0[at].store(word, Ordering::Relaxed);
    }

    fn get(&self, at: usize) -> u64 {
        self.0[at].load(Ordering::Relaxed)
    }
}

/// Rows by number, allocated with the first operation.
pub(super) struct Ring {
    rows: OnceLock<Box<[Row]>>,
    capacity: usize,
}

impl Ring {
    /// Keeps at least `capacity` operations, rounded up to a power of two because a division would double the cost. 0
    /// turns the ring off.
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = if capacity == 0 { 0 } else { capacity.next_power_of_two() };
        Self { rows: OnceLock::new(), capacity }
    }

    pub(super) fn is_off(&self) -> bool {
        self.capacity == 0
    }

    #[inline]
    fn row(&self, seq: u64) -> Option<&Row> {
        if self.capacity == 0 {
            return None;
        }
        let rows = self.rows.get_or_init(|| (0..self.capacity).map(|_| Row::default()).collect());
        rows.get(seq as usize & (self.capacity - 1))
    }

    /// Records a submitted operation. `started`: it is the first in its queue.
    #[inline]
    pub(super) fn submit(&self, seq: u64, fingerprint: CallFingerprint, bytes: u64, now: u64, started: bool) {
        let Some(row) = self.row(seq) else { return };
        row.set(0, 0);
        // Release fence: a reader that sees any of the following stores also sees the row marked as being written.
        fence(Ordering::Release);
        let start = if started { now } else { 0 };
        for (at, word) in
            [(1, fingerprint.call), (2, fingerprint.count), (3, bytes), (4, now), (5, start), (6, 0), (7, 0)]
        {
            row.set(at, word);
        }
        row.0[0].store(seq + 1, Ordering::Release);
    }

    /// Records the start of an operation that is still in the ring.
    #[inline]
    pub(super) fn start(&self, seq: u64, now: u64) {
        if let Some(row) = self.row(seq).filter(|row| row.get(0) == seq + 1) {
            row.set(5, now);
        }
    }

    /// Records the end of an operation that is still in the ring.
    #[inline]
    pub(super) fn end(&self, seq: u64, now: u64, outcome: Outcome) {
        if let Some(row) = self.row(seq).filter(|row| row.get(0) == seq + 1) {
            row.set(7, outcome as u64);
            row.0[6].store(now, Ordering::Release);
        }
    }

    /// Returns the recorded entries in the order of their numbers.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let rows = self.rows.get().map_or(&[][..], |rows| rows);
        let mut entries: Vec<Entry> = rows.iter().filter_map(read).collect();
        entries.sort_by_key(|entry| entry.seq);
        entries
    }
}

fn read(row: &Row) -> Option<Entry> {
    let number = row.0[0].load(Ordering::Acquire);
    let ended = row.0[6].load(Ordering::Acquire);
    let entry = Entry {
        seq: number.checked_sub(1)?,
        fingerprint: CallFingerprint { call: row.get(1), count: row.get(2) },
        bytes: row.get(3),
        submitted: row.get(4),
        started: row.get(5),
        ended,
        outcome: match (ended, row.get(7)) {
            (0, _) => Outcome::Running,
            (_, word) if word == Outcome::Ok as u64 => Outcome::Ok,
            _ => Outcome::Failed,
        },
    };
    fence(Ordering::Acquire);
    (row.get(0) == number).then_some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn newest_operations_are_kept_with_their_outcome() {
        let ring = Ring::new(4);
        for seq in 0..6 {
            ring.submit(seq, CallFingerprint { call: seq, count: 1 }, 8, 10 * seq + 1, seq == 0);
            ring.start(seq, 10 * seq + 2);
            if seq < 5 {
                ring.end(seq, 10 * seq + 3, if seq == 4 { Outcome::Failed } else { Outcome::Ok });
            }
        }
        // Updates of an overwritten entry have no effect.
        ring.end(1, 99, Outcome::Failed);
        let found = ring.entries();
        let seen: Vec<_> = found.iter().map(|e| (e.seq, e.fingerprint.call, e.ended, e.outcome)).collect();
        let ok = Outcome::Ok;
        assert_eq!(
            seen,
            [(2, 2, 23, ok), (3, 3, 33, ok), (4, 4, 43, Outcome::Failed), (5, 5, 0, Outcome::Running)]
        );
    }

    #[test]
    fn disabled_ring_keeps_nothing_and_allocates_nothing() {
        let ring = Ring::new(0);
        ring.submit(0, CallFingerprint::default(), 8, 1, true);
        ring.end(0, 2, Outcome::Ok);
        assert!(ring.entries().is_empty() && ring.rows.get().is_none());
        let unused = Ring::new(1024);
        assert!(unused.entries().is_empty() && unused.rows.get().is_none());
    }

    #[test]
    fn entry_read_during_writes_belongs_to_one_operation() {
        let (ring, stop) = (Ring::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in 0..200_000 {
                    ring.submit(seq, CallFingerprint { call: seq, count: seq }, seq, seq, true);
                    ring.end(seq, seq + 1, Outcome::Ok);
                }
                stop.store(true, Ordering::Relaxed);
            });
            while !stop.load(Ordering::Relaxed) {
                for entry in ring.entries() {
                    let Entry { seq, fingerprint, bytes, submitted, started, .. } = entry;
                    assert_eq!(
                        [fingerprint.call, fingerprint.count, bytes, submitted, started],
                        [seq; 5],
                        "{entry:?}"
                    );
                }
            }
        });
    }
}
