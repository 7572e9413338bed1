//! Messages that need no cell. Over sockets the kernel takes them from where they lie, and brings them to where they belong; from
//! symmetric memory the ranks of the node take them themselves.
//!
//! A message may wait in this process after its step was taken, and may arrive long before the step that waits for it. So what
//! leaves from a place must stay there, and what arrives in one must be written by nobody else and not be read as something else any
//! more. A program that writes each block once promises that, but for a call in place, whose In is its Out: see [`ZeroCopy::sends_in_place`].

use smddp_plan::{Buffer, Collective};
use smddp_transport::SingleCopy;

use super::{BlockRun, BoundCall, BoundStep};

#[derive(Clone, Debug, Default)]
pub(crate) struct ZeroCopy {
    /// By outlet; none where all messages leave from cells, as on one node.
    sends: Vec<SendFrom>,
    /// Inlets whose messages arrive in Out, and where.
    receives: Vec<(usize, BlockRun)>,
    /// A call in place reads each block before anything can arrive for it.
    in_place_receives: bool,
    candidates: Vec<ZeroCopyCandidate>,
    /// Some of them in any memory.
    single_copy: bool,
}

/// An outlet whose messages may stay where they lie, if that is symmetric memory: one block each, or blocks in a row that are one
/// message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZeroCopyCandidate {
    pub(crate) channel: usize,
    pub(crate) run: BlockRun,
    send_from: SendFrom,
    /// Whether other memory will do.
    pub(crate) single_copy: SingleCopy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SendFrom {
    #[default]
    Slots,
    /// From In, Out or Scratch, unless the call is in place.
    UnlessInPlace,
    /// In any case.
    Always,
}

impl ZeroCopy {
    pub(super) fn new(bound: &BoundCall, collective: Collective, single_copy: SingleCopy) -> Self {
        // In and Out have the same blocks in the same places, if In is a part of Out at all.
        let in_place_receives = matches!(
            collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast | Collective::Reduce
        );
        let send_from = |channel| match bound.routed.leaves_directly(channel) {
            true if in_place_receives && is_unchanged_until_sent(bound, channel) => SendFrom::Always,
            true => SendFrom::UnlessInPlace,
            false => SendFrom::Slots,
        };
        let mut sends: Vec<SendFrom> = (0..bound.channel_layout.send_channels.len()).map(send_from).collect();
        if sends.iter().all(|&send_from| send_from == SendFrom::Slots) {
            sends.clear();
        }
        // Where bytes go one way, staging has both ranks copy at once; and all_reduce in place, which writes where it was read, is as often
        // slower.
        let benefits =
            matches!(collective, Collective::AllGather | Collective::AllToAll | Collective::ReduceScatter);
        let allowed = if benefits { single_copy } else { SingleCopy::Never };
        let candidates = find_candidates(bound, in_place_receives, allowed);
        let single_copy = candidates.iter().any(|candidate| candidate.single_copy != SingleCopy::Never);
        Self {
            sends,
            receives: direct_receives(bound, allowed != SingleCopy::Never),
            in_place_receives,
            candidates,
            single_copy,
        }
    }

    /// Outlets whose messages may stay where they lie.
    pub(crate) fn candidates(&self, in_place: bool) -> impl Iterator<Item = &ZeroCopyCandidate> {
        self.candidates.iter().filter(move |candidate| candidate.send_from == SendFrom::Always || !in_place)
    }

    /// Whether some may. `symmetric`: this process has such memory.
    pub(crate) fn has_candidates(&self, symmetric: bool) -> bool {
        self.single_copy || symmetric && !self.candidates.is_empty()
    }

    /// Whether messages of that outlet leave from where they lie. `in_place`: In and Out overlap.
    #[inline]
    pub(crate) fn sends_in_place(&self, channel: usize, in_place: bool) -> bool {
        match self.sends.get(channel) {
            Some(SendFrom::Always) => true,
            Some(SendFrom::UnlessInPlace) => !in_place,
            _ => false,
        }
    }

    /// Inlets whose messages arrive in Out, and where.
    pub(crate) fn receives_in_place(&self, in_place: bool) -> &[(usize, BlockRun)] {
        if in_place && !self.in_place_receives { &[] } else { &self.receives }
    }

    /// Whether it matters to a call that it is in place. `symmetric`: this process has such memory.
    pub(crate) fn depends_on_overlap(&self, symmetric: bool) -> bool {
        !self.receives.is_empty() || !self.sends.is_empty() || self.has_candidates(symmetric)
    }
}

/// Below, a copy costs less than hearing from each reader that it has read.
const MIN_ZERO_COPY_BYTES: usize = 16 << 10;

/// The same where the kernel is to copy it, which has to look up each page.
const MIN_SINGLE_COPY_BYTES: usize = 512 << 10;

