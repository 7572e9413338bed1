//! Which algorithm, how it is cut, and into which pieces: by a cost model with fixed constants, and by what the user says.
//!
//! [`decide`] is the only way to a choice: the engine binds what it says, and everything that tells or simulates what
//! the engine would do asks it too.
//!
//! The same shape gives the same choice on every rank. Inside a node nothing is measured. Between nodes the prices of
//! a [`Network`] may be, but they do not decide a reducing collective's algorithm, so that a reduction has the same
//! bits today and tomorrow; how large its segments are changes none.

mod alternatives;
mod between;
mod cost;
mod cut;
mod need;
mod shape;

pub use alternatives::alternatives;
pub use shape::{Counts, Group, Memory, Settings, Shape};

use crate::algorithms::Algorithm;
use crate::format::{Format, GROUP};
use crate::ir::Collective;
use shape::Case;

/// What was chosen. Every rank of the group must come to the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    pub algorithm: Algorithm,
    /// Bytes of a block that move as one piece; a multiple of 64.
    pub segment: usize,
    /// Cells a channel should have (at least 2, or 1 where every channel carries one message).
    pub depth: usize,
    /// Bytes of each block that a writer may be ahead of its readers on other nodes.
    pub ahead: usize,
}

impl Choice {
    /// Cells that a channel between nodes has at its readers: what is on its way to them has a place.
    pub fn window(&self) -> usize {
        self.depth.max(self.ahead.div_ceil(self.segment.max(1)))
    }
}

/// What a message between nodes costs. Ranks of a group must agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// From a rank's write to another's read.
    pub latency_ns: f64,
    /// What each message costs its writer or reader beyond its bytes.
    pub message_ns: f64,
    /// Bytes that a node's link carries in a nanosecond, each way.
    pub bytes_per_ns: f64,
    /// How much longer a link takes for its bytes when several nodes write to its node at once; a property of the
    /// transport, never measured. 1: senders are paced so that none waits in line.
    pub incast: f64,
}

impl Network {
    /// Sockets over a link of about 10 Gbit/s. Their streams share a link by chance, and the last one ends late: 4
    /// nodes of 2 ranks at 1 Gbit/s took 1.1 (16 MiB) to 1.3 times (1 MiB) as long by the mesh as round a ring.
    pub const ASSUMED: Self =
        Self { latency_ns: 15_000.0, message_ns: 1_000.0, bytes_per_ns: 1.2, incast: 1.25 };

    /// The same where the transport paces its senders (EFA).
    pub const PACED: Self =
        Self { latency_ns: 15_000.0, message_ns: 300.0, bytes_per_ns: 200.0, incast: 1.0 };
}

/// A way is long from here on: one way, and bytes that are on it in a round trip.
const LONG_NS: f64 = 1e6;
const LONG_BYTES: f64 = (2 << 20) as f64;

impl Network {
    /// How much longer several streams to one node take than one. On a way so long that one stream's buffers do not fill it
    /// several carry more, however they share it. (all_gather of 64 MiB, 4 nodes at 1 Gbit/s, mesh and ring: 0.42 and 0.44 s
    /// with 1 ms there and back, 0.46 to 0.53 and 0.42 with 10, 0.46 and 0.67 with 50; the line 0.42.)
    fn crowd(&self) -> f64 {
        let long = self.latency_ns >= LONG_NS && 2.0 * self.latency_ns * self.bytes_per_ns >= LONG_BYTES;
        if long { 1.0 } else { self.incast }
    }

    /// What the transport alone says, whatever was measured.
    const fn fixed(self) -> Self {
        let Self { incast, .. } = self;
        if incast > 1.0 { Self { incast, ..Self::ASSUMED } } else { Self::PACED }
    }

    /// Bytes that should be on their way to a node, so that its link never waits for word of free room: four times what it
    /// carries in a round trip. Twice as much stands in line in the network itself, and that word behind what goes the
    /// other way; and what was measured may be short of the rate. (all_gather of 64 MiB, 2 nodes at 1 Gbit/s and 10 ms
    /// there and back: 340 ms with 2.5 times, 302 with 6, the line 281.)
    pub fn under_way(&self) -> usize {
        let round_trip = 2.0 * self.latency_ns;
        (4.0 * round_trip * self.bytes_per_ns) as usize
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::ASSUMED
    }
}

