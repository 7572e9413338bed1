//! Segment size and number of slots.

use super::need::{Traffic, traffic};
use super::shape::Case;
use super::{Choice, Network};
use crate::algorithms::Algorithm;
use crate::ir::Collective;

/// Cache line size; segments are whole cache lines.
const LINE: usize = 64;
/// Largest piece in bytes. Smaller pieces expose the cost per message. With larger ones two pieces exceed the
/// second-level cache.
const LARGEST: usize = 128 << 10;
/// Largest piece for two ranks with one slot each. An all_gather of 4 MiB takes 160 us with 128 KiB, 129 us
/// with this size and 137 us with 512 KiB. An all_reduce has two slots and takes 230 us with 128 KiB, 420 us
/// with this size.
const LARGEST_OF_TWO: usize = 256 << 10;
/// Smallest piece unless the staging memory is smaller: below it messages cost more than their bytes.
const SMALLEST: usize = 4 << 10;
/// The same between nodes for [`Network::ASSUMED`]: messages and their slots cost more there.
const SMALLEST_BETWEEN: usize = 64 << 10;
const LARGEST_BETWEEN: usize = 256 << 10;
/// Powers of two by which a network may change these two limits.
const MOST_DOUBLINGS: usize = 2;
/// Slots per channel between nodes, excluding the slots for data in flight ([`ahead`]).
const MAX_SLOTS: usize = 4;
/// Smallest piece for a slow link, and the maximum time in nanoseconds of one piece on a link. Pieces and
/// credits of free slots queue behind each other. An all_reduce of 16 MiB with pieces of 256, 128, 64, 32 KiB
/// takes 225, 221, 216, 208 ms on 4 nodes of 2 ranks at 1 Gbit/s. If processors are busier than the link (10
/// Gbit/s on two cores): 60, -, 70, 76 ms.
const SLOW_LINKS: usize = 32 << 10;
const LONGEST_NS: f64 = 220_000.0;
/// Largest message between nodes in bytes.
const LARGEST_MESSAGE: usize = 1 << 20;
/// Limits of the search for another piece size: smallest message, and powers of two around the default.
const LEAST_MESSAGE: usize = 8 << 10;
const MOST_HALVINGS: u32 = 5;
/// Minimum of bytes in flight, also on short paths, because processes may be delayed. With 64 MiB on 2 nodes
/// at 1 Gbit/s, all_gather, reduce_scatter and all_reduce take 322, 335, 569 ms with 128 KiB. With this value
/// they take 285, 272, 543 ms.
const LEAST_AHEAD: usize = 512 << 10;
/// Smallest piece of a block that is divided in two.
const WORTH_CUTTING: usize = 16 << 10;
/// Bytes in slots per rank if few ranks share the cache. A writer reuses a slot only when the copies of its
/// readers have left their caches. An all_gather of 64 MiB on two ranks takes 6.4 ms with 512 KiB of slots,
/// and 5.0 ms with 1 MiB.
const DEEP: usize = 1 << 20;
/// Bytes in all slots of more than four ranks together; these fit the last-level cache of a socket.
const STAGED: usize = 2 << 20;

/// Returns piece size and slots for an algorithm on one node.
///
/// A piece is half a block, so that two pieces overlap, up to 128 KiB (two ranks: 256 KiB). Up to four ranks
/// have about 1 MiB of slots each; more ranks have two slots per channel. From five ranks on pieces shrink,
/// so that all slots together fit the cache. Slots use at most a quarter of the staging memory; the number of
/// slots is reduced first, then their size.
pub(super) fn cut(algorithm: Algorithm, traffic: &Traffic, case: &Case<'_>) -> Choice {
    let Case { collective, size, block, .. } = *case;
    let whole = block.max(1).next_multiple_of(LINE);
    if size == 1 || (algorithm == Algorithm::Publish && case.fits_inline()) {
        return Choice { algorithm, segment: whole, depth: 1, ahead: 0 };
    }
    let (message, staged) = (traffic.message.max(1), traffic.staged());
    // Up to four ranks: about `DEEP` bytes of slots per rank.
    let largest = if size == 2 && staged == 1 { LARGEST_OF_TWO } else { LARGEST };
    let mut depth = if size <= 4 { (DEEP / (staged * largest)).clamp(2, 8) } else { 2 };

    let mut most = largest / message;
    if size > 4 {
        most = most.min(STAGED / (size * staged * depth));
    }
    let half = if block >= 2 * WORTH_CUTTING { block.div_ceil(2).next_multiple_of(LINE) } else { whole };
    let mut segment = half.min(down(most).max(SMALLEST));

    let budget = case.staging / 4 / staged;
    if depth * segment > budget {
        depth = 2;
        segment = segment.min(down(budget / depth));
    }
    if segment >= whole && one_message_a_segment(algorithm, collective) {
        depth = algorithm.least_depth(1);
    }
    Choice { algorithm, segment, depth, ahead: 0 }
}

