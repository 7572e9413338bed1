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

/// Whether `publish` with its message in a slot is no slower than `mesh`.
pub(super) fn publish_wins(case: &Case<'_>) -> bool {
    use Collective::*;
    let n = case.size as f64;
    let peers = n - 1.0;
    let share = peers / n;
    // What the busiest rank does: hops one after the other, messages written and read, and how often the whole buffer
    // passes through its hands. Segments are left out: they cost both alike.
    let time = |(hops, messages, passes): (f64, f64, f64), message: f64, rate: f64| {
        hops * HOP + messages * message + passes * case.bytes as f64 / rate
    };
    let publish = match case.collective {
        Barrier => (1.0, n, 0.0),
        AllGather | Broadcast | Gather | Scatter => (1.0, n, 1.0),
        ReduceScatter | AllToAll => (1.0, n, 1.0 + share),
        AllReduce => (1.0, n, n),
        Reduce => (1.0, peers, peers),
    };
    let mesh = match case.collective {
        Barrier => (1.0, n, 0.0),
        AllGather | Broadcast | Gather | Scatter => (1.0, n, 1.0),
        ReduceScatter | AllToAll => (1.0, 2.0 * peers, 2.0 * share),
        Reduce => (2.0, 3.0 * peers, 3.0 * share),
        AllReduce => (2.0, 3.0 * peers + 1.0, 3.0 * share + 1.0 / n),
    };
    case.fits_slot() && time(publish, SLOT_MESSAGE, SLOT_RATE) <= time(mesh, CELL_MESSAGE, CELL_RATE)
}
