//! Messages that need no cell. Over sockets the kernel takes them from where they lie, and brings them to where they belong; from
//! symmetric memory the ranks of the node take them themselves.
//!
//! A message may wait in this process after its step was taken, and may arrive long before the step that waits for it. So what
//! leaves from a place must stay there, and what arrives in one must be written by nobody else and not be read as something else any
//! more. A program that writes each block once promises that, but for a call in place, whose In is its Out: see [`Direct::leaves`].

use smddp_plan::{Buffer, Collective};
use smddp_transport::SingleCopy;

use super::{Act, Bound, Run};

#[derive(Clone, Debug, Default)]
pub(crate) struct Direct {
    /// By outlet; none where all messages leave from cells, as on one node.
    outs: Vec<Leaving>,
    /// Inlets whose messages arrive in Out, and where.
    ins: Vec<(usize, Run)>,
    /// A call in place reads each block before anything can arrive for it.
    arrives_in_place: bool,
    stays: Vec<Staying>,
    /// Some of them in any memory.
    single_copy: bool,
}

/// An outlet whose messages may stay where they lie, if that is symmetric memory: one block each, or blocks in a row that are one
/// message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staying {
    pub(crate) channel: usize,
    pub(crate) run: Run,
    leaving: Leaving,
    /// Whether other memory will do.
    pub(crate) single_copy: SingleCopy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Leaving {
    #[default]
    FromCells,
    /// From In, Out or Scratch, unless the call is in place.
    Apart,
    /// In any case.
    Always,
}

impl Direct {
    pub(super) fn new(bound: &Bound, collective: Collective, single_copy: SingleCopy) -> Self {
        // In and Out have the same blocks in the same places, if In is a part of Out at all.
        let arrives_in_place = matches!(
            collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast | Collective::Reduce
        );
        let place = |channel| match bound.routed.sends_in_place(channel) {
            true if arrives_in_place && stays(bound, channel) => Leaving::Always,
            true => Leaving::Apart,
            false => Leaving::FromCells,
        };
        let mut outs: Vec<Leaving> = (0..bound.channel_layout.send_channels.len()).map(place).collect();
        if outs.iter().all(|&leaving| leaving == Leaving::FromCells) {
            outs.clear();
        }
        // Where bytes go one way, staging has both ranks copy at once; and all_reduce in place, which writes where it was read, is as often
        // slower.
        let worth =
            matches!(collective, Collective::AllGather | Collective::AllToAll | Collective::ReduceScatter);
        let wanted = if worth { single_copy } else { SingleCopy::Never };
        let stays = staying(bound, arrives_in_place, wanted);
        let single_copy = stays.iter().any(|staying| staying.single_copy != SingleCopy::Never);
        Self { outs, ins: arriving(bound, wanted != SingleCopy::Never), arrives_in_place, stays, single_copy }
    }

    /// Outlets whose messages may stay where they lie.
    pub(crate) fn stays(&self, in_place: bool) -> impl Iterator<Item = &Staying> {
        self.stays.iter().filter(move |staying| staying.leaving == Leaving::Always || !in_place)
    }

    /// Whether some may. `symmetric`: this process has such memory.
    pub(crate) fn any_stay(&self, symmetric: bool) -> bool {
        self.single_copy || symmetric && !self.stays.is_empty()
    }

    /// Whether messages of that outlet leave from where they lie. `in_place`: In and Out overlap.
    #[inline]
    pub(crate) fn leaves(&self, channel: usize, in_place: bool) -> bool {
        match self.outs.get(channel) {
            Some(Leaving::Always) => true,
            Some(Leaving::Apart) => !in_place,
            _ => false,
        }
    }

    /// Inlets whose messages arrive in Out, and where.
    pub(crate) fn arrives(&self, in_place: bool) -> &[(usize, Run)] {
        if in_place && !self.arrives_in_place { &[] } else { &self.ins }
    }

    /// Whether it matters to a call that it is in place. `symmetric`: this process has such memory.
    pub(crate) fn matters(&self, symmetric: bool) -> bool {
        !self.ins.is_empty() || !self.outs.is_empty() || self.any_stay(symmetric)
    }
}

