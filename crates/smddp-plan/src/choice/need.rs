//! What a plan needs in cells and sends in messages, counted in one rank's program.

use super::shape::{Case, Memory};
use crate::algorithms::{Algorithm, plan};
use crate::ir::{Ask, Program, Source};
use std::collections::HashMap;

/// Of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// Blocks in the largest message.
    pub(super) message: usize,
    /// Blocks in one cell of each channel that it writes.
    pub(super) written: usize,
    /// Blocks in one cell of each channel that it reads from another node: it has to have room for them too.
    pub(super) received: usize,
    /// Steps of its program, those without bytes too.
    pub(super) steps: usize,
    /// To other nodes, and from them.
    pub(super) out: Moved,
    pub(super) inward: Moved,
    /// To its mates, and from them. A write for all readers is one message, and in the memory of a host their bytes are
    /// written once.
    pub(super) near_out: Moved,
    pub(super) near_in: Moved,
}

/// Messages between nodes, one for each reader. Those without bytes are not sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// Where no block has more than one segment.
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

impl Moved {
    fn add(&mut self, readers: usize, bytes: usize) {
        self.messages += readers;
        self.bytes += readers * bytes;
    }

    fn most(self, other: Self) -> Self {
        Self { messages: self.messages.max(other.messages), bytes: self.bytes.max(other.bytes) }
    }
}

impl Need {
    fn most(self, other: Self) -> Self {
        Self {
            message: self.message.max(other.message),
            written: self.written.max(other.written),
            received: self.received.max(other.received),
            steps: self.steps.max(other.steps),
            out: self.out.most(other.out),
            inward: self.inward.most(other.inward),
            near_out: self.near_out.most(other.near_out),
            near_in: self.near_in.most(other.near_in),
        }
    }

    /// Blocks in the cells of one of its channels each, whichever side has more.
    pub(super) fn staged(&self) -> usize {
        self.written.max(self.received).max(1)
    }
}

/// Of the rank that needs most, or of one that needs about as much; `None` where the algorithm does not do it.
///
/// That is a rank of the smallest node, which does for most ranks of other nodes, or the root, here rank 0; where there
/// is a root, a rank of another node may be as busy.
pub(super) fn need(algorithm: Algorithm, case: &Case<'_>) -> Option<Need> {
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

fn of_rank(algorithm: Algorithm, case: &Case<'_>, rank: usize) -> Option<Need> {
    let program = plan(algorithm, &Ask { rank, ..case.ask() }, case.topology)?;
    Some(of_program(&program, rank, case))
}

fn of_program(program: &Program, rank: usize, case: &Case<'_>) -> Need {
    let mut need = Need { message: 1, ..Need::default() };
    let mut written = vec![0; program.channels.len()];
    let mut received: HashMap<(usize, usize), usize> = HashMap::new();
    let away = |peer: usize| !case.topology.share_node(peer, rank);
    for timed in program.lanes.iter().flatten() {
        if let Some((channel, span)) = timed.step.published() {
            written[channel] = span.blocks.max(written[channel]);
            if let Some(bytes) = case.moves(span) {
                let readers = &program.channels[channel].readers;
                let remote = readers.iter().filter(|&&r| away(r)).count();
                need.out.add(remote, bytes);
                let copies = match case.memory {
                    Memory::Host => 1,
                    Memory::Bounced | Memory::Reference => readers.len() - remote,
                };
                need.near_out.add(usize::from(remote < readers.len()), bytes * copies);
            }
            need.message = need.message.max(span.blocks);
        }
        for Source { rank: writer, channel, message, .. } in timed.step.sources() {
            if away(*writer) {
                let cell = received.entry((*writer, *channel)).or_default();
                *cell = message.blocks.max(*cell);
            }
            if let Some(bytes) = case.moves(*message) {
                let from = if away(*writer) { &mut need.inward } else { &mut need.near_in };
                from.add(1, bytes);
            }
            need.message = need.message.max(message.blocks);
        }
    }
    need.steps = program.lanes.iter().map(|lane| lane.len()).sum();
    need.written = written.iter().sum();
    need.received = received.values().sum();
    need
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::programs;
    use crate::choice::{Counts, Group, Memory, Network, Settings, Shape};
    use crate::ir::Collective;
    use crate::topology::Topology;

    /// Mixed sizes, and a root anywhere.
    #[test]
    fn no_rank_needs_much_more_than_the_one_that_is_looked_at() {
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
                    let group = Group { topology: &topology, slot: 0, network: Network::ASSUMED };
                    let starts: Vec<usize> = (0..=size).map(|block| 64 * block).collect();
                    let case = Case::new(&shape, &starts, &group, &Settings::default());
                    let roots = if collective.has_root() { vec![0, size / 2, size - 1] } else { vec![0] };
                    for root in roots {
                        let Some(programs) = programs(algorithm, collective, &topology, root, false) else {
                            continue;
                        };
                        let told = need(algorithm, &case).unwrap();
                        for (rank, program) in programs.iter().enumerate() {
                            let Need { message, written, received, .. } = of_program(program, rank, &case);
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
