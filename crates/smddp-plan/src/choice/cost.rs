//! Cost model of the two algorithms for one node: hops, messages and bytes of the busiest rank at fixed
//! rates.
//!
//! The rates are for shared memory on one socket, rounded from measurements of a two-rank exchange. A flag
//! reaches another core in about 0.15 us. A message in a header costs its reader or writer about 0.05 us beyond
//! its bytes. A message in a ring of slots (space check, flag, release) costs about 0.25 us. Bytes move at
//! about 10 GB/s through slots, and at twice that rate while they fit the cache of one core. Only the ratios
//! matter.

use super::shape::Case;
use crate::ir::Collective;

/// Nanoseconds from a write of one rank to the read of another.
const HOP: f64 = 150.0;
/// Nanoseconds per message in a header.
const INLINE_MESSAGE: f64 = 50.0;
/// Nanoseconds per message in a ring of slots.
const SLOT_MESSAGE: f64 = 250.0;
/// Bytes per nanosecond through headers.
const INLINE_RATE: f64 = 20.0;
/// Bytes per nanosecond through slots.
const SLOT_RATE: f64 = 10.0;

/// Returns true if `publish` with its message in a header is at least as fast as `mesh`.
pub(super) fn publish_wins(case: &Case<'_>) -> bool {
    use Collective::*;
    let n = case.size as f64;
    let peers = n - 1.0;
    let share = peers / n;
    // Work of the busiest rank: sequential hops, messages written and read, and passes over the whole buffer.
    // Segments are omitted because they cost both algorithms the same.
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
    case.fits_inline() && time(publish, INLINE_MESSAGE, INLINE_RATE) <= time(mesh, SLOT_MESSAGE, SLOT_RATE)
}
