//! Time of the two algorithms that are chosen on one node: hops, messages and bytes of the busiest rank, each at a fixed price.
//!
//! The prices are those of shared memory on one socket, rounded from measurements of a two-rank exchange:
//! a flag reaches another core in about 0.15 us; a message in a slot costs its reader or writer about 0.05 us
//! beyond its bytes, one in a ring of cells (room, flag, release) about 0.25 us; bytes move at about 10 GB/s in
//! and out of cells, at twice that while they are few and stay in a core's own cache. Only their proportions
//! matter.

use super::shape::Case;
use crate::ir::Collective;

/// Nanoseconds from a rank's write to another's read.
const HOP: f64 = 150.0;
/// Nanoseconds for a message in a slot.
const SLOT_MESSAGE: f64 = 50.0;
/// Nanoseconds for a message in a ring of cells.
const CELL_MESSAGE: f64 = 250.0;
/// Bytes per nanosecond, from and to slots.
const SLOT_RATE: f64 = 20.0;
/// Bytes per nanosecond, from and to cells.
const CELL_RATE: f64 = 10.0;

/// What the busiest rank does: hops one after the other, messages written and read, and how often the whole
/// buffer passes through its hands.
struct Work {
    hops: f64,
    messages: f64,
    passes: f64,
}

impl Work {
    /// Modelled nanoseconds. Segments are left out: they cost both alike.
    fn time(&self, message: f64, bytes: f64, rate: f64) -> f64 {
        self.hops * HOP + self.messages * message + self.passes * bytes / rate
    }
}

/// Whether `publish` with its message in a slot is no slower than `mesh`.
pub(super) fn publish_wins(case: &Case<'_>) -> bool {
    use Collective::*;
    let n = case.size as f64;
    let peers = n - 1.0;
    let share = peers / n;
    let publish = match case.collective {
        Barrier => (n, 0.0),
        AllGather | Broadcast | Gather | Scatter => (n, 1.0),
        ReduceScatter | AllToAll => (n, 1.0 + share),
        AllReduce => (n, n),
        Reduce => (peers, peers),
    };
    let mesh = match case.collective {
        Barrier => (1.0, n, 0.0),
        AllGather | Broadcast | Gather | Scatter => (1.0, n, 1.0),
        ReduceScatter | AllToAll => (1.0, 2.0 * peers, 2.0 * share),
        Reduce => (2.0, 3.0 * peers, 3.0 * share),
        AllReduce => (2.0, 3.0 * peers + 1.0, 3.0 * share + 1.0 / n),
    };
    let work = |(hops, messages, passes)| Work { hops, messages, passes };
    let bytes = case.bytes as f64;
    let publish = work((1.0, publish.0, publish.1)).time(SLOT_MESSAGE, bytes, SLOT_RATE);
    case.fits_slot() && publish <= work(mesh).time(CELL_MESSAGE, bytes, CELL_RATE)
}
