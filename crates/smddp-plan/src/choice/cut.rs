//! Segment size and number of cells.

use super::need::{Need, need};
use super::shape::Case;
use super::{Choice, Network};
use crate::algorithms::Algorithm;
use crate::ir::Collective;

/// Segments are whole cache lines.
const LINE: usize = 64;
/// Largest piece: below it the cost per message shows, above it two pieces leave the second-level cache.
const LARGEST: usize = 128 << 10;
/// Largest piece of two ranks that have one cell of it each (all_gather of 4 MiB: 160 us with 128 KiB, 129 with
/// this, 137 with 512 KiB; all_reduce, which has two, 230 with 128 KiB and 420 with this).
const LARGEST_OF_TWO: usize = 256 << 10;
/// Smallest piece, unless staging is shorter than that: below it messages cost more than their bytes.
const SMALLEST: usize = 4 << 10;
/// The same between nodes, for [`Network::ASSUMED`]: there messages and their cells cost more.
const SMALLEST_BETWEEN: usize = 64 << 10;
const LARGEST_BETWEEN: usize = 256 << 10;
/// A network makes these two at most four times as large or small.
const MOST_DOUBLINGS: usize = 2;
/// Cells of a channel where there are several nodes, but for what is on its way ([`ahead`]).
const MOST_CELLS: usize = 4;
/// Smallest piece that a slow link makes of it, and nanoseconds that a link may take for a piece: pieces wait in line
/// behind each other, and for word of free cells that stands in the same lines. all_reduce of 16 MiB, 4 nodes of 2
/// ranks at 1 Gbit/s, by pieces of 256, 128, 64, 32 KiB: 225, 221, 216, 208 ms; where the processors are busier than
/// the link (10 Gbit/s on two cores) 60, -, 70, 76.
const SLOW_LINKS: usize = 32 << 10;
const LONGEST_NS: f64 = 220_000.0;
/// Largest message between nodes.
const LARGEST_MESSAGE: usize = 1 << 20;
/// Where another cut is looked for: smallest message, and how far from the own cut.
const LEAST_MESSAGE: usize = 8 << 10;
const MOST_HALVINGS: u32 = 5;
/// Bytes that may be on their way however short it is: processes are held up, too. (64 MiB, 2 nodes at 1 Gbit/s: with
/// 128 KiB all_gather 322 ms, reduce_scatter 335, all_reduce 569; with this 285, 272, 543.)
const LEAST_AHEAD: usize = 512 << 10;
/// A block is not cut in two pieces smaller than this.
const WORTH_CUTTING: usize = 16 << 10;
/// Cells of one rank where few share the cache: a cell is written again only when its readers' copies have left
/// their own caches (AG 64 MiB, two ranks: 6.4 ms with 512 KiB of cells, 5.0 ms with 1 MiB).
const DEEP: usize = 1 << 20;
/// What more than four ranks together should have in cells, so that it stays in a socket's last-level cache.
const STAGED: usize = 2 << 20;