/// Returns piece size and slots for a plan between nodes.
///
/// A piece is a quarter of a block, so that received data moves inside the node while the rest is on the
/// wire. It has between 64 KiB and 256 KiB, or the limits for the network ([`bounds`]); a message costs as
/// much as about ten thousand bytes. The send slots and the receive slots of a rank use at most a quarter of
/// the staging memory each. The number of slots is reduced first, then their size.
pub(super) fn cut_between(algorithm: Algorithm, traffic: &Traffic, case: &Case<'_>) -> Choice {
    let whole = case.block.max(1).next_multiple_of(LINE);
    let (smallest, largest) = bounds(&case.network);
    let quarter = case.block.div_ceil(4).clamp(smallest, largest);
    // A message respects this limit independent of its number of blocks.
    let most = (LARGEST_MESSAGE / traffic.message).max(SMALLEST);
    let mut segment = quarter.min(most).min(whole).next_multiple_of(LINE);
    let budget = case.staging / 4 / traffic.staged();
    let depth = if MAX_SLOTS * segment <= budget { MAX_SLOTS } else { 2 };
    segment = segment.min(down(budget / depth));
    Choice { algorithm, segment, depth, ahead: ahead(traffic, case) }
}

/// Returns the bytes of a block that may be in flight to another node. Each channel may have the amount that
/// the link needs, because the channels of a ring are busy one after the other. Together they use at most
/// their share of the staging memory.
fn ahead(traffic: &Traffic, case: &Case<'_>) -> usize {
    let share = case.staging / 2 / traffic.staged();
    case.network.in_flight_bytes().max(LEAST_AHEAD).min(share)
}

/// Returns other piece sizes for the same plan, with as many slots as fit the staging memory.
pub(super) fn others(own: Choice, traffic: &Traffic, case: &Case<'_>) -> impl Iterator<Item = Choice> {
    let room = case.staging / 4 / traffic.staged();
    let whole = case.block.max(1).next_multiple_of(LINE);
    let pieces = (1..=MOST_HALVINGS).flat_map(move |k| [own.segment >> k, own.segment << k]);
    pieces.filter_map(move |piece| {
        let segment = piece.next_multiple_of(LINE);
        let depth = if MAX_SLOTS * segment <= room { MAX_SLOTS } else { 2 };
        let fits = segment * traffic.message >= LEAST_MESSAGE && segment <= whole && depth * segment <= room;
        fits.then_some(Choice { segment, depth, ..own })
    })
}

/// Returns the smallest and the largest piece between nodes.
///
/// Consider a block in pieces of s bytes. Each piece costs its messages m, and each hop but one costs the
/// link time s / b of a piece. The sum is least for an s proportional to the square root of m b. Therefore
/// the limits double if m b is four times that of [`Network::ASSUMED`] and halve if it is a quarter; values
/// between keep them. The path length does not matter: enough pieces are in flight to fill it ([`ahead`]).
fn bounds(network: &Network) -> (usize, usize) {
    let product = |n: &Network| n.message_ns * n.bytes_per_ns;
    // Multiplications and comparisons only: the result is the same on every rank, independent of its math
    // library.
    let (mut ratio, mut smallest, mut largest) =
        (product(network) / product(&Network::ASSUMED), SMALLEST_BETWEEN, LARGEST_BETWEEN);
    for _ in 0..MOST_DOUBLINGS {
        if ratio >= 4.0 {
            (ratio, smallest, largest) = (ratio / 4.0, 2 * smallest, 2 * largest);
        } else if ratio <= 0.25 {
            (ratio, smallest, largest) = (ratio * 4.0, smallest / 2, largest / 2);
        }
    }
    // A piece also occupies the link only for a limited time.
    let timely = ((network.bytes_per_ns * LONGEST_NS) as usize).next_power_of_two().max(SLOW_LINKS);
    (smallest.min(timely), largest.min(timely))
}

/// Returns the bytes that all slots of one channel may use; all channels of a rank use a quarter of the
/// staging memory.
pub(super) fn room(algorithm: Algorithm, case: &Case<'_>) -> Option<usize> {
    Some(case.staging / 4 / traffic(algorithm, case)?.staged())
}

/// Rounds down to whole cache lines, at least one.
fn down(bytes: usize) -> usize {
    (bytes / LINE * LINE).max(LINE)
}

/// Returns true if a channel carries at most one message per segment.
fn one_message_a_segment(algorithm: Algorithm, collective: Collective) -> bool {
    match algorithm {
        Algorithm::Publish => true,
        Algorithm::Mesh => collective != Collective::Broadcast,
        _ => false,
    }
}
