//! What a plan needs in cells and sends in messages, counted in one rank's program.

use crate::algorithms::{Algorithm, plan};
use crate::ir::{Ask, Program, Source};
use crate::topology::Topology;
use std::collections::HashMap;

/// Of one rank, per segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// Blocks in the largest message.
    pub(super) message: usize,
    /// Blocks in one cell of each channel that it writes.
    pub(super) written: usize,
    /// Blocks in one cell of each channel that it reads from another node: it has to have room for them too.
    pub(super) received: usize,
    /// Messages to and from other nodes; one for each reader.
    pub(super) remote: usize,
}

impl Need {
    fn most(self, other: Self) -> Self {
        Self {
            message: self.message.max(other.message),
            written: self.written.max(other.written),
            received: self.received.max(other.received),
            remote: self.remote.max(other.remote),
        }
    }

    /// Blocks in the cells of one of its channels each, whichever side has more.
    pub(super) fn staged(&self) -> usize {
        self.written.max(self.received).max(1)
    }
}

/// Of the rank that needs most, or of one that needs about as much; `None` where the algorithm does not do it.
///
/// That is a rank of the smallest node, which does for most ranks of other nodes, or the root, here rank 0.
pub(super) fn need(algorithm: Algorithm, ask: &Ask, topology: &Topology) -> Option<Need> {
    let smallest = (0..topology.nodes()).map(|n| topology.ranks_of(n)).min_by_key(|ranks| ranks.len());
    let mut most = of_rank(algorithm, ask, topology, 0)?;
    if let Some(&first) = smallest.and_then(|ranks| ranks.first())
        && first != 0
    {
        most = most.most(of_rank(algorithm, ask, topology, first)?);
    }
    Some(most)
}

fn of_rank(algorithm: Algorithm, ask: &Ask, topology: &Topology, rank: usize) -> Option<Need> {
    let program = plan(algorithm, &Ask { rank, ..*ask }, topology)?;
    Some(of_program(&program, rank, topology))
}

pub(super) fn of_program(program: &Program, rank: usize, topology: &Topology) -> Need {
    let mut need = Need { message: 1, ..Need::default() };
    let mut written = vec![0; program.channels.len()];
    let mut received: HashMap<(usize, usize), usize> = HashMap::new();
    let away = |peer: usize| !topology.share_node(peer, rank);
    for timed in program.lanes.iter().flatten() {
        if let Some((channel, span)) = timed.step.published() {
            written[channel] = span.blocks.max(written[channel]);
            need.remote += program.channels[channel].readers.iter().filter(|&&r| away(r)).count();
            need.message = need.message.max(span.blocks);
        }
        for Source { rank: writer, channel, message, .. } in timed.step.sources() {
            if away(*writer) {
                let cell = received.entry((*writer, *channel)).or_default();
                *cell = message.blocks.max(*cell);
                need.remote += 1;
            }
            need.message = need.message.max(message.blocks);
        }
    }
    need.written = written.iter().sum();
    need.received = received.values().sum();
    need
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::programs;
    use crate::ir::Collective;

    /// Mixed sizes, and a root anywhere.
    #[test]
    fn no_rank_needs_much_more_than_the_one_that_is_looked_at() {
        let uneven = [0, 0, 1, 2, 2, 2, 1, 3, 3, 2, 0, 0, 4, 4, 4, 4];
        for topology in [Topology::blocks(4, 3), Topology::blocks(7, 1), Topology::from_labels(&uneven)] {
            for algorithm in Algorithm::ALL {
                for collective in Collective::ALL {
                    let size = topology.size();
                    let ask = Ask { collective, rank: 0, size, root: 0, uneven_pairs: false };
                    let roots = if collective.has_root() { vec![0, size / 2, size - 1] } else { vec![0] };
                    for root in roots {
                        let Some(programs) = programs(algorithm, collective, &topology, root, false) else {
                            continue;
                        };
                        let told = need(algorithm, &ask, &topology).unwrap();
                        for (rank, program) in programs.iter().enumerate() {
                            let Need { message, written, received, .. } =
                                of_program(program, rank, &topology);
                            let fits = |part: usize, told: usize| part <= 2 * told + 1;
                            assert!(
                                fits(message, told.message) && fits(written.max(received), told.staged()),
                                "{algorithm:?} {collective:?} root {root} rank {rank}: {message} {written} {received} {told:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
