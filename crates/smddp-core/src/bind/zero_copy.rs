//! Messages that bypass the staging slots. TCP sockets read from and write to the user buffers; ranks of a node copy
//! from symmetric memory of the sender, or with single copies by the kernel.
//!
//! A message may leave after its step has run, and may arrive long before the step that receives it. Therefore a
//! source must be unchanged until its data has left. A receive target must not be written or read for anything else
//! once the data can arrive. A program that writes each block once guarantees both, except for a call in place, whose
//! In is its Out: see [`ZeroCopy::sends_in_place`].

use smddp_plan::{Buffer, Collective};
use smddp_process::SingleCopy;

use super::{BlockRun, BoundCall, BoundStep};

#[derive(Clone, Debug, Default)]
pub(crate) struct ZeroCopy {
    /// By send channel; empty if all messages leave from slots, as on a single node.
    sends: Vec<SendFrom>,
    /// Receive channels whose messages arrive in Out, with their targets.
    receives: Vec<(usize, BlockRun)>,
    /// True if a call in place reads each block before data for that block can arrive.
    in_place_receives: bool,
    candidates: Vec<ZeroCopyCandidate>,
    /// True if any candidate allows single copies from ordinary memory.
    single_copy: bool,
}

/// A send channel whose messages peers may read from the user buffer, if that is symmetric memory. Each message is
/// one block, or adjacent blocks that form one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZeroCopyCandidate {
    pub(crate) channel: usize,
    pub(crate) run: BlockRun,
    send_from: SendFrom,
    /// Use of single copies from memory that is not symmetric.
    pub(crate) single_copy: SingleCopy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SendFrom {
    #[default]
    Slots,
    /// From In, Out or Scratch, unless the call is in place.
    UnlessInPlace,
    /// From In, Out or Scratch, also in place.
    Always,
}

impl ZeroCopy {
    pub(super) fn new(bound: &BoundCall, collective: Collective, single_copy: SingleCopy) -> Self {
        // If In overlaps Out at all, equal blocks have equal addresses.
        let in_place_receives = matches!(
            collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast | Collective::Reduce
        );
        let send_from = |channel| match bound.routed.sends_in_place(channel) {
            true if in_place_receives && is_unchanged_until_sent(bound, channel) => SendFrom::Always,
            true => SendFrom::UnlessInPlace,
            false => SendFrom::Slots,
        };
        let mut sends: Vec<SendFrom> = (0..bound.channel_layout.send_channels.len()).map(send_from).collect();
        if sends.iter().all(|&send_from| send_from == SendFrom::Slots) {
            sends.clear();
        }
        // In calls with a root, staging lets sender and receiver copy concurrently. An all_reduce in place is slower
        // about as often as it is faster.
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

    /// Send channels whose messages peers may read from the user buffer.
    pub(crate) fn candidates(&self, in_place: bool) -> impl Iterator<Item = &ZeroCopyCandidate> {
        self.candidates.iter().filter(move |candidate| candidate.send_from == SendFrom::Always || !in_place)
    }

    /// Returns true if there are any. `symmetric`: this process has symmetric memory.
    pub(crate) fn has_candidates(&self, symmetric: bool) -> bool {
        self.single_copy || symmetric && !self.candidates.is_empty()
    }

    /// Returns true if messages of the channel leave from the user buffer. `in_place`: In and Out overlap.
    #[inline]
    pub(crate) fn sends_in_place(&self, channel: usize, in_place: bool) -> bool {
        match self.sends.get(channel) {
            Some(SendFrom::Always) => true,
            Some(SendFrom::UnlessInPlace) => !in_place,
            _ => false,
        }
    }

    /// Receive channels whose messages arrive in Out, with their targets.
    pub(crate) fn receives_in_place(&self, in_place: bool) -> &[(usize, BlockRun)] {
        if in_place && !self.in_place_receives { &[] } else { &self.receives }
    }

    /// Returns true if the call must know whether In and Out overlap. `symmetric`: this process has symmetric memory.
    pub(crate) fn depends_on_overlap(&self, symmetric: bool) -> bool {
        !self.receives.is_empty() || !self.sends.is_empty() || self.has_candidates(symmetric)
    }
}

/// Minimum bytes of a zero-copy source. Below, a copy costs less than the wait for each reader to finish.
const MIN_ZERO_COPY_BYTES: usize = 16 << 10;

/// Minimum bytes of a single copy by the kernel, which translates each page.
const MIN_SINGLE_COPY_BYTES: usize = 512 << 10;

/// Finds the send channels whose messages all come from one step that sends from, or stores in, one contiguous range.
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
        let contiguous = run.buffer != Buffer::Scratch && (run.blocks == 1 || run.contiguous.is_some());
        let send_channel = &bound.channel_layout.send_channels[channel];
        let large_enough = send_channel.bytes >= MIN_ZERO_COPY_BYTES as u64;
        // With several readers, each saves less than the single copy costs.
        let single_copy_read =
            send_channel.bytes >= MIN_SINGLE_COPY_BYTES as u64 && send_channel.readers.len() == 1;
        if contiguous && large_enough && bound.routed.may_be_source(channel) {
            let always = in_place && is_unchanged_until_sent(bound, channel);
            let send_from = if always { SendFrom::Always } else { SendFrom::UnlessInPlace };
            let single_copy = if single_copy_read { single_copy } else { SingleCopy::Never };
            found.push(ZeroCopyCandidate { channel, run, send_from, single_copy });
        }
    }
    found
}

