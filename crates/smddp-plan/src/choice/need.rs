//! Slots and messages of a plan, counted in the program of one rank.

use super::shape::{Case, Memory};
use crate::algorithms::{Algorithm, plan};
use crate::ir::{PlanRequest, Program, Source};
use std::collections::HashMap;

/// Traffic of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    /// Blocks in the largest message.
    pub(super) message: usize,
    /// Blocks in one slot of each channel that the rank writes.
    pub(super) written: usize,
    /// Blocks in one slot of each channel that it reads from another node; it reserves memory for these too.
    pub(super) received: usize,
    /// Steps of its program, including those without payload.
    pub(super) steps: usize,
    /// Messages to other nodes, and from them.
    pub(super) remote_out: TrafficTotal,
    pub(super) remote_in: TrafficTotal,
    /// Messages to ranks of the same node, and from them. A write for all readers is one message; in host
    /// memory its bytes are written once.
    pub(super) local_out: TrafficTotal,
    pub(super) local_in: TrafficTotal,
}

/// Messages and bytes, one message per reader. Messages without payload are not sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrafficTotal {
    /// Number of messages if no block has more than one segment.
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

impl TrafficTotal {
    fn add(&mut self, readers: usize, bytes: usize) {
        self.messages += readers;
        self.bytes += readers * bytes;
    }

    fn most(self, other: Self) -> Self {
        Self { messages: self.messages.max(other.messages), bytes: self.bytes.max(other.bytes) }
    }
}

impl Traffic {
    fn most(self, other: Self) -> Self {
        Self {
            message: self.message.max(other.message),
            written: self.written.max(other.written),
            received: self.received.max(other.received),
            steps: self.steps.max(other.steps),
            remote_out: self.remote_out.most(other.remote_out),
            remote_in: self.remote_in.most(other.remote_in),
            local_out: self.local_out.most(other.local_out),
            local_in: self.local_in.most(other.local_in),
        }
    }

    /// Returns the blocks in one slot of each channel, for writing or for reading, whichever is larger.
    pub(super) fn staged(&self) -> usize {
        self.written.max(self.received).max(1)
    }
}

/// Returns the traffic of the busiest rank, or of one with about as much. `None` if the algorithm does not
/// support the collective.
///
/// That is a rank of the smallest node, which serves the most remote ranks, or the root (here rank 0). With a
/// root, a rank of another node may be as busy.
pub(super) fn traffic(algorithm: Algorithm, case: &Case<'_>) -> Option<Traffic> {
    let topology = case.topology;
    let smallest = (0..topology.nodes()).min_by_key(|&n| topology.ranks_of(n).len()).unwrap_or(0);
    let other =
        if smallest == 0 && case.collective.has_root() { topology.nodes().min(2) - 1 } else { smallest };
    let mut most = of_rank(algorithm, case, 0)?;
    if let Some(&first) = topology.ranks_of(other).first()
        && first != 0
    {
        most = most.most(of_rank(algorithm, case, first)?);
    }
    Some(most)
}

fn of_rank(algorithm: Algorithm, case: &Case<'_>, rank: usize) -> Option<Traffic> {
    let program = plan(algorithm, &PlanRequest { rank, ..case.request() }, case.topology)?;
    Some(of_program(&program, rank, case))
}

fn of_program(program: &Program, rank: usize, case: &Case<'_>) -> Traffic {
    let mut traffic = Traffic { message: 1, ..Traffic::default() };
    let mut written = vec![0; program.channels.len()];
    let mut received: HashMap<(usize, usize), usize> = HashMap::new();
    let is_remote = |peer: usize| !case.topology.share_node(peer, rank);
    for timed in program.pipelines.iter().flatten() {
        if let Some((channel, span)) = timed.step.published() {
            written[channel] = span.blocks.max(written[channel]);
            if let Some(bytes) = case.moves(span) {
                let readers = &program.channels[channel].readers;
                let remote = readers.iter().filter(|&&r| is_remote(r)).count();
                traffic.remote_out.add(remote, bytes);
                let copies = match case.memory {
                    Memory::Host => 1,
                    Memory::Bounced | Memory::Reference => readers.len() - remote,
                };
                traffic.local_out.add(usize::from(remote < readers.len()), bytes * copies);
            }
            traffic.message = traffic.message.max(span.blocks);
        }
        for Source { rank: writer, channel, message, .. } in timed.step.sources() {
            if is_remote(*writer) {
                let slot = received.entry((*writer, *channel)).or_default();
                *slot = message.blocks.max(*slot);
            }
            if let Some(bytes) = case.moves(*message) {
                let from = if is_remote(*writer) { &mut traffic.remote_in } else { &mut traffic.local_in };
                from.add(1, bytes);
            }
            traffic.message = traffic.message.max(message.blocks);
        }
    }
    traffic.steps = program.pipelines.iter().map(|pipeline| pipeline.len()).sum();
    traffic.written = written.iter().sum();
    traffic.received = received.values().sum();
    traffic
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::programs;
    use crate::choice::{Counts, GroupShape, Memory, Network, Settings, Shape};
    use crate::ir::Collective;
    use crate::topology::Topology;

    /// Covers mixed node sizes and several roots.
    #[test]
    fn sampled_rank_has_nearly_the_largest_traffic() {
        let uneven = [0, 0, 1, 2, 2, 2, 1, 3, 3, 2, 0, 0, 4, 4, 4, 4];
        for topology in [Topology::blocks(4, 3), Topology::blocks(7, 1), Topology::from_labels(&uneven)] {
            for algorithm in Algorithm::ALL {
                for collective in Collective::ALL {
                    let size = topology.size();
                    let counts = Counts::Even(1);
                    let shape = Shape {
                        collective,
                        element: 64,
                        half: false,
                        single: false,
                        counts,
                        memory: Memory::Host,
                    };
                    let group =
                        GroupShape { topology: &topology, inline_bytes: 0, network: Network::ASSUMED };
                    let starts: Vec<usize> = (0..=size).map(|block| 64 * block).collect();
                    let case = Case::new(&shape, &starts, &group, &Settings::default());
                    let roots = if collective.has_root() { vec![0, size / 2, size - 1] } else { vec![0] };
                    for root in roots {
                        let Some(programs) = programs(algorithm, collective, &topology, root, false) else {
                            continue;
                        };
                        let bound = traffic(algorithm, &case).unwrap();
                        for (rank, program) in programs.iter().enumerate() {
                            let Traffic { message, written, received, .. } = of_program(program, rank, &case);
                            let fits = |part: usize, bound: usize| part <= 2 * bound + 1;
                            assert!(
                                fits(message, bound.message) && fits(written.max(received), bound.staged()),
                                "{algorithm:?} {collective:?} root {root} rank {rank}: {message} {written} {received} {bound:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