/// Below, a copy costs less than hearing from each reader that it has read.
const WORTH_STAYING: usize = 16 << 10;

/// The same where the kernel is to copy it, which has to look up each page.
const WORTH_FETCHING: usize = 512 << 10;

/// Of each outlet whose messages are all made by one step, from one place or into one that is kept.
fn staying(bound: &Bound, in_place: bool, single_copy: SingleCopy) -> Vec<Staying> {
    let mut makers: Vec<Vec<Option<Run>>> = vec![Vec::new(); bound.channel_layout.send_channels.len()];
    for (_, act) in bound.lanes.iter().flatten() {
        match act {
            Act::Send { channel, source, .. } => makers[*channel].push(Some(*source)),
            Act::Receive { forward: Some(channel), .. } => makers[*channel].push(None),
            Act::Reduce(reduce) => {
                let kept = reduce.keep.then_some(reduce.result);
                reduce.send.iter().for_each(|&channel| makers[channel].push(kept));
            }
            Act::Receive { .. } | Act::Copy { .. } => {}
        }
    }
    let mut found = Vec::new();
    for (channel, makers) in makers.iter().enumerate() {
        let &[Some(run)] = &makers[..] else { continue };
        let placed = run.buffer != Buffer::Scratch && (run.blocks == 1 || run.row.is_some());
        let send_channel = &bound.channel_layout.send_channels[channel];
        let enough = send_channel.bytes >= WORTH_STAYING as u64;
        // Of several readers each saves less than the kernel costs it.
        let fetched = send_channel.bytes >= WORTH_FETCHING as u64 && send_channel.readers.len() == 1;
        if placed && enough && bound.routed.may_be_source(channel) {
            let always = in_place && stays(bound, channel);
            let leaving = if always { Leaving::Always } else { Leaving::Apart };
            let single_copy = if fetched { single_copy } else { SingleCopy::Never };
            found.push(Staying { channel, run, leaving, single_copy });
        }
    }
    found
}

/// `single_copy`: this call's messages may lie in their writers' memory.
fn arriving(bound: &Bound, single_copy: bool) -> Vec<(usize, Run)> {
    let mut uses = vec![0; bound.channel_layout.recv_channels.len()];
    let mut ins = Vec::new();
    for (_, act) in bound.lanes.iter().flatten() {
        match act {
            Act::Receive { from, to, .. } => {
                uses[from.recv_channel] += 1;
                let whole = from.before == 0 && from.message.blocks == to.blocks;
                // Segments of several blocks do not lie one behind the other.
                let placed = to.buffer == Buffer::Out && (to.blocks == 1 || to.row.is_some());
                let fetched = single_copy
                    && bound.channel_layout.recv_channels[from.recv_channel].bytes >= WORTH_FETCHING as u64
                    && bound.routed.may_be_target(from.recv_channel);
                let directly = fetched || bound.routed.receives_in_place(from.recv_channel);
                if whole && placed && directly {
                    ins.push((from.recv_channel, *to));
                }
            }
            Act::Reduce(reduce) => reduce.from.iter().for_each(|from| uses[from.recv_channel] += 1),
            Act::Send { .. } | Act::Copy { .. } => {}
        }
    }
    // The messages of one step alone.
    ins.retain(|&(recv_channel, _)| uses[recv_channel] == 1);
    ins
}