/// Reason of a decision's algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The lowest cost by the planner's formulas.
    Cost,
    /// `Settings::algorithm` names it.
    Setting,
    /// A row of `Settings::tune` names it.
    Table,
    /// The lowest cost, because the algorithm that the settings name does not support this call.
    Unsupported(Algorithm),
}

/// Algorithm, segment and depth of a call, with the facts that a binding needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub choice: Choice,
    pub reason: Reason,
    /// How blocks are known to the ranks: not always as they were asked for.
    pub counts: Counts,
    /// Bytes of each block that comes in, and that goes out.
    pub blocks: [Vec<usize>; 2],
    /// Every message is alone on its channel and fits a slot: it lies beside its flag.
    pub inline: bool,
    /// A reduction in one order, whatever else was chosen.
    pub canonical: bool,
    /// How elements travel between nodes, if not as they are.
    pub format: Option<Format>,
}

impl Decision {
    /// Bytes of the whole buffer, as nccl-tests counts.
    pub fn bytes(&self) -> usize {
        self.blocks[0].iter().sum()
    }

    /// Bytes of the longest block.
    pub fn longest(&self) -> usize {
        self.blocks.iter().flatten().copied().max().unwrap_or(0)
    }

    pub const fn uneven_pairs(&self) -> bool {
        self.counts.are_pairs()
    }
}

/// Whole buffers of a device up to this many bytes are reduced by every rank, in one hop.
const ONE_HOP: usize = 64 << 10;
/// One piece, however large: copies on a device need no others.
const WHOLE: usize = 1 << 40;

/// Algorithm, segment, depth and blocks of a call; the same on every rank.
///
/// What the settings name comes first, where it does the collective: the algorithm, then the table. Else it is by cost.
pub fn decide(shape: &Shape, group: &Group<'_>, settings: &Settings<'_>) -> Decision {
    let size = group.topology.size();
    let counts = by_pairs(shape, size, settings);
    let shape = &Shape { counts, ..shape.clone() };
    let bytes = |counts: &[usize]| counts.iter().map(|count| count * shape.element).collect::<Vec<_>>();
    let input = bytes(&shape.counts.blocks(size, shape.element));
    let output = match &shape.counts {
        Counts::Pairs(_, receive) => bytes(receive),
        _ => input.clone(),
    };
    let starts = starts(&input);
    let mut case = Case::new(shape, &starts, group, settings);
    if shape.memory != Memory::Host {
        case.slot = ONE_HOP;
    }
    let table = || settings.tune?.algorithm(shape.collective, case.bytes as u64, shape.memory.place(), size);
    let wanted = settings.algorithm.or_else(table);
    let supported = wanted.and_then(|wanted| named(wanted, &case));
    let reason = match (wanted, supported) {
        (None, _) => Reason::Cost,
        (Some(wanted), None) => Reason::Unsupported(wanted),
        (Some(_), Some(_)) if settings.algorithm.is_some() => Reason::Setting,
        (Some(_), Some(_)) => Reason::Table,
    };
    let mut choice = supported.unwrap_or_else(|| cheapest(&case));
    if let Some(segment) = settings.segment {
        choice.segment = segment;
    }
    if group.topology.nodes() == 1 && shape.memory == Memory::Reference {
        choice.segment = WHOLE;
    }
    // A segment is whole elements; and whole groups of a format, so that groups begin where they do in any other cut.
    let whole = if case.format == Some(Format::Int8) { GROUP * size_of::<f32>() } else { 64 };
    choice.segment = choice.segment.max(whole).next_multiple_of(whole);
    // By what all ranks know, so that they agree.
    choice.depth = choice.depth.max(choice.algorithm.least_depth(case.block.div_ceil(choice.segment)));
    let inline = choice.algorithm == Algorithm::Publish
        && shape.memory == Memory::Host
        && case.fits(group.slot)
        && case.block <= choice.segment;
    let canonical = settings.canonical && shape.collective.reduces();
    let format = case.format;
    Decision {
        choice,
        reason,
        counts: shape.counts.clone(),
        blocks: [input, output],
        inline,
        canonical,
        format,
    }
}

