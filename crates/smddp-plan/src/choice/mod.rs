//! Choice of algorithm, segment size and slots, by a cost model with fixed constants and by user settings.
//!
//! [`decide`] is the only entry point: the engine binds its result, and every report or simulation of the
//! engine calls it too.
//!
//! The same call shape gives the same choice on every rank. Inside a node no measured value is used. Between
//! nodes the parameters of a [`Network`] may be measured, but they do not affect the algorithm of a reducing
//! collective. A reduction therefore has the same bits in every run; its segment size does not change them.

mod alternatives;
mod between;
mod cost;
mod cut;
mod need;
mod shape;

pub use alternatives::alternatives;
pub use shape::{Counts, GroupShape, Memory, Settings, Shape};

use crate::algorithms::Algorithm;
use crate::format::{Format, GROUP};
use crate::ir::Collective;
use shape::Case;

/// Algorithm and sizes of a call. Every rank of the group must obtain the same choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Algorithm of the plan.
    pub algorithm: Algorithm,
    /// Bytes of a block that move as one piece; a multiple of 64.
    pub segment: usize,
    /// Slots per channel: at least 2, or 1 if every channel carries one message.
    pub depth: usize,
    /// Bytes of each block that a writer may send ahead of its readers on other nodes.
    pub ahead: usize,
}

impl Choice {
    /// Returns the slots of a channel between nodes at its readers: data in flight has a reserved slot.
    pub fn window(&self) -> usize {
        self.depth.max(self.ahead.div_ceil(self.segment.max(1)))
    }
}

/// Cost parameters of messages between nodes. Ranks of a group must agree on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Time from a write of one rank to the read of another.
    pub latency_ns: f64,
    /// Cost of a message for its writer or reader, in addition to its bytes.
    pub message_ns: f64,
    /// Bandwidth of a node link in bytes per nanosecond, each way.
    pub bytes_per_ns: f64,
    /// Slowdown of a link when several nodes write to its node at once. A property of the transport, never
    /// measured. 1 means that senders are paced and do not queue.
    pub incast: f64,
}

impl Network {
    /// Sockets over a link of about 10 Gbit/s. Their streams share a link unevenly, and the last one ends
    /// late. On 4 nodes of 2 ranks at 1 Gbit/s the mesh takes 1.1 (16 MiB) to 1.3 times (1 MiB) as long as
    /// the ring.
    pub const ASSUMED: Self =
        Self { latency_ns: 15_000.0, message_ns: 1_000.0, bytes_per_ns: 1.2, incast: 1.25 };

    /// Parameters of a transport that paces its senders (EFA).
    pub const PACED: Self =
        Self { latency_ns: 15_000.0, message_ns: 300.0, bytes_per_ns: 200.0, incast: 1.0 };
}

/// Limits of a long path: one-way latency, and bytes in flight during a round trip.
const LONG_NS: f64 = 1e6;
const LONG_BYTES: f64 = (2 << 20) as f64;

impl Network {
    /// Returns the slowdown of several streams to one node compared with one stream. If one stream cannot
    /// fill a long path, several streams carry more in spite of sharing. Measured times of an all_gather of
    /// 64 MiB on 4 nodes at 1 Gbit/s (line rate: 0.42 s):
    /// - Round trip of 1 ms: 0.42 s by the mesh, 0.44 s by the ring.
    /// - Round trip of 10 ms: 0.46 to 0.53 s by the mesh, 0.42 s by the ring.
    /// - Round trip of 50 ms: 0.46 s by the mesh, 0.67 s by the ring.
    fn incast_slowdown(&self) -> f64 {
        let long = self.latency_ns >= LONG_NS && 2.0 * self.latency_ns * self.bytes_per_ns >= LONG_BYTES;
        if long { 1.0 } else { self.incast }
    }

    /// Returns the parameters of the transport without measured values.
    const fn fixed(self) -> Self {
        let Self { incast, .. } = self;
        if incast > 1.0 { Self { incast, ..Self::ASSUMED } } else { Self::PACED }
    }

    /// Returns the bytes in flight to a node for which its link never waits for credits: four times its
    /// volume per round trip. Twice the volume of a round trip queues in the network itself, credits queue
    /// behind traffic in the other direction, and the measured rate may be too low. An all_gather of 64 MiB
    /// on 2 nodes at 1 Gbit/s and a round trip of 10 ms takes 340 ms with a factor of 2.5, and 302 ms with 6.
    /// At line rate it would take 281 ms.
    pub fn in_flight_bytes(&self) -> usize {
        let round_trip = 2.0 * self.latency_ns;
        (4.0 * round_trip * self.bytes_per_ns) as usize
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::ASSUMED
    }
}