/// Of each outlet whose messages are all made by one step, from one place or into one that is kept.
fn find_candidates(bound: &BoundCall, in_place: bool, single_copy: SingleCopy) -> Vec<ZeroCopyCandidate> {
    let mut sources: Vec<Vec<Option<BlockRun>>> = vec![Vec::new(); bound.channel_layout.send_channels.len()];
    for (_, step) in bound.pipelines.iter().flatten() {
        match step {
            BoundStep::Send { channel, source, .. } => sources[*channel].push(Some(*source)),
            BoundStep::Receive { forward: Some(channel), .. } => sources[*channel].push(None),
            BoundStep::Reduce(reduce) => {
                let kept = reduce.keep.then_some(reduce.result);
                reduce.send.iter().for_each(|&channel| sources[channel].push(kept));
            }
            BoundStep::Receive { .. } | BoundStep::Copy { .. } => {}
        }
    }
    let mut found = Vec::new();
    for (channel, sources) in sources.iter().enumerate() {
        let &[Some(run)] = &sources[..] else { continue };
        let contiguous = run.buffer != Buffer::Scratch && (run.blocks == 1 || run.row.is_some());
        let send_channel = &bound.channel_layout.send_channels[channel];
        let large_enough = send_channel.bytes >= MIN_ZERO_COPY_BYTES as u64;
        // Of several readers each saves less than the kernel costs it.
        let single_copy_read =
            send_channel.bytes >= MIN_SINGLE_COPY_BYTES as u64 && send_channel.readers.len() == 1;
        if contiguous && large_enough && bound.routed.may_stay(channel) {
            let always = in_place && is_unchanged_until_sent(bound, channel);
            let send_from = if always { SendFrom::Always } else { SendFrom::UnlessInPlace };
            let single_copy = if single_copy_read { single_copy } else { SingleCopy::Never };
            found.push(ZeroCopyCandidate { channel, run, send_from, single_copy });
        }
    }
    found
}

/// `single_copy`: this call's messages may lie in their writers' memory.
fn direct_receives(bound: &BoundCall, single_copy: bool) -> Vec<(usize, BlockRun)> {
    let mut uses = vec![0; bound.channel_layout.recv_channels.len()];
    let mut receives = Vec::new();
    for (_, step) in bound.pipelines.iter().flatten() {
        match step {
            BoundStep::Receive { from, to, .. } => {
                uses[from.recv_channel] += 1;
                let whole = from.before == 0 && from.message.blocks == to.blocks;
                // Segments of several blocks do not lie one behind the other.
                let contiguous = to.buffer == Buffer::Out && (to.blocks == 1 || to.row.is_some());
                let single_copy_read = single_copy
                    && bound.channel_layout.recv_channels[from.recv_channel].bytes
                        >= MIN_SINGLE_COPY_BYTES as u64
                    && bound.routed.may_be_fetched(from.recv_channel);
                let directly = single_copy_read || bound.routed.arrives_directly(from.recv_channel);
                if whole && contiguous && directly {
                    receives.push((from.recv_channel, *to));
                }
            }
            BoundStep::Reduce(reduce) => reduce.from.iter().for_each(|from| uses[from.recv_channel] += 1),
            BoundStep::Send { .. } | BoundStep::Copy { .. } => {}
        }
    }
    // The messages of one step alone.
    receives.retain(|&(recv_channel, _)| uses[recv_channel] == 1);
    receives
}