/// Finds the receive channels whose messages can arrive in Out. `single_copy`: peers may offer sources in ordinary
/// memory.
fn direct_receives(bound: &BoundCall, single_copy: bool) -> Vec<(usize, BlockRun)> {
    let mut uses = vec![0; bound.channel_layout.recv_channels.len()];
    let mut receives = Vec::new();
    for (_, step) in bound.pipelines.iter().flatten() {
        match step {
            BoundStep::Receive { from, to, .. } => {
                uses[from.recv_channel] += 1;
                let takes_all_blocks = from.skipped_blocks == 0 && from.message.blocks == to.blocks;
                // Segments of several blocks are not adjacent.
                let contiguous = to.buffer == Buffer::Out && (to.blocks == 1 || to.contiguous.is_some());
                let single_copy_read = single_copy
                    && bound.channel_layout.recv_channels[from.recv_channel].bytes
                        >= MIN_SINGLE_COPY_BYTES as u64
                    && bound.routed.may_be_target(from.recv_channel);
                let directly = single_copy_read || bound.routed.receives_in_place(from.recv_channel);
                if takes_all_blocks && contiguous && directly {
                    receives.push((from.recv_channel, *to));
                }
            }
            BoundStep::Reduce(reduce) => reduce.from.iter().for_each(|from| uses[from.recv_channel] += 1),
            BoundStep::Send { .. } | BoundStep::Copy { .. } => {}
        }
    }
    // Only channels whose messages belong to a single step.
    receives.retain(|&(recv_channel, _)| uses[recv_channel] == 1);
    receives
}

/// Returns true if data of the channel stays unchanged until it has left, although In is Out. Either nothing is
/// written there, or only data that its single reader computed from it.
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

    use smddp_group::Routes;
    use smddp_plan::check::{Operation, Sizes, check_by_reference, programs};
    use smddp_plan::{Algorithm, Counts, Memory, Topology};

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::key::Key;
    use crate::call::types::{DType, RedOp};
    use crate::config::Config;

    /// Binds a call on each rank of a group.
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
                    inline_bytes: 4096,
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

    /// The checker follows all reads and writes of all ranks.
    #[test]
    fn zero_copy_sources_are_not_written_while_peers_may_read_them() {
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

    /// Returns true if all sends of rank 0 of four nodes have unchanged sources in place.
    fn all_sources_unchanged(collective: Collective, algorithm: Algorithm) -> bool {
        let topology = Topology::from_labels(&[0, 1, 2, 3]);
        let (routes, network) = (Arc::new(Routes::local(0, 4)), OnceLock::new());
        let facts = GroupFacts {
            rank: 0,
            topology,
            inline_bytes: 0,
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
    fn call_in_place_sends_from_blocks_that_only_the_readers_result_overwrites() {
        assert!(all_sources_unchanged(Collective::AllReduce, Algorithm::HierMesh));
        assert!(all_sources_unchanged(Collective::AllGather, Algorithm::HierMesh));
        assert!(all_sources_unchanged(Collective::Broadcast, Algorithm::HierMesh));
        // Each rank overwrites its input once it has the other inputs, and its peers may still read that input.
        assert!(!all_sources_unchanged(Collective::AllReduce, Algorithm::HierPublish));
    }
}