/// Reason for the algorithm of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The lowest cost in the cost model.
    Cost,
    /// Named by `Settings::algorithm`.
    Setting,
    /// Named by a row of `Settings::tune`.
    Table,
    /// The lowest cost, because the algorithm in the settings does not support this call.
    Unsupported(Algorithm),
}

/// Algorithm, segment and depth of a call, and the facts that binding needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Algorithm and sizes.
    pub choice: Choice,
    /// Reason for the algorithm.
    pub reason: Reason,
    /// Block sizes as the ranks have them; they may differ from the requested form.
    pub counts: Counts,
    /// Bytes of each input block and of each output block.
    pub blocks: [Vec<usize>; 2],
    /// True if every message is alone on its channel and fits into a header: the payload is then next to its flag.
    pub inline: bool,
    /// True for a reduction in canonical order.
    pub canonical: bool,
    /// Format of elements between nodes; `None` sends them unchanged.
    pub format: Option<Format>,
}

impl Decision {
    /// Returns the bytes of the whole buffer as nccl-tests counts them.
    pub fn bytes(&self) -> usize {
        self.blocks[0].iter().sum()
    }

    /// Returns the bytes of the longest block.
    pub fn longest(&self) -> usize {
        self.blocks.iter().flatten().copied().max().unwrap_or(0)
    }

    /// Returns true if the pairs of an all_to_all differ in size.
    pub const fn uneven_pairs(&self) -> bool {
        self.counts.are_pairs()
    }
}

/// Maximum size in bytes of a device buffer that every rank reduces in one hop.
const ONE_HOP: usize = 64 << 10;
/// Segment size for copies on a device, which need no pieces.
const WHOLE: usize = 1 << 40;

