//! Time of an algorithm: hops, messages and bytes of the busiest rank, each at a fixed price.
//!
//! The prices are those of shared memory on one socket, rounded from measurements of a two-rank exchange:
//! a flag reaches another core in about 0.15 us; a message in a slot costs its reader or writer about 0.05 us
//! beyond its bytes, one in a ring of cells (room, flag, release) about 0.25 us; bytes move at about 10 GB/s in
//! and out of cells, at twice that while they are few and stay in a core's own cache. Only their proportions
//! matter.

use super::shape::Case;
use crate::algorithms::Algorithm;
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

/// Modelled nanoseconds; `None` where the algorithm does not do the collective. Segments are left out: they
/// cost every algorithm alike.
pub(super) fn cost(algorithm: Algorithm, case: &Case<'_>) -> Option<f64> {
    if case.size < 2 {
        return Some(case.bytes as f64 / CELL_RATE);
    }
    let work = work(algorithm, case.collective, case.size as f64)?;
    let (message, rate) = match algorithm {
        Algorithm::Publish if case.fits_slot() => (SLOT_MESSAGE, SLOT_RATE),
        _ => (CELL_MESSAGE, CELL_RATE),
    };
    Some(work.hops * HOP + work.messages * message + work.passes * case.bytes as f64 / rate)
}

fn work(algorithm: Algorithm, collective: Collective, n: f64) -> Option<Work> {
    use Collective::*;
    let peers = n - 1.0;
    let share = peers / n;
    let rounds = n.log2().ceil();
    let (hops, messages, passes) = match (algorithm, collective) {
        (Algorithm::Publish, Barrier) => (1.0, n, 0.0),
        (Algorithm::Publish, AllGather | Broadcast | Gather | Scatter) => (1.0, n, 1.0),
        (Algorithm::Publish, ReduceScatter | AllToAll) => (1.0, n, 1.0 + share),
        (Algorithm::Publish, AllReduce) => (1.0, n, n),
        (Algorithm::Publish, Reduce) => (1.0, peers, peers),

        (Algorithm::Mesh, Barrier) => (1.0, n, 0.0),
        (Algorithm::Mesh, AllGather | Broadcast | Gather | Scatter) => (1.0, n, 1.0),
        (Algorithm::Mesh, ReduceScatter | AllToAll) => (1.0, 2.0 * peers, 2.0 * share),
        (Algorithm::Mesh, Reduce) => (2.0, 3.0 * peers, 3.0 * share),
        (Algorithm::Mesh, AllReduce) => (2.0, 3.0 * peers + 1.0, 3.0 * share + 1.0 / n),

        (Algorithm::Ring, AllGather | ReduceScatter) => (peers, 2.0 * peers, 2.0 * share),
        (Algorithm::Ring, AllReduce) => (2.0 * peers, 4.0 * peers, 4.0 * share),
        (Algorithm::Ring, Broadcast | Reduce) => (peers, 2.0 * n, 2.0),

        (Algorithm::Tree, Broadcast) => (rounds, 4.0, 1.5),
        (Algorithm::Tree, Reduce) => (rounds, 4.0, 2.0),
        (Algorithm::Tree, AllReduce) => (2.0 * rounds, 8.0, 3.5),

        (Algorithm::Recursive, AllGather) => (rounds, 2.0 * rounds, 2.0 * share),
        // Scratch is written and read once more.
        (Algorithm::Recursive, ReduceScatter) => (rounds, 2.0 * rounds, 3.0 * share),
        (Algorithm::Recursive, AllReduce) => (2.0 * rounds, 4.0 * rounds, 5.0 * share),

        (Algorithm::Log, AllGather) => (rounds, 2.0 * rounds, 2.0 * share),
        // Half of the blocks in each round, packed, sent, received and unpacked; and out of Scratch at the end.
        (Algorithm::Log, AllToAll) => (rounds, 2.0 * rounds, 2.0 * rounds + 2.0),
        (Algorithm::Log, Barrier) => (rounds, 2.0 * rounds, 0.0),
        _ => return None,
    };
    Some(Work { hops, messages, passes })
}