/// Whether what an outlet sends stays as it is until it has left, though In is Out: either nothing is written there, or only what
/// its one reader makes of it.
fn stays(bound: &Bound, send_channel: usize) -> bool {
    let acts = || bound.lanes.iter().flatten().map(|(_, act)| act);
    let sends = |act: &Act| match act {
        Act::Send { channel, source, .. } => Some((*channel, *source)),
        _ => None,
    };
    let one_reader = bound.channel_layout.send_channels[send_channel].readers.len() == 1;
    acts().filter_map(sends).filter(|&(channel, _)| channel == send_channel).all(|(_, source)| {
        let meets = |run: &Run| {
            run.buffer != Buffer::Scratch
                && run.block < source.block + source.blocks
                && source.block < run.block + run.blocks
        };
        let once = acts().filter_map(sends).filter(|(_, other)| meets(other)).count() == 1;
        source.buffer == Buffer::Scratch
            || acts().all(|act| match act {
                Act::Receive { to, .. } => !meets(to) || one_reader && once,
                Act::Reduce(reduce) => !reduce.keep || !meets(&reduce.result),
                Act::Copy { to, finish, .. } => !finish || !meets(to),
                Act::Send { .. } => true,
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
    ) -> Option<Vec<Bound>> {
        let redop = if collective.reduces() { RedOp::Sum.code() } else { 0 };
        let config = Config { algorithm: Some(algorithm), ..Config::default() };
        (0..topology.size())
            .map(|rank| {
                let (reach, network) = (Arc::new(Routes::local(rank, topology.size())), OnceLock::new());
                let assumed = GroupFacts::assumed("");
                let facts = GroupFacts {
                    rank,
                    topology: topology.clone(),
                    slot: 4096,
                    reach,
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
                    exact: false,
                };
                let bound = bind(&key, &facts, &config).ok()?;
                (bound.choice.algorithm == algorithm).then_some(bound)
            })
            .collect()
    }

    /// The checker follows who reads which memory when, over all ranks.
    #[test]
    fn what_stays_in_symmetric_memory_is_not_written_while_others_may_read_it() {
        let mut staying = 0;
        let ways = Algorithm::ALL.into_iter().flat_map(|a| Collective::ALL.map(|collective| (a, collective)));
        // Blocks of one segment, and of several.
        let cases = ways.flat_map(|way| [1 << 12, 1 << 16].map(|count| (way, count)));
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
                    let stay: Vec<Vec<usize>> = bounds
                        .iter()
                        .map(|bound| bound.direct.stays(in_place).map(|staying| staying.channel).collect())
                        .collect();
                    let sizes = Sizes::Blocks(vec![segments; size]);
                    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                    let stays = |rank: usize, channel: usize| stay[rank].contains(&channel);
                    if let Err(error) = check_by_reference(&op, 2, &stays) {
                        panic!("{algorithm:?} {collective:?} {size} in place={in_place} {stay:?}: {error}");
                    }
                    staying += stay.iter().map(Vec::len).sum::<usize>();
                }
            }
        }
        assert!(staying > 100, "{staying}");
    }

    /// Whether all outlets of rank 0 of four nodes that send from In may do so in place.
    fn all_stay(collective: Collective, algorithm: Algorithm) -> bool {
        let topology = Topology::from_labels(&[0, 1, 2, 3]);
        let (reach, network) = (Arc::new(Routes::local(0, 4)), OnceLock::new());
        let facts = GroupFacts {
            rank: 0,
            topology,
            slot: 0,
            reach,
            assumed: GroupFacts::assumed(""),
            network,
            canonical: OnceLock::new(),
        };
        let redop = if collective.reduces() { RedOp::Sum.code() } else { 0 };
        let (counts, memory, dtype) = (Counts::Even(1 << 20), Memory::Host, DType::F32);
        let key = Key { collective, dtype, redop, root: 0, factor: 0, counts, memory, site: 0, exact: false };
        let config = Config { algorithm: Some(algorithm), ..Config::default() };
        let bound = bind(&key, &facts, &config).unwrap();
        (0..bound.channel_layout.send_channels.len()).all(|send_channel| stays(&bound, send_channel))
    }

    #[test]
    fn a_call_in_place_sends_from_where_only_the_readers_answer_is_written() {
        assert!(all_stay(Collective::AllReduce, Algorithm::HierMesh));
        assert!(all_stay(Collective::AllGather, Algorithm::HierMesh));
        assert!(all_stay(Collective::Broadcast, Algorithm::HierMesh));
        // Each adds all itself, as soon as it has the others', who may still wait for its own.
        assert!(!all_stay(Collective::AllReduce, Algorithm::HierPublish));
    }
}