/// Whether what an outlet sends stays as it is until it has left, though In is Out: either nothing is written there, or only what
/// its one reader makes of it.
fn is_unchanged_until_sent(bound: &BoundCall, send_channel: usize) -> bool {
    let steps = || bound.pipelines.iter().flatten().map(|(_, step)| step);
    let sends = |step: &BoundStep| match step {
        BoundStep::Send { channel, source, .. } => Some((*channel, *source)),
        _ => None,
    };
    let one_reader = bound.channel_layout.send_channels[send_channel].readers.len() == 1;
    steps().filter_map(sends).filter(|&(channel, _)| channel == send_channel).all(|(_, source)| {
        let meets = |run: &BlockRun| {
            run.buffer != Buffer::Scratch
                && run.block < source.block + source.blocks
                && source.block < run.block + run.blocks
        };
        let once = steps().filter_map(sends).filter(|(_, other)| meets(other)).count() == 1;
        source.buffer == Buffer::Scratch
            || steps().all(|step| match step {
                BoundStep::Receive { to, .. } => !meets(to) || one_reader && once,
                BoundStep::Reduce(reduce) => !reduce.keep || !meets(&reduce.result),
                BoundStep::Copy { to, finish, .. } => !finish || !meets(to),
                BoundStep::Send { .. } => true,
            })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use smddp_plan::check::{Operation, Sizes, check_by_reference, programs};
    use smddp_plan::{Algorithm, Counts, Memory, Topology};
    use smddp_transport::Routes;

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::key::Key;
    use crate::call::types::{DType, RedOp};
    use crate::config::Config;

    /// The binding of a call by each rank of a group.
    fn bound_by_all(
        topology: &Topology,
        collective: Collective,
        algorithm: Algorithm,
        count: usize,
    ) -> Option<Vec<BoundCall>> {
        let redop = if collective.reduces() { RedOp::Sum.code() } else { 0 };
        let config = Config { algorithm: Some(algorithm), ..Config::default() };
        (0..topology.size())
            .map(|rank| {
                let (routes, network) = (Arc::new(Routes::local(rank, topology.size())), OnceLock::new());
                let assumed = GroupFacts::assumed("");
                let facts = GroupFacts {
                    rank,
                    topology: topology.clone(),
                    slot: 4096,
                    routes,
                    assumed,
                    network,
                    canonical: OnceLock::new(),
                };
                let (counts, memory, dtype) = (Counts::Even(count), Memory::Host, DType::F32);
                let key = Key {
                    collective,
                    dtype,
                    redop,
                    root: 0,
                    factor: 0,
                    counts,
                    memory,
                    site: 0,
                    lossless: false,
                };
                let bound = bind(&key, &facts, &config).ok()?;
                (bound.choice.algorithm == algorithm).then_some(bound)
            })
            .collect()
    }

    /// The checker follows who reads which memory when, over all ranks.
    #[test]
    fn what_stays_in_symmetric_memory_is_not_written_while_others_may_read_it() {
        let mut total = 0;
        let variants =
            Algorithm::ALL.into_iter().flat_map(|a| Collective::ALL.map(|collective| (a, collective)));
        // Blocks of one segment, and of several.
        let cases = variants.flat_map(|variant| [1 << 12, 1 << 16].map(|count| (variant, count)));
        for size in 2..=6 {
            let topology = Topology::single(size);
            for ((algorithm, collective), count) in cases.clone() {
                let bounds = bound_by_all(&topology, collective, algorithm, count);
                let Some(bounds) = bounds else { continue };
                let programs = programs(algorithm, collective, &topology, 0, false).unwrap();
                for (in_place, segments) in [(false, 1), (false, 3), (true, 1), (true, 3)] {
                    if in_place && collective == Collective::AllToAll {
                        continue;
                    }
                    let channels: Vec<Vec<usize>> = bounds
                        .iter()
                        .map(|bound| {
                            bound.zero_copy.candidates(in_place).map(|candidate| candidate.channel).collect()
                        })
                        .collect();
                    let sizes = Sizes::Blocks(vec![segments; size]);
                    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                    let is_source = |rank: usize, channel: usize| channels[rank].contains(&channel);
                    if let Err(error) = check_by_reference(&op, 2, &is_source) {
                        panic!(
                            "{algorithm:?} {collective:?} {size} in place={in_place} {channels:?}: {error}"
                        );
                    }
                    total += channels.iter().map(Vec::len).sum::<usize>();
                }
            }
        }
        assert!(total > 100, "{total} candidates");
    }

    /// Whether all outlets of rank 0 of four nodes that send from In may do so in place.
    fn all_sources_unchanged(collective: Collective, algorithm: Algorithm) -> bool {
        let topology = Topology::from_labels(&[0, 1, 2, 3]);
        let (routes, network) = (Arc::new(Routes::local(0, 4)), OnceLock::new());
        let facts = GroupFacts {
            rank: 0,
            topology,
            slot: 0,
            routes,
            assumed: GroupFacts::assumed(""),
            network,
            canonical: OnceLock::new(),
        };
        let redop = if collective.reduces() { RedOp::Sum.code() } else { 0 };
        let (counts, memory, dtype) = (Counts::Even(1 << 20), Memory::Host, DType::F32);
        let key =
            Key { collective, dtype, redop, root: 0, factor: 0, counts, memory, site: 0, lossless: false };
        let config = Config { algorithm: Some(algorithm), ..Config::default() };
        let bound = bind(&key, &facts, &config).unwrap();
        (0..bound.channel_layout.send_channels.len())
            .all(|send_channel| is_unchanged_until_sent(&bound, send_channel))
    }

    #[test]
    fn a_call_in_place_sends_from_where_only_the_readers_answer_is_written() {
        assert!(all_sources_unchanged(Collective::AllReduce, Algorithm::HierMesh));
        assert!(all_sources_unchanged(Collective::AllGather, Algorithm::HierMesh));
        assert!(all_sources_unchanged(Collective::Broadcast, Algorithm::HierMesh));
        // Each adds all itself, as soon as it has the others', who may still wait for its own.
        assert!(!all_sources_unchanged(Collective::AllReduce, Algorithm::HierPublish));
    }
}