/// Pieces and cells for an algorithm that does the collective.
///
/// Half a block, so that two pieces overlap, up to 128 KiB (two ranks: 256 KiB); up to four ranks have about a megabyte of cells, more have two a
/// channel;
/// from five ranks on pieces shrink so that all cells together stay in cache; and cells take no more than a
/// quarter of the staging, for which first cells and then bytes are given up.
pub(super) fn cut(algorithm: Algorithm, need: &Need, case: &Case<'_>) -> Choice {
    let Case { collective, size, block, .. } = *case;
    let whole = block.max(1).next_multiple_of(LINE);
    if size == 1 || (algorithm == Algorithm::Publish && case.fits_slot()) {
        return Choice { algorithm, segment: whole, depth: 1, ahead: 0 };
    }
    let (message, staged) = (need.message.max(1), need.staged());
    // Up to four ranks: about DEEP bytes of cells a rank.
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

/// Pieces and cells where a plan goes between nodes.
///
/// A quarter of a block, so that what arrives moves on inside the node while the rest is on the wire, but no less
/// than 64 KiB if there is as much (a message costs as much as some ten thousand bytes) and no more than 256 KiB, or
/// what the network asks for instead ([`bounds`]). A rank's cells, and those that it keeps for what others send it, take
/// no more than a quarter of the staging each; for that first cells and then bytes are given up.
pub(super) fn cut_between(algorithm: Algorithm, need: &Need, case: &Case<'_>) -> Choice {
    let whole = case.block.max(1).next_multiple_of(LINE);
    let (smallest, largest) = bounds(&case.network);
    let quarter = case.block.div_ceil(4).clamp(smallest, largest);
    // A message is no larger than that either, however many blocks it has.
    let most = (LARGEST_MESSAGE / need.message).max(SMALLEST);
    let mut segment = quarter.min(most).min(whole).next_multiple_of(LINE);
    let budget = case.staging / 4 / need.staged();
    let depth = if MOST_CELLS * segment <= budget { MOST_CELLS } else { 2 };
    segment = segment.min(down(budget / depth));
    Choice { algorithm, segment, depth, ahead: ahead(need, case) }
}

/// Bytes of a block that may be on their way to another node: each channel may have all that the link needs, since those
/// of a ring are busy one after the other; together they keep to a share of the staging that is theirs.
fn ahead(need: &Need, case: &Case<'_>) -> usize {
    let share = case.staging / 2 / need.staged();
    case.network.under_way().max(LEAST_AHEAD).min(share)
}

/// Other pieces for the same plan, with as many cells as the staging has room for.
pub(super) fn others(own: Choice, need: &Need, case: &Case<'_>) -> impl Iterator<Item = Choice> {
    let room = case.staging / 4 / need.staged();
    let whole = case.block.max(1).next_multiple_of(LINE);
    let pieces = (1..=MOST_HALVINGS).flat_map(move |k| [own.segment >> k, own.segment << k]);
    pieces.filter_map(move |piece| {
        let segment = piece.next_multiple_of(LINE);
        let depth = if MOST_CELLS * segment <= room { MOST_CELLS } else { 2 };
        let fits = segment * need.message >= LEAST_MESSAGE && segment <= whole && depth * segment <= room;
        fits.then_some(Choice { segment, depth, ..own })
    })
}

/// The smallest and the largest piece between nodes.
///
/// Of a block cut in pieces of s bytes each piece costs its messages m, and every hop but one the time of a piece on the
/// link, s / b: the sum is least for an s that grows with the square root of m b. So the bounds double where m b is four
/// times that of [`Network::ASSUMED`], and halve where it is a quarter; whatever is between leaves them alone. How long
/// the way is does not matter: as many of them are under way as fill it ([`ahead`]).
fn bounds(network: &Network) -> (usize, usize) {
    let product = |n: &Network| n.message_ns * n.bytes_per_ns;
    // Multiplied and compared only: every rank gets the same, whatever its mathematical library.
    let (mut ratio, mut smallest, mut largest) =
        (product(network) / product(&Network::ASSUMED), SMALLEST_BETWEEN, LARGEST_BETWEEN);
    for _ in 0..MOST_DOUBLINGS {
        if ratio >= 4.0 {
            (ratio, smallest, largest) = (ratio / 4.0, 2 * smallest, 2 * largest);
        } else if ratio <= 0.25 {
            (ratio, smallest, largest) = (ratio * 4.0, smallest / 2, largest / 2);
        }
    }
    // And no piece keeps the others waiting for long.
    let timely = ((network.bytes_per_ns * LONGEST_NS) as usize).next_power_of_two().max(SLOW_LINKS);
    (smallest.min(timely), largest.min(timely))
}

/// Bytes that the cells of one channel may take together, so that all of a rank take a quarter of the staging.
pub(super) fn room(algorithm: Algorithm, case: &Case<'_>) -> Option<usize> {
    Some(case.staging / 4 / need(algorithm, case)?.staged())
}

/// Down to whole lines, at least one.
fn down(bytes: usize) -> usize {
    (bytes / LINE * LINE).max(LINE)
}

/// Whether a channel carries no more than one message of each segment.
fn one_message_a_segment(algorithm: Algorithm, collective: Collective) -> bool {
    match algorithm {
        Algorithm::Publish => true,
        Algorithm::Mesh => collective != Collective::Broadcast,
        _ => false,
    }
}