/// Returns algorithm, segment, depth and blocks of a call; the same on every rank.
///
/// The algorithm of the settings has priority, then the tuning table, if it supports the collective.
/// Otherwise the cost model decides.
pub fn decide(shape: &Shape, group: &GroupShape<'_>, settings: &Settings<'_>) -> Decision {
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
        case.inline_bytes = ONE_HOP;
    }
    let table = || settings.tune?.algorithm(shape.collective, case.bytes as u64, shape.memory.kind(), size);
    let requested = settings.algorithm.or_else(table);
    let supported = requested.and_then(|requested| forced(requested, &case));
    let reason = match (requested, supported) {
        (None, _) => Reason::Cost,
        (Some(requested), None) => Reason::Unsupported(requested),
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
    // A segment has whole elements and whole groups of a format, so that group boundaries do not depend on
    // the segment size.
    let whole = if case.format == Some(Format::Int8) { GROUP * size_of::<f32>() } else { 64 };
    choice.segment = choice.segment.max(whole).next_multiple_of(whole);
    // Uses only values that all ranks have, so that they agree.
    choice.depth = choice.depth.max(choice.algorithm.least_depth(case.block.div_ceil(choice.segment)));
    let inline = choice.algorithm == Algorithm::Publish
        && shape.memory == Memory::Host
        && case.fits(group.inline_bytes)
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

/// Returns the start of each block, and the end of the last.
fn starts(lengths: &[usize]) -> Vec<usize> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Converts an even all_to_all to pairs. A rank with equal split sizes and a rank without split sizes call
/// the same all_to_all, but neither has the sizes of the other. All ranks therefore plan uneven pairs, unless
/// the settings force an algorithm.
fn by_pairs(shape: &Shape, size: usize, settings: &Settings<'_>) -> Counts {
    match &shape.counts {
        Counts::Even(count) if shape.collective == Collective::AllToAll && settings.algorithm.is_none() => {
            Counts::Pairs(vec![*count; size], vec![*count; size])
        }
        counts => counts.clone(),
    }
}

/// Selects algorithm, segment and depth by cost.
///
/// On one node: `publish` or `mesh`. `publish` is a candidate if its whole message fits into a header; with headers up
/// to 8 KiB it then always wins. The other algorithms are never faster where one write reaches all readers in
/// one hop. The settings can name them.
///
/// On several nodes: one of the hierarchical algorithms. For a reducing collective the choice assumes
/// [`Network::ASSUMED`] with the [`Network::incast`] of the transport.
fn cheapest(case: &Case<'_>) -> Choice {
    if case.topology.nodes() > 1 {
        if let Some(choice) = cheapest_between(case) {
            return choice;
        }
        // No hierarchical plan keeps the requested order, so each contribution travels alone.
        let traffic = need::traffic(Algorithm::Mesh, case).unwrap_or_default();
        return cut::cut_between(Algorithm::Mesh, &traffic, case);
    }
    let algorithm = if cost::publish_wins(case) { Algorithm::Publish } else { Algorithm::Mesh };
    cut::cut(algorithm, &need::traffic(algorithm, case).unwrap_or_default(), case)
}

/// Returns the fastest hierarchical algorithm. `hier` supports every collective, so one exists unless an
/// order is required.
fn cheapest_between(case: &Case<'_>) -> Option<Choice> {
    let network = if case.collective.reduces() { case.network.fixed() } else { case.network };
    let candidates = Algorithm::ALL.into_iter().filter_map(|algorithm| {
        if !algorithm.is_hierarchical() || !case.allows(algorithm) || needs_many_connections(algorithm, case)
        {
            return None;
        }
        let traffic = need::traffic(algorithm, case)?;
        let (cost, _) = cut_between(algorithm, &traffic, &Case { network, ..*case });
        Some((cost?, algorithm, traffic))
    });
    let candidates: Vec<_> = candidates.collect();
    let least = candidates.iter().map(|(cost, ..)| *cost).min_by(f64::total_cmp)?;
    // Among equal costs the simplest algorithm wins.
    let (_, algorithm, traffic) = candidates.into_iter().find(|(cost, ..)| *cost <= EQUAL * least)?;
    Some(cut_between(algorithm, &traffic, case).1)
}

/// Maximum bytes of a block that counts as a small message.
const WORTH_CONNECTING: usize = 4 << 10;
/// Maximum number of nodes for a mesh of small messages over sockets.
const MAX_SMALL_MESH: usize = 128;

/// Returns true for a mesh of small messages whose connections cost more than it saves. Over sockets each rank opens a
/// connection to every other node. A measured latency that includes the delays of a busy host must not cause that:
/// with the default latency the cost model itself prefers fewer connections beyond about 90 nodes.
fn needs_many_connections(algorithm: Algorithm, case: &Case<'_>) -> bool {
    algorithm == Algorithm::HierMesh
        && matches!(case.collective, Collective::Barrier | Collective::AllGather)
        && case.network.incast > 1.0
        && case.topology.nodes() > MAX_SMALL_MESH
        && case.block <= WORTH_CONNECTING
}

/// Ratio up to which two costs are equal.
const EQUAL: f64 = 1.02;
/// Maximum ratio of the cost of another piece size to that of the default.
const CLEARLY: f64 = 0.92;

/// Returns the cost and the choice with the default piece size. For collectives with one root and several
/// hops another size may be clearly better.
fn cut_between(algorithm: Algorithm, traffic: &need::Traffic, case: &Case<'_>) -> (Option<f64>, Choice) {
    let own = cut::cut_between(algorithm, traffic, case);
    let cost = |choice: &Choice| between::cost(choice, traffic, case, &case.network);
    let Some(usual) = cost(&own) else { return (None, own) };
    if !matches!(case.collective, Collective::Broadcast | Collective::Reduce) {
        return (Some(usual), own);
    }
    let others = cut::others(own, traffic, case).filter_map(|choice| Some((cost(&choice)?, choice)));
    match others.min_by(|(a, _), (b, _)| a.total_cmp(b)) {
        Some((best, choice)) if best < CLEARLY * usual => (Some(best), choice),
        _ => (Some(usual), own),
    }
}

/// Returns segment and depth for a forced algorithm. `None` if it does not support the collective, rounds a
/// 16-bit reduction more than once, or needs all ranks on one node (`publish`).
fn forced(algorithm: Algorithm, case: &Case<'_>) -> Option<Choice> {
    if !case.allows(algorithm) {
        return None;
    }
    let traffic = need::traffic(algorithm, case)?;
    if case.topology.nodes() == 1 {
        return Some(cut::cut(algorithm, &traffic, case));
    }
    (algorithm != Algorithm::Publish).then(|| cut_between(algorithm, &traffic, case).1)
}