/// Where blocks of these lengths begin, and the last one ends.
fn starts(lengths: &[usize]) -> Vec<usize> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// A rank that gives equal split sizes and one that gives none make the same all_to_all, and neither knows the
/// other's sizes: so all of them go the way of uneven pairs, unless an algorithm is forced.
fn by_pairs(shape: &Shape, size: usize, settings: &Settings<'_>) -> Counts {
    match &shape.counts {
        Counts::Even(count) if shape.collective == Collective::AllToAll && settings.algorithm.is_none() => {
            Counts::Pairs(vec![*count; size], vec![*count; size])
        }
        counts => counts.clone(),
    }
}

/// Picks algorithm, segment and depth, all by cost.
///
/// On one node: `publish` or `mesh`. `publish` is a candidate where its whole message fits a slot; with slots up to
/// 8 KiB it then always wins. The others are never quicker where one write reaches all readers in one hop; the settings can
/// name them.
///
/// On several: one of the hierarchical algorithms. A reducing collective's is chosen for [`Network::ASSUMED`], with
/// the transport's own [`Network::incast`].
fn cheapest(case: &Case<'_>) -> Choice {
    if case.topology.nodes() > 1 {
        if let Some(choice) = cheapest_between(case) {
            return choice;
        }
        // Nodes whose sums are not in the order asked for: each rank's contribution goes by itself.
        let need = need::need(Algorithm::Mesh, case).unwrap_or_default();
        return cut::cut_between(Algorithm::Mesh, &need, case);
    }
    let algorithm = if cost::publish_wins(case) { Algorithm::Publish } else { Algorithm::Mesh };
    cut::cut(algorithm, &need::need(algorithm, case).unwrap_or_default(), case)
}

/// Of the hierarchical algorithms the quickest. `hier` does every collective, so there is one.
fn cheapest_between(case: &Case<'_>) -> Option<Choice> {
    let network = if case.collective.reduces() { case.network.fixed() } else { case.network };
    let priced = Algorithm::ALL.into_iter().filter_map(|algorithm| {
        if !algorithm.is_hierarchical() || !case.allows(algorithm) {
            return None;
        }
        let need = need::need(algorithm, case)?;
        let (cost, _) = cut_between(algorithm, &need, &Case { network, ..*case });
        Some((cost?, algorithm, need))
    });
    let priced: Vec<_> = priced.collect();
    let least = priced.iter().map(|(cost, ..)| *cost).min_by(f64::total_cmp)?;
    // Of equals the simplest.
    let (_, algorithm, need) = priced.into_iter().find(|(cost, ..)| *cost <= EQUAL * least)?;
    Some(cut_between(algorithm, &need, case).1)
}

/// Costs that differ less are equal.
const EQUAL: f64 = 1.02;
/// Another cut than the usual one has to be this much better by the model.
const CLEARLY: f64 = 0.92;

/// The usual cut, and its cost. Where all goes from one rank or to one, piece by piece over hops, another may be
/// clearly better.
fn cut_between(algorithm: Algorithm, need: &need::Need, case: &Case<'_>) -> (Option<f64>, Choice) {
    let own = cut::cut_between(algorithm, need, case);
    let cost = |choice: &Choice| between::cost(choice, need, case, &case.network);
    let Some(usual) = cost(&own) else { return (None, own) };
    if !matches!(case.collective, Collective::Broadcast | Collective::Reduce) {
        return (Some(usual), own);
    }
    let others = cut::others(own, need, case).filter_map(|choice| Some((cost(&choice)?, choice)));
    match others.min_by(|(a, _), (b, _)| a.total_cmp(b)) {
        Some((best, choice)) if best < CLEARLY * usual => (Some(best), choice),
        _ => (Some(usual), own),
    }
}

/// Segment and depth for an algorithm that the user asks for; `None` where it does not do the collective, would
/// round a 16-bit reduction more than once although that is forbidden, or needs all ranks on one node (`publish`).
fn named(algorithm: Algorithm, case: &Case<'_>) -> Option<Choice> {
    if !case.allows(algorithm) {
        return None;
    }
    let need = need::need(algorithm, case)?;
    if case.topology.nodes() == 1 {
        return Some(cut::cut(algorithm, &need, case));
    }
    (algorithm != Algorithm::Publish).then(|| cut_between(algorithm, &need, case).1)
}
