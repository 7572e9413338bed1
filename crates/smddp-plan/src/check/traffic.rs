//! Inter-node traffic of a plan.

use super::shape::Operation;
use crate::topology::Topology;

/// Traffic of the link of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Link {
    /// Bytes that leave the node.
    pub bytes_out: u64,
    /// Bytes that enter the node.
    pub bytes_in: u64,
    /// Messages that leave the node, one for each remote reader, if every block is one segment.
    pub messages_out: u64,
    /// Messages that enter the node, counted as `messages_out`.
    pub messages_in: u64,
}

/// Counts the traffic of each node link to readers in other nodes.
///
/// [`Operation::sizes`] are bytes here, not segments. `None` if a plan mixes local and remote readers on one
/// channel, because the cost of a message is then undefined. Hierarchical plans never mix them.
pub fn traffic(operation: &Operation<'_>, topology: &Topology) -> Option<Vec<Link>> {
    let mut links = vec![Link::default(); topology.nodes()];
    for (writer, program) in operation.programs.iter().enumerate() {
        for timed in program.pipelines.iter().flatten() {
            let Some((channel, span)) = timed.step.published() else { continue };
            let readers = &program.channels[channel].readers;
            let remote = readers.iter().filter(|&&reader| !topology.share_node(writer, reader)).count();
            if remote == 0 {
                continue;
            }
            if remote < readers.len() {
                return None;
            }
            let blocks = span.block..span.block + span.blocks;
            let bytes: usize = blocks.map(|b| operation.segments(writer, span.buffer, b)).sum();
            let mut add = |node: usize, out: bool| {
                let link = &mut links[node];
                let (moved, messages) = match out {
                    true => (&mut link.bytes_out, &mut link.messages_out),
                    false => (&mut link.bytes_in, &mut link.messages_in),
                };
                *moved += bytes as u64;
                *messages += u64::from(bytes > 0 || span.blocks == 0);
            };
            for &reader in readers {
                add(topology.node_of(writer), true);
                add(topology.node_of(reader), false);
            }
        }
    }
    Some(links)
}
